-- How many events are ready for a group, and whether the group has come to a point.

-- The number of events for which a condition of a group failed, up to a thousand.
create function pgmb.faults(gid text) returns bigint
language plpgsql stable security definer as $$
begin
    return (
        select count(*) from (
            select from pgmb.fault as f cross join lateral unnest(f.event_ids) where f.group_id = gid limit 1000) as found_faults
    );
end
$$;

-- The number of events that are not dispatched yet or that lie in the future, counted up to about the given number.
create function pgmb.waiting(upto integer, out counted bigint, out age double precision)
language plpgsql volatile
set plan_cache_mode = force_generic_plan
set jit = off
set enable_sort = off
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
    at pgmb.dispatcher := pgmb.dispatcher_now();
    slice record;
    later bigint;
    oldest text;
begin
    counted := 0;
    for slice in
        select cardinality(u.ids) as n, u.ids[1] as id
        from pgmb.undispatched(at.snapshot, at.partial_txid, at.partial_seq, pgmb.visible_now()) as u
    loop
        oldest := coalesce(oldest, slice.id);
        counted := counted + slice.n;
        exit when counted > upto;
    end loop;
    select count(*), least(oldest, min(s.event_id)) into later, oldest
    from (
        (select x.event_id from pgmb.scheduled as x where x.event_id > at.scheduled_upto order by x.event_id
         limit greatest(upto - counted, 0) + 1)
        union all
        (select l.event_id from pgmb.late(at.snapshot, at.scheduled_upto, 'pmg') as l limit greatest(upto - counted, 0) + 1)
        union all
        (select x.id from pgmb.later as x where x.id >= (select min(m.id) from pgmb.later_from as m) order by x.id
         limit greatest(upto - counted, 0) + 1)
    ) as s;
    counted := counted + later;
    age := pgmb.age(oldest);
end
$$;

-- An estimate of how many dispatched events a group has not read. It reads the given number of dispatches: the rank of the last
-- slice of a dispatch is the number of the group's events in it. For the rest, up to the group's latest dispatch, it assumes
-- that the group has the same share of all events. total counts the events of all groups.
create function pgmb.estimate_unread(gid text, after text, dispatches integer) returns bigint
language plpgsql stable
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set jit = off
as $$
declare
    at constant pgmb.dispatcher := pgmb.dispatcher_now();
    -- Events before this id are dispatched, so partitions of the future are not read.
    before constant text := left(at.last_id, 15) || 'g';
    reached text := pgmb.over_gap(gid, after);
    part text := pgmb.first_part(reached, before);
    slice record;
    latest record;
    started bigint;
    counted bigint := 0;
    whole_reads integer := 0;
begin
    for n in 0..greatest(dispatches, 1) loop
        select d.id, d.total into slice
        from pgmb.dispatched as d
        where d.group_id = gid and d.id > reached and d.id < part
        order by d.group_id, d.id limit 1;
        if not found and part <> before then
            select d.id, d.total into slice
            from pgmb.dispatched as d
            where d.group_id = gid and d.id > part and d.id < before
            order by d.group_id, d.id limit 1;
            whole_reads := whole_reads + 1;
            part := pgmb.first_part(slice.id, before);
        end if;
        if slice.id is null then
            return counted;
        end if;
        started := coalesce(started, slice.total);
        -- Two reads of the rest of the span are enough for an estimate.
        exit when n = greatest(dispatches, 1) or n > 0 and whole_reads = 2;
        select d.id into latest
        from pgmb.dispatched as d
        where d.group_id = gid and d.id >= slice.id and d.id < left(slice.id, 15) || 'g'
        order by d.group_id desc, d.id desc limit 1;
        counted := counted + pgmb.rank_of(latest.id) - case when left(after, 15) = left(latest.id, 15) then pgmb.rank_of(after) else 0 end;
        reached := latest.id;
    end loop;
    select d.total into latest
    from pgmb.dispatched as d
    where d.group_id = gid and d.id > reached and d.id < before
    order by d.group_id desc, d.id desc limit 1;
    -- total counts the events of all groups, and all dispatches of a poll have the same total. So the estimate is at most its
    -- growth since the group's cursor.
    return greatest(counted, least(
        at.total - started,
        counted + (counted::double precision * (latest.total - slice.total) / greatest(slice.total - started, 1))::bigint));
end
$$;

-- How many events are dispatched to a group and unread, and how many wait to be dispatched to any group. On a primary, it first
-- dispatches a chunk if fewer than upto events are ready. Events of open transactions are not counted.
create function pgmb.lag(gid text, "position" jsonb, upto integer) returns jsonb
language plpgsql volatile security definer as $$
declare
    after text := coalesce("position" ->> 'cursor', '');
    dispatched bigint;
    ready record;
    waiting record;
    exact boolean;
    counted bigint;
begin
    perform pgmb.check_position(gid, "position");
    if coalesce(upto < 0, true) then
        raise invalid_parameter_value using message = 'upto must not be negative';
    end if;
    dispatched := (pgmb.dispatcher_now()).version;
    ready := pgmb.next_events(gid, after, upto::bigint + 1);
    if ready.count <= upto and pgmb.may_dispatch() then
        perform pgmb.dispatch();
        -- Another session may have dispatched meanwhile.
        if (pgmb.dispatcher_now()).version > dispatched then
            ready := pgmb.next_events(gid, after, upto::bigint + 1);
        end if;
    end if;
    counted := ready.count;
    exact := counted <= upto;
    if not exact then
        counted := greatest(counted, pgmb.estimate_unread(gid, after, least(upto, 100)));
    end if;
    waiting := pgmb.waiting(upto);
    return jsonb_build_object(
        'ready', counted, 'ready_exact', exact,
        'ready_age', pgmb.age(ready.lowest),
        'waiting', waiting.counted, 'waiting_exact', waiting.counted = 0, 'waiting_age', waiting.age,
        'faults', pgmb.faults(gid));
end
$$;

-- A point to wait for: all that is published and due now.
create function pgmb.point() returns jsonb
language plpgsql volatile security definer as $$
declare
    due text := pgmb.create_event_id(clock_timestamp(), 0);
    -- Read this before the snapshot. So the snapshot sees the transaction that has published the events set aside.
    aside boolean := pgmb.aside(due);
begin
    return jsonb_build_object(
        'snapshot', pgmb.visible_now(), 'source', pgmb.here(), 'until', clock_timestamp()::timestamptz(0),
        'due', due, 'aside', aside);
end
$$;

-- Whether a position has come to a point, and the goal for the next call.
create function pgmb.passed(gid text, "position" jsonb, goal jsonb) returns jsonb
language plpgsql volatile security definer as $$
declare
    at pgmb.dispatcher;
    ready record;
    upto text := goal ->> 'cursor';
    aside boolean := (goal ->> 'aside')::boolean and pgmb.aside(goal ->> 'due');
begin
    perform pgmb.check_position(gid, "position");
    if goal ->> 'source' <> pgmb.here() then
        raise exception using errcode = 'PC004', message = 'the point was taken in another database than this source',
            hint = 'the source was restored, upgraded or replaced since: take a new point';
    end if;
    if (goal ->> 'aside')::boolean and not aside then
        -- The events set aside were published after the goal's snapshot was taken.
        goal := goal || jsonb_build_object('aside', false, 'snapshot', pgmb.visible_now());
    end if;
    if upto is null then
        if pgmb.may_dispatch() then
            perform pgmb.dispatch();
        end if;
        at := pgmb.dispatcher_now();
        -- All events of the point are dispatched if the dispatcher has left none of them. From then on only the cursor counts.
        -- Which events the dispatcher of another cluster has left is not known.
        if pgmb.is_native() and not exists (
            select from pgmb.undispatched(
                at.snapshot, at.partial_txid, at.partial_seq, (goal ->> 'snapshot')::pg_snapshot))
           and not pgmb.due_by(at, goal ->> 'due') and aside is not true
        then
            upto := at.last_id;
        end if;
    end if;
    ready := pgmb.next_events(gid, coalesce("position" ->> 'cursor', ''), 1);
    return jsonb_build_object(
        'goal', goal || jsonb_build_object('cursor', upto),
        'passed', upto is not null and (ready.count = 0 or left(ready.upto, 15) collate "C" > left(upto, 15)));
end
$$;
