-- The workers of a tube, and which of their shards wait for another worker.

-- Refuse a number of a worker that is out of range.
create function tube.check_worker_number(workers integer, worker integer) returns void
language plpgsql immutable as $$
begin
    if coalesce(workers not between 1 and 999 or worker not between 0 and workers - 1, true) then
        perform pgchange.refuse(format('there is no worker %s of %s', worker, workers), 'use 1 to 999 workers, numbered from 0');
    end if;
end
$$;

-- Refuse a worker that the tube does not have.
create function tube.check_still_shared_by(known tube.tube, workers integer, worker integer) returns void
language plpgsql stable as $$
begin
    if workers is distinct from known.partitions then
        raise exception using errcode = 'PC006',
            message = format('tube %I is shared by %s workers now, but this worker counts %s', known.name, known.partitions, workers),
            hint = format('make the feeds again: TubeFeed(%L, worker, workers=%s)', known.name, known.partitions);
    end if;
    perform tube.check_worker_number(workers, worker);
end
$$;

-- Create the position of a worker at the beginning, if it does not exist.
create function tube.register(tube text, workers integer, worker integer) returns void
language plpgsql as $$
declare
    known constant tube.tube := tube.named(tube);
begin
    perform tube.check_still_shared_by(known, workers, worker);
    perform tube.demand(known, 'work tube', '{select,delete}');
    if tube.worker_now(tube, worker) is null then
        insert into tube.worker (tube, worker) values (register.tube, register.worker) on conflict do nothing;
    end if;
end
$$;

-- The number of batches that each worker of each tube has done.
create function tube.positions() returns jsonb
language sql stable as $$
    select coalesce(jsonb_object_agg(w.tube || '/' || w.worker, w.version), '{}')
    from (select x.tube, x.worker, max(x.version) as version from tube.worker as x group by 1, 2) as w
$$;

-- Whether pods are left of the shard that a table moved from. While a table moves, this may read over the backlog before them.
create function tube.is_left(known tube.tube, move tube.moved) returns boolean
language plpgsql volatile as $$
declare
    old_worker integer := tube.worker_of(move.from_shard, known.partitions);
    at jsonb := tube.position_or_start(tube.position(known.name, old_worker));
    of_shard text := format('l.shard = %s', move.from_shard);
begin
    return tube.first_unread(known, old_worker, 'incremental', at, high => move.upto, extra => of_shard) is not null
        or tube.first_unread(known, old_worker, 'backfill', at, high => move.upto, extra => of_shard) is not null;
end
$$;

-- The shards of a worker that wait, and from which seq on, as [[shard, seq], ...]. A table came to such a shard from another
-- worker, and pods of its old shard are left.
create function tube.held_back(known tube.tube, worker integer) returns jsonb
language plpgsql volatile as $$
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
