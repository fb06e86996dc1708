-- Reading and deleting the pods of a worker manually, in SQL.

-- One row, for which PostgreSQL expects a thousand. If the result is joined and a limit follows, the planner then prefers the
-- order of an index. It expects that sorting so many rows costs more than reading the first few.
create function tube.one_of_many() returns setof boolean
language plpgsql stable rows 1000 as $$
begin
    return next true;
end
$$;

-- The query of a worker's pods of a kind, with its control pods, from the position of the worker when it runs. In it, at is the
-- row of the worker. The rows must be read in the order of the query. The function in it keeps PostgreSQL from using parallel
-- workers.
create function tube.by_hand_sql(known tube.tube, worker integer, kind text) returns text
language sql immutable as $$
    select format($query$
    (
        select p.*
        from (
            select l.seq, l.op, l.shard, l.ids, l.payload, l.ts
            from unnest(array(select pg_snapshot_xip(a.%5$s) from at as a)) as late(txid)
            cross join lateral (
                select r.* from %1$s as r where r.txid = late.txid order by r.txid, r.seq offset 0
            ) as l
            where (l.op is not distinct from 'B') = %2$s and %3$s = %4$s and l.ids <> '{}' and l.seq <= (select a.%6$s from at as a)
            union all
            select l.seq, l.op, l.shard, l.ids, l.payload, l.ts
            from %1$s as l
            where l.ids = '{}' and (l.op is not distinct from 'B') = %2$s
              and %3$s = %4$s and l.seq <= (select a.%6$s from at as a)
        ) as p
        order by p.seq
    )
    union all
    (
        select l.seq, l.op, l.shard, l.ids, l.payload, l.ts
        from %1$s as l cross join tube.one_of_many()
        where (l.op = 'B') is %2$s and %3$s = %4$s and l.seq > coalesce((select a.%6$s from at as a), 0)
        order by l.op = 'B', %3$s, l.seq
    )$query$,
        tube.full_name(known.pods), case kind when 'backfill' then 'true' else 'false' end,
        tube.belongs('l.shard', known.partitions), worker, case kind when 'backfill' then 'backfill_snapshot' else 'snapshot' end,
        case kind when 'backfill' then 'backfill_done' else 'done' end)
$$;

create function tube.tube_pods_sql(
    tube text, partitions integer, "partition" integer, exclude_backfill boolean default false
) returns text
language plpgsql stable as $$
declare
    known tube.tube := tube.named(tube);
begin
    perform tube.check_worker_number(partitions, "partition");
    if partitions <> known.partitions then
        return format(
            'select seq, op, shard, ids, payload, ts from %s where %s = %s%s order by op = ''B'', seq',
            tube.full_name(known.pods), tube.belongs('shard', partitions), "partition",
            case when exclude_backfill then ' and op <> ''B''' end);
    end if;
    return format('with at as materialized (select w.* from tube.worker_now(%L, %s) as w) ', known.name, "partition")
        || 'select seq, op, shard, ids, payload, ts from (' || tube.by_hand_sql(known, "partition", 'incremental')
        || case when exclude_backfill then '' else ' union all ' || tube.by_hand_sql(known, "partition", 'backfill') end
        || ') as pods';
end
$$;
comment on function tube.tube_pods_sql(text, integer, integer, boolean) is
    'The query of a worker''s pods for manual use, in the order in which they are to be processed; LIMIT may follow. With the '
    'tube''s own number of workers, it begins after the position of tube_pods_delete(). With another number, it reads all pods.';

create function tube.tube_pods_delete(tube text, partitions integer, "partition" integer, seqs bigint[]) returns integer
language plpgsql
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
declare
    known tube.tube := tube.named(tube);
    is_own boolean := partitions = known.partitions;
    deleted integer;
begin
    perform tube.check_worker_number(partitions, "partition");
    execute format(
        'with gone as (
            -- One look for each (offset 0), however few pods the planner expects.
            delete from %1$s as d
            where d.ctid = any (array(
                select found.place
                from (
                    select distinct b, h, s
                    from unnest($1) as s, (values (false), (true)) as k(b), generate_series($2, $3) as h
                ) as wanted
                cross join lateral (
                    select p.ctid as place from %1$s as p
                    where (p.op = ''B'') = wanted.b and %2$s = wanted.h and p.seq = wanted.s and %3$s = $4
                    offset 0
                ) as found))
            returning 1)
        select count(*) from gone',
        known.pods, tube.belongs('p.shard', known.partitions), tube.belongs('p.shard', partitions))
    using seqs, case when is_own then "partition" else 0 end, case when is_own then "partition" else known.partitions - 1 end,
          "partition"
    into deleted;
    if deleted > 0 and is_own then
        perform tube.advance_by_hand(known, "partition");
    end if;
    return deleted;
end
$$;
comment on function tube.tube_pods_delete(text, integer, integer, bigint[]) is
    'Delete pods of a worker by their seq, for manual use. Returns how many were deleted.';

-- Move a worker whose pods are deleted manually behind the deleted pods. Does nothing if it has a batch in work or its lock is
-- held. In a restored tube, where this would hide pods, it rebases the tube as a claim does.
create function tube.advance_by_hand(known tube.tube, worker integer) returns void
language plpgsql as $$
declare
    horizon bigint;
    fresh xid;
    upto pg_snapshot;
    at tube.worker;
    from_position jsonb;
    incremental bigint;
    backfill bigint;
begin
    if not tube.take_lock(known.name, worker) then
        return;
    end if;
    at := tube.worker_now(known.name, worker);
    from_position := tube.position_or_start(tube.position(known.name, worker));
    if at.batch is not null or known.partitions <> (tube.named(known.name)).partitions then
        return;
    end if;
    horizon := (select s.last_value from tube.seq as s);
    begin
        -- This block is a subtransaction, so the xmin of the row is a transaction id that was assigned after the horizon was read.
        -- tube.snapshot_before() needs such an id.
        insert into tube.worker (tube, worker, version) values (known.name, advance_by_hand.worker, coalesce(at.version, 0) + 1)
        returning xmin into fresh;
    exception when unique_violation then
        return;
    end;
    upto := tube.snapshot_before(pgchange.full_xid(fresh));
    if tube.is_restored(known, pgchange.full_xid(fresh)) then
        delete from tube.worker as w
        where w.tube = known.name and w.worker = advance_by_hand.worker and w.version = coalesce(at.version, 0) + 1;
        perform tube.rebase_after_restore(known.name);
        return;
    end if;
    if upto is null then
        delete from tube.worker as w
        where w.tube = known.name and w.worker = advance_by_hand.worker and w.version = coalesce(at.version, 0) + 1;
        return;
    end if;
    incremental := coalesce(tube.first_unread(known, worker, 'incremental', from_position, upto, horizon) - 1, horizon);
    backfill := coalesce(tube.first_unread(known, worker, 'backfill', from_position, upto, horizon) - 1, horizon);
    update tube.worker as w set
        snapshot = case when incremental >= coalesce(at.done, 0) then upto else at.snapshot end,
        done = greatest(incremental, at.done),
        backfill_snapshot = case when backfill >= coalesce(at.backfill_done, 0) then upto else at.backfill_snapshot end,
        backfill_done = greatest(backfill, at.backfill_done),
        control_attempt = coalesce(at.control_attempt, 0),
        control_failed_at = at.control_failed_at
    where w.tube = known.name and w.worker = advance_by_hand.worker and w.version = coalesce(at.version, 0) + 1;
    delete from tube.worker as w where w.tube = known.name and w.worker = advance_by_hand.worker and w.version = at.version;
end
$$;
