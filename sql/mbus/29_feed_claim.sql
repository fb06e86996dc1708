-- The batch of a feed: claimed in a transaction of its own, read, acked with the results.

-- A claim finds messages by indexes, whatever the statistics say: the hooks below run under these settings.
alter function mbus_sealed.claim(pgchange.caller, text, text, jsonb, integer, integer)
    set enable_seqscan = off set enable_bitmapscan = off set enable_mergejoin = off set enable_hashjoin = off set enable_sort = off
    set jit = off set max_parallel_workers_per_gather = 0 set plan_cache_mode = force_generic_plan;

-- The next batch that was claimed and is not at work, as this slot's, with the attempt counted; null for none. Refuse a consumer by whom
-- the caller may not consume, and a position without a lock of its feed. Batches that are no longer whole are dissolved.
create function mbus.claim_again(
    caller pgchange.caller, qname text, cname text, "position" jsonb, max_changes integer, max_attempts integer
) returns jsonb
language plpgsql as $$
declare
    c mbus.consumer := mbus.feed_consumer(caller, qname, cname);
    my_slot constant integer := "position" ->> 'slot';
    mark mbus.batch;
    remaining bigint;
begin
    perform pgchange.check_claim(max_changes);
    if my_slot is null or ("position" ->> 'consumer')::integer is distinct from c.id then
        raise exception using errcode = 'PC006', message = format('queue:%s/%s is claimed without its lock', qname, cname),
            hint = 'take mbus.take_lock() first, and give the mbus.position() of the transaction that has it';
    end if;
    if current_setting('synchronous_commit') in ('off', 'local') then
        perform set_config('synchronous_commit', 'on', true);
    end if;
    loop
        -- What another worker adopts meanwhile is locked, or at work when this comes to it.
        select b.* into mark from mbus.batch as b
        where b.consumer = c.id
          and (b.slot = my_slot or b.slot not in (select h.slot from mbus.held_slots(claim_again.qname, claim_again.cname) as h))
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
    perform pgchange.check_attempts(mbus.name_of(qname, cname), mark.batch ->> 'id', mark.attempt, max_attempts);
    update mbus.batch as b set
        attempt = b.attempt + 1, slot = my_slot, claimed_at = clock_timestamp(), taken = 0, taken_by = null
    where b.number = mark.number
    returning b.* into mark;
    return mark.batch || jsonb_build_object('attempt', mark.attempt, 'lsn', pg_current_wal_insert_lsn());
end
$$;

-- Claim messages as a batch: nobody else has them, and they are not received yet. Null if nothing is ready.
create function mbus.claim_next(caller pgchange.caller, qname text, cname text, "position" jsonb, max_changes integer) returns jsonb
language plpgsql as $$
declare
    known mbus.queue := mbus.queue_named(qname);
    c constant integer := "position" ->> 'consumer';
    ids constant bigint[] := mbus.claim_ids(known, c, max_changes);
    mark mbus.batch;
    slices jsonb;
    oldest timestamptz;
begin
    if ids = '{}' then
        return null;
    end if;
    -- What was claimed is not received before the ack.
    delete from mbus.receipt as r
    where r.queue = known.id and r.consumer = c and r.id = any (ids) and r.txid = pg_current_xact_id();
    with numbered as (
        select i as id, (row_number() over (order by i) - 1) / 10000 as slice from unnest(ids) as i
    ), sliced as (
        select count(*) as counted, min(n.id) as lowest, max(n.id) as highest from numbered as n group by n.slice
    )
    select jsonb_agg(jsonb_build_object('count', s.counted, 'after', s.lowest - 1, 'upto', s.highest) order by s.lowest)
    into slices from sliced as s;
    insert into mbus.batch (consumer, slot, batch, count, lowest, highest)
    values (c, ("position" ->> 'slot')::integer, '{}', cardinality(ids), (slices -> 0 ->> 'after')::bigint + 1, (slices -> -1 ->> 'upto')::bigint)
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
    execute format('select l.added from mbus.%I as l where l.id = $1', 'log$' || known.qname) into oldest using mark.lowest;
    update mbus.batch as b set batch = jsonb_build_object(
        -- Not made of numbers: a restored database gives them again, to other messages.
        'id', gen_random_uuid(),
        'version', mark.number, 'count', mark.count, 'slices', slices, 'oldest', oldest,
        'bounds', jsonb_build_object('number', mark.number, 'consumer', c, 'lowest', mark.lowest, 'highest', mark.highest))
    where b.number = mark.number
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
        -- One look for each, however few rows the planner expects.
        cross join lateral (select x.* from mbus.%1$I as x where x.id = a.id offset 0) as l
        where a.consumer = $1 and a.batch = $2 and a.id > $3 and a.id <= $4
        order by a.id
        $query$, 'log$' || qname, qname || '.', qname)
    using c.id, (batch ->> 'number')::bigint, "after", upto;
end
$$;
comment on function mbus_sealed.changes(pgchange.caller, text, text, jsonb, bigint, bigint) is
    'The messages of a batch, by the bounds that it was claimed with, behind one number in the log up to another, in that order.';

-- Receive the messages of a batch; the version of the batch. The transaction that holds the lock of its worker may have taken some of them by their ids; a batch of
-- which another transaction took one is refused.
create function mbus.advance(caller pgchange.caller, qname text, cname text, batch jsonb) returns bigint
language plpgsql
set enable_seqscan = off
set jit = off
as $$
declare
    c mbus.consumer := mbus.feed_consumer(caller, qname, cname);
    mark mbus.batch;
    ids bigint[];
begin
    delete from mbus.batch as b
    where b.number = (advance.batch ->> 'version')::bigint and b.consumer = c.id and b.attempt = (advance.batch ->> 'attempt')::integer
    returning b.* into mark;
    with gone as (
        delete from mbus.apart as a
        where a.consumer = c.id and a.batch = mark.number and a.id between mark.lowest and mark.highest
        returning a.id
    )
    select coalesce(array_agg(g.id), '{}') into ids from gone as g;
    if mark.taken_by is distinct from pg_current_xact_id() then
        mark.taken := 0;
    end if;
    if mark.number is null or cardinality(ids) + mark.taken <> mark.count then
        raise exception using errcode = 'PC006',
            message = format('batch %s of queue:%s/%s is no longer as it was claimed', batch ->> 'id', qname, cname),
            hint = 'somebody else has it, or took messages of it; roll back and claim again';
    end if;
    if exists (
        select from mbus.apart as a where a.wait_consumer = c.id and a.wait_id between mark.lowest and mark.highest)
    then
        perform mbus.wake_up(array[c.id], ids);
    end if;
    if random() * 1000 < cardinality(ids) then
        perform mbus.trim_sometimes(mbus.queue_named(qname), cardinality(ids));
    end if;
    return mark.number;
end
$$;

create function mbus_sealed.in_work(caller pgchange.caller, qname text, cname text, "position" jsonb) returns jsonb
language sql stable security definer as $$
    select b.batch || jsonb_build_object('attempt', b.attempt, 'error', b.error, 'claimed_at', b.claimed_at)
    from mbus.pending(qname, mbus.feed_consumer(caller, qname, cname), ("position" ->> 'slot')::integer) as b
    limit 1
$$;
comment on function mbus_sealed.in_work(pgchange.caller, text, text, jsonb) is
    'The batch that was claimed, is not acked and not at work, with its attempts and the error of the last one; null for none.';

-- Keep the error of an attempt with its batch; true if it is the last attempt.
create function mbus.set_error(caller pgchange.caller, qname text, cname text, batch jsonb, error text) returns boolean
language plpgsql as $$
declare
    c mbus.consumer := mbus.feed_consumer(caller, qname, cname);
begin
    update mbus.batch as b set error = set_error.error
    where b.number = (set_error.batch ->> 'version')::bigint and b.attempt = (set_error.batch ->> 'attempt')::integer
      and b.consumer = c.id;
    return found;
end
$$;
