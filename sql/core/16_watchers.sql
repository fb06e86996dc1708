-- For people: what became of batches, and what watchers of feeds see.

-- Whether a role owns this schema, or looks after all consumers of a kind, as a role that may repair them does.
create function pgchange.keeps(caller name, kind text) returns boolean
language sql stable as $$
    select pg_has_role(caller, home.nspowner, 'usage')
        or exists (
            select from pgchange.registered as r
            join pg_namespace as n on n.nspname = r.schema
            join pg_proc as f on f.pronamespace = n.oid and f.proname = 'adopt_mark'
            join pg_roles as o on o.oid = f.proowner
            where r.kind = keeps.kind and has_function_privilege(caller, f.oid, 'execute')
              -- Not one that somebody else has made there since.
              and (o.oid = home.nspowner or o.rolsuper))
    from pg_namespace as home where home.nspname = 'pgchange'
$$;

create function pgchange_sealed.batches(caller pgchange.caller, of_consumer text default null, most integer default 100) returns setof pgchange.batch
language plpgsql stable security definer as $$
declare
    kept constant text[] := array(select r.kind from pgchange.registered as r where pgchange.keeps(caller, r.kind));
begin
    if of_consumer is null then
        return query
            select b.* from pgchange.batch as b where b.kind = any (kept) order by b.noted_at desc limit most;
    else
        -- By its key: one that has not worked for long is far behind what others noted since.
        return query
            with of_one as materialized (
                select b from pgchange.batch as b where b.kind = any (kept) and b.consumer = of_consumer
            )
            select (o.b).* from of_one as o order by (o.b).noted_at desc limit most;
    end if;
end
$$;
comment on function pgchange_sealed.batches(pgchange.caller, text, integer) is
    'The latest attempts on batches, of one consumer or of all, the last first; of the feeds that the caller looks after.';

create table pgchange.watcher (
    feed text,
    watched_by name default current_user,
    kind text,
    since timestamptz not null default clock_timestamp(),
    looked_at timestamptz not null default clock_timestamp(),
    error text,
    ready bigint,
    woke_at timestamptz,
    max_lag interval check (max_lag > interval '0'),
    max_backlog bigint check (max_backlog > 0),
    primary key (kind, feed, watched_by)
);
comment on table pgchange.watcher is
    'What watchers of feeds see, by the kind and the name of what they watch and the role that they watch as: since when they can look, or cannot '
    'and why; when they looked last; how much was ready then; and when they woke anybody last. max_lag and max_backlog: the age of the '
    'oldest ready change and the number of changes from which on pgchange.health() reports the consumer, as its DAG says; null if it does '
    'not.';

create index watcher_looked on pgchange.watcher (looked_at);

create function pgchange_sealed.note_watchers(caller pgchange.caller, watched jsonb) returns void
language plpgsql security definer
set lock_timeout = '1s'
as $$
begin
    perform pgchange.check_face(caller, 'pgchange.note_watchers(jsonb)');
    insert into pgchange.watcher as w (feed, watched_by, kind, error, ready, woke_at, max_lag, max_backlog)
    -- A key must fit into an index. Several watchers may look at one feed: an error is what a person should see.
    select distinct on (x.kind, left(x.feed, 600)) left(x.feed, 600), caller, x.kind, left(x.error, 4000), x.ready,
           clock_timestamp() - make_interval(secs => x.woke),
           case when x.limits is null then o.max_lag else make_interval(secs => (x.limits ->> 'max_lag')::double precision) end,
           case when x.limits is null then o.max_backlog else (x.limits ->> 'max_backlog')::bigint end
    from jsonb_to_recordset(watched) as x(feed text, kind text, error text, ready bigint, woke double precision, limits jsonb)
    left join pgchange.watcher as o on o.kind = x.kind and o.feed = left(x.feed, 600) and o.watched_by = caller
    order by x.kind, left(x.feed, 600), x.error
    on conflict on constraint watcher_pkey do update set
        looked_at = excluded.looked_at, error = excluded.error,
        max_lag = excluded.max_lag, max_backlog = excluded.max_backlog,
        ready = coalesce(excluded.ready, w.ready), woke_at = greatest(excluded.woke_at, w.woke_at),
        since = case when (w.error is null) = (excluded.error is null) then w.since else excluded.since end;
end
$$;
comment on function pgchange_sealed.note_watchers(pgchange.caller, jsonb) is
    'Note what the watchers of the caller have seen: [{feed, kind, error or null, ready or null, woke: seconds since they woke '
    'somebody, if they did since they last said so, limits: {max_lag: seconds or null, max_backlog or null} of the consumer''s lag, or '
    'null to leave them as they are}, ...].';

create function pgchange_sealed.watchers(caller pgchange.caller) returns setof pgchange.watcher
language sql stable security definer as $$
    select w.* from pgchange.watcher as w
    where w.watched_by = caller
       or w.kind in (select k.kind from (select distinct o.kind from pgchange.watcher as o) as k where pgchange.keeps(caller, k.kind))
    order by w.feed, w.kind, w.watched_by
$$;
comment on function pgchange_sealed.watchers(pgchange.caller) is
    'The watchers of the caller, and those of the feeds that the caller looks after.';

select pgchange.show_sealed('pgchange');

-- Forget watchers that have not looked for so long, at most a thousand at a time; says which, and whether more may be left.
create function pgchange.trim_watchers(keep interval default '7 days') returns setof text
language sql security definer
set enable_seqscan = off
set enable_bitmapscan = off
as $$
    with gone as (
        delete from pgchange.watcher as w
        where w.ctid = any (array(
            select o.ctid from pgchange.watcher as o where o.looked_at < now() - keep limit 1000 for update skip locked))
        returning w.feed
    )
    select format('forgot the watcher of %s', g.feed) from gone as g
    union all
    select 'left watchers to the next time' where (select count(*) from gone) = 1000
$$;
