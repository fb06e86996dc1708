-- The next batch of a worker. A claim is recorded before the work begins, so that a retry gets the same batch with the same id.

-- The current snapshot, with a list of every open transaction whose id is below fresh. Before fresh is assigned, the caller reads
-- the horizon: the last seq that was drawn. So a pod of a transaction that is neither visible nor in the list has a seq above the
-- horizon. Null if the list would contain thousands of subtransactions.
create function tube.snapshot_before(fresh xid8) returns pg_snapshot
language sql stable as $$
    -- A running transaction may have an id at or above the xmax of a snapshot, without being listed in it.
    select pgchange.snapshot_of(
        array(
            select x::text::bigint from pg_snapshot_xip(s.now) as x
            union all
            select g from generate_series(s.upper, s.fresh - 1) as g
            union all
            select pg_current_xact_id_if_assigned()::text::bigint
        ),
        greatest(s.upper, s.fresh))
    from (
        select pg_current_snapshot(), pg_snapshot_xmax(pg_current_snapshot())::text::bigint, snapshot_before.fresh::text::bigint
    ) as s(now, upper, fresh)
    where s.fresh - s.upper <= 10000
$$;

-- The next batch of a worker, as {upto, held_back, after, moves_on, pods, incremental, backfill, oldest}. It consists of whole
-- pods, incremental pods first, with at most max_changes ids in all, or of a single pod with more ids. incremental, backfill: the
-- last seq of each kind. moves_on: whether the position of the worker may follow.
create function tube.choose(known tube.tube, worker integer, "position" jsonb, max_changes integer) returns jsonb
language plpgsql volatile
set jit = off
set enable_sort = off
set enable_seqscan = off
set enable_bitmapscan = off
set max_parallel_workers_per_gather = 0
as $$
declare
    -- The id is assigned after the snapshot was taken, so after each pod that the snapshot sees drew its seq. Each such seq is a
    -- horizon of tube.snapshot_before. If rebasing has assigned the id earlier, the worker's position stays.
    listed pg_snapshot := case
        when pg_current_xact_id_if_assigned() is null then tube.snapshot_before(pg_current_xact_id()) end;
    upto pg_snapshot := coalesce(listed, pg_current_snapshot());
    held jsonb := tube.held_back(known, worker);
    chosen jsonb := jsonb_build_object(
        'upto', upto, 'held_back', held, 'after', "position", 'moves_on', held = '[]' and listed is not null)
        || case when known.key = '{bigint}' then '{}' else jsonb_build_object('key', known.key::text[]) end;
    pods bigint := 0;
    ids bigint := 0;
    oldest timestamptz;
    kind text;
    last_seq bigint;
    pod record;
    is_full boolean := false;
begin
    foreach kind in array array['incremental', 'backfill'] loop
        last_seq := null;
        for pod in execute 'select seq, cardinality(ids) as size, ts from (' || tube.unread_sql(
            known, worker, kind, "position", upto, null, max_changes, tube.held_sql(held, false)
        ) || ') as u' loop
            is_full := ids > 0 and ids + pod.size > max_changes;
            exit when is_full;
            pods := pods + 1;
            ids := ids + pod.size;
            oldest := least(oldest, pod.ts);
            last_seq := pod.seq;
        end loop;
        if last_seq is not null then
            chosen := chosen || jsonb_build_object(kind, last_seq);
        end if;
        exit when is_full or ids >= max_changes;
    end loop;
    return chosen || jsonb_build_object('pods', pods, 'oldest', oldest);
end
$$;

-- The part of a shard that has an id, one of 64.
create function tube.part_of(id bigint) returns integer
language sql immutable as $$
    select pg_catalog.hashint8(id) & 63
$$;

-- The part of a shard that has an id that is a text, like tube.part_of() for integers.
create function tube.part_of(id text) returns integer
language sql immutable as $$
    select (pg_catalog.hashtextextended(id collate pg_catalog."C", 0) & 63)::integer
$$;

-- A number by which ids are sorted to find equal ids: comparing numbers is faster than comparing texts.
create function tube.sort_key(id bigint) returns bigint
language sql immutable as $$
    select id
$$;

-- Like tube.sort_key() for integers. Different ids rarely have the same number.
create function tube.sort_key(id text) returns bigint
language sql immutable as $$
    select pg_catalog.hashtextextended(id collate pg_catalog."C", 0)
$$;

-- The place of an id in the order in which a batch is split. An id in several pods has the place of the first of them.
create function tube.place_in_order(shard integer, backfill boolean, first_seq bigint, id anyelement) returns jsonb
language sql stable as $$
    select pg_catalog.jsonb_build_array(shard, backfill, first_seq, id)
$$;

-- Whether the place of an id is in a part of a batch. A reader asks once whether a batch is a part, because asking for each id
-- takes a third of the time of reading.
create function tube.is_in_part(part jsonb, place jsonb) returns boolean
language sql immutable as $$
    select place > part -> 0 and place <= part -> 1
$$;

-- The slices of a batch, each of one shard and, if the parts of the shard are small enough, of about 20,000 ids.
create function tube.slices(tube text, worker integer, choice jsonb, like_ids anyarray default null::bigint[]) returns jsonb
language sql volatile as $$
    with counted as (
        select d.shard, d.part, count(*) as n
        from (
            -- Sorting finds equal ids in half the time of a hash table that does not fit into work_mem.
            select distinct on (tube.sort_key(i.id), p.shard, i.id) p.shard, tube.part_of(i.id) as part
            from tube.pods_of(tube, worker, choice, like_ids) as p cross join lateral unnest(p.ids) as i(id)
            where choice -> 'part' is null
            order by tube.sort_key(i.id), p.shard, i.id
        ) as d
        group by d.shard, d.part
        union all
        select d.shard, d.part, count(*)
        from (
            select p.shard, tube.part_of(i.id) as part
            from tube.pods_of(tube, worker, choice, like_ids) as p cross join lateral unnest(p.ids) as i(id)
            where choice -> 'part' is not null
            group by p.shard, i.id
            having tube.is_in_part(choice -> 'part', tube.place_in_order(p.shard, bool_and(p.op = 'B'), min(p.seq), i.id))
        ) as d
        group by d.shard, d.part
    ), summed as (
        select c.shard, c.part, c.n, sum(c.n) over (partition by c.shard order by c.part) - c.n as before from counted as c
    ), sliced as (
        select s.shard, min(s.part) - 1 as after, max(s.part) as upto, sum(s.n) as n
        from summed as s
        group by s.shard, div(s.before, 20000)
    )
    select jsonb_agg(
        jsonb_build_object('count', s.n, 'after', array[s.shard, s.after], 'upto', array[s.shard, s.upto])
        order by s.shard, s.upto)
    from sliced as s
$$;

-- The batch of a worker at a version, with the slices of the chosen pods, or of a part of their ids.
create function tube.batch_of(known tube.tube, worker integer, choice jsonb, began_at bigint, version bigint) returns jsonb
language plpgsql volatile as $$
declare
    slices constant jsonb := case when known.key = '{bigint}' then tube.slices(known.name, worker, choice)
                                  else tube.slices(known.name, worker, choice, null::text[]) end;
begin
    return jsonb_build_object(
        'id', md5(concat_ws('|', known.name, known.partitions, worker, began_at, choice - 'upto'))::uuid,
        'version', version, 'attempt', 1, 'first_claimed_at', clock_timestamp(), 'slices', slices,
        'count', (select sum((s.slice -> 'count')::bigint) from jsonb_array_elements(slices) as s(slice)),
        'bounds', choice || jsonb_build_object('from_version', began_at),
        'lsn', pg_current_wal_insert_lsn(), 'oldest', choice -> 'oldest');
end
$$;

-- The place of the last of a number of ids of a batch after a place.
create function tube.part_end(
    tube text, worker integer, choice jsonb, after jsonb, counted bigint, like_ids anyarray default null::bigint[]
) returns jsonb
language sql volatile as $$
    select x.place
    from (
        select tube.place_in_order(p.shard, bool_and(p.op = 'B'), min(p.seq), i.id) as place
        from tube.pods_of(tube, worker, choice, like_ids) as p cross join lateral unnest(p.ids) as i(id)
        group by p.shard, i.id
    ) as x
    where x.place > after
    order by x.place
    offset counted - 1 limit 1
$$;

-- The next part of a split batch, from the result of pgchange.halves() or pgchange.parts_behind(). A part has all pods of the
-- whole, and those of their ids between two places.
create function tube.part(known tube.tube, worker integer, split jsonb, began_at bigint, version bigint) returns jsonb
language plpgsql volatile as $$
declare
    choice constant jsonb := split -> 'within';
    after constant jsonb := case when split ? 'before' then choice -> 'part' -> 1 else coalesce(choice -> 'part' -> 0, '[]') end;
    counted constant bigint := split -> 'rest' -> 0 -> 'count';
    upto constant jsonb := case when known.key = '{bigint}' then tube.part_end(known.name, worker, choice, after, counted)
                                else tube.part_end(known.name, worker, choice, after, counted, null::text[]) end;
begin
    return pgchange.part(split, tube.batch_of(
        known, worker, choice || jsonb_build_object('part', jsonb_build_array(after, upto)), began_at, version));
end
$$;

-- The batch of a worker as a claim, for pgchange.halves().
create function tube.mark_of(at tube.worker) returns pgchange.claim
language plpgsql stable as $$
begin
    return jsonb_populate_record(null::pgchange.claim, jsonb_build_object(
        'consumer', tube.name_of(at.tube, at.worker), 'version', at.batch -> 'version', 'batch_id', at.batch -> 'id',
        'attempt', at.attempt, 'failures', at.failures, 'outages', at.outages, 'batch', at.batch,
        'leased_by', at.leased_by, 'leased_until', at.leased_until));
end
$$;

select pgchange.make_sealed('tube');

create function tube_sealed.note_attempt(
    caller pgchange.caller, tube text, worker integer, became text, batch jsonb, error text default null
) returns void
language plpgsql security definer as $$
declare
    consumer constant text := tube.name_of(tube, worker);
begin
    if not exists (
        select from tube.tube as t where t.name = note_attempt.tube and has_table_privilege(caller, t.pods, 'delete'))
    then
        return;
    end if;
    case became
        when 'claimed' then perform pgchange.note_claim('tube', consumer, batch);
        when 'failed' then perform pgchange.note_failed('tube', consumer, batch, error);
        when 'split' then
            perform pgchange.note_split('tube', consumer, (batch ->> 'id')::uuid, (batch ->> 'attempt')::integer);
        else perform pgchange.note_end('tube', consumer, batch, skipped => became = 'skipped');
    end case;
end
$$;
comment on function tube_sealed.note_attempt(pgchange.caller, text, integer, text, jsonb, text) is
    'Record the outcome of an attempt on a batch in pgchange.batch: claimed, failed, split, acked or skipped. Does nothing if the '
    'caller may not work the tube.';

create function tube_sealed.outcome(caller pgchange.caller, tube text, worker integer, batch jsonb) returns text
language plpgsql stable security definer as $$
begin
    if not exists (
        select from tube.tube as t where t.name = outcome.tube and has_table_privilege(caller, t.pods, 'delete'))
    then
        return null;
    end if;
    return pgchange.outcome('tube', tube.name_of(tube, worker), batch);
end
$$;
comment on function tube_sealed.outcome(pgchange.caller, text, integer, jsonb) is
    'The outcome of an attempt on a batch: acked, skipped, split, failed or claimed. Null if it was not recorded or is deleted, '
    'or if the caller may not work the tube.';

select pgchange.show_sealed('tube');

-- The batch that a worker claimed and never acked; null if there is none, or if pods of it were deleted. Refuse a number of a
-- worker that is out of range, and a worker that is not at the given position. Rebases a restored tube.
create function tube.claimed(tube text, worker integer, "position" jsonb, max_changes integer, workers integer) returns pgchange.claim
language plpgsql volatile as $$
declare
    known tube.tube := tube.named(tube);
    at tube.worker;
begin
    perform tube.check_still_shared_by(known, workers, worker);
    perform pgchange.check_claim(max_changes);
    at := tube.worker_now(tube, worker);
    if at.version is distinct from ("position" ->> 'version')::bigint then
        raise exception using errcode = 'PC006',
            message = format('worker %s of tube %I is not at the given position', worker, tube),
            hint = 'another batch of the worker was acked, or the number of workers changed: claim again';
    end if;
    if tube.is_restored(known) then
        perform tube.rebase_after_restore(tube);
        at := tube.worker_now(tube, worker);
    end if;
    if at.batch is null
       or (select count(*) from tube.seqs_of(tube, worker, at.batch -> 'bounds')) <> (at.batch -> 'bounds' ->> 'pods')::bigint
    then
        return null;
    end if;
    return tube.mark_of(at);
end
$$;

-- Claim the batch of a worker again, with the attempt counted, or the first of its parts.
create function tube.claim_again(tube text, worker integer, "position" jsonb, batch jsonb, split jsonb) returns jsonb
language plpgsql volatile as $$
declare
    began_at constant bigint := "position" ->> 'version';
    part jsonb;
    at tube.worker;
begin
    if split is not null then
        part := tube.part(tube.named(tube), worker, split, began_at, (batch -> 'version')::bigint + 1);
    end if;
    update tube.worker as w set
        batch = coalesce(part, w.batch), claimed_at = clock_timestamp(), leased_by = null, leased_until = null,
        attempt = case when part is null then w.attempt else 0 end + 1,
        failures = case when part is null then w.failures else 0 end,
        outages = case when part is null then w.outages else 0 end,
        error = case when part is null then w.error end
    where w.tube = claim_again.tube and w.worker = claim_again.worker and w.version = began_at
    returning w.* into at;
    return at.batch || jsonb_build_object('attempt', at.attempt);
end
$$;

-- Record and return the next batch of a worker; null if nothing is ready.
create function tube.claim_next(tube text, worker integer, "position" jsonb, max_changes integer) returns jsonb
language plpgsql volatile as $$
declare
    -- claimed() has checked it.
    known tube.tube := (select t from tube.tube as t where t.name = claim_next.tube);
    began_at constant bigint := "position" ->> 'version';
    choice jsonb;
    made jsonb;
begin
    if not tube.has_unread(known, worker) then
        return null;
    end if;
    -- Not the given position, because a restored tube was rebased since.
    choice := tube.choose(known, worker, tube.position(tube, worker), max_changes);
    delete from tube.moved as m where m.tube = claim_next.tube and not tube.is_left(known, m);
    if (choice ->> 'pods')::bigint = 0 then
        return null;
    end if;
    made := tube.batch_of(known, worker, choice, began_at, began_at + 1);
    update tube.worker as w set batch = made, attempt = 1, failures = 0, outages = 0, error = null, claimed_at = clock_timestamp(),
        leased_by = null, leased_until = null
    where w.tube = claim_next.tube and w.worker = claim_next.worker and w.version = began_at;
    return made;
end
$$;

-- Give the last attempt on a worker's batch a lease, or end its lease if ends_at is null. False if the attempt is not the last.
create function tube.set_lease(tube text, worker integer, batch jsonb, owner text, ends_at timestamptz) returns boolean
language plpgsql volatile as $$
begin
    update tube.worker as w set
        leased_by = case when ends_at is not null then coalesce(left(owner, 1000), w.leased_by, '') end, leased_until = ends_at
    where w.tube = set_lease.tube and w.worker = set_lease.worker
      and w.version = (select n.version from tube.worker_now(set_lease.tube, set_lease.worker) as n)
      and w.batch ->> 'id' = set_lease.batch ->> 'id' and w.attempt = (set_lease.batch ->> 'attempt')::integer;
    return found;
end
$$;

-- Whether the batch of a worker is leased.
create function tube.is_leased(tube text, worker integer) returns boolean
language plpgsql stable as $$
begin
    return coalesce((tube.worker_now(tube, worker)).leased_until > clock_timestamp(), false);
end
$$;

-- The batch of a worker as a claim if it has this id; null otherwise.
create function tube.resumed(tube text, worker integer, "position" jsonb, batch jsonb) returns pgchange.claim
language plpgsql stable as $$
begin
    return (
        select tube.mark_of(w) from tube.worker_now(tube, worker) as w
        where w.attempt > 0 and w.batch ->> 'id' = resumed.batch ->> 'id');
end
$$;

-- End the lease of a worker if the owner has it; a null owner ends any lease. Returns how many there were.
create function tube.forget_leases(tube text, worker integer, owner text) returns bigint
language plpgsql volatile as $$
declare
    ended bigint;
begin
    update tube.worker as w set leased_by = null, leased_until = null
    where w.tube = forget_leases.tube and w.worker = forget_leases.worker and w.leased_until > clock_timestamp()
      and coalesce(w.leased_by = left(forget_leases.owner, 1000), true);
    get diagnostics ended = row_count;
    return ended;
end
$$;
