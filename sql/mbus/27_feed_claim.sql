-- The batch of a feed: claimed in a transaction of its own, read, acked with the results.

-- Keep messages that were just claimed as a batch: nobody else has them, and they are not received yet.
create function mbus.set_by(known mbus.queue, c mbus.consumer, my_slot integer, ids bigint[]) returns mbus.batch
language plpgsql as $$
declare
    mark mbus.batch;
    slices jsonb;
    oldest timestamptz;
begin
    -- What was claimed is not received before the ack.
    delete from mbus.receipt as r
    where r.queue = known.id and r.consumer = c.id and r.id = any (ids) and r.txid = pg_current_xact_id();
    with numbered as (
        select i as id, (row_number() over (order by i) - 1) / 10000 as slice from unnest(ids) as i
    ), sliced as (
        select count(*) as counted, min(n.id) as lowest, max(n.id) as highest from numbered as n group by n.slice
    )
    select jsonb_agg(jsonb_build_object('count', s.counted, 'after', s.lowest - 1, 'upto', s.highest) order by s.lowest)
    into slices from sliced as s;
    insert into mbus.batch (consumer, slot, batch, count, lowest, highest)
    values (c.id, my_slot, '{}', cardinality(ids), (slices -> 0 ->> 'after')::bigint + 1, (slices -> -1 ->> 'upto')::bigint)
    returning * into mark;
    if known.ordered_by is null then
        insert into mbus.apart (consumer, id, part, due, batch)
        select c.id, i, mod(i, known.consumers_cnt), 'infinity', mark.number from unnest(ids) as i;
    else
        execute format(
            'insert into mbus.apart (consumer, id, part, due, batch, key) '
            'select $1, i, mod(i, $2), ''infinity'', $3, (select %s from mbus.%I as l where l.id = i) from unnest($4) as i',
            mbus.key_of(known, 'l'), 'log$' || known.qname)
        using c.id, known.consumers_cnt, mark.number, ids;
    end if;
    execute format('select l.added from mbus.%I as l where l.id = $1', 'log$' || known.qname) into oldest using mark.lowest;
    update mbus.batch as b set batch = jsonb_build_object(
        -- Not made of numbers: a restored database gives them again, to other messages.
        'id', gen_random_uuid(),
        'version', mark.number, 'count', mark.count, 'slices', slices, 'oldest', oldest,
        'bounds', jsonb_build_object('number', mark.number, 'consumer', c.id, 'lowest', mark.lowest, 'highest', mark.highest))
    where b.number = mark.number
    returning b.* into mark;
    return mark;
end
$$;

create function mbus_sealed.feed_claim(
    caller pgchange.caller, qname text, cname text, "position" jsonb, max_changes integer, max_attempts integer default null
) returns jsonb
language plpgsql security definer
set enable_seqscan = off
set enable_bitmapscan = off
set enable_mergejoin = off
set enable_hashjoin = off
set enable_sort = off
set jit = off
set max_parallel_workers_per_gather = 0
set plan_cache_mode = force_generic_plan
as $$
declare
    c mbus.consumer := mbus.feed_consumer(caller, qname, cname);
    known mbus.queue := mbus.queue_named(qname);
    my_slot integer := "position" ->> 'slot';
    mark mbus.batch;
    ids bigint[];
    batch jsonb;
begin
    perform pgchange.check_claim(max_changes);
    if my_slot is null or ("position" ->> 'consumer')::integer <> c.id then
        raise exception using errcode = 'PC006', message = format('queue:%s/%s is claimed without its lock', qname, cname),
            hint = 'take mbus.feed_lock() first, and give the mbus.feed_position() of the transaction that has it';
    end if;
    if current_setting('synchronous_commit') in ('off', 'local') then
        perform set_config('synchronous_commit', 'on', true);
    end if;
    mark := mbus.adopt(qname, c, my_slot, max_attempts);
    if mark.number is null then
        ids := mbus.claim(known, c.id, max_changes);
        if ids = '{}' then
            return null;
        end if;
        mark := mbus.set_by(known, c, my_slot, ids);
    end if;
    batch := mark.batch || jsonb_build_object('attempt', mark.attempt, 'lsn', pg_current_wal_insert_lsn());
    perform pgchange.note_claim('queue', mbus.name_of(qname, cname), batch);
    return batch;
end
$$;
comment on function mbus_sealed.feed_claim(pgchange.caller, text, text, jsonb, integer, integer) is
    'Record and return the next batch of a consumer, or one that was claimed and never acked, with the attempt counted; null when '
    'nothing is ready. Call it in a transaction of its own, while the transaction of "position" holds a lock of the feed.';

create function mbus_sealed.feed_changes(caller pgchange.caller, qname text, cname text, batch jsonb, "after" bigint, upto bigint)
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
comment on function mbus_sealed.feed_changes(pgchange.caller, text, text, jsonb, bigint, bigint) is
    'The messages of a batch, by the bounds that it was claimed with, behind one number in the log up to another, in that order.';

create function mbus_sealed.feed_ack(caller pgchange.caller, qname text, cname text, batch jsonb) returns bigint
language plpgsql security definer
set enable_seqscan = off
set jit = off
as $$
declare
    c mbus.consumer := mbus.feed_consumer(caller, qname, cname);
    mark mbus.batch;
    ids bigint[];
begin
    delete from mbus.batch as b
    where b.number = (feed_ack.batch ->> 'version')::bigint and b.consumer = c.id and b.attempt = (feed_ack.batch ->> 'attempt')::integer
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
    perform pgchange.note_end('queue', mbus.name_of(qname, cname), batch);
    return mark.number;
end
$$;
comment on function mbus_sealed.feed_ack(pgchange.caller, text, text, jsonb) is
    'Receive the messages of a batch, in the transaction that holds the lock of its worker and writes the results. That transaction '
    'may have taken some of them by their ids; a batch of which another transaction took one is refused.';

create function mbus_sealed.feed_in_work(caller pgchange.caller, qname text, cname text, "position" jsonb) returns jsonb
language sql stable security definer as $$
    select b.batch || jsonb_build_object('attempt', b.attempt, 'error', b.error, 'claimed_at', b.claimed_at)
    from mbus.pending(qname, mbus.feed_consumer(caller, qname, cname), ("position" ->> 'slot')::integer) as b
    limit 1
$$;
comment on function mbus_sealed.feed_in_work(pgchange.caller, text, text, jsonb) is
    'The batch that was claimed, is not acked and not at work, with its attempts and the error of the last one; null for none.';

create function mbus_sealed.feed_note_failure(caller pgchange.caller, qname text, cname text, batch jsonb, error text) returns void
language plpgsql security definer as $$
declare
    c mbus.consumer := mbus.feed_consumer(caller, qname, cname);
begin
    update mbus.batch as b set error = feed_note_failure.error
    where b.number = (feed_note_failure.batch ->> 'version')::bigint and b.attempt = (feed_note_failure.batch ->> 'attempt')::integer
      and b.consumer = c.id;
    if found then
        perform pgchange.note_failed('queue', mbus.name_of(qname, cname), batch, error);
    end if;
end
$$;
comment on function mbus_sealed.feed_note_failure(pgchange.caller, text, text, jsonb, text) is 'Note what the attempt on a batch failed on, for its dead letter.';
