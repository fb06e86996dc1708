-- The unread pods of a worker: incremental pods before those of a backfill, each in the order of seq.
--
-- A lower seq may be committed after a higher seq that was already read. So the position of a worker has a snapshot and a seq for
-- each of the two kinds. Unread are the pods above the seq, and those below it of transactions that were open in the snapshot.
--
-- The queries read pods in the order of an index, whatever the statistics say. A limit without a sort relies on this order, and
-- so does a cost that does not depend on the backlog. The settings of these functions leave PostgreSQL no other plan. An index is
-- on (op = 'B'), worker and seq. If pods are searched by their transaction, PostgreSQL must not use it. So that query writes the
-- kind as (op is not distinct from 'B').

-- The newest row of a worker; null if the worker has not begun.
create function tube.worker_now(tube text, worker integer) returns tube.worker
language plpgsql stable as $$
begin
    return (
        select w from tube.worker as w
        where w.tube = worker_now.tube and w.worker = worker_now.worker
        order by w.version desc limit 1);
end
$$;

-- The position of a worker; null if the worker has not begun.
create function tube.position(tube text, worker integer) returns jsonb
language plpgsql stable as $$
begin
    return (
        select jsonb_build_object(
            'schema', (select max(i.version) from tube.installed as i),
            'version', w.version,
            'incremental', jsonb_build_array(w.snapshot, w.done),
            'backfill', jsonb_build_array(w.backfill_snapshot, w.backfill_done))
        from tube.worker_now(tube, worker) as w
        where w.version is not null);
end
$$;

-- The position, or the position before all pods if there is none.
create function tube.position_or_start("position" jsonb) returns jsonb
language sql immutable as $$
    select coalesce(nullif("position", '{}'), '{"incremental": ["1:1:", 0], "backfill": ["1:1:", 0]}')
$$;

create function tube.unread_sql(
    known tube.tube, worker integer, kind text, "position" jsonb, upto pg_snapshot, high bigint default null,
    most bigint default null, extra text default 'true'
) returns text
language plpgsql immutable as $$
declare
    done pg_snapshot := "position" -> kind ->> 0;
    done_upto bigint := "position" -> kind ->> 1;
    late xid8[] := array(select pg_snapshot_xip(done));
    is_backfill text := case kind when 'backfill' then 'true' else 'false' end;
    belongs text := tube.belongs('l.shard', known.partitions);
    at_most text := coalesce(most::text, 'all');
    found_late text := '';
begin
    high := coalesce(high, 9223372036854775807);
    -- Add the part about late transactions only if there are any, because planning is the main cost of an idle worker.
    if late <> '{}' then
        found_late := format($query$
            (
                select p.*
                from (
                    select l.ctid as place, l.seq, l.op, l.shard, l.ids, l.payload, l.ts
                    from unnest(%2$L::xid8[]) as late(txid)
                    cross join lateral (
                        select l.ctid, l.* from %1$s as l
                        where l.txid = late.txid and l.seq <= %4$s and (l.op is not distinct from 'B') = %3$s
                          and l.ids <> '{}' and %6$s = %9$s and %8$s
                        order by l.txid, l.seq
                        limit %7$s
                    ) as l
                    where %5$L::pg_snapshot is null or pg_visible_in_snapshot(late.txid, %5$L)
                ) as p
                order by p.seq
            )
            union all
            $query$, known.pods, late, is_backfill, least(done_upto, high), upto, belongs, at_most, extra, worker);
    end if;
    return found_late || format($query$
        (
            select l.ctid as place, l.seq, l.op, l.shard, l.ids, l.payload, l.ts from %1$s as l
            where (l.op = 'B') is %2$s and %6$s = %9$s and l.seq > %3$s and l.seq <= %4$s
              and l.ids <> '{}' and %8$s
              and (%5$L::pg_snapshot is null or pg_visible_in_snapshot(l.txid, %5$L))
            order by l.op = 'B', %6$s, l.seq
        )
        limit %7$s
        $query$, known.pods, is_backfill, done_upto, high, upto, belongs, at_most, extra, worker);
end
$$;
comment on function tube.unread_sql is
    'The query of the first most pods of a kind, incremental or backfill, in the order of seq. It returns pods that a position '
    'has not done, that upto sees, and whose seq is at most high. A null most or high is no limit. With a null upto, it returns '
    'all pods that the query itself sees, also those of its own transaction. Its cost does not depend on the backlog, on deleted '
    'pods or on other workers.';

create function tube.first_unread(
    known tube.tube, worker integer, kind text, "position" jsonb, upto pg_snapshot default pg_current_snapshot(),
    high bigint default null, extra text default 'true'
) returns bigint
language plpgsql volatile
set jit = off
set enable_sort = off
set enable_seqscan = off
set enable_bitmapscan = off
set max_parallel_workers_per_gather = 0
as $$
declare
    first_seq bigint;
begin
    execute 'select u.seq from (' || tube.unread_sql(known, worker, kind, "position", upto, high, 1, extra) || ') as u'
    into first_seq;
    return first_seq;
end
$$;
comment on function tube.first_unread is
    'The seq of the first pod that the query of tube.unread_sql() returns; null if there is none.';

-- Whether a worker has unread pods. A claim asks first, so that a claim of nothing writes nothing.
create function tube.has_unread(known tube.tube, worker integer) returns boolean
language plpgsql volatile as $$
declare
    at jsonb := tube.position_or_start(tube.position(known.name, worker));
begin
    return tube.first_unread(known, worker, 'incremental', at) is not null
        or tube.first_unread(known, worker, 'backfill', at) is not null;
end
$$;

-- The SQL condition of the pods that are held back, or of the others.
create function tube.held_sql(held_back jsonb, held boolean) returns text
language plpgsql immutable as $$
begin
    return (
        select format('%s (%s)', case when not held then 'not' else '' end, coalesce(
            string_agg(format('l.shard = %s and l.seq > %s', (m ->> 0)::integer, (m ->> 1)::bigint), ' or '), 'false'))
        from jsonb_array_elements(held_back) as m);
end
$$;

-- The query of the remaining pods of a batch.
create function tube.pods_sql(known tube.tube, worker integer, choice jsonb) returns text
language sql immutable as $$
    select string_agg('(' || tube.unread_sql(
        known, worker, k.kind, choice -> 'after', (choice ->> 'upto')::pg_snapshot, (choice ->> k.kind)::bigint,
        (choice ->> 'pods')::bigint, tube.held_sql(choice -> 'held_back', false)) || ')', ' union all ')
    from (values ('incremental'), ('backfill')) as k(kind)
    where choice ->> k.kind is not null
$$;

-- The remaining pods of a batch. like_ids is an array of the type of the tube's ids: bigint or text.
create function tube.pods_of(tube text, worker integer, choice jsonb, like_ids anyarray)
returns table (seq bigint, op character(1), shard integer, ids anyarray, payload jsonb, ts timestamptz)
language plpgsql volatile
set jit = off
set enable_sort = off
set enable_seqscan = off
set enable_bitmapscan = off
set max_parallel_workers_per_gather = 0
as $$
begin
    return query execute 'select u.seq, u.op, u.shard, u.ids, u.payload, u.ts from ('
        || tube.pods_sql(tube.named(tube), worker, choice) || ') as u';
end
$$;

-- The seqs of the remaining pods of a batch.
create function tube.seqs_of(tube text, worker integer, choice jsonb) returns setof bigint
language plpgsql volatile
set jit = off
set enable_sort = off
set enable_seqscan = off
set enable_bitmapscan = off
set max_parallel_workers_per_gather = 0
as $$
begin
    return query execute 'select u.seq from (' || tube.pods_sql(tube.named(tube), worker, choice) || ') as u';
end
$$;
