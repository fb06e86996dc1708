-- Trimming history that every consumer has processed. By default history is kept: a new consumer gets all commits.

-- The positions behind which commits are kept, up to a transaction, with the consumer or the letter that needs them. A consumer
-- whose watermark is in another database counts by its last claim, and by the point to which it was moved since. A dead letter
-- that is on its way to a consumer with its watermark here counts, too.
create function pubsub.holders()
returns table (name text, branch_id bigint, snapshot pg_snapshot, partial_txid xid8, partial_id bigint, upto xid8)
language plpgsql stable as $$
begin
    -- A stored letter keeps nothing; a letter that is on its way needs its commits.
    return query
        select pubsub.name_of(w.consumer_id, w.branch_id) as name, w.branch_id, w.snapshot, w.partial_txid, w.partial_id,
               '18446744073709551615'::xid8 as upto
        from pubsub.watermark as w
        union all
        select c.consumer, (c.address -> 'branch_id')::bigint, at.*, '18446744073709551615'
        from pgchange.claim as c cross join lateral pubsub.cursor_of(c.after) as at
        where c.kind = 'commit' and not exists (
            select from pubsub.watermark as w
            where w.consumer_id = c.address ->> 'consumer_id' and w.branch_id = (c.address -> 'branch_id')::bigint)
        union all
        -- A consumer that was moved needs both ends, until it has claimed from the new position.
        select c.consumer, (c.address -> 'branch_id')::bigint, at.*, '18446744073709551615'
        from pgchange.claim as c cross join lateral pubsub.cursor_of(c.upto) as at
        where c.kind = 'commit' and c.batch is null
        union all
        select format('letter %s of %s', l.id, l.consumer), (l.address -> 'branch_id')::bigint, at.after, at.partial_txid,
               at.partial_id, (l.content -> 'slices' -> -1 -> 'upto' ->> 0)::xid8
        from pgchange.letter as l
        cross join lateral pubsub.cursor_of(l.content -> 'bounds' -> 'after') as at
        where l.kind = 'commit' and l.on_its_way;
end
$$;

-- A consumer that has not processed everything in a partition, or null.
create function pubsub.needed_by(partition regclass) returns text
language plpgsql stable security definer
set enable_hashjoin = off
set enable_mergejoin = off
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
    holder text;
begin
    -- One query for all positions, because there can be hundreds of them.
    execute format(
        'select h.name from pubsub.holders() as h cross join lateral (select from %s as q where q.branch_id = h.branch_id '
        'and q.txid >= pg_snapshot_xmin(h.snapshot) and q.txid <= h.upto and not pg_visible_in_snapshot(q.txid, h.snapshot) '
        'and not (q.txid = h.partial_txid and q.id <= h.partial_id and h.partial_txid is not null) limit 1) as found_commit limit 1',
        partition)
    into holder;
    return holder;
end
$$;

-- Empty a partition that no consumer needs. Returns a text with the result, or with the reason against it.
create function pubsub.trim_partition(partition regclass, keep interval) returns text
language plpgsql security definer
set lock_timeout = '1s'
as $$
declare
    holder text := pubsub.needed_by(partition);
    gone bigint;
begin
    perform set_config('lock_timeout', pgchange.patience('1 s'), true);
    if holder is not null then
        return format('kept %s: %s has not processed it', partition, holder);
    end if;
    perform pgchange.lock_briefly(format('lock table only %s in access exclusive mode', partition), '1 s');
    -- An insert or a new consumer may have come before the lock.
    if pubsub.needed_by(partition) is not null or pubsub.has_commits(partition, now() - keep) then
        return format('kept %s: it came into use', partition);
    end if;
    execute format(
        'with gone as (select branch_id, count(*) as commits, max(txid::text::bigint) + 1 as upto from %s group by 1), '
        'noted as (insert into revision.trimmed (branch_id, upto, commits) '
        'select branch_id, upto::text::xid8, commits from gone returning commits) select sum(commits) from noted', partition)
    into gone;
    execute format('truncate %s', partition);
    return format('trimmed %s commits from %s', gone, partition);
exception when lock_not_available or deadlock_detected then
    return format('postponed %s: it is in use', partition);
end
$$;

-- Whether a partition has a commit that was written after a time. The scan ends at the first such commit.
create function pubsub.has_commits(partition regclass, after timestamptz) returns boolean
language plpgsql stable security definer as $$
declare
    found_one boolean;
begin
    execute format('select exists (select from %s where created_at > $1)', partition) into found_one using after;
    return found_one;
end
$$;

-- The time of the first commit of a partition in physical order, which mostly is the oldest; null if it is empty.
create function pubsub.first_commit_at(partition regclass) returns timestamptz
language plpgsql stable security definer as $$
declare
    found_at timestamptz;
begin
    execute format('select created_at from %s limit 1', partition) into found_at;
    return found_at;
end
$$;

-- Whether the default partition has commits, and no open or future transaction writes there.
create function pubsub.default_at_rest(settled bigint) returns boolean
language sql stable as $$
    select exists (select from revision.partitions() as p where p.lower <= settled and p.upper > settled)
       and (select r.latest from revision.range_of_default() as r) < settled
$$;

-- The transaction of the first commit of a branch from a transaction on; null if there is none.
create function pubsub.first_commit(branch_id bigint, txid xid8) returns bigint
language plpgsql stable
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set jit = off
as $$
declare
    low constant xid8 := greatest(txid, (
        select g.high from revision.gap as g
        where g.branch_id = first_commit.branch_id and g.low <= first_commit.txid order by g.low desc limit 1));
    distance constant bigint := pg_snapshot_xmax(pg_current_snapshot())::text::bigint - low::text::bigint;
    first xid8;
    part integer;
begin
    -- Behind a gap, the next commit is mostly near, so the first query is planned for few partitions.
    foreach part in array array[64, 1] loop
        -- Planning all partitions each time takes longer than keeping such a plan.
        perform set_config('plan_cache_mode', 'force_generic_plan', true) where part = 1;
        select q.txid into first from revision.commit_queue as q
        where q.branch_id = first_commit.branch_id and q.txid >= low and q.txid <= (low::text::bigint + distance / part)::text::xid8
        order by q.branch_id, q.txid, q.id limit 1;
        exit when found;
    end loop;
    return first::text::bigint;
end
$$;

-- How much of the queue each of these consumers keeps from being trimmed. That is the size of the complete partitions, from the
-- first commit that the consumer has not processed. An estimate by the sizes of the last vacuum. If the watermark of a consumer
-- is in another database, its last claim counts.
create function pubsub.kept(consumers text[]) returns table (consumer text, bytes bigint, store text)
language plpgsql stable security definer as $$
declare
    names text[];
    firsts bigint[];
    lowest bigint;
begin
    select array_agg(b.name), array_agg(b.first), min(b.first) into names, firsts, lowest
    from (
        select x.name, pubsub.first_commit(x.branch_id, x.txid) as first
        from (
            select n.name, w.branch_id, w.txid::text::xid8 as txid
            from pubsub.watermark as w cross join lateral pubsub.name_of(w.consumer_id, w.branch_id) as n(name)
            where n.name = any (consumers)
            union all
            select c.consumer, (c.address -> 'branch_id')::bigint, pg_snapshot_xmin(at.after)
            from pgchange.claim as c cross join lateral pubsub.cursor_of(c.after) as at
            where c.kind = 'commit' and c.elsewhere and c.consumer = any (consumers)
        ) as x
    ) as b;
    if lowest is null then
        return;
    end if;
    return query
        with written as materialized (
            select p.upper, pgchange.estimated_size(p.relid) as bytes
            from revision.partitions_from(lowest) as p
            where p.upper <= pg_snapshot_xmin(pg_current_snapshot())::text::bigint and p.upper > lowest
        )
        select f.name, sum(w.bytes)::bigint, 'commit queue'
        from unnest(names, firsts) as f(name, txid) join written as w on w.upper > f.txid
        group by f.name;
end
$$;

-- The oldest partitions without which the queue is within its limits, of those that no transaction writes any more.
create function pubsub.in_excess(settled bigint, retention_bytes bigint, retention_count bigint) returns regclass[]
language sql stable as $$
    with parts as (
        select p.relid, p.upper from revision.partitions() as p
        union all
        select 'revision.commit_queue_default'::regclass, (select r.latest from revision.range_of_default() as r) + 1
    ), summed as (
        select p.relid, p.upper,
               sum(pg_total_relation_size(p.relid)) over newer as bytes,
               sum(case when retention_count is not null then pgchange.estimated_rows(p.relid) end) over newer as commits
        from parts as p
        window newer as (order by p.upper desc nulls last)
    )
    select coalesce(array_agg(s.relid), '{}') from summed as s
    where s.upper <= settled and (s.bytes > retention_bytes or s.commits > retention_count)
$$;

create function pubsub.trim_commit_queue(
    retention interval default null, retention_bytes bigint default null, retention_count bigint default null
) returns setof text
language plpgsql security definer as $$
declare
    settled bigint := pg_snapshot_xmin(pg_current_snapshot())::text::bigint;
    excess regclass[];
    part record;
    first_at timestamptz;
    holder text;
    line text;
    began timestamptz;
    trimming_since timestamptz;
begin
    perform pgchange.check_retention(retention, retention_bytes, retention_count);
    perform pgchange.check_isolation();
    perform pubsub.check_origin();
    if not pg_try_advisory_xact_lock(revision.upkeep_key()) then
        return next 'postponed trimming the queue: another maintenance is at work';
        return;
    end if;
    excess := pubsub.in_excess(settled, retention_bytes, retention_count);
    if pubsub.default_at_rest(settled) then
        if 'revision.commit_queue_default'::regclass = any (excess) then
            return next pubsub.trim_partition('revision.commit_queue_default', '0');
        elsif retention is not null and not pubsub.has_commits('revision.commit_queue_default', now() - retention) then
            return next pubsub.trim_partition('revision.commit_queue_default', retention);
        end if;
    end if;
    for part in
        select p.relid, p.relid = any (excess) as is_excess from revision.partitions() as p where p.upper <= settled order by p.lower
    loop
        first_at := pubsub.first_commit_at(part.relid);
        -- Partitions after a partition that is too young are younger. A whole partition is only read if no consumer needs it.
        exit when not part.is_excess and (
            retention is null or first_at > now() - retention
            or pubsub.needed_by(part.relid) is null and pubsub.has_commits(part.relid, now() - retention));
        if first_at is not null then
            -- The locks of the partitions last to the end of the transaction, and their rows are counted under them.
            if clock_timestamp() > trimming_since + interval '500 ms' then
                return next 'left partitions of the queue to the next transaction';
                exit;
            end if;
            began := clock_timestamp();
            line := pubsub.trim_partition(part.relid, case when part.is_excess then '0' else retention end);
            trimming_since := coalesce(trimming_since, case when line like 'trimmed %' then began end);
            return next line;
            holder := coalesce(holder, case when part.is_excess then pubsub.needed_by(part.relid) end);
        end if;
    end loop;
    perform pgchange.note_held(
        'commit', case when holder like 'commits:%' then holder end,
        case when holder is not null
             then format('the commit queue is larger than its retention: %s has not processed the oldest of it', holder) end);
end
$$;
comment on function pubsub.trim_commit_queue(interval, bigint, bigint) is
    'Remove history, partition by partition, the oldest first: commits that are older than retention, or beyond the newest '
    'retention_bytes or retention_count commits. Partitions that a consumer has yet to process, or that an open transaction might '
    'still write, are kept. Returns a line for each partition that was trimmed or kept, with the consumer. If a line begins with '
    '"left", call it again in a transaction of its own.';
