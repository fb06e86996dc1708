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
        select count(*) filter (where t.fits) as pods, sum(t.size) filter (where t.fits) as ids,
               max(t.seq) filter (where t.fits) as seq, min(t.ts) filter (where t.fits) as oldest, bool_and(t.fits) as all_fit
        into taken
        from (
            select u.seq, u.ts, cardinality(u.ids) as size,
                   sum(cardinality(u.ids)) over w <= room or row_number() over w = 1 and room = max_changes as fits
            from tube.unread(known, worker, kind = 'backfill', "position" -> kind, upto, horizon, held, max_changes) as u
            window w as (order by u.seq)
        ) as t;
        chosen := chosen || jsonb_build_object(
            kind, taken.seq, 'pods', (chosen ->> 'pods')::bigint + taken.pods,
            'oldest', least((chosen ->> 'oldest')::timestamptz, taken.oldest));
        room := room - coalesce(taken.ids, 0);
        exit when room <= 0 or not taken.all_fit;
    end loop;
    return chosen;
end
$$;
comment on function tube.choose is
    'The next batch of a worker: whole pods, incremental ones first, of at most max_changes ids in all, or one pod that has '
    'more; {upto, held_back, after, pods, incremental, backfill, oldest}, the two kinds as the seq up to which it goes.';

create function tube.pods_of(tube text, worker integer, choice jsonb)
returns table (seq bigint, op character(1), shard integer, ids bigint[], payload jsonb, ts timestamptz)
language sql volatile
set search_path = pg_catalog, tube, pg_temp
as $$
    select u.*
    from (values ('incremental'), ('backfill')) as k(kind)
    cross join lateral tube.unread(
        tube.named(tube), worker, k.kind = 'backfill', choice -> 'after' -> k.kind, (choice ->> 'upto')::pg_snapshot,
        (choice ->> k.kind)::bigint, choice -> 'held_back', (choice ->> 'pods')::bigint) as u
    where choice ->> k.kind is not null
$$;
comment on function tube.pods_of(text, integer, jsonb) is 'The pods of a batch, as far as they are there.';

create function tube.bucket(id bigint, buckets integer) returns integer
language sql immutable
as $$
    select (pg_catalog.hashint8(id) & 2147483647) % buckets
$$;
comment on function tube.bucket(bigint, integer) is 'Which part of a batch an id is in.';

create function tube.changes(tube text, worker integer, choice jsonb, above integer, upto integer)
returns table (id bigint, shard integer, seq bigint, backfill boolean, payload jsonb, touched_at timestamptz)
language sql volatile
set search_path = pg_catalog, tube, pg_temp
as $$
    select i.id, p.shard, max(p.seq), bool_and(p.op = 'B'),
           (array_agg(p.payload order by p.seq desc) filter (where p.payload is not null))[1], min(p.ts)
    from tube.pods_of(tube, worker, choice) as p
    cross join lateral unnest(p.ids) as i(id)
    where (choice ->> 'buckets')::integer = 1
       or tube.bucket(i.id, (choice ->> 'buckets')::integer) between above + 1 and upto
    group by p.shard, i.id
    order by bool_and(p.op = 'B'), min(p.seq), i.id
$$;
comment on function tube.changes(text, integer, jsonb, integer, integer) is
    'The ids of a batch, each once a shard, incremental ones first and in the order in which they were first touched; of the '
    'parts above one number up to another.';

create function tube.claim(tube text, workers integer, worker integer, "position" jsonb, max_changes integer) returns jsonb
language plpgsql volatile
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    known tube.tube := tube.named(tube);
    at tube.worker;
    choice jsonb;
    slices jsonb;
    total bigint;
    made jsonb;
begin
    perform tube.check_workers(known, workers, worker);
    if max_changes < 1 then
        raise invalid_parameter_value using message = 'a batch has at least 1 change';
    end if;
    if pg_current_xact_id_if_assigned() is not null then
        raise exception using errcode = 'PC007', message = 'this transaction has already written something',
            hint = 'claim in a transaction of its own';
    end if;
    select w.* into at from tube.worker as w where w.tube = claim.tube and w.worker = claim.worker;
    if at.version is distinct from ("position" ->> 'version')::bigint then
        raise exception using errcode = 'PC006',
            message = format('worker %s of tube %I is not where its position says', worker, tube),
            hint = 'the number of workers changed meanwhile: claim again';
    end if;
    perform tube.mend_after_restore(known);
    if at.batch is not null
       and (select count(*) from tube.pods_of(tube, worker, at.batch -> 'bounds')) = (at.batch -> 'bounds' ->> 'pods')::bigint
    then
        update tube.worker as w set attempt = w.attempt + 1, claimed_at = clock_timestamp()
        where w.tube = claim.tube and w.worker = claim.worker
        returning w.attempt into at.attempt;
        return at.batch || jsonb_build_object('attempt', at.attempt);
    end if;

    choice := tube.choose(known, worker, tube.position(tube, worker), max_changes);
    if (choice ->> 'pods')::bigint = 0 then
        return null;
    end if;
    choice := choice || jsonb_build_object('buckets', case when max_changes < 20000 then 1 else 64 end);
    select jsonb_agg(jsonb_build_object('count', b.n, 'after', b.bucket - 1, 'upto', b.bucket) order by b.bucket), sum(b.n)
    into slices, total
    from (
        select tube.bucket(d.id, (choice ->> 'buckets')::integer) as bucket, count(*) as n
        from (
            select distinct p.shard, i.id
            from tube.pods_of(tube, worker, choice) as p cross join lateral unnest(p.ids) as i(id)
        ) as d
        group by 1
    ) as b;
    made := jsonb_build_object(
        'id', md5(concat_ws('|', tube, workers, worker, at.version, choice - 'upto'))::uuid,
        'version', at.version + 1, 'attempt', 1, 'count', total, 'slices', slices,
        'bounds', choice || jsonb_build_object('from_version', at.version),
        'lsn', pg_current_wal_insert_lsn(), 'oldest', choice -> 'oldest');
    update tube.worker as w set batch = made, attempt = 1, claimed_at = clock_timestamp()
    where w.tube = claim.tube and w.worker = claim.worker;
    return made;
end
$$;
comment on function tube.claim(text, integer, integer, jsonb, integer) is
    'Record and return the next batch of a worker, or the one that it claimed and never acked, with the attempt counted; null '
    'when nothing is ready. Call it in a transaction of its own, holding the worker''s lock.';

create function tube.ack(tube text, worker integer, batch jsonb) returns bigint
language plpgsql volatile
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    known tube.tube := tube.named(tube);
    bounds jsonb := ack.batch -> 'bounds';
    is_whole boolean := bounds -> 'held_back' = '[]';
    seqs bigint[];
begin
    update tube.worker as w set
        version = (ack.batch ->> 'version')::bigint,
        snapshot = case when is_whole and bounds ->> 'incremental' is not null
                        then (bounds ->> 'upto')::pg_snapshot else w.snapshot end,
        done = case when is_whole then coalesce((bounds ->> 'incremental')::bigint, w.done) else w.done end,
        backfill_snapshot = case when is_whole and bounds ->> 'backfill' is not null
                                 then (bounds ->> 'upto')::pg_snapshot else w.backfill_snapshot end,
        backfill_done = case when is_whole then coalesce((bounds ->> 'backfill')::bigint, w.backfill_done)
                             else w.backfill_done end,
        batch = null, attempt = 0, updated_at = now()
    where w.tube = ack.tube and w.worker = ack.worker and w.version = (bounds ->> 'from_version')::bigint;
    if not found then
        raise exception using errcode = 'PC006',
            message = format('worker %s of tube %I is not where batch %s began', worker, tube, batch ->> 'id'),
            hint = 'somebody moved it; roll back and claim again';
    end if;
    seqs := array(select p.seq from tube.pods_of(tube, worker, bounds) as p);
    if cardinality(seqs) <> (bounds ->> 'pods')::bigint
       or tube.tube_pods_delete(tube, known.partitions, worker, seqs) <> cardinality(seqs)
    then
        raise exception using errcode = 'PC006',
            message = format('pods of batch %s are gone', batch ->> 'id'),
            hint = 'somebody deleted them meanwhile; roll back and claim again';
    end if;
    return (batch ->> 'version')::bigint;
end
$$;
comment on function tube.ack(text, integer, jsonb) is
    'Delete the pods of a batch whose ids are all done, in the transaction that holds the worker''s lock.';

create function tube.mend_after_restore(known tube.tube) returns void
language plpgsql
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    upto xid8 := pg_snapshot_xmax(pg_current_snapshot());
    ahead boolean;
begin
    execute format(
        'select coalesce((select p.txid >= $1 from %s as p order by p.txid desc, p.seq desc limit 1), false)', known.pods)
    into ahead using upto;
    if ahead or exists (
        select from tube.worker as w
        where w.tube = known.name and greatest(pg_snapshot_xmax(w.snapshot), pg_snapshot_xmax(w.backfill_snapshot)) > upto
    ) then
        execute format('update %s set txid = ''3'' where txid >= $1', known.pods) using upto;
        update tube.worker as w set
            snapshot = '1:1:', done = 0, backfill_snapshot = '1:1:', backfill_done = 0, batch = null
        where w.tube = known.name;
    end if;
end
$$;
comment on function tube.mend_after_restore(tube.tube) is
    'In a restored dump transaction ids come from another cluster: those that this one has not reached are forgotten, and '
    'every worker looks at all its pods again.';
