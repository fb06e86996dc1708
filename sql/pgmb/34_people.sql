-- What people ask and do: status, and dropping a group.

do $$
begin
    perform pgchange.register('pgmb', 'event');
end
$$;

create function pgmb.status(upto integer default 1000) returns setof pgchange.consumer_status
language plpgsql volatile security definer
set search_path = pg_catalog, pgmb, pg_temp
set jit = off
as $$
declare
    known record;
    run record;
    waits record;
begin
    if coalesce(upto < 0, true) then
        raise invalid_parameter_value using message = 'upto must not be negative';
    end if;
    waits := pgmb.waiting(upto);
    for known in
        select g.id, coalesce(c.elsewhere, false) as elsewhere, c.batch_id, c.attempt, c.error, c.claimed_at, c.version as claimed,
               case when not c.elsewhere or c is null then coalesce(g.last_read_event_id, '')
                    when c.batch is null then c.upto else c.after end as cursor,
               case when not c.elsewhere or c is null then g.version
                    when c.batch is null then c.version else c.from_version end as version,
               case when c.elsewhere then c.claimed_at else g.updated_at end as updated_at,
               c is null and not exists (select from pgmb.subscriptions as s where s.group_id = g.id) as unknown
        from pgmb.subscription_groups as g left join pgmb.claims as c on c.group_id = g.id
        order by g.id
    loop
        select a.* into run from pgmb.next_runs(known.id, known.cursor, upto::bigint + 1) as a;
        return query select
            'event', pgmb.name_of(known.id), jsonb_build_object('group', known.id), known.version,
            coalesce(run.count, 0), coalesce(run.count, 0) <= upto,
            greatest(extract(epoch from clock_timestamp() - pgmb.extract_date_from_event_id(run.lowest)), 0)::double precision,
            waits.counted, pgmb.faults(known.id), pgmb.locked(known.id),
            case when known.claimed > known.version then known.batch_id end,
            case when known.claimed > known.version then known.attempt end,
            -- It may quote what an event holds.
            case when known.claimed > known.version and has_table_privilege(session_user, 'pgmb.events', 'select') then known.error end,
            case when known.claimed > known.version then known.claimed_at end,
            known.updated_at::timestamptz, null::text,
            case when known.elsewhere then 'progress' when known.unknown then 'changes' end;
    end loop;
end
$$;
comment on function pgmb.status(integer) is
    'Every group, as pgchange.status() shows it: what is ready for it and how old, what waits to be dispatched for any group, its '
    'faults, whether it is being read, and the batch that it claimed last and has not acked. For a group whose cursor is elsewhere, '
    'only the last claim tells, so a batch that is done can be shown as in work.';

create function pgmb.dispatching()
returns table (
    dispatched_at timestamptz, events bigint, waiting bigint, oldest_seconds double precision, at_work integer, restored text,
    faults bigint, astray bigint
)
language plpgsql volatile security definer
set search_path = pg_catalog, pgmb, pg_temp
as $$
begin
    return query
        select d.dispatched_at, d.total, w.counted, w.age, (select min(l) from pgchange.who_locks(pgmb.dispatch_key()) as l),
               case when d.restored_at > now() - interval '1 day' then d.restored end,
               (select count(*) from (select from pgmb.fault limit 1000) as bounded),
               (select count(*) from (select from pgmb.fault as f where f.group_id is null limit 1000) as bounded)
        from pgmb.dispatcher_now() as d, pgmb.waiting(1000) as w;
end
$$;
comment on function pgmb.dispatching() is
    'The last poll that had something to dispatch, how many events there have ever been, how many wait and since when, which '
    'process dispatches now, what was done after a restore in the last day, how many faults there are, and how many of those, '
    'astray, are for a subscription that is gone; each counted up to a thousand.';

create function pgmb.drop_group(gid text) returns void
language plpgsql security definer
set search_path = pg_catalog, pgmb, dead_letter, pg_temp
as $$
begin
    perform pgmb.take_idle(gid);
    -- What a poll under way dispatches to this group would be there for the next one of its name.
    perform pg_advisory_xact_lock(pgmb.dispatch_key());
    delete from pgmb.fault as f where f.group_id = gid;
    perform pgchange.forget_claim('event', pgmb.name_of(gid));
    delete from dead_letter.letter as l where l.kind in ('event', 'handler') and l.address ->> 'group' = gid;
    delete from pgmb.subscription_groups as g where g.id = gid;
end
$$;
comment on function pgmb.drop_group(text) is
    'Delete a group, its subscriptions, its cursor and its dead letters; it no longer keeps events from being deleted. It waits '
    'for a poll that is under way, and nothing is dispatched until its transaction ends.';
