-- Lock, claim, ack. A claim is recorded before it is worked on, so that a retry is the same batch under the same id; an ack
-- deletes the batch's pods. Each worker has a lock of its own, and all share the tube's, which who changes their number or a
-- table's shard takes alone: so no id is ever in two batches at once.

create function tube.take_lock(tube text, worker integer) returns boolean
language sql volatile
as $$
    select pg_catalog.pg_try_advisory_xact_lock_shared(tube.lock_key(tube))
       and pg_catalog.pg_try_advisory_xact_lock(tube.lock_key(tube, worker))
$$;
comment on function tube.take_lock(text, integer) is 'Take a worker''s lock until the transaction ends, if it is free.';

create function tube.wait_for_lock(tube text, worker integer) returns void
language sql volatile
as $$
    select pg_catalog.pg_advisory_xact_lock_shared(tube.lock_key(tube));
    select pg_catalog.pg_advisory_xact_lock(tube.lock_key(tube, worker));
$$;
comment on function tube.wait_for_lock(text, integer) is
    'Take a worker''s lock until the transaction ends, waiting as long as lock_timeout says.';

create function tube.locked(tube text, worker integer) returns boolean
language sql stable
set search_path = pg_catalog, tube, pg_temp
as $$
    select exists (
        select from pg_locks as l
        where l.locktype = 'advisory' and l.objsubid = 1 and l.granted
          and l.database = (select d.oid from pg_database as d where d.datname = current_database())
          and (l.classid::bigint << 32 | l.objid::bigint) = tube.lock_key(tube, worker))
$$;
comment on function tube.locked(text, integer) is 'Whether a worker is at work.';

create function tube.register(tube text, workers integer, worker integer) returns void
language plpgsql
set search_path = pg_catalog, tube, pg_temp
as $$
begin
    perform tube.check_workers(tube.named(tube), workers, worker);
    insert into tube.worker (tube, worker) values (register.tube, register.worker) on conflict do nothing;
end
$$;
comment on function tube.register(text, integer, integer) is 'Make a worker''s position, at zero, if it is not there yet.';

create function tube.check_workers(known tube.tube, workers integer, worker integer) returns void
language plpgsql stable
set search_path = pg_catalog, tube, pg_temp
as $$
begin
    if workers <> known.partitions then
        raise exception using errcode = 'PC006',
            message = format('tube %I is shared by %s workers now, and this is one of %s', known.name, known.partitions, workers),
            hint = format('make the feeds anew: TubeFeed(%L, worker, workers=%s)', known.name, known.partitions);
    end if;
    if worker not between 0 and workers - 1 then
        perform tube.refuse(format('there is no worker %s of %s', worker, workers), 'workers are numbered from 0');
    end if;
end
$$;
comment on function tube.check_workers(tube.tube, integer, integer) is 'Refuse a worker that the tube does not have.';

create function tube.position(tube text, worker integer) returns jsonb
language sql stable
set search_path = pg_catalog, tube, pg_temp
as $$
    select jsonb_build_object(
        'schema', (select max(i.version) from tube.installed as i),
        'version', w.version,
        'incremental', jsonb_build_array(w.snapshot, w.done),
        'backfill', jsonb_build_array(w.backfill_snapshot, w.backfill_done))
    from tube.worker as w
    where w.tube = "position".tube and w.worker = "position".worker
$$;
comment on function tube.position(text, integer) is 'How far a worker has come; null for one that has not begun.';

create function tube.held_back(known tube.tube) returns jsonb
language plpgsql stable
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    each_move tube.moved;
    is_left boolean;
    found_moves jsonb := '[]';
begin
    for each_move in select m.* from tube.moved as m where m.tube = known.name loop
        execute format(
            'select exists (select from %s as p where p.shard = $1 and p.seq <= $2 and p.ids <> ''{}'')', known.pods)
        into is_left using each_move.from_shard, each_move.upto;
        if is_left then
            found_moves := found_moves || jsonb_build_array(jsonb_build_array(each_move.to_shard, each_move.upto));
        end if;
    end loop;
    return found_moves;
end
$$;
comment on function tube.held_back(tube.tube) is
    'Which shards wait from which seq on, as [[shard, seq], ...]: a table came to them, and pods of its old shard are left.';

create function tube.unread(
    known tube.tube, worker integer, backfill boolean, "position" jsonb, upto pg_snapshot, high bigint, held_back jsonb, most bigint
) returns table (seq bigint, op character(1), shard integer, ids bigint[], payload jsonb, ts timestamptz)
language plpgsql volatile
set search_path = pg_catalog, tube, pg_temp
set plan_cache_mode = force_generic_plan
set jit = off
set enable_sort = off
set enable_seqscan = off
set enable_bitmapscan = off
set max_parallel_workers_per_gather = 0
as $$
begin
    return query execute tube.unread_sql(
        known, worker, backfill, ("position" ->> 0)::pg_snapshot, ("position" ->> 1)::bigint, upto, high, most,
        coalesce((
            select string_agg(format('not (l.shard = %s and l.seq > %s)', m ->> 0, m ->> 1), ' and ')
            from jsonb_array_elements(held_back) as m), 'true'));
end
$$;
comment on function tube.unread is
    'The first most pods of one kind that a position [snapshot, seq] has not done, upto sees, and whose seq is at most high.';

create function tube.choose(known tube.tube, worker integer, "position" jsonb, max_changes integer) returns jsonb
language plpgsql volatile
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    -- In this order: a pod that the snapshot does not know then has a seq above the horizon.
    horizon bigint := (select s.last_value from tube.seq as s);
    upto pg_snapshot := pg_current_snapshot();
    held jsonb := tube.held_back(known);
    room bigint := max_changes;
    taken record;
    chosen jsonb := jsonb_build_object('upto', upto, 'held_back', held, 'after', "position", 'pods', 0);
    kind text;
begin
    foreach kind in array array['incremental', 'backfill'] loop
        select count(*) as pods, sum(t.size) as ids, max(t.seq) as seq, min(t.ts) as oldest
        into taken
        from (
            select u.seq, u.ts, cardinality(u.ids) as size, sum(cardinality(u.ids)) over (order by u.seq) as total
            from tube.unread(known, worker, kind = 'backfill', "position" -> kind, upto, horizon, held, max_changes) as u
        ) as t
        where t.total <= room or (t.total = t.size and room = max_changes);
        chosen := chosen || jsonb_build_object(
            kind, taken.seq, 'pods', (chosen ->> 'pods')::bigint + taken.pods,
            'oldest', least((chosen ->> 'oldest')::timestamptz, taken.oldest));
        room := room - coalesce(taken.ids, 0);
        exit when room <= 0;
    end loop;
    return chosen;
end
$$;
