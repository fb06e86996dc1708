-- The partitions of the queue. They are created ahead, as many as the rate of the cluster's transactions requires.
--
-- The default partition stays, so that no write fails, and maintenance empties it. Its rows move to partitions of their own, which
-- end below the oldest open transaction, so that no session writes there. Two transactions move a range of ids. The first adds a
-- constraint that keeps new rows of this range out. The second moves the rows, checks the constraint while writers go on, and
-- attaches the partition under locks that are held for a moment.
--
-- When a partition of the future is attached, PostgreSQL reads the whole default partition, and its writers wait meanwhile. So a
-- default partition of up to 16 MB is read in this way, so that further rows find a partition, and is emptied then. A larger
-- default partition is emptied first.

create table revision.pace (
    at timestamptz primary key default clock_timestamp(),
    txid bigint not null,
    seconds double precision,
    per_second double precision
);
comment on table revision.pace is
    'The next transaction id of the cluster at each run of maintenance of the last day. seconds: the time since the run before, '
    'at most an hour. per_second: how many ids a second all databases of the cluster assigned in that time. Both are null for the '
    'first run.';

-- The partitions of the queue with their range of transaction ids, without the default partition.
create function revision.partitions() returns table (relid regclass, lower bigint, upper bigint)
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select i.inhrelid::regclass, b.bound[2]::bigint, b.bound[4]::bigint
    from pg_inherits as i
    join pg_class as c on c.oid = i.inhrelid
    -- FOR VALUES FROM ('1') TO ('2')
    cross join lateral string_to_array(pg_get_expr(c.relpartbound, c.oid), '''') as b(bound)
    where i.inhparent = 'revision.commit_queue'::regclass and b.bound[4] is not null
    order by 2
$$;

-- The key of the advisory lock for creating, trimming and dropping partitions. If another session holds it, a run does nothing.
create function revision.upkeep_key() returns bigint
language sql immutable as $$
    select pg_catalog.hashtextextended('pgchange upkeep revision', 0)
$$;

-- Record the next transaction id of the cluster, unless it was recorded in the last 30 seconds: a shorter time would give no
-- useful rate.
create function revision.note_pace() returns void
language plpgsql as $$
declare
    now_at bigint := pg_snapshot_xmax(pg_current_snapshot())::text::bigint;
    last revision.pace;
    seconds double precision;
begin
    -- After a restore into another cluster, the ids of the old cluster have no meaning.
    delete from revision.pace as p where p.txid > now_at or p.at < clock_timestamp() - interval '1 day';
    select p.* into last from revision.pace as p order by p.at desc limit 1;
    seconds := extract(epoch from clock_timestamp() - last.at);
    if last.at is null or seconds > 30 then
        -- If more than an hour passed between two runs, maintenance was not running.
        insert into revision.pace (txid, seconds, per_second) values (now_at, case when seconds > 3600 then 3600 else seconds end, (now_at - last.txid) / seconds);
    end if;
end
$$;

-- The number of transaction ids for which partitions are needed. They last for ten times the longest time between two runs, at
-- the highest rate of the last day.
create function revision.needed_ahead() returns bigint
language sql stable as $$
    select coalesce(ceil(10 * max(p.seconds) * max(p.per_second)), 0)::bigint from revision.pace as p
$$;

-- The partition with an id, or the last before it, and all behind it. Partitions with names of their own are returned, too,
-- wherever they are. PostgreSQL writes out the bounds of a partition slowly. revision.add_partitions() names partitions after
-- their first id, so of these only the bounds of the returned partitions are read.
create function revision.partitions_from(id bigint) returns table (relid regclass, lower bigint, upper bigint)
language sql stable as $$
    with named as materialized (
        select c.oid, case when c.relname like 'commit\_queue\__%' and length(c.relname) < 32 and ltrim(substr(c.relname, 14), '0123456789') = ''
                           then substr(c.relname, 14)::bigint end as lower
        from pg_inherits as i join pg_class as c on c.oid = i.inhrelid
        where i.inhparent = 'revision.commit_queue'::regclass
    )
    select c.oid::regclass, b.bound[2]::bigint, b.bound[4]::bigint
    from pg_class as c
    cross join lateral string_to_array(pg_get_expr(c.relpartbound, c.oid), '''') as b(bound)
    where b.bound[4] is not null and c.oid = any (array(
        select n.oid from named as n
        where n.lower is null or n.lower >= coalesce((select max(x.lower) from named as x where x.lower <= id), 0)))
$$;

-- The transaction id behind the last partition; null if there is no partition.
create function revision.last_upper() returns bigint
language sql stable as $$
    select max(p.upper) from revision.partitions_from(9223372036854775807) as p
$$;

-- A text about when the partitions run out, if that is soon; null if there are enough.
create function revision.running_out() returns text
language plpgsql stable security definer as $$
declare
    left_ids bigint := revision.last_upper() - pg_snapshot_xmax(pg_current_snapshot())::text::bigint;
    last revision.pace;
    per_second double precision;
begin
    if left_ids is null or left_ids <= 0 then
        return 'new rows go to the default partition, until maintenance creates partitions';
    end if;
    select p.* into last from revision.pace as p order by p.at desc limit 1;
    -- In the first seconds after a run, the run's own transactions would distort the rate.
    per_second := case when last.at > clock_timestamp() - interval '30 seconds' then last.per_second
                       else (pg_snapshot_xmax(pg_current_snapshot())::text::bigint - last.txid)
                            / extract(epoch from clock_timestamp() - last.at) end;
    -- Maintenance must have time for three more runs.
    if left_ids < per_second * coalesce(3 * last.seconds, 600) then
        return format(
            'the partitions that are ready last for %s at %s transactions a second',
            date_trunc('second', make_interval(secs => left_ids / per_second)), round(per_second));
    end if;
    return null;
end
$$;

-- Add the partitions of the transaction ids from each bound to below the next. The default partition must have no rows of them.
-- Writers wait while this is read only if the ids are in use now.
create function revision.add_partitions(bounds bigint[]) returns setof text
language plpgsql security definer
set lock_timeout = '200ms'
as $$
declare
    n integer := cardinality(bounds);
begin
    perform set_config('lock_timeout', pgchange.patience('200 ms'), true);
    for i in 2..n loop
        if bounds[i - 1] < 0 or bounds[i] <= bounds[i - 1] then
            raise invalid_parameter_value using
                message = format(
                    'partitions cannot be added: %s to %s is not a range of transaction ids', bounds[i - 1], bounds[i]);
        end if;
        execute format(
            'create table revision.%I (like revision.commit_queue including defaults including indexes)',
            'commit_queue_' || bounds[i - 1]);
        perform pgchange.keep_to_owner(format('revision.%I', 'commit_queue_' || bounds[i - 1])::regclass);
    end loop;
    -- Lock the parent before its partitions, as every reader and writer does, so that there is no deadlock. If ids of the new
    -- partitions are in use already, or soon, lock out writers. Else they could put rows of these ids into the default partition.
    perform pgchange.lock_briefly(
        format('lock table only revision.commit_queue in %s mode', case
            when bounds[1] < pg_snapshot_xmax(pg_current_snapshot())::text::bigint + (bounds[2] - bounds[1]) / 2
            then 'share row exclusive' else 'share update exclusive' end),
        '200 ms');
    perform pgchange.lock_briefly('lock table revision.commit_queue_default in access exclusive mode', '200 ms');
    begin
        -- This reads the default partition, once for all new partitions.
        execute format(
            'alter table revision.commit_queue_default add constraint pgchange_free check (txid < %L or txid >= %L)',
            bounds[1], bounds[n]);
    exception when check_violation then
        raise object_in_use using
            message = format(
                'partitions cannot be added: the default partition has commits of transactions %s to %s', bounds[1], bounds[n] - 1),
            hint = 'leave them there, where readers find them: select revision.maintain_partitions() adds partitions behind them';
    end;
    for i in 2..n loop
        execute format(
            'alter table revision.commit_queue attach partition revision.%I for values from (%L) to (%L)',
            'commit_queue_' || bounds[i - 1], bounds[i - 1], bounds[i]);
        return next format('added partition commit_queue_%s up to transaction %s', bounds[i - 1], bounds[i]);
    end loop;
    alter table revision.commit_queue_default drop constraint pgchange_free;
end
$$;

-- Add a partition, like revision.add_partitions.
create function revision.add_partition(lower bigint, upper bigint) returns text
language sql security definer as $$
    select * from revision.add_partitions(array[lower, upper])
$$;

-- The earliest and the latest transaction id in the default partition; null if it is empty.
create function revision.range_of_default(out earliest bigint, out latest bigint)
language plpgsql stable
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
begin
    -- From branch to branch by the index: two lookups for each, however many rows the default partition has.
    with recursive b(id) as (
        (select q.branch_id from revision.commit_queue_default as q order by q.branch_id limit 1)
        union all
        select (
            select q.branch_id from revision.commit_queue_default as q
            where q.branch_id > b.id order by q.branch_id limit 1)
        from b where b.id is not null
    )
    select min(first.txid)::text::bigint, max(last.txid)::text::bigint into earliest, latest
    from b
    cross join lateral (
        select q.txid from revision.commit_queue_default as q
        where q.branch_id = b.id order by q.branch_id, q.txid limit 1) as first
    cross join lateral (
        select q.txid from revision.commit_queue_default as q
        where q.branch_id = b.id order by q.branch_id desc, q.txid desc limit 1) as last;
end
$$;

-- The range of transaction ids of which the default partition gets no new rows, because its rows are to move; null if there is
-- none.
create function revision.moving(out lower bigint, out upper bigint)
language sql stable as $$
    select b.bound[1]::bigint, b.bound[2]::bigint
    from pg_constraint as c
    cross join lateral regexp_match(c.conname::text, '^pgchange_moving_([0-9]+)_([0-9]+)$') as b(bound)
    where c.conrelid = 'revision.commit_queue_default'::regclass and b.bound is not null
$$;

-- Whether the default partition is so large that writers would wait long while PostgreSQL reads it.
create function revision.default_is_large() returns boolean
language sql stable as $$
    select pg_relation_size('revision.commit_queue_default') > 16 * 1024 * 1024
$$;

-- The lowest transaction id from which on the default partition has no rows, but at least lower. The partition gets no such
-- rows until this transaction ends.
create function revision.end_of_default(lower bigint) returns bigint
language plpgsql
set lock_timeout = '200ms'
as $$
declare
    -- Rows that arrive before the lock belong to transactions that have begun.
    last bigint := (select r.latest from revision.range_of_default() as r);
begin
    perform set_config('lock_timeout', pgchange.patience('200 ms'), true);
    if last is null or last < lower then
        return lower;
    end if;
    -- Lock out further rows until the partition exists.
    perform pgchange.lock_briefly('lock table only revision.commit_queue in share row exclusive mode', '200 ms');
    return greatest(pg_snapshot_xmax(pg_current_snapshot())::text::bigint, last + 1);
end
$$;

-- Drop emptied partitions if there are more than spare of them. This locks the whole queue for a moment, so it is rare, and it
-- gives up if sessions would have to wait long.
create function revision.drop_empty_partitions(spare integer default 8) returns setof text
language plpgsql security definer
set lock_timeout = '200ms'
as $$
declare
    settled bigint := pg_snapshot_xmin(pg_current_snapshot())::text::bigint;
    part record;
    filled boolean;
    empty regclass[] := '{}';
    done text[] := '{}';
begin
    perform set_config('lock_timeout', pgchange.patience('200 ms'), true);
    if not pg_try_advisory_xact_lock(revision.upkeep_key()) then
        return next 'postponed dropping empty partitions: another maintenance is at work';
        return;
    end if;
    for part in select * from revision.partitions() as p where p.upper <= settled loop
        execute format('select exists (select from %s)', part.relid) into filled;
        if not filled then
            empty := empty || part.relid;
        end if;
    end loop;
    if cardinality(empty) <= spare then
        return;
    end if;
    -- Lock the parent before its partitions, as every reader and writer does, so that there is no deadlock. Dropping a partition
    -- also locks the default partition.
    perform pgchange.lock_briefly(format('lock table only %s in access exclusive mode', relid::regclass), '200 ms')
    from unnest(array['revision.commit_queue', 'revision.commit_queue_default']) as relid;
    for part in select unnest(empty) as relid loop
        perform pgchange.lock_briefly(format('lock table %s in access exclusive mode', part.relid), '200 ms');
        execute format('select exists (select from %s)', part.relid) into filled;
        if not filled then
            execute format('drop table %s', part.relid);
            done := done || format('dropped the empty partition %s', part.relid);
        end if;
    end loop;
    return query select unnest(done);
exception when lock_not_available or deadlock_detected then
    return next 'postponed dropping empty partitions: the queue is in use';
end
$$;
