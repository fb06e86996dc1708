-- Ranges of transactions in which a branch has no commits, so that readers step over them.

-- For each branch of ids, the transaction of its latest commit, or null if it has no commit in the range. The range begins with
-- the branch's entry in lows, and ends before the transaction below. lowest: the lowest of lows. It is a constant of the plan,
-- which then has only the partitions from there on.
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

-- Extend the last gap of each branch to the beginning of the current partition, or begin its next gap after its last commit.
-- Writes once for each branch and partition. The caller holds the lock of revision.upkeep_key().
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
    -- A gap within a single partition saves readers nothing.
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
    -- A branch that has no gap yet also gets a gap before its first commit, because a new consumer begins there.
    select l.id, '0', first.txid
    from unnest(ids, highs, latest) as l(id, high, txid)
    cross join lateral (
        select q.txid from revision.commit_queue as q where q.branch_id = l.id order by q.branch_id, q.txid, q.id limit 1) as first
    where l.txid is not null and l.high = '0' and first.txid > '0';
    delete from revision.gap as g where not exists (select from revision.branch as b where b.id = g.branch_id);
end
$$;
