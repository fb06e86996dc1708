-- Attempts on batches and watchers of feeds, for people.

-- Whether a role has the rights of the owner of this schema, or administers all consumers of a kind. Such a role may repair
-- consumers of that kind.
create function pgchange.keeps(caller name, kind text) returns boolean
language sql stable as $$
    select pg_has_role(caller, home.nspowner, 'usage')
        or exists (
            select from pgchange.registered as r
            join pg_namespace as n on n.nspname = r.schema
            join pg_proc as f on f.pronamespace = n.oid and f.proname = 'adopt_mark'
            join pg_roles as o on o.oid = f.proowner
            where r.kind = keeps.kind and has_function_privilege(caller, f.oid, 'execute')
              -- Leave out a function that another role has created in that schema.
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
        -- Use the primary key. If a consumer has not worked for long, its rows are far behind those of other consumers in the
        -- index on noted_at.
        return query
            with of_one as materialized (
                select b from pgchange.batch as b where b.kind = any (kept) and b.consumer = of_consumer
            )
            select (o.b).* from of_one as o order by (o.b).noted_at desc limit most;
    end if;
end
$$;
comment on function pgchange_sealed.batches(pgchange.caller, text, integer) is
    'The latest attempts on batches, of a consumer or of all consumers, the latest first, of the feeds that the caller '
    'administers.';

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
    version bigint not null default 0,
    primary key (kind, feed, watched_by, version)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
comment on table pgchange.watcher is
    'The state of watchers of feeds, by kind, feed and the role that watches. since: since when they can look, or cannot, with '
    'the error. looked_at: when they looked last. ready: how much was ready then. woke_at: when they last started work. max_lag '
    'and max_backlog: the limits that its DAG sets, or null. pgchange.health() reports the consumer if its oldest ready change is '
    'older, or if it has more changes. Each report replaces the row by a row with the next version. So the newest row is found at '
    'once, however many dead rows an old snapshot keeps.';

-- The newest row of each watcher. Each takes a single step of an index.
create function pgchange.newest_watchers() returns setof pgchange.watcher
language plpgsql stable
set jit = off
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
as $$
begin
    return query
        with recursive newest as (
            (select w.* from pgchange.watcher as w
             order by w.kind desc, w.feed desc, w.watched_by desc, w.version desc limit 1)
            union all
            select o.*
            from newest as n
            cross join lateral (
                select w.* from pgchange.watcher as w
                where (w.kind, w.feed, w.watched_by) < (n.kind, n.feed, n.watched_by)
                order by w.kind desc, w.feed desc, w.watched_by desc, w.version desc limit 1) as o
        )
        select n.* from newest as n;
end
$$;

create function pgchange_sealed.note_watchers(caller pgchange.caller, watched jsonb) returns void
language plpgsql security definer
set lock_timeout = '1s'
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
as $$
begin
    perform pgchange.check_face(caller, 'pgchange.note_watchers(jsonb)');
    with noted as materialized (
        -- A key must fit into an index. If several watchers look at one feed, keep an error, because it needs attention.
        select distinct on (x.kind, left(x.feed, 600)) x.kind, left(x.feed, 600) as feed, left(x.error, 4000) as error, x.ready,
               clock_timestamp() - make_interval(secs => x.woke) as woke_at, x.limits,
               make_interval(secs => (x.limits ->> 'max_lag')::double precision) as max_lag, (x.limits ->> 'max_backlog')::bigint as max_backlog
        from jsonb_to_recordset(watched) as x(feed text, kind text, error text, ready bigint, woke double precision, limits jsonb)
        order by x.kind, left(x.feed, 600), x.error
    ), newest as materialized (
        select n.*, w as last, w.place
        from noted as n
        left join lateral (
            select x.*, x.ctid as place from pgchange.watcher as x
            where x.kind = n.kind and x.feed = n.feed and x.watched_by = caller
            order by x.kind desc, x.feed desc, x.watched_by desc, x.version desc limit 1
        ) as w on true
    ), gone as (
        delete from pgchange.watcher as w where w.ctid = any (array(select n.place from newest as n))
    )
    insert into pgchange.watcher as w (kind, feed, watched_by, version, since, error, ready, woke_at, max_lag, max_backlog)
    select n.kind, n.feed, caller, coalesce((n.last).version, 0) + 1,
           case when ((n.last).error is null) = (n.error is null) then coalesce((n.last).since, clock_timestamp()) else clock_timestamp() end,
           n.error, coalesce(n.ready, (n.last).ready), greatest(n.woke_at, (n.last).woke_at),
           case when n.limits is null then (n.last).max_lag else n.max_lag end,
           case when n.limits is null then (n.last).max_backlog else n.max_backlog end
    from newest as n
    -- Another process of the same role may report on the same feed at the same time.
    on conflict on constraint watcher_pkey do update set
        looked_at = excluded.looked_at, error = excluded.error, max_lag = excluded.max_lag, max_backlog = excluded.max_backlog,
        ready = coalesce(excluded.ready, w.ready), woke_at = greatest(excluded.woke_at, w.woke_at);
end
$$;
comment on function pgchange_sealed.note_watchers(pgchange.caller, jsonb) is
    'Record the observations of the watchers of the caller: [{feed, kind, error or null, ready or null, woke, limits}, ...]. '
    'woke: seconds since they started work, if they did since their last report. limits: {max_lag: seconds or null, max_backlog '
    'or null} of the consumer''s lag, or null to leave the limits as they are.';

create function pgchange_sealed.watchers(caller pgchange.caller) returns setof pgchange.watcher
language sql stable security definer
set jit = off
as $$
    with newest as materialized (select n.* from pgchange.newest_watchers() as n)
    select w.* from newest as w
    where w.watched_by = caller
       or w.kind in (select k.kind from (select distinct o.kind from newest as o) as k where pgchange.keeps(caller, k.kind))
    order by w.feed, w.kind, w.watched_by
$$;
comment on function pgchange_sealed.watchers(pgchange.caller) is
    'The watchers of the caller, and those of the feeds that the caller administers.';

select pgchange.show_sealed('pgchange');

-- Delete watchers that have not looked for longer than keep, at most a thousand. Returns which were deleted, and whether more may
-- be left.
create function pgchange.trim_watchers(keep interval default '7 days') returns setof text
language sql security definer
set jit = off
set enable_seqscan = off
set enable_bitmapscan = off
as $$
    with gone as (
        delete from pgchange.watcher as w
        where w.ctid = any (array(
            select o.ctid
            from (select n.* from pgchange.newest_watchers() as n where n.looked_at < now() - keep limit 1000) as old
            join pgchange.watcher as o using (kind, feed, watched_by, version)
            for update of o skip locked))
        returning w.feed
    )
    select format('deleted the watcher of %s', g.feed) from gone as g
    union all
    select 'left more watchers for the next run' where (select count(*) from gone) = 1000
$$;
