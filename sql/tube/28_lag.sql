-- The lag of workers and the content of tubes, at a cost that does not depend on the backlog.

-- The number of different ids for a worker under a condition. It is exact if no kind of pods has more than upto touches. For a
-- kind with more it is an estimate. It assumes as many ids per seq up to the worker's latest pod as in the part that was read.
create function tube.count_unread(
    known tube.tube, worker integer, "position" jsonb, condition text, upto integer,
    out counted bigint, out exact boolean, out oldest timestamptz
)
language plpgsql volatile
set jit = off
set enable_sort = off
set enable_seqscan = off
set enable_bitmapscan = off
set max_parallel_workers_per_gather = 0
as $$
declare
    touched constant text :=
        '(select u.seq, u.shard, u.ts, cardinality(u.ids) as size, i.id, i.n, %s as is_backfill
          from (%s) as u cross join lateral unnest(u.ids) with ordinality as i(id, n) limit %s)';
    latest constant text :=
        '(select l.seq from %1$s as l where (l.op = ''B'') is %3$s and %2$s = %4$s order by l.op = ''B'' desc, %2$s desc, l.seq desc limit 1)';
    belongs constant text := tube.belongs('l.shard', known.partitions);
    estimated bigint;
begin
    execute format(
        'with touched as materialized (%1$s union all %2$s)
         select (select count(distinct (t.shard, t.id)) from touched as t), coalesce(bool_and(k.touches <= %3$s), true), min(k.oldest),
                sum(case when k.touches <= %3$s then k.ids
                         else k.whole + greatest(0, case when k.is_backfill then %5$s else %4$s end - k.high) * k.whole / (k.high - k.low + 1)
                    end)
         from (
            select t.is_backfill, count(*) as touches, count(distinct (t.shard, t.id)) as ids, min(t.seq) as low, max(t.seq) as high,
                   sum(t.size) filter (where t.n = 1) as whole, min(t.ts) as oldest
            from touched as t group by t.is_backfill) as k',
        format(touched, 'false',
               tube.unread_sql(known, worker, 'incremental', "position", pg_current_snapshot(), extra => condition), upto::bigint + 1),
        format(touched, 'true',
               tube.unread_sql(known, worker, 'backfill', "position", pg_current_snapshot(), extra => condition), upto::bigint + 1),
        upto,
        format(latest, known.pods, belongs, 'false', worker), format(latest, known.pods, belongs, 'true', worker))
    into counted, exact, oldest, estimated;
    if not exact then
        counted := estimated;
    end if;
end
$$;

-- The query of the numbers of the workers of a tube that have something to do, and perhaps some more. It reads the workers from
-- asked, which tube.with_pods() makes. are_late: also read the pods of transactions that were open in a snapshot of a position.
create function tube.with_pods_sql(known tube.tube, are_late boolean) returns text
language plpgsql immutable as $$
begin
    return format($query$
        select a.n from asked as a
        where a.tube = %3$L and (
            (select true from %1$s as l
             where (l.op = 'B') = a.is_backfill and %2$s = a.worker and l.seq > a.done
             order by l.op = 'B', %2$s, l.seq limit 1)
            or (select true from %1$s as l where l.ids = '{}' and %2$s = a.worker order by %2$s, l.seq limit 1)
            %4$s)
        $query$, known.pods, tube.belongs('l.shard', known.partitions), known.name,
        case when are_late then format($query$
            or (select true
                from pg_snapshot_xip(a.seen) as late(txid)
                cross join lateral (
                    select from %1$s as l where l.txid = late.txid and %2$s = a.worker order by l.txid, l.seq limit 1) as l
                limit 1)
            $query$, known.pods, tube.belongs('l.shard', known.partitions)) end);
end
$$;

-- The workers that have something to do, and perhaps some more, as numbers from 1 on of their names and positions in the arrays.
-- known has their tubes. One query for all of them, because planning queries is the main cost of a worker without pods.
create function tube.with_pods(known tube.tube[], names text[], workers integer[], positions jsonb[]) returns integer[]
language plpgsql volatile
set plan_cache_mode = force_generic_plan
set jit = off
set enable_sort = off
set enable_seqscan = off
set enable_bitmapscan = off
set max_parallel_workers_per_gather = 0
as $$
declare
    queries text := (
        select string_agg(tube.with_pods_sql(t, t.name in (
            select a.name
            from unnest(names, positions) as a(name, at)
            cross join (values ('incremental'), ('backfill')) as k(kind)
            cross join lateral pg_snapshot_xip((a.at -> k.kind ->> 0)::pg_snapshot))), ' union all ')
        from unnest(known) as t);
    numbers integer[];
begin
    execute format($query$
        with asked as materialized (
            select a.n, a.tube, a.worker, k.is_backfill, (a.at -> k.kind ->> 0)::pg_snapshot as seen, (a.at -> k.kind ->> 1)::bigint as done
            from unnest($1, $2, $3) with ordinality as a(tube, worker, at, n)
            cross join (values ('incremental', false), ('backfill', true)) as k(kind, is_backfill)
        )
        select coalesce(array_agg(f.n), '{}') from (%s) as f
        $query$, queries)
    into numbers using names, workers, positions;
    return numbers;
end
$$;

-- The workers of a tube that have something to do, and perhaps some more, in their order.
create function tube.workers_with_pods(known tube.tube) returns setof integer
language plpgsql volatile as $$
begin
    return query
        select distinct n - 1
        from (
            select array_agg(known.name) as names, array_agg(k.worker order by k.worker) as workers,
                   array_agg(tube.position_or_start(tube.position(known.name, k.worker)) order by k.worker) as positions
            from generate_series(0, known.partitions - 1) as k(worker)
        ) as w
        cross join lateral unnest(tube.with_pods(array[known], w.names, w.workers, w.positions)) as n
        order by 1;
end
$$;

-- The result of tube.lag() for a worker that may have pods, with the number of faults of its tube.
create function tube.lag_of(known tube.tube, worker integer, "position" jsonb, upto integer, faults bigint) returns jsonb
language plpgsql volatile as $$
declare
    held jsonb := tube.held_back(known, worker);
    ready record;
    waiting record;
    controls record;
begin
    ready := tube.count_unread(known, worker, "position", tube.held_sql(held, false), upto);
    select 0::bigint as counted, true as exact, null::timestamptz as oldest into waiting;
    if held <> '[]' then
        waiting := tube.count_unread(known, worker, "position", tube.held_sql(held, true), upto);
    end if;
    select count(*) filter (where d.is_due) as due, count(*) filter (where not d.is_due) as others,
           min(d.ts) filter (where d.is_due) as due_since, min(d.ts) filter (where not d.is_due) as others_since
    into controls from tube.due(known, worker, "position") as d;
    return jsonb_build_object(
        'ready', ready.counted + controls.due, 'ready_exact', ready.exact,
        'ready_age', extract(epoch from clock_timestamp() - least(ready.oldest, controls.due_since)),
        'waiting', waiting.counted + controls.others, 'waiting_exact', waiting.exact,
        'waiting_age', extract(epoch from clock_timestamp() - least(waiting.oldest, controls.others_since)),
        'faults', faults);
end
$$;

-- The lag of many workers, as tube.lag() returns it: for [{tube, workers, worker, position, upto}, ...] an array in their order. It
-- costs less than asking one by one. Raises an error if tube.lag() would raise an error for any of them.
create function tube.lags(asked jsonb) returns jsonb
language plpgsql volatile
set plan_cache_mode = force_generic_plan
as $$
declare
    known tube.tube[] := array(
        select tube.named(a.tube) from (select distinct a.tube from jsonb_to_recordset(asked) as a(tube text)) as a);
    busy integer[];
begin
    if asked = '[]' then
        return '[]';
    end if;
    perform tube.check_still_shared_by(t, a.workers, a.worker)
    from jsonb_to_recordset(asked) as a(tube text, workers integer, worker integer) join unnest(known) as t on t.name = a.tube;
    if exists (select from jsonb_to_recordset(asked) as a(upto integer) where coalesce(a.upto < 0, true)) then
        raise invalid_parameter_value using message =
            'the lag cannot be computed: upto must not be negative or null; give the number up to which ids are counted';
    end if;
    select tube.with_pods(
        known, array_agg(a.tube order by a.n), array_agg(a.worker order by a.n),
        array_agg(tube.position_or_start(a."position") order by a.n))
    into busy
    from rows from (jsonb_to_recordset(asked) as (tube text, worker integer, "position" jsonb))
        with ordinality as a(tube, worker, "position", n);
    return (
        select jsonb_agg(
            case when a.n = any (busy) then tube.lag_of(t.known, a.worker, tube.position_or_start(a."position"), a.upto, t.faults)
                 else jsonb_build_object(
                     'ready', 0, 'ready_exact', true, 'ready_age', null, 'waiting', 0, 'waiting_exact', true, 'waiting_age', null,
                     'faults', t.faults) end
            order by a.n)
        from rows from (jsonb_to_recordset(asked) as (tube text, worker integer, "position" jsonb, upto integer))
            with ordinality as a(tube, worker, "position", upto, n)
        join (select t.name, t as known, tube.count_faults(t.name) as faults from unnest(known) as t) as t on t.name = a.tube);
end
$$;

-- The number of ids that are ready for a worker, with the control pods whose turn has come, and the number that waits. Ids wait
-- if their table came from another worker's shard whose pods are not done. Control pods wait for earlier pods. Exact up to upto;
-- the cost grows with upto only. Touches of open transactions are invisible.
create function tube.lag(tube text, workers integer, worker integer, "position" jsonb, upto integer default 1000) returns jsonb
language plpgsql volatile as $$
begin
    return tube.lags(jsonb_build_array(jsonb_build_object(
        'tube', tube, 'workers', workers, 'worker', worker, 'position', "position", 'upto', upto))) -> 0;
end
$$;

-- Whether a failed attempt is recent: half a minute after the first attempt, longer after each further attempt, at most 5
-- minutes.
create function tube.is_backing_off(attempt integer, since timestamptz) returns boolean
language sql stable as $$
    select attempt > 0 and clock_timestamp() < since + least(30 * 2 ^ least(attempt - 1, 9), 300) * interval '1 s'
$$;

-- The lag of the idle workers of all tubes that the caller may empty. Workers at work are left out, and workers that rest after
-- their batch failed. A worker whose control pods failed rests only if it has nothing else to do. Counting stops at upto.
create function tube.lag_of_idle(upto integer) returns jsonb
language plpgsql volatile as $$
declare
    known tube.tube;
    worker integer;
    at tube.worker;
    lag jsonb;
    ready bigint := 0;
    waiting bigint := 0;
    age double precision;
    faults bigint := 0;
begin
    for known in select t.* from tube.readable_tubes() as t where has_table_privilege(t.pods, 'delete') order by t.name loop
        faults := faults + tube.count_faults(known.name);
        for worker in select p.worker from tube.workers_with_pods(known) as p(worker) loop
            at := tube.worker_now(known.name, worker);
            continue when tube.locked(known.name, worker)
                or tube.is_backing_off(at.attempt, greatest(at.claimed_at, at.updated_at))
                -- Pods with ids do not wait for control pods that fail.
                or tube.is_backing_off(at.control_attempt, at.control_failed_at) and not tube.has_unread(known, worker);
            lag := tube.lag_of(known, worker, tube.position_or_start(tube.position(known.name, worker)), upto, faults);
            ready := ready + (lag ->> 'ready')::bigint;
            waiting := waiting + (lag ->> 'waiting')::bigint;
            age := greatest(age, (lag ->> 'ready_age')::double precision);
            exit when ready >= upto;
        end loop;
        exit when ready >= upto;
    end loop;
    return jsonb_build_object(
        'ready', ready, 'ready_exact', ready < upto, 'ready_age', age,
        'waiting', waiting, 'waiting_exact', ready < upto, 'faults', faults);
end
$$;

-- The number of pods of a kind for a worker, with their first and last seq and time.
create function tube.stats_of(known tube.tube, worker integer, kind text)
returns table (pods text, min_seq bigint, max_seq bigint, min_ts timestamptz, max_ts timestamptz)
language plpgsql volatile
set jit = off
set enable_sort = off
set enable_seqscan = off
set enable_bitmapscan = off
set max_parallel_workers_per_gather = 0
as $$
declare
    at jsonb := tube.position_or_start(tube.position(known.name, worker));
    counted bigint;
begin
    execute 'select count(*), min(seq), max(seq), min(ts), max(ts) from (select seq, ts from (' || tube.unread_sql(
        known, worker, kind, at, upto => null, most => 1001) || ') as u) as t'
    into counted, min_seq, max_seq, min_ts, max_ts;
    pods := case when counted > 1000 then '1000+' else counted::text end;
    if counted > 1000 then
        execute format(
            'select l.seq, l.ts from %1$s as l
             where (l.op = ''B'') is %3$s and %2$s = %4$s and l.ids <> ''{}''
             order by l.op = ''B'' desc, %2$s desc, l.seq desc limit 1',
            known.pods, tube.belongs('l.shard', known.partitions), case kind when 'backfill' then 'true' else 'false' end, worker)
        into max_seq, max_ts;
    end if;
    return next;
end
$$;

-- The number of control pods of each type of a worker, as in backfill_end:1 backfill_start:1. Of its first 1000; if there are
-- more, each number has a plus. Null if it has none.
create function tube.controls_by_type(known tube.tube, worker integer) returns text
language sql volatile as $$
    select string_agg(format('%s:%s', t.type, t.counted) || case when t.whole >= 1000 then '+' else '' end, ' ' order by t.type)
    from (
        select coalesce(d.payload ->> 'type', 'control') as type, count(*) as counted, sum(count(*)) over () as whole
        from tube.due(known, worker, tube.position_or_start(tube.position(known.name, worker))) as d
        group by 1
    ) as t
$$;

create function tube.tube_stats()
returns table (
    tube text, predicate text, partition integer, shards integer,
    inc_count text, inc_min_seq bigint, inc_max_seq bigint, inc_min_ts timestamptz, inc_max_ts timestamptz,
    backfill_count text, backfill_min_seq bigint, backfill_max_seq bigint, backfill_min_ts timestamptz,
    backfill_max_ts timestamptz, control_count text
)
language plpgsql volatile
set jit = off
as $$
declare
    known tube.tube;
begin
    for known in select t.* from tube.readable_tubes() as t loop
        return query
            select known.name, known.predicate, k.worker,
                   (select count(distinct a.shard)::integer from tube.attachment as a
                    where a.tube = known.name and tube.worker_of(a.shard, known.partitions) = k.worker),
                   i.*, b.*,
                   tube.controls_by_type(known, k.worker)
            from generate_series(0, known.partitions - 1) as k(worker)
            cross join lateral tube.stats_of(known, k.worker, 'incremental') as i
            cross join lateral tube.stats_of(known, k.worker, 'backfill') as b;
    end loop;
end
$$;
comment on function tube.tube_stats() is
    'Every tube, with a row for each worker and its waiting pods. They are counted up to 1000 and then shown as 1000+, so that '
    'the cost does not grow with their number. shards: those of attached tables. Control pods of both kinds are counted by type. '
    'Touches of the own transaction count, too.';

-- A point in a tube to wait for: everything that was touched by committed transactions.
create function tube.point(tube text) returns jsonb
language plpgsql volatile as $$
declare
    -- Take the snapshot before reading the sequence: then every pod that the snapshot sees has at most this seq.
    s pg_snapshot := pg_current_snapshot();
    seq bigint := (select q.last_value from tube.seq as q);
begin
    perform tube.named(tube);
    return jsonb_build_object('snapshot', s, 'seq', seq, 'until', clock_timestamp()::timestamptz(0));
end
$$;

-- Whether a worker has done all of its pods up to a point, and the point.
create function tube.passed(tube text, workers integer, worker integer, "position" jsonb, goal jsonb) returns jsonb
language plpgsql volatile as $$
declare
    known tube.tube := tube.named(tube);
    at jsonb := tube.position_or_start("position");
    seen pg_snapshot := goal ->> 'snapshot';
    high bigint := goal ->> 'seq';
    is_left boolean;
begin
    perform tube.check_still_shared_by(known, workers, worker);
    is_left := tube.first_unread(known, worker, 'incremental', at, seen, high) is not null
        or tube.first_unread(known, worker, 'backfill', at, seen, high) is not null;
    return jsonb_build_object('passed', not is_left, 'goal', goal);
end
$$;
