-- What people ask and do: status, mending, faults.

do $$
begin
    perform pgchange.register('tube', 'tube');
end
$$;

create function tube.status(upto integer default 1000) returns setof pgchange.consumer_status
language plpgsql volatile
set search_path = pg_catalog, tube, pg_temp
set jit = off
as $$
declare
    known tube.tube;
begin
    for known in select t.* from tube.readable_tubes() as t loop
        return query
            select 'tube', tube.name_of(known.name, k.worker),
                   jsonb_build_object('tube', known.name, 'worker', k.worker, 'workers', known.partitions), coalesce(w.version, 0),
                   coalesce((l.lag ->> 'ready')::bigint, 0), coalesce((l.lag ->> 'ready_exact')::boolean, true),
                   (l.lag ->> 'ready_age')::double precision, coalesce((l.lag ->> 'waiting')::bigint, 0), f.faults,
                   tube.locked(known.name, k.worker), (w.batch ->> 'id')::uuid, nullif(w.attempt, 0),
                   case when w.batch is not null then w.error end, case when w.batch is not null then w.claimed_at end, w.updated_at,
                   null::text, null::text
            from generate_series(0, known.partitions - 1) as k(worker)
            left join lateral tube.worker_now(known.name, k.worker) as w on true
            cross join tube.count_faults(known.name) as f(faults)
            left join tube.workers_with_pods(known) as p(worker) on p.worker = k.worker
            cross join lateral (
                select case when p.worker is not null then tube.lag(
                    known.name, known.partitions, k.worker, tube.position(known.name, k.worker), upto) end
            ) as l(lag)
            order by k.worker;
    end loop;
end
$$;
comment on function tube.status(integer) is
    'Every worker of every tube that the caller may read, as pgchange.status() shows it; faults are those of the tube''s capture. '
    'tube.attachments() tells of the tables.';

create function tube.attachments()
returns table (
    tube text, tbl regclass, shard integer, id_column name, untriggered regclass[], disabled regclass[], stale boolean,
    faults bigint, predicate_waits boolean, lost text, missed bigint
)
language sql stable
set search_path = pg_catalog, tube, pg_temp
set jit = off
as $$
    select a.tube, a.tbl, a.shard, a.id_column, tube.uncaptured(a),
           c.disabled,
           (i.key).attname is distinct from a.id_column or (i.key).attnum <> a.id_number
           or exists (
               select from pg_proc as p
               where p.oid = any (c.functions)
                 and (p.prosrc <> tube.capture_body(a, split_part(p.proname, '_', 3)) or p.proowner <> r.relowner)
           )
           or a.predicate is not null and not exists (
               select from pg_proc as p where p.proname = tube.function_name(a.token, 'judge') and p.proowner = r.relowner),
           (select count(*) from (select from tube.fault as f where f.tube = a.tube and f.kind = 'capture' and f.tbl in (
               select d.relid from tube.descendants(a.tbl) as d(relid)) limit 1000) as bounded),
           a.predicate is distinct from t.predicate,
           coalesce(
               (select format('%s, %I, may not write the pods of tube %I: %s; %s; then backfill it',
                              case when p.proowner = r.relowner then 'its owner' else 'a former owner' end, w.name, t.name, l.lost,
                              tube.rights_hint(w.name, t.pods))
                from pg_proc as p
                cross join lateral pg_get_userbyid(p.proowner) as w(name)
                cross join lateral tube.what_is_lost(p.proowner, t.pods) as l(lost)
                where p.oid = any (c.functions) and l.lost is not null
                limit 1),
               (select format('what is written through %1$s, a parent of it or of its child, is not captured; detach it, '
                              'attach %1$s to tube %2$I, and backfill', p.relid, t.name)
                from tube.outer_parents(a.tbl) as p(relid)
                where (tube.attachment_of(p.relid, a.tube)).tube is null
                order by p.relid limit 1)),
           (select count(*) from tube.fault as f where f.tube = a.tube and f.kind = 'missed' and f.tbl = a.tbl)
    from tube.attachment as a
    join pg_class as r on r.oid = a.tbl
    cross join lateral (select tube.id_attribute(a)) as i(key)
    cross join lateral (
        select coalesce(array_agg(distinct f.relid) filter (where not f.enabled), '{}') as disabled,
               array_agg(distinct f.function) as functions
        from tube.captures(a.tbl, a.tube) as f
    ) as c
    join tube.tube as t on t.name = a.tube
    where tube.are_pods(t.pods, t.name) and not tube.is_gone(a)
$$;
comment on function tube.attachments() is
    'Every attached table, with what is not captured as it should be: partitions that lack a trigger, and a capture that no '
    'longer fits because a column, the pods or the table''s owner changed: tube.refresh() mends those; triggers that somebody '
    'disabled, and has to enable; faults of their capture, up to 1000; whether the tube has another predicate than the '
    'table''s owner agreed to by attaching it; and why changes are lost: where the table''s owner may no longer write the pods, '
    'or the table got a parent that is not attached; and with how many partitions rows came that a backfill has to bring.';

create function tube.to_mend() returns table (tube text, tbl regclass, name text)
language sql stable
set search_path = pg_catalog, tube, pg_temp
as $$
    select a.tube, a.tbl, tube.full_name(a.tbl) from tube.attachments() as a join pg_class as c on c.oid = a.tbl
    where pg_has_role(current_user, c.relowner, 'usage') and (a.untriggered <> '{}' or a.stale)
$$;
comment on function tube.to_mend() is
    'The tables that the caller owns and whose capture needs tube.mend(), with their full names.';

create function tube.mend(tube text, tbl regclass) returns void
language plpgsql
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    before tube.attachment := (select a from tube.attachment as a where a.tube = mend.tube and a.tbl = mend.tbl);
begin
    if before.predicate is not null then
        -- A predicate that the former owner agreed to is not the new owner's.
        perform tube.judge_of(before);
    end if;
    perform tube.attach(tube, tbl, shard => null, id_column => null, agreed => false);
end
$$;
comment on function tube.mend(text, regclass) is 'Mend the capture of a table: nothing of how it is attached changes.';

create function tube.missed() returns table (tube text, tbl regclass, told text, call text)
language sql stable
set search_path = pg_catalog, tube, pg_temp
as $$
    select a.tube, a.tbl, format('%s: %s', tube.full_name(a.tbl), f.message), tube.backfill_call(a)
    from tube.fault as f
    join tube.attachment as a on (a.tube, a.tbl) = (f.tube, f.tbl)
    where f.kind = 'missed' and not tube.is_gone(a)
    order by f.id
$$;
comment on function tube.missed() is 'The rows that came with a partition and may be in no pod, and what brings them.';

create function tube.refresh() returns setof text
language plpgsql
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    each_one record;
begin
    for each_one in select m.* from tube.to_mend() as m loop
        begin
            perform tube.mend(each_one.tube, each_one.tbl);
            return next format('%s: its capture for tube %s was mended', each_one.tbl, each_one.tube);
            return query select format('%s; %s', m.told, m.call) from tube.missed() as m where (m.tube, m.tbl) = (each_one.tube, each_one.tbl);
        exception
            when lock_not_available then
                return next format('%s: postponed, it is being written', each_one.tbl);
            when others then
                return next format('%s: its capture for tube %s cannot be mended: %s', each_one.tbl, each_one.tube, sqlerrm);
        end;
    end loop;
end
$$;
comment on function tube.refresh() is
    'Mend the capture of the tables that the caller owns: partitions that came later, a renamed column; a line for each, with '
    'the reason where one cannot be mended.';

create function tube.attached_to(tube text, workers integer, worker integer) returns jsonb
language plpgsql stable
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    known tube.tube := tube.named(tube);
begin
    perform tube.check_worker_number(workers, worker);
    return (
        with tables as (
            select a as attached, a.shard, n.nspname, c.relname, count(*) over (partition by c.relname) as namesakes,
                   min(format('%I.%I', n.nspname, c.relname)) over (
                       partition by c.relname, a.shard
                       rows between unbounded preceding and unbounded following exclude current row) as twin
            from tube.attachment as a
            join pg_class as c on c.oid = a.tbl
            join pg_namespace as n on n.oid = c.relnamespace
            where a.tube = known.name and not tube.is_gone(a)
        ), former as (
            select c.relname, min(d.shard) as lowest, max(d.shard) as highest
            from tube.detached as d join pg_class as c on c.oid = d.tbl
            where d.tube = known.name
            group by c.relname
        )
        select coalesce(jsonb_agg(jsonb_build_object(
            'shard', t.shard, 'schema', t.nspname, 'name', t.relname,
            'id_column', coalesce((tube.id_attribute(t.attached)).attname, (t.attached).id_column),
            'predicate', (t.attached).predicate,
            'shared', t.namesakes > 1 or coalesce(f.lowest <> t.shard or f.highest <> t.shard, false),
            'keeper', (select pg_get_userbyid(p.relowner) from pg_class as p where p.oid = known.pods),
            'twin', t.twin
        ) order by t.shard, t.nspname, t.relname), '[]')
        from tables as t
        left join former as f on f.relname = t.relname
        where tube.worker_of(t.shard, workers) = worker);
end
$$;
comment on function tube.attached_to(text, integer, integer) is
    'The tables in a worker''s shards: of each the shard, its schema and name, today''s name of the column of its ids, the '
    'predicate that it is attached with; shared: whether another table that touches the tube, or did under another shard, has '
    'the same name, so that copies in one schema would be one; the twin that has both name and shard in common with it, or null; '
    'and the keeper, who owns the pods.';

create function tube.positions() returns jsonb
language sql stable
set search_path = pg_catalog, tube, pg_temp
as $$
    select coalesce(jsonb_object_agg(w.tube || '/' || w.worker, w.version), '{}')
    from (select x.tube, x.worker, max(x.version) as version from tube.worker as x group by 1, 2) as w
$$;
comment on function tube.positions() is 'How many batches each worker of each tube has done.';

create function tube.is_backing_off(attempt integer, since timestamptz) returns boolean
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select attempt > 0 and clock_timestamp() < since + least(30 * 2 ^ least(attempt - 1, 9), 300) * interval '1 s'
$$;
comment on function tube.is_backing_off(integer, timestamptz) is
    'Whether what has failed did so a short time ago: half a minute after the first attempt, longer and longer after others, at '
    'most 5 minutes.';

create function tube.lag_of_idle(upto integer) returns jsonb
language plpgsql volatile
set search_path = pg_catalog, tube, pg_temp
as $$
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
            lag := tube.lag(known.name, known.partitions, worker, tube.position(known.name, worker), upto);
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
comment on function tube.lag_of_idle(integer) is
    'What is ready for the workers, of all tubes that the caller may empty, that are not at work and do not rest after their '
    'batch failed, nor, where they have nothing else to do, after their control pods did; it stops counting at upto.';

create function tube.clear_faults(tube text) returns bigint
language sql
set search_path = pg_catalog, tube, pg_temp
as $$
    with gone as (delete from tube.fault as f where f.tube = clear_faults.tube returning 1) select count(*) from gone
$$;
comment on function tube.clear_faults(text) is
    'Forget the faults of a tube, when what caused them is mended; returns how many there were.';
