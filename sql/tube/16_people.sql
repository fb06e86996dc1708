-- What people ask and do: status, skip.

create function tube.status(upto integer default 1000)
returns table (
    tube text, worker integer, workers integer, ready bigint, ready_exact boolean, oldest_seconds double precision,
    waiting bigint, faults bigint, at_work boolean, batch_id uuid, attempt integer, claimed_at timestamptz,
    updated_at timestamptz
)
language plpgsql volatile
set search_path = pg_catalog, tube, pg_temp
set jit = off
as $$
declare
    known tube.tube;
begin
    for known in select t.* from tube.tube as t where tube.schema_of(t.pods) is not null order by t.name loop
        return query
            select known.name, k.worker, known.partitions, (l.lag ->> 'ready')::bigint, (l.lag ->> 'ready_exact')::boolean,
                   (l.lag ->> 'ready_age')::double precision, (l.lag ->> 'waiting')::bigint, (l.lag ->> 'faults')::bigint,
                   tube.locked(known.name, k.worker), (w.batch ->> 'id')::uuid, nullif(w.attempt, 0),
                   case when w.batch is not null then w.claimed_at end, w.updated_at
            from generate_series(0, known.partitions - 1) as k(worker)
            left join lateral tube.worker_now(known.name, k.worker) as w on true
            cross join lateral tube.lag(
                known.name, known.partitions, k.worker, coalesce(tube.position(known.name, k.worker), '{}'), upto) as l(lag);
    end loop;
end
$$;
comment on function tube.status(integer) is
    'Every worker of every tube that the caller may read: what is ready and how old, what waits, whether it is at work, the '
    'batch that it claimed with its attempts and since when, and the tube''s faults. Of the tables tells tube.attachments().';

create function tube.skip_batch(tube text, worker integer, reason text) returns uuid
language plpgsql volatile
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    known tube.tube := tube.named(tube);
    at tube.worker;
begin
    perform tube.check_worker(known.partitions, worker);
    if coalesce(trim(reason), '') = '' then
        raise invalid_parameter_value using message = 'say why the batch is skipped';
    end if;
    if not tube.take_lock(tube, worker) then
        raise lock_not_available using message = format('worker %s of tube %I is at work', worker, tube),
            hint = 'stop it, or wait until its batch has ended';
    end if;
    at := tube.worker_now(tube, worker);
    if at.batch is null then
        raise exception using errcode = 'PC009', message = format('worker %s of tube %I has no batch in work', worker, tube),
            hint = 'only a batch that was claimed and not acked can be skipped';
    end if;
    insert into tube.skipped (tube, worker, batch, pods, reason)
    select skip_batch.tube, skip_batch.worker, at.batch, coalesce(jsonb_object_agg(p.shard, p.ids), '{}'), skip_batch.reason
    from (
        select c.shard, jsonb_agg(c.id) as ids from tube.changes(tube, worker, at.batch -> 'bounds', -1, 64) as c group by c.shard
    ) as p;
    perform tube.ack(tube, worker, at.batch);
    return (at.batch ->> 'id')::uuid;
end
$$;
comment on function tube.skip_batch(text, integer, text) is
    'Give up the batch that a worker claimed and cannot finish. Its ids stay in tube.skipped, by shard.';

create function tube.clear_faults(tube text) returns bigint
language sql
set search_path = pg_catalog, tube, pg_temp
as $$
    with gone as (delete from tube.fault as f where f.tube = clear_faults.tube returning 1) select count(*) from gone
$$;
comment on function tube.clear_faults(text) is
    'Forget the faults of a tube, when what caused them is mended; returns how many there were.';
