-- How far a group has read, and where its next events end.

-- Make the row of a group, with nothing read, unless the row exists or the group is being read. It is called in
-- the database of the group's results, if the group's subscriptions are in another database.
create function pgmb.register(gid text) returns boolean
language sql security definer as $$
    insert into pgmb.subscription_groups (id)
    select register.gid
    where pgmb.take_lock(register.gid)
    on conflict do nothing
    returning true
$$;

-- How far a group has read, as a position; null if the group is not in this database.
create function pgmb.position(gid text) returns jsonb
language plpgsql stable security definer as $$
begin
    return (
        select jsonb_build_object(
            'schema', (select max(i.version) from pgmb.installed as i),
            'group', g.id, 'version', g.version, 'cursor', coalesce(g.last_read_event_id, ''), 'source', g.source,
            'database', pgmb.here())
        from pgmb.subscription_groups as g where g.id = gid);
end
$$;

-- Return the place of this database. Refuse a position that belongs to another database, that is ahead of the last recorded
-- claim, or after which retention has deleted events.
create function pgmb.check_position(gid text, "position" jsonb) returns text
language plpgsql stable security definer as $$
declare
    here constant text := pgmb.here();
    consumer_name constant text := pgmb.name_of(gid);
    at bigint := "position" ->> 'version';
    cursor text := "position" ->> 'cursor';
    known record;
begin
    select c.version, c.from_version into known
    from pgmb.subscription_groups as g
    left join pgmb.claims as c on c.consumer = consumer_name
    where g.id = check_position.gid;
    if not found then
        perform pgmb.check_group(gid);
    end if;
    if coalesce(at, 0) = 0 or pg_is_in_recovery() then
        return here;
    end if;
    perform pgchange.check_position(consumer_name, "position", here, known.version);
    -- Retention has kept only events after a later position. If the last dispatch before the cursor was deleted, later
    -- dispatches may have been, too. A cursor that was set to a time need not be at a dispatch, so it is not checked.
    if at < known.from_version and pgmb.rank_of(cursor) between 1 and 68719476734 then
        -- The query is nested in the condition, because it costs much more than the comparison.
        if not exists (
            select from pgmb.dispatched as d
            where d.group_id = gid and d.id >= cursor and d.id < left(cursor, 15) || 'g')
        then
            raise exception using errcode = 'PC005',
                message = format(
                    'group %I cannot go on from batch %s: it had already processed batches up to %s, and the events in between were '
                    'deleted. Its results may have been restored from an older state', gid, at, known.from_version),
                hint = format(
                    'airflow-pgchange move %s --to beginning goes on with the events that the log still has',
                        pgchange.shell_quoted(consumer_name));
        end if;
    end if;
    return here;
end
$$;

-- Whether this transaction can dispatch events.
create function pgmb.may_dispatch() returns boolean
language plpgsql stable as $$
begin
    return (
        select not pg_is_in_recovery() and current_setting('transaction_read_only') = 'off'
           and current_setting('transaction_isolation') = 'read committed'
    );
end
$$;

-- The end of the gap in which a cursor of a group is, or the cursor if it is in no gap. The same dispatches are behind both.
-- Without settings of its own, so that the plan of its caller takes it in.
create function pgmb.over_gap(gid text, after text) returns text
language sql stable as $$
    select greatest(over_gap.after collate "C", (
        select g.high from pgmb.gap as g
        where g.group_id = over_gap.gid and g.low <= over_gap.after order by g.low desc limit 1) collate "C")
$$;

-- The end of the first part of a span of ids: some partition_intervals behind its beginning, at most its end. A read mostly finds
-- enough in the first interval, which is in one or two partitions. The cost of a query of the whole span grows with its partitions.
create function pgmb.first_part(after text, before text, intervals integer default 1) returns text
language sql stable as $$
    select case when first_part.before collate "C" > c.cursor then c.cursor else first_part.before end
    from pgmb.cursor_at(
        least(
            pgmb.micros(first_part.after)
            + intervals * 1000000 * extract(epoch from pgmb.setting_as_interval('partition_interval'))::bigint,
            4503599627370495),
        0) as c(cursor)
$$;

-- The next events of a group, at most the given number. Returns the number of events, the cursor behind them, whether every slice
-- is alone, and the lowest and highest id. runs: the events in runs of about step events, in the form of a batch.
create function pgmb.next_events(
    gid text, after text, most bigint, step bigint default null, out count bigint, out upto text, out alone boolean, out lowest text,
    out highest text, out runs jsonb
)
language plpgsql stable
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set jit = off
as $$
declare
    has_many constant boolean := exists (
        select from pg_inherits as i where i.inhparent = 'pgmb.dispatched'::regclass offset 50);
    lower_end text := pgmb.over_gap(gid, next_events.after);
    -- So that partitions of the future are not read.
    before constant text := left((pgmb.dispatcher_now()).last_id, 15) || 'g';
    upper_end text := case when has_many then pgmb.first_part(lower_end, before) else before end;
    is_custom boolean;
    slice record;
    seen text;
    begun bigint;
    n bigint;
    run_after text := after;
    run_count bigint := 0;
begin
    count := 0;
    alone := true;
    upto := after;
    runs := '[]';
    -- The first part, and then the rest.
    for part in 1..2 loop
        -- A kept plan locks all partitions. With many of them, that takes longer than planning the query for the few of a part.
        is_custom := has_many and (part = 1 or pgmb.first_part(lower_end, upper_end, 50) = upper_end);
        perform set_config('plan_cache_mode', 'force_custom_plan', true) where is_custom;
        for slice in
            select d.id, d.alone, d.event_ids[1] as lowest, d.event_ids[cardinality(d.event_ids)] as highest
            from pgmb.dispatched as d
            where d.group_id = gid and d.id > lower_end and d.id < upper_end
            order by d.group_id, d.id
        loop
            if is_custom then
                -- The expressions below keep their plans.
                perform set_config('plan_cache_mode', 'force_generic_plan', true);
                is_custom := false;
            end if;
            -- The slices of several subscriptions have the same id.
            if slice.id is distinct from seen then
                exit when count = most;
                if run_count >= step then
                    runs := runs || jsonb_build_object('count', run_count, 'after', run_after, 'upto', upto);
                    run_after := upto;
                    run_count := 0;
                end if;
                begun := case when left(slice.id, 15) = left(upto, 15) then pgmb.rank_of(upto) else 0 end;
                n := least(pgmb.rank_of(slice.id) - begun, most - count);
                count := count + n;
                run_count := run_count + n;
                upto := pgmb.cursor_at(pgmb.micros(slice.id), begun + n);
                seen := slice.id;
            end if;
            alone := alone and slice.alone;
            lowest := least(lowest, slice.lowest collate "C");
            highest := greatest(highest, slice.highest collate "C");
        end loop;
        exit when count = most or upper_end = before;
        perform set_config('plan_cache_mode', 'force_generic_plan', true) where is_custom;
        lower_end := upper_end;
        upper_end := before;
    end loop;
    if count > 0 then
        runs := runs || jsonb_build_object('count', run_count, 'after', run_after, 'upto', upto);
    end if;
end
$$;
