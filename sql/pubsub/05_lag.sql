-- The lag of a position, and whether it has passed a point. Nothing here writes, so all of it works on a standby.

create type pubsub.unread_range as (
    n bigint, branch_id bigint, after pg_snapshot, partial_txid xid8, partial_id bigint, upto pg_snapshot, max_changes integer,
    is_behind boolean
);
comment on type pubsub.unread_range is
    'The commits of a branch that a position has not processed and upto sees, to be counted up to max_changes. n: the place '
    'of the position among those of a query; is_behind: see pubsub.over_gap().';

-- How many commits are unread in a range that is behind, exact up to max_changes; else an estimate. It reads a part of the range,
-- and a larger part if that has too few commits. So the plans have no more partitions than are needed.
create function pubsub.count_behind(r pubsub.unread_range) returns table (counted bigint, exact boolean, age double precision)
language plpgsql volatile
set plan_cache_mode = force_custom_plan
set jit = off
set enable_sort = off
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
    lowest constant xid8 := pg_snapshot_xmax(r.after);
    late constant xid8[] := '{0}' || array(select pg_snapshot_xip(r.after));
    distance constant bigint := pg_snapshot_xmax(r.upto)::text::bigint - lowest::text::bigint;
    gap revision.gap;
    part integer;
    seen record;
begin
    foreach part in array array[64, 8, 1] loop
        -- With many partitions, planning at each call takes longer than a kept generic plan.
        perform set_config('plan_cache_mode', 'force_generic_plan', true) where part = 1;
        select count(*) as commits, min(u.id) as first_id, max(u.id) as last_id, min(u.created_at) as oldest into seen
        from (
            select c.id, c.created_at
            from pubsub.unread(
                r.branch_id, r.after, r.partial_txid, r.partial_id, r.upto,
                high_txid => (lowest::text::bigint + distance / part)::text::xid8, lowest => lowest, late => late) as c
            limit r.max_changes::bigint + 1
        ) as u;
        exit when seen.commits > r.max_changes;
    end loop;
    exact := seen.commits <= r.max_changes;
    counted := seen.commits;
    if not exact then
        select g.* into gap from revision.gap as g where g.branch_id = r.branch_id order by g.low desc limit 1;
        counted := counted + greatest(0, coalesce((
            select ((q.id - seen.last_id)::double precision * seen.commits / (seen.last_id - seen.first_id + 1))::bigint
            from revision.commit_queue as q
            where q.branch_id = r.branch_id and (q.txid >= gap.high or q.txid = (gap.low::text::bigint - 1)::text::xid8)
            order by q.branch_id desc, q.txid desc, q.id desc limit 1), 0));
    end if;
    age := extract(epoch from clock_timestamp() - seen.oldest);
    return next;
end
$$;

-- How many commits are unread in each range, exact up to max_changes, and an estimate beyond. Numbers of the queue count the
-- commits of all branches. So the estimate assumes that the branch has the same share of them in the rest of the range, up to its
-- latest commit. low_txid: commits before it are not counted. lowest, late: see pubsub.unread(); they hold for all ranges except
-- those with is_behind.
create function pubsub.count_unread(ranges pubsub.unread_range[], low_txid xid8, lowest xid8, late xid8[])
returns table (n bigint, counted bigint, exact boolean, age double precision)
language plpgsql volatile rows 50
set plan_cache_mode = force_custom_plan
set jit = off
set enable_sort = off
set enable_seqscan = off
set enable_bitmapscan = off
as $$
begin
    if ranges is null then
        return;
    end if;
    return query
        select r.n, case when f.counted <= r.max_changes then f.counted else f.counted + greatest(0, coalesce((
                   select ((q.id - f.last_id)::double precision * f.counted / (f.last_id - f.first_id + 1))::bigint
                   from revision.commit_queue as q
                   where q.branch_id = r.branch_id and q.txid >= lowest
                   order by q.branch_id desc, q.txid desc, q.id desc limit 1), 0)) end,
               f.counted <= r.max_changes, extract(epoch from clock_timestamp() - f.oldest)::double precision
        from unnest(ranges) as r
        cross join lateral (
            select count(*) as counted, min(u.id) as first_id, max(u.id) as last_id, min(u.created_at) as oldest
            from (
                select c.id, c.created_at
                from pubsub.unread(
                    r.branch_id, r.after, r.partial_txid, r.partial_id, r.upto,
                    low_txid => count_unread.low_txid, lowest => count_unread.lowest, late => count_unread.late) as c
                limit r.max_changes::bigint + 1
            ) as u
        ) as f
        where not r.is_behind;
    if exists (select from unnest(ranges) as r where r.is_behind) then
        return query
            select r.n, b.* from unnest(ranges) as r cross join lateral pubsub.count_behind(r) as b where r.is_behind;
    end if;
end
$$;

-- How many faults may belong to each of these branches, up to a thousand. Counted are the faults of the branch's tables, and
-- those of tables whose branch comes from an expression. The cost grows with the number of tables that have faults, and not
-- with the number of faults.
create function pubsub.faults(branch_ids bigint[]) returns table (branch_id bigint, faults bigint)
language plpgsql stable security definer as $$
begin
    return query
        with faulty as materialized (
            select f.tbl, f.branch_id from revision.faulty_tables() as f
        )
        select b.id, (
            select count(*)
            from (
                select
                from faulty
                cross join lateral (select from revision.fault as f where f.tbl = faulty.tbl limit 1000) as found_fault
                where coalesce(faulty.branch_id, b.id) = b.id
                limit 1000
            ) as bounded)
        from unnest(branch_ids) as b(id);
end
$$;

-- The result of lag() for a position, with the dead letter that it is to process again. waiting is null if nothing can wait.
-- The function is volatile and has no settings of its own, so that the planner inlines it.
create function pubsub.lag_of(
    "position" jsonb, ready bigint, ready_exact boolean, ready_age double precision,
    waiting bigint, waiting_exact boolean, waiting_age double precision, faults bigint
) returns jsonb
language sql volatile as $$
    select pg_catalog.jsonb_build_object(
        'ready', ready + coalesce(("position" -> 'letter' -> 'batch' -> 'count')::bigint, 0), 'ready_exact', ready_exact,
        'ready_age', greatest(
            ready_age, extract(epoch from pg_catalog.clock_timestamp() - ("position" -> 'letter' ->> 'since')::timestamptz)),
        'waiting', coalesce(waiting, 0), 'waiting_exact', coalesce(waiting_exact, true), 'waiting_age', waiting_age,
        'faults', faults)
$$;

-- pubsub.lag() of many positions at once, at a lower cost than one by one: for [{branch_id, position, upto, in_order}, ...] an
-- array in their order. Raises an error if lag() would raise an error for any of them. are_checked: the positions were checked in
-- an earlier snapshot, so a consumer that was dropped meanwhile still has a lag.
create function pubsub.lags(asked jsonb, are_checked boolean default false) returns jsonb
language plpgsql volatile
set plan_cache_mode = force_generic_plan
set jit = off
as $$
declare
    visible pg_snapshot := pubsub.current_snapshot();
    settled pg_snapshot := pgchange.snapshot_below(visible, pg_snapshot_xmin(visible));
    ranges pubsub.unread_range[];
    waits pubsub.unread_range[];
    lowest xid8;
    late xid8[];
begin
    if not are_checked then
        perform pubsub.check_branch(b.id)
        from (select distinct a.branch_id from jsonb_to_recordset(asked) as a(branch_id bigint)) as b(id);
        perform pubsub.check_positions(asked);
        if exists (select from jsonb_to_recordset(asked) as a(upto integer) where coalesce(a.upto < 0, true)) then
            raise invalid_parameter_value using message =
                'the lag cannot be computed: upto must not be negative or null; give the number up to which commits are counted';
        end if;
    end if;
    select array_agg(row(a.n, a.branch_id, o.after, c.partial_txid, c.partial_id, case when a.in_order then settled else visible end,
                         a.upto, o.is_behind)::pubsub.unread_range),
           array_agg(row(a.n, a.branch_id, o.after, c.partial_txid, c.partial_id, visible, a.upto, false)::pubsub.unread_range)
               filter (where a.in_order),
           min(pg_snapshot_xmax(o.after)) filter (where not o.is_behind)
    into ranges, waits, lowest
    from rows from (jsonb_to_recordset(asked) as (branch_id bigint, "position" jsonb, upto integer, in_order boolean))
        with ordinality as a(branch_id, "position", upto, in_order, n)
    cross join lateral pubsub.cursor_of(a."position") as c
    cross join lateral pubsub.over_gap(a.branch_id, c.after) as o;
    late := '{0}' || array(
        select distinct x from unnest(ranges) as r cross join lateral pg_snapshot_xip(r.after) as x where not r.is_behind);
    return (
        with branch as materialized (
            select f.branch_id as id, f.faults
            from pubsub.faults(array(select distinct r.branch_id from unnest(ranges) as r)) as f
        )
        select jsonb_agg(
            pubsub.lag_of(
                a."position", ready.counted, ready.exact, ready.age, waiting.counted, waiting.exact, waiting.age, branch.faults)
            order by a.n)
        from rows from (jsonb_to_recordset(asked) as (branch_id bigint, "position" jsonb)) with ordinality as a(branch_id, "position", n)
        join branch on branch.id = a.branch_id
        join pubsub.count_unread(ranges, '0', lowest, late) as ready on ready.n = a.n
        left join pubsub.count_unread(waits, pg_snapshot_xmax(settled), pg_snapshot_xmax(settled), late) as waiting on waiting.n = a.n);
end
$$;

-- How many commits are ready for a position, with those of the dead letter that it is to process again. waiting: how many an
-- in-order consumer has to wait for because an older transaction is open. Rows of open transactions are invisible.
create function pubsub.lag(branch_id bigint, "position" jsonb, upto integer, in_order boolean) returns jsonb
language sql volatile as $$
    select pubsub.lags(jsonb_build_array(jsonb_build_object(
        'branch_id', branch_id, 'position', "position", 'upto', upto, 'in_order', in_order))) -> 0
$$;

-- A point in the queue to wait for, or to which a consumer can be moved. It is behind everything that is committed now, or before
-- the first commit that was written at or after a time.
create function pubsub.point(branch_id bigint, at timestamptz default null) returns jsonb
language plpgsql volatile as $$
declare
    s pg_snapshot := pubsub.current_snapshot();
    first_txid xid8;
begin
    perform pubsub.check_branch(branch_id);
    if at > clock_timestamp() then
        raise invalid_parameter_value using message = format('the time %s is in the future', at),
            hint = 'give a time in the past, or leave it out for now';
    end if;
    if at is not null then
        select q.txid into first_txid
        from revision.commit_queue as q
        where q.branch_id = point.branch_id and q.created_at >= point.at
        order by q.txid, q.id
        limit 1;
        s := pgchange.snapshot_below(s, coalesce(first_txid, pg_snapshot_xmax(s)));
    end if;
    return jsonb_build_object(
        'snapshot', s, 'source', revision.here(), 'until', coalesce(at, clock_timestamp())::timestamptz(0));
end
$$;

-- Whether a position has processed every commit up to a point; and the point, for the next call.
create function pubsub.passed(branch_id bigint, "position" jsonb, goal jsonb) returns jsonb
language plpgsql volatile
set plan_cache_mode = force_generic_plan
set jit = off
set enable_sort = off
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
    at record;
    seen pg_snapshot;
    is_narrow boolean;
    late xid8[];
begin
    perform pubsub.check_branch(branch_id);
    perform pubsub.check_position("position" ->> 'consumer', branch_id, "position");
    at := pubsub.cursor_of("position");
    if goal ->> 'source' <> revision.here() then
        raise exception using errcode = 'PC004', message = 'the point was taken in another database than this source',
            hint = 'the source was restored, upgraded or replaced since: take a new point';
    end if;
    select o.after, pubsub.has_narrow_plan(o.is_behind) into seen, is_narrow from pubsub.over_gap(branch_id, at.after) as o;
    late := '{0}' || array(select pg_snapshot_xip(seen));
    if is_narrow then
        perform set_config('plan_cache_mode', 'force_custom_plan', true);
    end if;
    return jsonb_build_object('goal', goal, 'passed', not exists (
        select from pubsub.unread(
            passed.branch_id, seen, at.partial_txid, at.partial_id, (goal ->> 'snapshot')::pg_snapshot,
            lowest => pg_snapshot_xmax(seen), late => late)));
end
$$;
