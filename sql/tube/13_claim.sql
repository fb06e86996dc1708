-- Which pods are a worker's next batch.

create function tube.check_worker_number(workers integer, worker integer) returns void
language plpgsql immutable
set search_path = pg_catalog, tube, pg_temp
as $$
begin
    if coalesce(workers not between 1 and 999 or worker not between 0 and workers - 1, true) then
        perform tube.refuse(format('there is no worker %s of %s', worker, workers), 'there are 1 to 999, numbered from 0');
    end if;
end
$$;
comment on function tube.check_worker_number(integer, integer) is 'Refuse a worker that cannot be.';

create function tube.check_still_shared_by(known tube.tube, workers integer, worker integer) returns void
language plpgsql stable
set search_path = pg_catalog, tube, pg_temp
as $$
begin
    if workers is distinct from known.partitions then
        raise exception using errcode = 'PC006',
            message = format('tube %I is shared by %s workers now, and this is one of %s', known.name, known.partitions, workers),
            hint = format('make the feeds again: TubeFeed(%L, worker, workers=%s)', known.name, known.partitions);
    end if;
    perform tube.check_worker_number(workers, worker);
end
$$;
comment on function tube.check_still_shared_by(tube.tube, integer, integer) is 'Refuse a worker that the tube does not have.';

create function tube.register(tube text, workers integer, worker integer) returns void
language plpgsql
set search_path = pg_catalog, tube, pg_temp
as $$
begin
    perform tube.check_still_shared_by(tube.named(tube), workers, worker);
    if tube.worker_now(tube, worker) is null then
        insert into tube.worker (tube, worker) values (register.tube, register.worker) on conflict do nothing;
    end if;
end
$$;
comment on function tube.register(text, integer, integer) is 'Make a worker''s position, at zero, if it is not there yet.';

create function tube.is_left(known tube.tube, move tube.moved) returns boolean
language plpgsql volatile
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    old_worker integer := tube.worker_of(move.from_shard, known.partitions);
    at jsonb := tube.position_or_start(tube.position(known.name, old_worker));
    of_shard text := format('l.shard = %s', move.from_shard);
begin
    return tube.first_unread(known, old_worker, 'incremental', at, high => move.upto, extra => of_shard) is not null
        or tube.first_unread(known, old_worker, 'backfill', at, high => move.upto, extra => of_shard) is not null;
end
$$;
comment on function tube.is_left(tube.tube, tube.moved) is
    'Whether pods are left of the shard that a table moved from. While a table moves it may step over the backlog before them.';

create function tube.held_back(known tube.tube, worker integer) returns jsonb
language plpgsql volatile
set search_path = pg_catalog, tube, pg_temp
as $$
begin
    if not exists (select from tube.moved as m where m.tube = known.name) then
        return '[]';
    end if;
    return (
        select coalesce(jsonb_agg(jsonb_build_array(m.to_shard, m.upto)), '[]')
        from tube.moved as m
        where m.tube = known.name
          and tube.worker_of(m.to_shard, known.partitions) = worker
          and tube.worker_of(m.from_shard, known.partitions) <> worker
          and tube.is_left(known, m));
end
$$;
comment on function tube.held_back(tube.tube, integer) is
    'Which shards of a worker wait from which seq on, as [[shard, seq], ...]: a table came to them from another worker, and '
    'pods of its old shard are left.';

create function tube.held_sql(held_back jsonb, held boolean) returns text
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
begin
    return (
        select format('%s (%s)', case when not held then 'not' else '' end, coalesce(
            string_agg(format('l.shard = %s and l.seq > %s', (m ->> 0)::integer, (m ->> 1)::bigint), ' or '), 'false'))
        from jsonb_array_elements(held_back) as m);
end
$$;
comment on function tube.held_sql(jsonb, boolean) is 'The condition of the pods that are held back, or of the others.';

create function tube.choose(known tube.tube, worker integer, "position" jsonb, max_changes integer) returns jsonb
language plpgsql volatile
set search_path = pg_catalog, tube, pg_temp
set jit = off
set enable_sort = off
set enable_seqscan = off
set enable_bitmapscan = off
set max_parallel_workers_per_gather = 0
as $$
declare
    -- In this order: see tube.snapshot_before.
    horizon bigint := (select s.last_value from tube.seq as s);
    listed pg_snapshot := tube.snapshot_before(pg_current_xact_id());
    upto pg_snapshot := coalesce(listed, pg_current_snapshot());
    held jsonb := tube.held_back(known, worker);
    chosen jsonb := jsonb_build_object(
        'upto', upto, 'held_back', held, 'after', "position", 'moves_on', held = '[]' and listed is not null);
    pods bigint := 0;
    ids bigint := 0;
    oldest timestamptz;
    kind text;
    pod record;
    is_full boolean := false;
begin
    foreach kind in array array['incremental', 'backfill'] loop
        for pod in execute 'select seq, cardinality(ids) as size, ts from (' || tube.unread_sql(
            known, worker, kind, "position", upto, horizon, max_changes, tube.held_sql(held, false)
        ) || ') as u' loop
            is_full := ids > 0 and ids + pod.size > max_changes;
            exit when is_full;
            pods := pods + 1;
            ids := ids + pod.size;
            oldest := least(oldest, pod.ts);
            chosen := jsonb_set(chosen, array[kind], to_jsonb(pod.seq));
        end loop;
        exit when is_full or ids >= max_changes;
    end loop;
    return chosen || jsonb_build_object('pods', pods, 'oldest', oldest);
end
$$;
comment on function tube.choose(tube.tube, integer, jsonb, integer) is
    'The next batch of a worker: whole pods, incremental ones first, of at most max_changes ids in all, or one pod that has '
    'more; {upto, held_back, after, moves_on, pods, incremental, backfill, oldest}, the two kinds as the seq up to which it '
    'goes, moves_on as whether the worker''s position may follow.';

create function tube.pods_sql(known tube.tube, worker integer, choice jsonb) returns text
language sql immutable
set search_path = pg_catalog, tube, pg_temp
as $$
    select string_agg('(' || tube.unread_sql(
        known, worker, k.kind, choice -> 'after', (choice ->> 'upto')::pg_snapshot, (choice ->> k.kind)::bigint,
        (choice ->> 'pods')::bigint, tube.held_sql(choice -> 'held_back', false)) || ')', ' union all ')
    from (values ('incremental'), ('backfill')) as k(kind)
    where choice ->> k.kind is not null
$$;
comment on function tube.pods_sql(tube.tube, integer, jsonb) is 'The query of the pods of a batch, as far as they are there.';

create function tube.pods_of(tube text, worker integer, choice jsonb)
returns table (seq bigint, op character(1), shard integer, ids bigint[], payload jsonb, ts timestamptz)
language plpgsql volatile
set search_path = pg_catalog, tube, pg_temp
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
comment on function tube.pods_of(text, integer, jsonb) is 'The pods of a batch, as far as they are there.';

create function tube.place(shard integer, id bigint) returns integer[]
language sql immutable
as $$
    select array[shard, pg_catalog.hashint8(id) & 63]
$$;
comment on function tube.place(integer, bigint) is 'Where in a batch an id is: its shard, and one of 64 parts of it.';

create function tube.changes(tube text, worker integer, choice jsonb, after integer[], upto integer[])
returns table (id bigint, shard integer, seq bigint, backfill boolean, payload jsonb, touched_at timestamptz)
language sql volatile
set search_path = pg_catalog, tube, pg_temp
as $$
    select i.id, p.shard, max(p.seq), bool_and(p.op = 'B'),
           (array_agg(p.payload order by p.seq desc) filter (where p.payload is not null))[1], min(p.ts)
    from tube.pods_of(tube, worker, choice) as p
    cross join lateral unnest(p.ids) as i(id)
    where tube.place(p.shard, i.id) > after and tube.place(p.shard, i.id) <= upto
    group by p.shard, i.id
    order by bool_and(p.op = 'B'), min(p.seq), i.id
$$;
comment on function tube.changes(text, integer, jsonb, integer[], integer[]) is
    'The ids of a batch, each once a shard, incremental ones first and in the order in which they were first touched; from '
    'behind one place up to another.';

create function tube.slices(tube text, worker integer, choice jsonb) returns jsonb
language sql volatile
set search_path = pg_catalog, tube, pg_temp
as $$
    with counted as (
        select tube.place(p.shard, i.id) as place, count(distinct i.id) as n
        from tube.pods_of(tube, worker, choice) as p cross join lateral unnest(p.ids) as i(id)
        group by 1
    ), summed as (
        select c.place, c.n, sum(c.n) over (partition by c.place[1] order by c.place) - c.n as before from counted as c
    ), sliced as (
        select s.place[1] as shard, min(s.place[2]) - 1 as after, max(s.place[2]) as upto, sum(s.n) as n
        from summed as s
        group by s.place[1], div(s.before, 20000)
    )
    select jsonb_agg(
        jsonb_build_object('count', s.n, 'after', array[s.shard, s.after], 'upto', array[s.shard, s.upto])
        order by s.shard, s.upto)
    from sliced as s
$$;
comment on function tube.slices(text, integer, jsonb) is
    'The slices of a batch, each of one shard and, where parts are that small, of about 20,000 ids.';
