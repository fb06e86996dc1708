-- Deletion of rows that are older than partition_retention_period, one partition at a time, when no group needs any of them.
--
-- The search for rows that are still needed takes no lock. Then a few partitions are emptied under locks for which no session
-- waits long. Under the locks the search is repeated, because an insert may have come before the lock. Locks are kept to the end
-- of the transaction, so the other partitions are left to the next transaction. Emptied partitions are dropped later, several at
-- once.

-- Free the space of a default partition. All of its rows must be deleted, or set aside from the id edge on. Do nothing if the
-- partition is in use. This pays, because making the next partition reads all of that space.
create function pgmb.shrink_default(tbl regclass, edge pgmb.event_id) returns void
language plpgsql
set lock_timeout = '50ms'
as $$
declare
    part regclass := pgmb.default_partition(tbl);
begin
    perform set_config('lock_timeout', pgchange.patience('50 ms'), true);
    if pg_table_size(part) > 1024 * 1024 and not pgmb.default_holds(tbl, '', edge) then
        -- If events of the future are published all the time, some are in the default partition again. Set most of them aside
        -- before the lock is taken.
        perform pgmb.set_most_aside(tbl, edge, 'pmg');
        perform pgchange.lock_briefly(format('lock table only %s in access exclusive mode', part), '50 ms');
        perform pgmb.set_aside(tbl, edge, 'pmg', 1000);
        if not pgmb.default_holds(tbl, '', 'pmg') then
            execute format('truncate %s', part);
        end if;
    end if;
exception when lock_not_available or deadlock_detected then
    null;
end
$$;

-- Delete the old rows of the default partition, which came while there was no partition for their id. They are deleted by spans
-- as long as partitions are, each when no group needs any row in it.
create function pgmb.trim_default(tbl regclass, cut pgmb.event_id) returns setof text
language plpgsql
set lock_timeout = '50ms'
as $$
declare
    part regclass := pgmb.default_partition(tbl);
    span record;
    deleted bigint;
    gone bigint := 0;
    holders text[] := '{}';
begin
    for span in select * from pgmb.default_spans(tbl, cut) loop
        begin
            perform set_config('lock_timeout', pgchange.patience('50 ms'), true);
            -- A single statement sees the rows, and whether they are needed, at one moment.
            execute format('delete from %s where id >= $2 and id < $3 and (select pgmb.holder_of($1, $2, $3)) is null', part)
            using tbl, span.lower_bound, span.upper_bound;
            get diagnostics deleted = row_count;
        exception when lock_not_available or deadlock_detected then
            -- Another transaction has deleted some of them and has not committed.
            return next format('postponed the old rows of %s: some are in use', part);
            exit;
        end;
        gone := gone + deleted;
        if deleted = 0 then
            holders := holders || coalesce(pgmb.holder_of(tbl, span.lower_bound, span.upper_bound), 'they have come into use');
        end if;
    end loop;
    if gone > 0 then
        return next format('deleted %s rows of %s', gone, part);
    end if;
    return query select distinct format('kept old rows of %s: %s', part, h) from unnest(holders) as h;
end
$$;

-- Empty the partitions of pgmb.published whose quarter of an hour is over and whose events are dispatched. Returns a line for
-- each.
create function pgmb.trim_published() returns setof text
language plpgsql security definer
set lock_timeout = '200ms'
as $$
declare
    -- The number of the partition for this quarter of an hour. This partition and the one before it are not emptied.
    turn integer := extract(epoch from statement_timestamp())::bigint / 900 % 4;
    part text;
    filled boolean;
    waits boolean;
    at pgmb.dispatcher;
begin
    perform set_config('lock_timeout', pgchange.patience('200 ms'), true);
    perform pgchange.check_isolation();
    if pgmb.restored() then
        return next 'kept all of pgmb.published: it was restored here, and select pgmb.poll_for_events() must come first';
        return;
    end if;
    for part in select 'published_' || i from generate_series(0, 3) as i where i not in (turn, (turn + 3) % 4) loop
        execute format('select exists (select from pgmb.%I)', part) into filled;
        continue when not filled;
        begin
            perform pgchange.lock_briefly(format('lock table pgmb.%I in access exclusive mode', part), '200 ms');
            at := pgmb.dispatcher_now();
            execute format(
                'select exists (select from pgmb.%I as p where not pg_visible_in_snapshot(p.txid, $1) '
                'and (p.txid <> $2 or p.seq > $3 or $2 is null))', part)
            into waits using at.snapshot, at.partial_txid, at.partial_seq;
            if waits then
                return next format('kept %s: not all in it is dispatched', part);
            else
                execute format('truncate pgmb.%I', part);
                return next format('emptied %s', part);
            end if;
        exception when lock_not_available or deadlock_detected then
            return next format('postponed %s: it is in use', part);
        end;
    end loop;
end
$$;

-- Like pgmb.holder_of, for a range in which no session can write now, and in which all events that the snapshot sees are
-- dispatched. The caller has the lock pgmb.upkeep_key().
create function pgmb.holder_since(tbl regclass, lower pgmb.event_id, upper pgmb.event_id, seen pg_snapshot) returns text
language plpgsql
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
begin
    -- Only maintenance adds rows to pgmb.later, and the upkeep lock keeps other maintenance away. So the earlier search for
    -- holders has seen all rows of it.
    if tbl = 'pgmb.events'::regclass and (
        exists (
            select
            from pgmb.dispatcher_now() as d
            cross join lateral pgmb.undispatched(
                pgchange.snapshot_union(d.snapshot, seen), null, null, pg_current_snapshot()) as u
            cross join lateral unnest(u.ids) as i(id)
            where i.id >= lower and i.id < upper)
        or exists (select from pgmb.scheduled as s where s.event_id >= lower and s.event_id < upper))
    then
        return 'not all in it is dispatched';
    end if;
    return pgmb.holder_of(tbl, lower, upper, all_dispatched => true);
end
$$;

-- Empty the first of some partitions that no group needed when the snapshot was taken, as many as a fraction of a second allows.
-- Returns a line for each, and a line for those that are left.
create function pgmb.trim_some(tbl regclass, parts regclass[], seen pg_snapshot) returns setof text
language plpgsql
set lock_timeout = '50ms'
as $$
declare
    part record;
    holder text;
    locked_at timestamptz;
    tried integer := 0;
    free regclass[] := '{}';
begin
    perform set_config('lock_timeout', pgchange.patience('50 ms'), true);
    for part in
        select p.* from pgmb.get_partitions_and_bounds(tbl) as p where p.partition_id = any (parts)
        -- While this transaction waits for other sessions, none should have to wait for it. So partitions in use come last.
        order by exists (
                select from pg_locks as l where l.relation = p.partition_id and l.pid is distinct from pg_backend_pid()),
            p.lower_bound
    loop
        exit when cardinality(free) = 16 or clock_timestamp() > locked_at + interval '100 ms';
        tried := tried + 1;
        begin
            perform pgchange.lock_briefly(format('lock table only %s in access exclusive mode', part.partition_id), '50 ms');
            locked_at := coalesce(locked_at, clock_timestamp());
            holder := pgmb.holder_since(tbl, part.lower_bound, part.upper_bound, seen);
            if holder is null then
                free := free || part.partition_id;
            else
                return next format('kept %s: %s', part.partition_id, holder);
            end if;
        exception when lock_not_available or deadlock_detected then
            return next format('postponed %s: it is in use', part.partition_id);
        end;
    end loop;
    -- Truncate only after all have been checked, because truncating a partition makes PostgreSQL plan every query again.
    for part in select f.id from unnest(free) as f(id) loop
        execute format('truncate %s', part.id);
        return next format('emptied %s', part.id);
    end loop;
    if tried < cardinality(parts) then
        return next format('left %s old partitions of %s to the next time', cardinality(parts) - tried, tbl);
    end if;
end
$$;

-- Empty some partitions that are older than partition_retention_period, or beyond the newest retention_bytes or retention_count
-- of the log, and that no group needs. Returns a line for each partition emptied, kept (and for which group) or postponed. If
-- partitions are left, a line says so; then call it again in another transaction.
create function pgmb.trim_partitions(
    tbl regclass, current_ts timestamptz default now(), retention_bytes bigint default null, retention_count bigint default null
) returns setof text
language plpgsql security definer as $$
declare
    old constant pgmb.event_id := pgmb.retained_from(current_ts);
    cut constant pgmb.event_id := greatest(old, pgmb.excess_from(retention_bytes, retention_count));
    held text;
    seen pg_snapshot;
    part record;
    free regclass[] := '{}';
begin
    perform pgmb.check_append_only(tbl, current_ts);
    if not pg_try_advisory_xact_lock(pgmb.upkeep_key()) then
        return next format('postponed emptying partitions of %s: another maintenance is at work', tbl);
        return;
    end if;
    if pgmb.restored() then
        return next format('kept all of %s: it was restored here, and select pgmb.poll_for_events() must come first', tbl);
        return;
    end if;
    if exists (select from pgmb.published as p where p.txid = pg_current_xact_id_if_assigned()) then
        -- No snapshot that this transaction takes shows these events as waiting, so they would be taken for dispatched.
        return next format('kept all of %s: this transaction has published events; maintain it in another transaction', tbl);
        return;
    end if;
    return query select * from pgmb.trim_default(tbl, cut);
    seen := pg_current_snapshot();
    for part in select * from pgmb.old_partitions(tbl, cut) loop
        if part.holder is null then
            free := free || part.partition_id;
        else
            return next format('kept %s: %s', part.partition_id, part.holder);
            held := coalesce(held, case when part.upper_bound > old then format(
                'the event log is larger than its retention: %s is kept, %s', part.partition_id, part.holder) end);
        end if;
    end loop;
    if tbl = 'pgmb.events'::regclass then
        perform pgchange.note_held('event', null, held);
    end if;
    -- Do this even if no row was deleted now, because the partition may have been in use when its last rows were deleted.
    perform pgmb.shrink_default(tbl, pgmb.placed_from(current_ts));
    return query select * from pgmb.trim_some(tbl, free, seen);
end
$$;

-- Drop those of some partitions that are empty. This locks the whole table for a moment, so it is done rarely. It is postponed if
-- other sessions would have to wait long.
create function pgmb.drop_partitions(tbl regclass, unwanted regclass[]) returns setof text
language plpgsql
set lock_timeout = '50ms'
as $$
declare
    part regclass;
    done text[] := '{}';
begin
    perform set_config('lock_timeout', pgchange.patience('50 ms'), true);
    -- Lock the parent first, as every reader and writer does, and then the default partition, which dropping a partition locks,
    -- too.
    perform pgchange.lock_briefly(format('lock table only %s in access exclusive mode', t), '50 ms')
    from unnest(array[tbl, pgmb.default_partition(tbl)]) as t;
    foreach part in array unwanted loop
        perform pgchange.lock_briefly(format('lock table %s in access exclusive mode', part), '50 ms');
        if pgmb.empty_ones(array[part]) <> '{}' then
            done := done || format('dropped the empty partition %s', part);
            execute format('drop table %s', part);
        end if;
    end loop;
    return query select unnest(done);
exception when lock_not_available or deadlock_detected then
    return next format('postponed dropping empty partitions of %s: it is in use', tbl);
end
$$;

-- Drop the old partitions that are empty, when there are more than spare of them.
create function pgmb.drop_emptied(tbl regclass, current_ts timestamptz default now(), spare integer default 8)
returns setof text
language plpgsql security definer as $$
declare
    emptied regclass[];
begin
    perform pgmb.check_append_only(tbl, current_ts);
    if not pg_try_advisory_xact_lock(pgmb.upkeep_key()) then
        return next format('postponed dropping empty partitions of %s: another maintenance is at work', tbl);
        return;
    end if;
    emptied := pgmb.empty_ones(array(select p.partition_id from pgmb.past_retention(tbl, pgmb.retained_from(current_ts)) as p));
    if cardinality(emptied) > spare then
        return query select * from pgmb.drop_partitions(tbl, emptied);
    end if;
end
$$;
