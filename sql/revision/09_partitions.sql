-- Partitions of the queue, made ahead.

-- The partitions of the queue with their range of transaction ids, the default one excepted.
create function revision.partitions() returns table (relid regclass, lower bigint, upper bigint)
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select i.inhrelid::regclass, b.bound[1]::bigint, b.bound[2]::bigint
    from pg_inherits as i
    join pg_class as c on c.oid = i.inhrelid
    cross join lateral regexp_match(
        pg_get_expr(c.relpartbound, c.oid), $re$FROM \('(\d+)'\) TO \('(\d+)'\)$re$) as b(bound)
    where i.inhparent = 'revision.commit_queue'::regclass and b.bound is not null
    order by 2
$$;

-- The advisory lock of who makes, trims and drops partitions: one at a time, and who comes meanwhile steps aside.
create function revision.upkeep_key() returns bigint
language sql immutable as $$
    select pg_catalog.hashtextextended('pgchange upkeep revision', 0)
$$;

-- Add the partitions of the transaction ids from each bound to below the next, none of which the default partition may hold. Writers
-- are held up, while that is read, only where the ids are those of today.
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
                message = format('no range of transaction ids: %s to %s', bounds[i - 1], bounds[i]);
        end if;
        execute format(
            'create table revision.%I (like revision.commit_queue including defaults including indexes)',
            'commit_queue_' || bounds[i - 1]);
        perform pgchange.keep_to_owner(format('revision.%I', 'commit_queue_' || bounds[i - 1])::regclass);
    end loop;
    -- The parent first, as every reader and writer does. Of today's ids writers may be on their way to the default partition,
    -- where their row will not belong any more.
    perform pgchange.lock_briefly(
        format('lock table only revision.commit_queue in %s mode', case
            when bounds[1] < pg_snapshot_xmax(pg_current_snapshot())::text::bigint + (bounds[2] - bounds[1]) / 2
            then 'share row exclusive' else 'share update exclusive' end),
        '200 ms');
    perform pgchange.lock_briefly('lock table revision.commit_queue_default in access exclusive mode', '200 ms');
    begin
        -- This reads the default partition, once for all of them.
        execute format(
            'alter table revision.commit_queue_default add constraint pgchange_free check (txid < %L or txid >= %L)',
            bounds[1], bounds[n]);
    exception when check_violation then
        raise object_in_use using
            message = format('the default partition holds commits of transactions %s to %s', bounds[1], bounds[n] - 1),
            hint = 'they stay there, where readers look for them: select revision.maintain_partitions() begins behind them';
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

-- Add one partition, as revision.add_partitions does.
create function revision.add_partition(lower bigint, upper bigint) returns text
language sql security definer as $$
    select * from revision.add_partitions(array[lower, upper])
$$;

-- The latest transaction id of which the default partition has rows; null where it is empty.
create function revision.last_of_default() returns bigint
language plpgsql stable
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
begin
    -- From one branch to the next by the index: one look for each, whatever the default partition holds.
    return (
        with recursive b(id) as (
            (select q.branch_id from revision.commit_queue_default as q order by q.branch_id limit 1)
            union all
            select (
                select q.branch_id from revision.commit_queue_default as q
                where q.branch_id > b.id order by q.branch_id limit 1)
            from b where b.id is not null
        )
        select max(latest.txid)::text::bigint
        from b
        cross join lateral (
            select q.txid from revision.commit_queue_default as q
            where q.branch_id = b.id order by q.branch_id desc, q.txid desc limit 1) as latest
    );
end
$$;

-- Why partitions of the queue are made only when somebody says that writers may be stopped; else null.
create function revision.crowded_default() returns text
language plpgsql stable security definer as $$
begin
    return (
        select format(
            'writers would wait while the %s of the default partition are read; when they may: '
            'select revision.maintain_partitions(stop_writers => true)', pg_size_pretty(d.bytes))
        from pg_relation_size('revision.commit_queue_default') as d(bytes)
        -- In this order: the size is known at once, and the partitions are read from the catalogue.
        where case when d.bytes > 16 * 1024 * 1024 then not exists (
            select from revision.partitions() as p
            where p.lower <= pg_snapshot_xmax(pg_current_snapshot())::text::bigint
              and p.upper > pg_snapshot_xmax(pg_current_snapshot())::text::bigint) end);
end
$$;

-- Have nobody at work in the queue until this transaction ends; it waits up to a minute for those who are.
create function revision.stop_writers() returns void
language plpgsql
set lock_timeout = '60s'
as $$
begin
    -- So that no autovacuum is at the default one once writers wait.
    lock table revision.commit_queue_default in share update exclusive mode;
    -- Readers too: who reads first and writes then would wait for us, and we for it.
    lock table only revision.commit_queue in access exclusive mode;
end
$$;

-- The first transaction id, from one on, that the default partition has no rows of and gets none until this transaction ends.
create function revision.end_of_default(lower bigint) returns bigint
language plpgsql
set lock_timeout = '200ms'
as $$
declare
    -- What comes before the lock is of a transaction that has begun.
    last bigint := revision.last_of_default();
begin
    perform set_config('lock_timeout', pgchange.patience('200 ms'), true);
    if last is null or last < lower then
        return lower;
    end if;
    -- No more of them until the partition is there.
    perform pgchange.lock_briefly('lock table only revision.commit_queue in share row exclusive mode', '200 ms');
    return greatest(pg_snapshot_xmax(pg_current_snapshot())::text::bigint, last + 1);
end
$$;

-- Drop the partitions that trimming emptied, when there are more than spare of them: for a moment it locks the whole queue, so it is
-- done rarely, and not at all where somebody would have to wait long.
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
    -- The parent first, as every reader and writer does; and the default one, which a drop locks too.
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

-- For each branch the transaction of its latest commit from its entry of lows on and below a transaction; null if there is none. lowest:
-- the lowest of lows, a constant of the plan, which so has the partitions from there on.
create function revision.latest_commits(ids bigint[], lows xid8[], lowest xid8, below xid8) returns xid8[]
language plpgsql stable
set plan_cache_mode = force_custom_plan
set jit = off
set enable_sort = off
set enable_seqscan = off
set enable_bitmapscan = off
as $$
begin
    return array(
        select (
            select q.txid from revision.commit_queue as q
            where q.branch_id = b.id and q.txid >= b.low and q.txid >= lowest and q.txid < below
            order by q.branch_id desc, q.txid desc, q.id desc limit 1)
        from unnest(ids, lows) with ordinality as b(id, low, n)
        order by b.n);
end
$$;

-- Extend the last gap of each branch to the beginning of the current partition; or begin its next gap behind its last commit. It writes
-- once for each branch and partition. For the holder of revision.upkeep_key().
create function revision.note_gaps() returns void
language plpgsql as $$
declare
    settled constant bigint := pg_snapshot_xmin(pg_current_snapshot())::text::bigint;
    -- No transaction below it is open, or will be.
    edge constant xid8 := (select max(p.lower)::text::xid8 from revision.partitions() as p where p.lower <= settled);
    ids bigint[];
    highs xid8[];
    latest xid8[];
begin
    select array_agg(b.id order by b.id), array_agg(coalesce(g.high, '0') order by b.id) into ids, highs
    from revision.branch as b
    left join lateral (select x.high from revision.gap as x where x.branch_id = b.id order by x.low desc limit 1) as g on true
    where coalesce(g.high, '0') < edge;
    if ids is null or not revision.is_native() then
        return;
    end if;
    latest := revision.latest_commits(ids, highs, (select min(h) from unnest(highs) as h), edge);
    update revision.gap as g set high = edge
    from unnest(ids, highs, latest) as l(id, high, txid)
    where g.branch_id = l.id and g.high = l.high and l.txid is null;
    -- A gap within one partition saves no reader anything.
    delete from revision.gap as g
    using unnest(ids, highs, latest) as l(id, high, txid)
    where g.branch_id = l.id and g.high = l.high and not exists (
        select from revision.partitions() as p
        where p.lower >= g.low::text::bigint and p.upper <= g.high::text::bigint) and l.txid is not null;
    insert into revision.gap (branch_id, low, high)
    select l.id, coalesce((l.txid::text::bigint + 1)::text::xid8, '0'), edge
    from unnest(ids, highs, latest) as l(id, high, txid)
    where l.txid is not null or l.high = '0'
    union all
    -- A branch that is noted the first time has a gap before its first commit, too: a new consumer begins there.
    select l.id, '0', first.txid
    from unnest(ids, highs, latest) as l(id, high, txid)
    cross join lateral (
        select q.txid from revision.commit_queue as q where q.branch_id = l.id order by q.branch_id, q.txid, q.id limit 1) as first
    where l.txid is not null and l.high = '0' and first.txid > '0';
    delete from revision.gap as g where not exists (select from revision.branch as b where b.id = g.branch_id);
end
$$;

create function revision.maintain_partitions(
    width bigint default 1000000, ahead integer default 2, stop_writers boolean default false
) returns setof text
language plpgsql security definer as $$
declare
    now_at bigint := pg_snapshot_xmax(pg_current_snapshot())::text::bigint;
    lower bigint;
    upper bigint;
    bounds bigint[];
    crowded text;
begin
    if width < 1 or ahead < 1 then
        raise invalid_parameter_value using message = 'width and ahead must be at least 1';
    end if;
    if not pg_try_advisory_xact_lock(revision.upkeep_key()) then
        return next 'postponed partitions: another maintenance is at work';
        return;
    end if;
    perform revision.note_gaps();
    crowded := revision.crowded_default();
    if crowded is not null and not stop_writers then
        return next format('postponed partitions: %s', crowded);
        return;
    end if;
    begin
        if crowded is not null then
            perform revision.stop_writers();
        end if;
        lower := revision.end_of_default(coalesce((select max(p.upper) from revision.partitions() as p), now_at));
        bounds := array[lower];
        while lower < now_at + ahead * width loop
            upper := (greatest(lower, now_at) / width + 1) * width;
            if upper - lower < width / 2 and lower > now_at then
                upper := upper + width;
            end if;
            bounds := bounds || upper;
            lower := upper;
        end loop;
        if cardinality(bounds) > 1 then
            return query select * from revision.add_partitions(bounds);
        end if;
    exception when lock_not_available or object_in_use or deadlock_detected then
        return next 'postponed partitions: the queue is being written';
        return;
    end;
    return query select * from revision.drop_empty_partitions();
end
$$;
comment on function revision.maintain_partitions(bigint, integer, boolean) is
    'Keep ahead partitions of width transaction ids each in front of today''s; returns a line for each thing done. What was '
    'written without a partition stays in the default one, and of emptied partitions a few are kept. Where much was, it must be '
    'told that it may stop writers while that is read: then it waits, up to a minute, for those at work.';

do $$ begin perform revision.maintain_partitions(); end $$;
