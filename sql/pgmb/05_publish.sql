-- Publishing: the ids of inserted events are recorded for the next poll, in one or more slices for each statement.
--
-- A statement fires the triggers of the table that it names. Events are inserted into pgmb.events by this name, because only the
-- owner has rights on a partition.
--
-- Events of a time that has no partition yet are set aside. A new partition can be attached only if the default partition has
-- none of its rows. An event is moved together with its row of scheduled, without which no poll takes it meanwhile.

-- Record the ids of inserted events. Due events are recorded in slices, in the order of the statement, and events of the future
-- one by one.
create function pgmb.publish() returns trigger
language plpgsql security definer as $$
declare
    now_id text := pgmb.due_before();
    due text[];
    block text[];
    addressed boolean;
    later boolean;
begin
    select array_agg(a.id::text) filter (where a.id < now_id), bool_or(a.subscription_id is not null), bool_or(a.id >= now_id)
    into due, addressed, later from added as a;
    if cardinality(due) <= 280 then
        insert into pgmb.published (addressed, ids) values (addressed, due);
    else
        -- PostgreSQL reads everything before an element of an array. Cut into blocks, the cost does not grow with the square of
        -- the number.
        for begins in 1..coalesce(cardinality(due), 0) by 28000 loop
            block := due[begins:begins + 27999];
            insert into pgmb.published (addressed, ids)
            select addressed, block[i:i + 279] from generate_series(1, cardinality(block), 280) as i;
        end loop;
    end if;
    if later then
        insert into pgmb.scheduled (event_id) select a.id from added as a where a.id >= now_id;
    end if;
    return null;
end
$$;

create trigger published after insert on pgmb.events
    referencing new table as added
    for each statement execute function pgmb.publish();

-- The given ids that belong to a different event. The function is security definer, because publishers may not read the log.
create function pgmb.other_events(ids text[], topics text[], payloads jsonb[], metadata jsonb[], sids text[]) returns text[]
language sql stable security definer
set jit = off
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
    select array(
        select x.id from unnest(ids, topics, payloads, metadata, sids) with ordinality as x(id, topic, payload, metadata, sid, n)
        cross join lateral (select y.* from pgmb.events as y where y.id = x.id offset 0) as e
        where (e.topic, e.payload, e.metadata, e.subscription_id) is distinct from (x.topic, x.payload, x.metadata, x.sid)
        order by x.n)
$$;

-- Move events of the future from the default partition to pgmb.later: those with ids from lower_id to before upper_id. Moves at
-- most this many, or all if most is null, and returns how many. pgmb.dispatched has no such rows. Only maintenance calls this,
-- because it changes pgmb.later_from.
create function pgmb.set_aside(tbl regclass, lower_id pgmb.event_id, upper_id pgmb.event_id, most bigint) returns bigint
language plpgsql
set plan_cache_mode = force_generic_plan
set jit = off
set enable_sort = off
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
declare
    places tid[];
    schedules tid[];
begin
    -- Lock the rows first, because only a later statement sees the ctid of a row that another transaction changed before the
    -- lock.
    select array_agg(f.place), array_agg(f.schedule) into places, schedules
    from (
        -- These rows are in the default partition. If publishers are locked out, its size limits how long they wait.
        select e.ctid as place, s.place as schedule
        from pgmb.events_default as e
        -- Look up each row by a range in the order of the key. With =, the planner could choose another plan if it expects few
        -- rows.
        cross join lateral (
            select x.ctid as place from pgmb.scheduled as x where x.event_id >= e.id and x.event_id <= e.id order by x.event_id limit 1
        ) as s
        where e.id >= lower_id and e.id < upper_id and tbl = 'pgmb.events'::regclass
        order by e.id limit most
        for update of s, e skip locked
    ) as f;
    if places is null then
        return 0;
    end if;
    delete from pgmb.scheduled as s where s.ctid = any (schedules);
    with moved as (
        delete from pgmb.events_default as e where e.ctid = any (places) returning e.*
    )
    -- If an id was published twice, store it once, as the primary key of a single table would.
    insert into pgmb.later select m.* from moved as m on conflict do nothing;
    update pgmb.later_from as m set id = lower_id where m.id > lower_id;
    return cardinality(places);
end
$$;

-- Set most events aside before others have to wait for it: the given number at a time, until only some hundreds are left.
create function pgmb.set_most_aside(
    tbl regclass, lower_id pgmb.event_id, upper_id pgmb.event_id, most bigint default 10000
) returns void
language plpgsql as $$
begin
    -- Each pass leaves fewer events than the pass before, unless publishers add them faster. So give up after eight passes.
    for pass in 1..8 loop
        exit when pgmb.set_aside(tbl, lower_id, upper_id, most) < 500;
    end loop;
end
$$;

-- Whether events with lower ids are set aside.
create function pgmb.aside(before text) returns boolean
language plpgsql
set plan_cache_mode = force_generic_plan
set jit = off
set enable_sort = off
set enable_seqscan = off
set enable_bitmapscan = off
as $$
begin
    return exists (select from pgmb.later as x where x.id >= (select min(m.id) from pgmb.later_from as m) and x.id < before);
end
$$;

-- Publish events of pgmb.later with ids from lowest to before another, at most this many. Returns how many. Waits for a publisher
-- that has inserted such an id a second time and has not committed.
create function pgmb.publish_later_range(lowest text, before text, most bigint) returns bigint
language plpgsql
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
declare
    places tid[];
begin
    -- Lock the rows first, as in set_aside(): only a later statement sees the ctid of a row that was changed before the lock.
    select array_agg(f.place) into places
    from (
        select x.ctid as place from pgmb.later as x
        where x.id >= lowest and x.id < before
        order by x.id limit most
        for update of x skip locked
    ) as f;
    with moved as (
        delete from pgmb.later as x where x.ctid = any (places) returning x.*
    )
    insert into pgmb.events select m.* from moved as m on conflict do nothing;
    return coalesce(cardinality(places), 0);
end
$$;

-- Publish events of pgmb.later with lower ids, at most this many, without those for which it would have to wait. Returns how
-- many.
create function pgmb.publish_later(before pgmb.event_id, most bigint) returns bigint
language plpgsql
set lock_timeout = '50ms'
as $$
declare
    lowest text := (select min(m.id) from pgmb.later_from as m);
    one text;
    n bigint := 0;
    busy integer := 0;
begin
    -- Return early, so that a poll writes nothing if no events were set aside.
    if not pgmb.aside(before) then
        return 0;
    end if;
    begin
        perform set_config('lock_timeout', pgchange.patience('50 ms'), true);
        return pgmb.publish_later_range(lowest, before, most);
    exception when lock_not_available or deadlock_detected then
        -- An open transaction has published such an event a second time. The other events must not wait for it.
    end;
    -- Take the events in a random order, because an event may stay locked.
    for one in
        select x.id from pgmb.later as x where x.id >= lowest and x.id < before order by random() limit least(most, 1000)
    loop
        begin
            perform set_config('lock_timeout', pgchange.patience('50 ms'), true);
            n := n + pgmb.publish_later_range(one, one || '0', 1);
        exception when lock_not_available or deadlock_detected then
            busy := busy + 1;
        end;
        exit when busy = 5;
    end loop;
    return n;
end
$$;

-- Set the lower bound of pgmb.later to its lowest id. Only maintenance calls it, one run at a time: nothing else may write
-- pgmb.later then.
create function pgmb.move_later_from() returns void
language plpgsql
set enable_seqscan = off
set enable_bitmapscan = off
as $$
begin
    update pgmb.later_from as m set id = f.id
    from (
        select coalesce(min(x.id), 'pmg') from pgmb.later as x where x.id >= (select min(n.id) from pgmb.later_from as n)) as f(id)
    where m.id <> f.id;
end
$$;
