-- Reading a worker's pods: incremental ones before those of a backfill, each in the order of seq.
--
-- A lower seq may commit later than a higher one that was read. So a worker's position is a snapshot and a seq for each of the
-- two kinds: to be read are the pods above the seq, and those below it of transactions that the snapshot found open.
--
-- Pods are read in the order of an index, whatever the statistics say: a limit without a sort relies on it, and so does a cost
-- that knows no backlog. The settings of these functions leave PostgreSQL no other plan. One index is on (op = 'B'), worker
-- and seq; where pods are to be found by their transaction instead, the kind is asked for in words that this index does not
-- answer: (op is not distinct from 'B').

create function tube.full_xid(xid xid) returns xid8
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select (near.n + ((xid::text::bigint - near.n) & 4294967295 | case
        when (xid::text::bigint - near.n) & 2147483648 > 0 then -4294967296 else 0 end))::text::xid8
    from (select pg_snapshot_xmax(pg_current_snapshot())::text::bigint) as near(n)
$$;
comment on function tube.full_xid(xid) is 'A transaction id near today''s, with its epoch.';

create function tube.snapshot_before(fresh xid8) returns pg_snapshot
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    -- A transaction at work may have an id at or above a snapshot's xmax, without being listed in it.
    select format('%s:%s:%s', coalesce(min(o.xid), s.upper), s.upper, string_agg(o.xid::text, ',' order by o.xid))::pg_snapshot
    from (
        select pg_current_snapshot() as now,
               greatest(pg_snapshot_xmax(pg_current_snapshot())::text::bigint, fresh::text::bigint) as upper
    ) as s
    left join lateral (
        select x::text::bigint from pg_snapshot_xip(s.now) as x
        union
        select g from generate_series(pg_snapshot_xmax(s.now)::text::bigint, s.upper - 1) as g
        union
        select pg_current_xact_id_if_assigned()::text::bigint
    ) as o(xid) on o.xid < s.upper
    where s.upper - pg_snapshot_xmax(pg_current_snapshot())::text::bigint <= 10000
    group by s.upper
$$;
comment on function tube.snapshot_before(xid8) is
    'The current snapshot, in which every open transaction with an id below fresh is listed as open. Where fresh was assigned '
    'after the horizon (the last seq drawn) was read, a pod that the snapshot does not see, and whose transaction it does not '
    'list, has a seq above the horizon. Null where thousands of subtransactions would be listed too.';

create function tube.worker_now(tube text, worker integer) returns tube.worker
language plpgsql stable
set search_path = pg_catalog, tube, pg_temp
as $$
begin
    return (
        select w from tube.worker as w
        where w.tube = worker_now.tube and w.worker = worker_now.worker
        order by w.version desc limit 1);
end
$$;
comment on function tube.worker_now(text, integer) is 'The newest row of a worker; null for one that has not begun.';

create function tube.position(tube text, worker integer) returns jsonb
language plpgsql stable
set search_path = pg_catalog, tube, pg_temp
as $$
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
comment on function tube.position(text, integer) is 'How far a worker has come; null for one that has not begun.';

create function tube.position_or_start("position" jsonb) returns jsonb
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
    select coalesce(nullif("position", '{}'), '{"incremental": ["1:1:", 0], "backfill": ["1:1:", 0]}')
$$;
comment on function tube.position_or_start(jsonb) is 'A position, and that of a worker that has not begun where there is none.';

create function tube.unread_sql(
    known tube.tube, worker integer, kind text, "position" jsonb, upto pg_snapshot, high bigint default null,
    most bigint default null, extra text default 'true'
) returns text
language plpgsql immutable
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    done pg_snapshot := "position" -> kind ->> 0;
    done_upto bigint := "position" -> kind ->> 1;
begin
    high := coalesce(high, 9223372036854775807);
    return format($query$
        (
            select p.*
            from (
                select l.ctid as place, l.seq, l.op, l.shard, l.ids, l.payload, l.ts
                from unnest(%2$L::xid8[]) as late(txid)
                cross join lateral (
                    select l.ctid, l.* from %1$s as l
                    where l.txid = late.txid and l.seq <= %10$s and (l.op is not distinct from 'B') = %3$s
                      and l.ids <> '{}' and %7$s = %11$s and %9$s
                    order by l.txid, l.seq
                    limit %8$s
                ) as l
                where %5$L::pg_snapshot is null or pg_visible_in_snapshot(late.txid, %5$L)
            ) as p
            order by p.seq
        )
        union all
        (
            select l.ctid as place, l.seq, l.op, l.shard, l.ids, l.payload, l.ts from %1$s as l
            where (l.op = 'B') is %3$s and %7$s = %11$s and l.seq > %4$s and l.seq <= %6$s
              and l.ids <> '{}' and %9$s
              and (%5$L::pg_snapshot is null or pg_visible_in_snapshot(l.txid, %5$L))
            order by l.op = 'B', %7$s, l.seq
        )
        limit %8$s
        $query$,
        known.pods, array(select pg_snapshot_xip(done)), case kind when 'backfill' then 'true' else 'false' end, done_upto, upto,
        high, tube.belongs('l.shard', known.partitions), coalesce(most::text, 'all'), extra, least(done_upto, high), worker);
end
$$;
comment on function tube.unread_sql is
    'The query of the first most pods of one kind, incremental or backfill, that a position has not done, upto sees, whose seq '
    'is at most high, in the order of seq; null for most or high sets no bound, and for upto lets pass what the query itself '
    'sees, the transaction''s own too. Its cost depends on neither the backlog nor what '
    'was deleted nor other workers.';

create function tube.first_unread(
    known tube.tube, worker integer, kind text, "position" jsonb, upto pg_snapshot default pg_current_snapshot(),
    high bigint default null, extra text default 'true'
) returns bigint
language plpgsql volatile
set search_path = pg_catalog, tube, pg_temp
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
comment on function tube.first_unread is 'The seq of the first pod of tube.unread_sql(); null where there is none.';

create function tube.has_unread(known tube.tube, worker integer) returns boolean
language plpgsql volatile
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    at jsonb := tube.position_or_start(tube.position(known.name, worker));
begin
    return tube.first_unread(known, worker, 'incremental', at) is not null
        or tube.first_unread(known, worker, 'backfill', at) is not null;
end
$$;
comment on function tube.has_unread(tube.tube, integer) is
    'Whether there is a pod for a worker: asked first, so that a claim of nothing writes nothing.';
