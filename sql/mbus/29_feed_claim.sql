-- The batch of a feed: claimed in a transaction of its own, read, and acked with the results.

-- A claim finds messages by indexes, whatever the statistics say. The hooks below run under these settings.
alter function mbus_sealed.claim(pgchange.caller, text, text, jsonb, integer, integer, text)
    set enable_seqscan = off set enable_bitmapscan = off set enable_mergejoin = off set enable_hashjoin = off set enable_sort = off
    set jit = off set max_parallel_workers_per_gather = 0 set plan_cache_mode = force_generic_plan;

-- The record of a batch in the form of a claim of the core, for pgchange.halves().
create function mbus.mark_of(qname text, cname text, mark mbus.batch) returns pgchange.claim
language plpgsql stable as $$
begin
    return jsonb_populate_record(null::pgchange.claim, jsonb_build_object(
        'consumer', mbus.name_of(qname, cname), 'version', mark.batch -> 'version', 'batch_id', mark.batch -> 'id',
        'attempt', mark.attempt, 'failures', mark.failures, 'outages', mark.outages, 'batch', mark.batch,
        'leased_by', mark.leased_by, 'leased_until', mark.leased_until));
end
$$;

-- Make a batch of the messages with these ids. They are some or all of the messages of the row of mbus.batch with this number.
create function mbus.batch_of(known mbus.queue, c integer, number bigint, version bigint, ids bigint[]) returns jsonb
language plpgsql stable as $$
declare
    slices jsonb;
    lowest bigint;
    highest bigint;
    oldest timestamptz;
begin
    with numbered as (
        select i as id, (row_number() over (order by i) - 1) / 10000 as slice from unnest(ids) as i
    ), sliced as (
        select count(*) as counted, min(n.id) as lowest, max(n.id) as highest from numbered as n group by n.slice
    )
    select jsonb_agg(jsonb_build_object('count', s.counted, 'after', s.lowest - 1, 'upto', s.highest) order by s.lowest),
           min(s.lowest), max(s.highest)
    into slices, lowest, highest from sliced as s;
    execute format('select l.added from mbus.%I as l where l.id = $1', 'log$' || known.qname) into oldest using lowest;
    return jsonb_build_object(
        -- The id is random. An id made of numbers could come again in a restored database, for other messages.
        'id', gen_random_uuid(),
        'version', version, 'first_claimed_at', clock_timestamp(), 'count', cardinality(ids), 'slices', slices, 'oldest', oldest,
        'bounds', jsonb_build_object('number', number, 'consumer', c, 'lowest', lowest, 'highest', highest));
end
$$;

-- Make the next part of a split batch from the result of pgchange.halves() or pgchange.parts_behind(). It has the first
-- messages that the record still has.
create function mbus.part(known mbus.queue, mark mbus.batch, split jsonb) returns jsonb
language plpgsql as $$
begin
    return pgchange.part(split, mbus.batch_of(
        known, mark.consumer, mark.number, nextval(pg_get_serial_sequence('mbus.batch', 'number')), array(
            select a.id from mbus.apart as a
            where a.consumer = mark.consumer and a.batch = mark.number and a.id between mark.lowest and mark.highest
            order by a.id
            limit (split -> 'rest' -> 0 -> 'count')::integer)));
end
$$;

-- The next batch that was claimed and that no worker processes now; null if there is none. Refuses a caller without the right to
-- consume, and a position that names no slot, which is the lock of a worker. A batch some of whose messages were taken or deleted
-- is dissolved.
create function mbus.claimed(caller pgchange.caller, qname text, cname text, "position" jsonb, max_changes integer) returns pgchange.claim
language plpgsql as $$
declare
    c mbus.consumer := mbus.feed_consumer(caller, qname, cname);
    my_slot constant integer := "position" ->> 'slot';
    mark mbus.batch;
    remaining bigint;
begin
    perform pgchange.check_claim(max_changes);
    if my_slot is null or ("position" ->> 'consumer')::integer is distinct from c.id then
        raise exception using errcode = 'PC006', message = format('queue:%s/%s cannot be claimed without its lock', qname, cname),
            hint = 'first call mbus.take_lock(), and pass the mbus.position() of the transaction that has it';
    end if;
    if current_setting('synchronous_commit') in ('off', 'local') then
        perform set_config('synchronous_commit', 'on', true);
    end if;
    loop
        -- If another worker adopts a batch meanwhile, this query skips the locked row, or finds its slot among those that are
        -- held.
        select b.* into mark from mbus.batch as b
        where b.consumer = c.id
          and (b.slot = my_slot or b.slot not in (select h.slot from mbus.held_slots(claimed.qname, claimed.cname) as h))
          -- Leave leased batches to their owners. This worker goes on with the next messages.
          and not mbus.is_leased(b)
        order by b.slot <> my_slot, b.number
        limit 1
        for update skip locked;
        if mark.number is null then
            return null;
        end if;
        execute format(
            'select count(*) from mbus.apart as a cross join lateral (select from mbus.%I as x where x.id = a.id offset 0) as l '
            'where a.consumer = $1 and a.batch = $2 and a.id between $3 and $4', 'log$' || qname)
        into remaining using c.id, mark.number, mark.lowest, mark.highest;
        exit when mark.count = remaining;
        perform mbus.dissolve(mbus.queue_named(qname), mark);
    end loop;
    return mbus.mark_of(qname, cname, mark);
end
$$;

-- Claim a batch again, for the slot of this worker. The attempt of a whole batch goes up by one. If the batch is split, its first
-- part is claimed, with attempts of its own.
create function mbus.claim_again(caller pgchange.caller, qname text, cname text, "position" jsonb, batch jsonb, split jsonb)
returns jsonb
language plpgsql as $$
declare
    known mbus.batch := (select b from mbus.batch as b where b.number = (claim_again.batch -> 'bounds' -> 'number')::bigint);
begin
    if split is not null then
        known.batch := mbus.part(mbus.queue_named(qname), known, split);
        known.attempt := 0;
        known.failures := 0;
        known.outages := 0;
        known.error := null;
    end if;
    update mbus.batch as b set
        batch = known.batch, attempt = known.attempt + 1, failures = known.failures, outages = known.outages, error = known.error,
        slot = ("position" ->> 'slot')::integer, claimed_at = clock_timestamp(), taken = 0, taken_by = null,
        leased_by = null, leased_until = null
    where b.number = known.number
    returning b.* into known;
    return known.batch || jsonb_build_object('attempt', known.attempt, 'lsn', pg_current_wal_insert_lsn());
end
$$;

-- Claim messages as a batch. Other claims skip them, and they are not received yet. Null if nothing is ready.
create function mbus.claim_next(caller pgchange.caller, qname text, cname text, "position" jsonb, max_changes integer) returns jsonb
language plpgsql as $$
declare
    known mbus.queue := mbus.queue_named(qname);
    c constant integer := "position" ->> 'consumer';
    ids constant bigint[] := mbus.claim_ids(known, c, max_changes);
    mark mbus.batch;
begin
    if ids = '{}' then
        return null;
    end if;
    -- A claim does not receive messages: they are received by the ack.
    delete from mbus.receipt as r
    where r.queue = known.id and r.consumer = c and r.id = any (ids) and r.txid = pg_current_xact_id();
    insert into mbus.batch (consumer, slot, batch, count, lowest, highest)
    select c, ("position" ->> 'slot')::integer, '{}', count(*), min(i), max(i) from unnest(ids) as i
    returning * into mark;
    if known.ordered_by is null then
        insert into mbus.apart (consumer, id, part, due, batch)
        select c, i, mod(i, known.consumers_cnt), 'infinity', mark.number from unnest(ids) as i;
    else
        execute format(
            'insert into mbus.apart (consumer, id, part, due, batch, key) '
            'select $1, i, mod(i, $2), ''infinity'', $3, (select %s from mbus.%I as l where l.id = i) from unnest($4) as i',
            mbus.key_of(known, 'l'), 'log$' || known.qname)
        using c, known.consumers_cnt, mark.number, ids;
    end if;
    update mbus.batch as b set batch = mbus.batch_of(known, c, mark.number, mark.number, ids) where b.number = mark.number
    returning b.* into mark;
    return mark.batch || jsonb_build_object('attempt', 1, 'lsn', pg_current_wal_insert_lsn());
end
$$;

create function mbus_sealed.changes(caller pgchange.caller, qname text, cname text, batch jsonb, "after" bigint, upto bigint)
returns table (
    id text, number bigint, data jsonb, properties jsonb, headers jsonb, added timestamptz
)
language plpgsql stable security definer
set enable_seqscan = off
set jit = off
as $$
declare
    c mbus.consumer := mbus.feed_consumer(caller, qname, cname);
begin
    return query execute format($query$
        select coalesce(l.iid, %2$L || l.id), l.id, hstore_to_jsonb(l.data), hstore_to_jsonb(l.properties),
               hstore_to_jsonb(l.headers || hstore('destination', %3$L)), l.added
        from mbus.apart as a
        -- With offset 0, the plan is one lookup for each message, however few rows the planner expects.
        cross join lateral (select x.* from mbus.%1$I as x where x.id = a.id offset 0) as l
        where a.consumer = $1 and a.batch = $2 and a.id > $3 and a.id <= $4
        order by a.id
        $query$, 'log$' || qname, qname || '.', qname)
    using c.id, (batch ->> 'number')::bigint, "after", upto;
end
$$;
comment on function mbus_sealed.changes(pgchange.caller, text, text, jsonb, bigint, bigint) is
    'The messages of a batch between two numbers in the log, in order, by the bounds of its claim.';

-- Record the next part of a split batch when a part has ended. The next part has had no attempt yet. If the worker has taken
-- messages of later parts by their ids, the split ends: the other messages go back to the consumer.
create function mbus.keep_parts(known mbus.queue, mark mbus.batch, parts jsonb, left_over bigint) returns void
language plpgsql as $$
begin
    mark.lowest := (mark.batch -> 'bounds' -> 'highest')::bigint + 1;
    mark.count := left_over;
    if left_over <> (select sum((r.part -> 'count')::bigint) from jsonb_array_elements(parts -> 'rest') as r(part)) then
        perform mbus.dissolve(known, mark);
        return;
    end if;
    insert into mbus.batch (number, consumer, slot, batch, attempt, count, lowest, highest) overriding system value
    values (mark.number, mark.consumer, mark.slot, mbus.part(known, mark, parts), 0, mark.count, mark.lowest, mark.highest);
end
$$;

-- Receive the messages of a batch; a next part of a split batch takes its place. Returns the version of the batch. The
-- transaction with the slot of its worker may have taken some messages by their ids. If another transaction took some, the ack is
-- refused.
create function mbus.advance(caller pgchange.caller, qname text, cname text, batch jsonb) returns bigint
language plpgsql
set enable_seqscan = off
set jit = off
as $$
declare
    c mbus.consumer := mbus.feed_consumer(caller, qname, cname);
    mark mbus.batch;
    bounds jsonb;
    parts jsonb;
    ids bigint[];
    left_over bigint := 0;
begin
    delete from mbus.batch as b
    where b.number = (advance.batch -> 'bounds' ->> 'number')::bigint and b.consumer = c.id
      and b.batch ->> 'id' = advance.batch ->> 'id' and b.attempt = (advance.batch ->> 'attempt')::integer
    returning b.* into mark;
    if found then
        perform pgchange.check_version(batch, (mark.batch ->> 'version')::bigint);
    end if;
    bounds := mark.batch -> 'bounds';
    with gone as (
        delete from mbus.apart as a
        where a.consumer = c.id and a.batch = mark.number
          and a.id between (bounds -> 'lowest')::bigint and (bounds -> 'highest')::bigint
        returning a.id
    )
    select coalesce(array_agg(g.id), '{}') into ids from gone as g;
    if bounds ? 'split' then
        parts := pgchange.parts_behind(mbus.mark_of(qname, cname, mark));
        left_over := (
            select count(*) from mbus.apart as a
            where a.consumer = c.id and a.batch = mark.number and a.id between mark.lowest and mark.highest);
    end if;
    if mark.taken_by is distinct from pg_current_xact_id() then
        mark.taken := 0;
    end if;
    if mark.number is null or cardinality(ids) + left_over + mark.taken <> mark.count then
        raise exception using errcode = 'PC006',
            message = format('batch %s of queue:%s/%s is no longer as it was claimed', batch ->> 'id', qname, cname),
            hint = 'another session has it, or took messages of it; roll back and claim again';
    end if;
    if exists (
        select from mbus.apart as a where a.wait_consumer = c.id and a.wait_id between mark.lowest and mark.highest)
    then
        perform mbus.wake_up(array[c.id], ids);
    end if;
    if parts is not null then
        perform mbus.keep_parts(mbus.queue_named(qname), mark, parts, left_over);
    end if;
    if random() * 1000 < cardinality(ids) then
        perform mbus.trim_sometimes(mbus.queue_named(qname), cardinality(ids));
    end if;
    return (mark.batch -> 'version')::bigint;
end
$$;

create function mbus_sealed.in_work(caller pgchange.caller, qname text, cname text, "position" jsonb) returns jsonb
language sql stable security definer as $$
    select b.batch || jsonb_build_object('attempt', b.attempt, 'error', b.error, 'claimed_at', b.claimed_at)
    from mbus.pending(qname, mbus.feed_consumer(caller, qname, cname), ("position" ->> 'slot')::integer) as b
    where b.attempt > 0
    limit 1
$$;
comment on function mbus_sealed.in_work(pgchange.caller, text, text, jsonb) is
    'The batch that was claimed, is not acked and not at work, with its attempts and its last error. Null if there is none, or if '
    'it is a part of a split batch that is not claimed yet.';

create function mbus_sealed.outcome(caller pgchange.caller, qname text, cname text, batch jsonb) returns text
language plpgsql stable security definer as $$
begin
    perform mbus.feed_consumer(caller, qname, cname);
    return pgchange.outcome('queue', mbus.name_of(qname, cname), batch);
end
$$;
comment on function mbus_sealed.outcome(pgchange.caller, text, text, jsonb) is
    'The outcome of an attempt on a batch: acked, skipped, split, failed or claimed; null if it was not recorded or is deleted.';

-- Store the error of an attempt with its batch, and count the attempt; false if the attempt is not the last.
create function mbus.set_error(caller pgchange.caller, qname text, cname text, batch jsonb, error text, of_batch boolean) returns boolean
language plpgsql as $$
declare
    c mbus.consumer := mbus.feed_consumer(caller, qname, cname);
begin
    update mbus.batch as b set
        error = set_error.error,
        -- Count an attempt once, even if its error is recorded twice.
        failures = b.failures + (of_batch is true and b.failures + b.outages < b.attempt)::integer,
        outages = b.outages + (of_batch is false and b.failures + b.outages < b.attempt)::integer
    where b.number = (set_error.batch -> 'bounds' ->> 'number')::bigint and b.consumer = c.id
      and b.batch ->> 'id' = set_error.batch ->> 'id' and b.attempt = (set_error.batch ->> 'attempt')::integer;
    return found;
end
$$;

-- Give the last attempt on a batch a lease, or end its lease if ends_at is null. False if the attempt is not the last.
create function mbus.set_lease(caller pgchange.caller, qname text, cname text, batch jsonb, owner text, ends_at timestamptz)
returns boolean
language plpgsql as $$
declare
    c mbus.consumer := mbus.feed_consumer(caller, qname, cname);
begin
    update mbus.batch as b set
        leased_by = case when ends_at is not null then coalesce(left(owner, 1000), b.leased_by, '') end, leased_until = ends_at
    where b.consumer = c.id and b.batch ->> 'id' = set_lease.batch ->> 'id' and b.attempt = (set_lease.batch ->> 'attempt')::integer;
    return found;
end
$$;

-- The batch with this id, as a claim, moved to the slot of the worker; null if there is none.
create function mbus.resumed(caller pgchange.caller, qname text, cname text, "position" jsonb, batch jsonb) returns pgchange.claim
language plpgsql as $$
declare
    c mbus.consumer := mbus.feed_consumer(caller, qname, cname);
    mark mbus.batch;
begin
    update mbus.batch as b set slot = ("position" ->> 'slot')::integer
    where b.consumer = c.id and b.batch ->> 'id' = resumed.batch ->> 'id' and b.attempt > 0
    returning b.* into mark;
    return case when mark.number is not null then mbus.mark_of(qname, cname, mark) end;
end
$$;

-- End the leases of a consumer, or only those of an owner. Returns how many there were.
create function mbus.forget_leases(caller pgchange.caller, qname text, cname text, owner text) returns bigint
language plpgsql as $$
declare
    c mbus.consumer := mbus.feed_consumer(caller, qname, cname);
    ended bigint;
begin
    update mbus.batch as b set leased_by = null, leased_until = null
    where b.consumer = c.id and b.leased_until > clock_timestamp()
      and coalesce(b.leased_by = left(forget_leases.owner, 1000), true);
    get diagnostics ended = row_count;
    return ended;
end
$$;
