-- The maintenance that a scheduler calls every few minutes.

-- Set aside the events of the default partition for which there is no other partition yet, and publish those for which there is
-- one now. At most the given number of each; returns how many. No session waits for it. Call it until nothing is left to do, each
-- time in a transaction of its own.
create function pgmb.place_scheduled(current_ts timestamptz default now(), most bigint default 10000) returns bigint
language plpgsql security definer as $$
declare
    edge pgmb.event_id;
    placed bigint;
begin
    perform pgmb.check_time(current_ts);
    perform pgchange.check_isolation();
    if most not between 1 and 1000000 then
        raise invalid_parameter_value using message = format(
            'pgmb.place_scheduled() places 1 to 1000000 events at once, not %s', most);
    end if;
    if not pg_try_advisory_xact_lock(pgmb.upkeep_key()) then
        return 0;
    end if;
    edge := pgmb.placed_from(current_ts);
    placed := pgmb.set_aside('pgmb.events', edge, 'pmg', most) + pgmb.publish_later(edge, most);
    perform pgmb.move_later_from();
    return placed;
end
$$;

-- Why partitions that a table needs are made only with stop_publishers; null if they are made without it.
create function pgmb.crowded_default(tbl regclass, current_ts timestamptz default now()) returns text
language plpgsql stable security definer as $$
begin
    perform pgmb.check_append_only(tbl, current_ts);
    return (
        select format(
            'publishers would wait while the %s of the default partition are read; when they can: select pgmb.make_partitions(%L, '
            'stop_publishers => true)', pg_size_pretty(d.bytes), 'pgmb.' || tbl)
        from pg_relation_size(pgmb.default_partition(tbl)) as d(bytes)
        -- Check the size first, because it takes longer to find the missing partitions.
        where case when d.bytes > 16 * 1024 * 1024 then exists (select from pgmb.missing_partitions(tbl, current_ts)) end);
end
$$;

-- Why no partition can be attached to a table now: the processes that have locked it or its default partition.
create function pgmb.in_use(tbl regclass) returns text
language sql stable as $$
    -- Not only publishers are in the way: so is a dump, or a transaction that has read the default partition and does not end.
    select 'it is in use' || coalesce(', just now by ' || string_agg(distinct coalesce(
        'process ' || l.pid, 'the prepared transaction ' || quote_literal(p.gid), 'a prepared transaction'), ', '), '')
    from pg_locks as l
    left join pg_locks as t on l.pid is null and t.pid is null and t.virtualtransaction = l.virtualtransaction
        and t.locktype = 'transactionid'
    left join pg_prepared_xacts as p on p.transaction = t.transactionid
    where l.locktype = 'relation' and l.database = (select d.oid from pg_database as d where d.datname = current_database())
      and l.relation in (tbl, pgmb.default_partition(tbl)) and l.pid is distinct from pg_backend_pid()
$$;

-- Note the gaps of groups before the partition in which the dispatcher is. It writes for groups without a dispatch in the
-- partition before, once for each partition. The caller holds the lock of pgmb.upkeep_key().
create function pgmb.note_gaps() returns void
language plpgsql
set plan_cache_mode = force_custom_plan
set jit = off
set enable_sort = off
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
    -- Every poll writes dispatches behind it, so the dispatches before it are all committed, and get no more.
    reached constant text := (pgmb.dispatcher_now()).last_id;
    edge text;
    prior text;
begin
    select max(p.lower_bound), max(p.lower_bound) filter (where p.upper_bound <= reached) into edge, prior
    from pgmb.get_partitions_and_bounds('pgmb.dispatched'::regclass) as p where p.lower_bound <= reached;
    if prior is null then
        return;
    end if;
    insert into pgmb.gap (group_id, low, high)
    select g.id, '', coalesce(left(d.id, 15) || '000000000', edge)
    from pgmb.subscription_groups as g
    left join lateral (
        select x.id from pgmb.dispatched as x where x.group_id = g.id and x.id < edge order by x.group_id, x.id limit 1) as d on true
    where not exists (select from pgmb.gap as known where known.group_id = g.id);
    with idle as materialized (
        select g.id as group_id, k.low, k.high
        from pgmb.subscription_groups as g
        cross join lateral (
            select x.low, x.high from pgmb.gap as x where x.group_id = g.id order by x.low desc limit 1) as k
        where k.high < edge and not exists (
            select from pgmb.dispatched as d where d.group_id = g.id and d.id >= prior and d.id < edge)
    ), searched as materialized (
        select i.*, (
            select d.id from pgmb.dispatched as d where d.group_id = i.group_id and d.id > i.high and d.id < prior
            order by d.group_id desc, d.id desc limit 1) as latest
        from idle as i
    ), extended as (
        update pgmb.gap as g set high = edge from searched as s
        where g.group_id = s.group_id and g.low = s.low and s.latest is null
    )
    insert into pgmb.gap (group_id, low, high) select s.group_id, s.latest, edge from searched as s where s.latest is not null;
    -- Delete gaps before the first partition, which save readers nothing. Keep the gap with low '', because it shows that the
    -- dispatches of the group were searched.
    delete from pgmb.gap as g
    where g.low > '' and g.high <= (
            select min(p.lower_bound) from pgmb.get_partitions_and_bounds('pgmb.dispatched'::regclass) as p)
       or not exists (select from pgmb.subscription_groups as s where s.id = g.group_id);
end
$$;

create function pgmb.make_partitions(
    tbl regclass, current_ts timestamptz default now(), stop_publishers boolean default false
) returns setof text
language plpgsql security definer as $$
declare
    -- Locks last to the end of the transaction, so other sessions would wait while this one sleeps.
    tries integer := case when stop_publishers or pg_current_xact_id_if_assigned() is not null then 1 else 8 end;
    misfits regclass[];
    missing tstzrange[];
    crowded text;
    -- Publishers wait while partitions are attached, so this must take only a moment.
    lot constant integer := 50;
    left_over integer;
begin
    perform pgmb.check_append_only(tbl, current_ts);
    if not pg_try_advisory_xact_lock(pgmb.upkeep_key()) then
        return next format('postponed the partitions of %s: another maintenance is at work', tbl);
        return;
    end if;
    if tbl = 'pgmb.dispatched'::regclass then
        perform pgmb.note_gaps();
    end if;
    crowded := pgmb.crowded_default(tbl, current_ts);
    if crowded is not null and not stop_publishers then
        return next format('postponed the partitions of %s: %s', tbl, crowded);
        return;
    end if;
    misfits := pgmb.misfits(tbl, current_ts);
    missing := array(select m from pgmb.missing_partitions(tbl, current_ts) as m);
    if missing = '{}' and misfits = '{}' then
        return;
    end if;
    left_over := greatest(cardinality(missing), cardinality(misfits)) - lot;
    if left_over > 0 then
        missing := missing[:lot];
        misfits := array(
            select p.partition_id from pgmb.get_partitions_and_bounds(tbl) as p
            where p.partition_id = any (misfits)
              and p.lower_bound < pgmb.create_event_id(coalesce(upper(missing[lot]), 'infinity'), 0)
            limit lot);
    end if;
    -- Prepare all partitions before the first is attached, because publishers wait from the first attach until this transaction
    -- ends.
    perform pgmb.prepare_partition(tbl, m) from unnest(missing) as m;
    loop
        perform pgmb.set_most_aside(
            tbl, pgmb.create_event_id(lower(missing[1]), 0), pgmb.create_event_id(upper(missing[cardinality(missing)]), 0),
            case when stop_publishers then null else 10000 end);
        begin
            return query select pgmb.attach_partitions(tbl, missing, misfits, stop_publishers);
            if left_over > 0 then
                return next format('left %s partitions of %s to the next time', left_over, tbl);
            end if;
            return;
        exception when lock_not_available or object_in_use or deadlock_detected then
            tries := tries - 1;
        end;
        exit when tries = 0;
        -- Other sessions wait while an attempt waits, so between two attempts they get much more time than that.
        perform pg_sleep(0.5);
    end loop;
    if missing <> '{}' then
        execute (select string_agg(format('drop table pgmb.%I', pgmb.partition_name(tbl, m)), '; ') from unnest(missing) as m);
    end if;
    return next format('postponed the partitions of %s: %s', tbl, pgmb.in_use(tbl));
end
$$;
comment on function pgmb.make_partitions(regclass, timestamptz, boolean) is
    'Keep partitions of partition_interval ready for future_intervals_to_create from now, at least one. Returns a line for each '
    'change. It makes the next 50 partitions; if some are left, a line says so: then call it again in another transaction. If '
    'publishers are in the way it tries again for a few seconds, unless its transaction has written before. Empty partitions that '
    'were made ahead with a longer interval are replaced. If the default partition has grown, pass stop_publishers => true. Then '
    'publishers wait while it is read, and this function waits up to a minute for publishers at work.';

create function pgmb.maintain_append_only_table(tbl regclass, current_ts timestamptz default now()) returns setof text
language plpgsql security definer as $$
begin
    -- The steps that lock the whole table come last, because locks are kept to the end.
    return query select * from pgmb.trim_partitions(tbl, current_ts);
    return query select * from pgmb.make_partitions(tbl, current_ts);
    return query select * from pgmb.drop_emptied(tbl, current_ts);
end
$$;
comment on function pgmb.maintain_append_only_table(regclass, timestamptz) is
    'Make the partitions of pgmb.events or pgmb.dispatched ahead, and delete rows that are old and no longer needed. Returns a '
    'line for each thing done, postponed or kept.';

-- Maintain the log as of a time, in one transaction. Returns a line for each thing done, postponed, kept or left.
create function pgmb.maintain_log(current_ts timestamptz) returns setof text
language plpgsql as $$
begin
    return query select * from pgmb.misfit_settings();
    return query select * from pgmb.expire_subscriptions(current_ts);
    return query select * from pgmb.forget_faults(current_ts);
    return query select * from pgmb.forget_dropped();
    return query select * from pgmb.trim_published();
    perform pgmb.place_scheduled(current_ts);
    -- The steps that lock a whole table come last for both, because locks are kept to the end.
    return query select * from pgmb.trim_partitions('pgmb.dispatched', current_ts);
    return query select * from pgmb.trim_partitions('pgmb.events', current_ts);
    return query select * from pgmb.make_partitions('pgmb.dispatched', current_ts);
    return query select * from pgmb.make_partitions('pgmb.events', current_ts);
    return query select * from pgmb.drop_emptied('pgmb.dispatched', current_ts);
    return query select * from pgmb.drop_emptied('pgmb.events', current_ts);
end
$$;

create function pgmb.maintain_events_table() returns setof text
language sql volatile security definer as $$
    select * from pgmb.maintain_log(now())
$$;
comment on function pgmb.maintain_events_table() is
    'Maintain the log, in one transaction: select pgmb.maintain_events_table(). Subscriptions expire, partitions are made ahead, '
    'and rows that are old and no longer needed are deleted. Returns a line for each thing done, postponed, kept (and for which '
    'group) or left to the next time. A call locks only as much as takes a moment. Locks last to the end of the transaction. So '
    'it tries once where its steps, each in a transaction of its own, try for some seconds.';

create procedure pgmb.maintain_events_table(current_ts timestamptz)
language plpgsql security definer as $$
declare
    line text;
begin
    for line in select * from pgmb.maintain_log(current_ts) loop
        raise notice '%', line;
    end loop;
end
$$;
comment on procedure pgmb.maintain_events_table(timestamptz) is
    'Maintain the log as of a time, as the function without arguments does as of now: call pgmb.maintain_events_table(now()). '
    'Raises a notice for each thing done, postponed, kept or left to the next time.';

-- The first partitions, before any event is published.
do $$
begin
    perform pgmb.make_partitions('pgmb.dispatched');
    perform pgmb.make_partitions('pgmb.events');
end
$$;
