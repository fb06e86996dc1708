-- Receiving single messages that were found, and raising the level behind them.

-- Receive a message by moving the position of its part to it. The message was found in the snapshot `now`. False if another session
-- has moved that position since, or has taken the message.
create function mbus.settle(queue integer, c integer, start mbus.start, h mbus.head, now pg_snapshot, bound bigint) returns boolean
language plpgsql as $$
declare
    stood mbus.position;
    mine xid8 := pg_current_xact_id();
    open xid8[] := mbus.open_in(now, bound);
begin
    if open = '{}' then
        -- In most cases no other transaction is open. Then a single statement moves the position.
        update mbus.position as p set
            version = p.version + 1, done = h.id, began = case when p.txid = mine then p.began else p.done end,
            began_xids = case when p.txid = mine then p.began_xids else '{}' end,
            began_ids = case when p.txid = mine then p.began_ids else '{}' end, txid = mine
        where p.ctid = (
                select x.ctid from mbus.position as x where x.consumer = c and x.part between h.part and h.part
                order by x.part desc, x.version desc limit 1)
          and p.version = h.version and p.version > start.version and p.late_xids = '{}'
          and start.version >= coalesce((
              select w.version from mbus.position as w where w.consumer = c and w.part between -1 and -1
              order by w.part desc, w.version desc limit 1), 0)
          and not exists (
              select from mbus.receipt as r
              where r.queue = settle.queue and coalesce(r.consumer, 0) = any (array[0, c]) and r.id = h.id);
        if found then
            return true;
        end if;
    end if;
    select p.* into stood from mbus.stands_at(c, h.part) as p;
    if coalesce(stood.version, 0) <> h.version or mbus.was_taken(queue, c, h.id) then
        return false;
    end if;
    perform mbus.keep_apart(
        c, row(array[h.part], start.version, array[h.version], null, null, null, null, null, null)::mbus.standing, h.id, open,
        h.id <= stood.done, array(select x from unnest(stood.late_xids) as x where pg_visible_in_snapshot(x, now) or x = mine), h.id);
    return true;
end
$$;

-- Raise the level of a consumer, so that the search for its next message begins behind the messages that it has received. next:
-- the next message outside of the busy parts. has_received: this transaction has just received a message.
create function mbus.raise_level(
    c integer, start mbus.start, horizon bigint, bound bigint, next mbus.found, busy integer[], has_received boolean
) returns void
language plpgsql as $$
declare
    reached bigint := coalesce(next.heads[1].id - 1, horizon);
    froms bigint[] := '{}';
    late xid8[];
begin
    -- The next message is late, or in a part that was busy. The level can rise only after it is received.
    if reached < start.done or cardinality(busy) > 64 then
        return;
    end if;
    late := mbus.open_in(next.now, bound);
    if busy <> '{}' then
        froms := array(
            select least(coalesce(p.done, 0), f.above)
            from unnest(busy) with ordinality as b(part, n)
            left join lateral mbus.stands_at(c, b.part) as p on true
            left join unnest(start.busy, start.froms) as f(part, above) on f.part = b.part
            order by b.n);
        late := array(
            select unnest(late)
            union select x from unnest(busy) as b(part) cross join mbus.stands_at(c, b.part) as p cross join unnest(p.late_xids) as x);
    end if;
    -- If the level stays at the same place, replace it only by a level with fewer transactions or busy parts to check.
    if reached = start.done and cardinality(late) + cardinality(busy) >= cardinality(start.late_xids) + cardinality(start.busy) then
        return;
    end if;
    delete from mbus.level as l
    where l.ctid = any (array(
        select x.ctid from mbus.level as x
        where x.consumer = c and (x.done <= reached or raise_level.busy = '{}' and x.busy <> '{}') for update skip locked));
    insert into mbus.level (consumer, done, late_xids, busy, froms) values (c, reached, late, busy, froms);
    -- Fold with a probability that grows with the number of receipts. A transaction that has received a message may last long,
    -- and would hold the locks of the fold for as long. So it folds only from 500 receipts on.
    if busy = '{}' and random() * 5000 < reached - coalesce(start.whole, 0) - 500 * has_received::integer then
        perform mbus.fold(c, reached, late, next.now);
    end if;
end
$$;

-- The beginning of a function that receives messages. It receives the next amt messages by receipts, at most 64, and returns
-- them. columns: the columns of l, a message of the log, to return. then_do: code to run after that.
-- The rest of the function runs in four cases. A message apart is due or waits. The next message must be checked by itself. All
-- parts that were busy still are. None of the next 256 messages is free; a batch looks at up to 1,024, so that 16 transactions
-- can hold 64 each.
-- Null if this consumer has a selector, because it may fail, or if its queue is ordered.
create function mbus.quick_text(known mbus.queue, c mbus.consumer, columns text, then_do text) returns text
language plpgsql immutable as $function$
declare
    -- SQL: whether message i has a receipt.
    has_receipt text := format($sql$exists (
                    select from mbus.receipt as r
                    where r.queue = %1$s and coalesce(r.consumer, 0) = any (array[0, %2$s]) and r.id = i.id offset 0)$sql$, known.id, c.id);
    -- SQL: whether message l of the log is for this consumer, and free. A skipped message is not locked; at most its part is
    -- locked, which the holder of the message has locked, too. The lock of the part comes before the positions, because reading
    -- these costs more.
    is_free text := format($sql$
                (l.expires is null or l.expires > clock_timestamp()) and (l.not_for is null or %2$s <> all (l.not_for))
                and case
                    when %%s then false
                    when not l.special and not pg_try_advisory_xact_lock_shared(mbus.part_key(%2$s, mod(l.id, %3$s)::integer)) then false
                    when %%s then false
                    when l.special then true
                    else pg_try_advisory_xact_lock(mbus.message_key(%1$s, l.id)) end$sql$,
        known.id, c.id, known.consumers_cnt);
    went_past text := format('mbus.went_past(%s, mod(l.id, %s)::integer, l.id, l.txid)', c.id, known.consumers_cnt);
begin
    if c.selector is not null or known.ordered_by is not null then
        return null;
    end if;
    return format($body$
    -- Other transactions may receive messages after the statement that finds them and before the statement that inserts the
    -- receipts. The first attempt assumes that all parts have the same position. If they do not, it inserts nothing, and the
    -- second attempt reads the position of each part.
    for attempt in 1..4 loop
        exit when (amt between 1 and 64 and current_setting('transaction_isolation') = 'read committed') is not true;
        horizon := coalesce(pg_sequence_last_value(%3$L), 0);
        select s.* into start from mbus.starts_at(%2$s) as s;
        -- In most cases nothing was posted since the last call.
        if horizon <= start.done and start.late_xids = '{}' and start.busy = '{}' and not start.has_apart then
            return;
        end if;
        if start.busy <> '{}' then
            -- The parts in busy were locked when the level was written. If they are all still locked, go on with the rest of
            -- the function. Otherwise begin at the messages in these parts, which the level left out.
            exit when not exists (
                select from unnest(start.busy) as b(part) where pg_try_advisory_xact_lock_shared(mbus.part_key(%2$s, b.part)));
            -- Begin at or above the position of all parts, because a fold has deleted the receipts below it. Add the late
            -- transactions of that position, because the level may not know those in a part that was busy.
            start.done := least(start.done, greatest(start.whole, (select min(b.done) from unnest(start.froms) as b(done))));
            start.late_xids := array(select unnest(start.late_xids) union select unnest(start.whole_xids));
            start.busy := '{}';
        end if;
        if start.has_apart then
            moment := clock_timestamp();
            exit when exists (
                    select from mbus.apart as a
                    where a.consumer = %2$s and a.wait_consumer is null and not a.failed and a.due <= moment)
                or (select true from mbus.apart as a where a.consumer = %2$s and a.wait_consumer is not null
                    order by a.wait_consumer, a.wait_part, a.wait_id limit 1);
        end if;
        -- If this transaction has written nothing yet, these are its first messages.
        is_first := pg_current_xact_id_if_assigned() is null;
        if not is_first then
            held := coalesce(nullif(current_setting('mbus.held', true), ''), '0');
            exit when held + amt > 64;
        end if;
        -- An id is negative if the message must be checked by itself.
        ids := '{}';
        if start.late_xids <> '{}' then
            ids := array(
                select case when l.special then -l.id else l.id end
                from unnest(start.late_xids) as e(xid)
                cross join lateral (
                    select l.id, l.special from mbus.%4$I as l
                    where l.txid = e.xid and l.id + 0 <= start.done and %6$s
                    order by l.txid, l.id + 0
                    limit amt
                ) as l
                where pg_visible_in_snapshot(e.xid, pg_current_snapshot()) or e.xid = pg_current_xact_id_if_assigned()
                limit amt);
        end if;
        -- Read in one query: the messages, the result of mbus.is_native(), and whether any message waits for this consumer. An
        -- aggregate would cost more than the rest of the query.
        select ids || array(
                   select case when l.special then -l.id else l.id end
                   from mbus.%4$I as l
                   where l.id > start.done and l.id <= least(horizon, start.done + 256 * attempt) and %5$s
                   order by l.id
                   limit amt - cardinality(ids)),
               array(select pgchange.is_native(o.cluster, o.written_in, o.xmin, o.written_as, o.tableoid) from mbus.origin as o) = '{t}',
               exists (select from mbus.apart as a where a.wait_consumer = %2$s)
        into ids, is_native, is_awaited;
        if ids <> '{}' and (attempt > 1 or start.late_xids <> '{}') then
            -- The messages are locked now, so read the positions again: another transaction may have received some of them.
            ids := array(
                select i.id from unnest(ids) as i(id) cross join lateral (select x.* from mbus.%4$I as x where x.id = abs(i.id) offset 0) as l
                where not %9$s);
            continue when ids = '{}';
        end if;
        exit when not is_native or ids[1] < 0;
        if ids = '{}' and horizon > start.done + 256 * attempt then
            -- A claim of many messages would lock whole parts, and so keep others from their messages. So look farther first,
            -- and raise the level, because these messages may have been received.
            exit when amt = 1 or attempt = 4;
            if attempt = 1 then
                bound := mbus.bound_now();
                perform mbus.raise_level(%2$s, start, horizon, bound, mbus.find$%2$s(start, horizon, '{}', 1), '{}', false);
            end if;
            continue;
        end if;
        if amt > 1 and 0 > any (ids) then
            -- The next call begins with the first message that must be checked by itself.
            ids := array(select i from unnest(ids) as i where i > 0);
        end if;
        -- A higher level spares the next calls the messages that this call skipped. Raising it costs as much as skipping some
        -- hundred messages. The total cost is least if it is raised about every 20 messages.
        is_raised := (ids[1] > start.done + 16
            or ids = '{}' and (horizon > start.done or not start.late_xids <@ mbus.open_in(pg_current_snapshot(), 0)))
            and random() < 0.25;
        if is_raised then
            -- Read the bound before the receipts are written: if this transaction has just got its id, the id is such a bound.
            bound := mbus.bound_now();
        end if;
        if ids <> '{}' then
            return query
            with received as (
                insert into mbus.receipt (queue, id, consumer)
                select %7$s, i.id, %2$s from unnest(ids) as i(id)
                where not %10$s and (
                    attempt > 1
                    or not exists (select from mbus.position as p where p.consumer = %2$s and p.version > start.version))
                returning id
            )
            select %8$s
            from received as r
            cross join lateral (select x.* from mbus.%4$I as x where x.id = r.id offset 0) as l
            order by l.id;
            get diagnostics counted = row_count;
            continue when counted = 0;
            if not is_first or counted > 1 then
                perform set_config('mbus.held', (coalesce(held, 0) + counted)::text, true);
            end if;
            if is_awaited then
                perform mbus.wake_up(array[%2$s], ids);
            end if;%1$s
        end if;
        if is_raised then
            perform mbus.raise_level(%2$s, start, horizon, bound, mbus.find$%2$s(start, horizon, '{}', 1), '{}', ids <> '{}');
        end if;
        return;
    end loop;$body$,
        then_do, c.id, format('mbus.%I', 'seq$' || known.qname), 'log$' || known.qname,
        format(is_free, format($sql$
                    l.id = any (array(
                        select r.id from mbus.receipt as r
                        where r.queue = %1$s and coalesce(r.consumer, 0) = any (array[0, %2$s])
                          and r.id > start.done and r.id <= start.done + 256 * attempt))$sql$, known.id, c.id), 'attempt > 1 and ' || went_past),
        format(is_free, replace(has_receipt, 'i.id', 'l.id'), went_past), known.id, columns, went_past, has_receipt);
end
$function$;

-- Create the function by which a consumer receives a single message. Claims of other messages of the same part do not wait for
-- it.
create function mbus.make_single_function(known mbus.queue, c mbus.consumer) returns void
language plpgsql as $$
begin
    perform mbus.place('single$' || c.id, '', 'bigint', 'language plpgsql',
        format($body$
#variable_conflict use_variable
declare
    held integer;
    start mbus.start;
    horizon bigint;
    bound bigint;
    free bigint[];
    found mbus.found;
    heads mbus.head[];
    h mbus.head;
    busy integer[] := '{}';
    others integer[];
    -- In most cases one of the first few messages is free.
    few integer := 4;
    has_whole boolean;
    is_vain boolean;
    number bigint;
begin
    if current_setting('transaction_isolation') not in ('read committed', 'read uncommitted') then
        perform pgchange.check_isolation();
    end if;
    <<looking>>
    loop
        bound := null;
        horizon := coalesce(pg_sequence_last_value(%3$L), 0);
        select s.* into start from mbus.starts_at(%2$s) as s;
        -- In most cases nothing was posted since the last call.
        if horizon <= start.done and start.late_xids = '{}' and start.busy = '{}' and not start.has_apart then
            return null;
        end if;
        -- This is the query of mbus.is_native(). It is written out, because calling the function for each message would cost
        -- more than the query.
        if (
            select bool_and(pgchange.is_native(o.cluster, o.written_in, o.xmin, o.written_as, o.tableoid)) from mbus.origin as o
        ) is not true
        then
            perform mbus.check_origin(mbus.queue_named(%1$L));
        end if;
        held := coalesce(nullif(current_setting('mbus.held', true), ''), '0');
        found := mbus.find$%2$s(start, horizon, busy, few);
        heads := found.heads;
        if start.has_apart then
            others := array(select p from unnest(%4$L::integer[]) as p where p <> all (busy));
            free := mbus.set_free(%2$s, others, 2 * few, heads = '{}' or random() < 0.1);
            heads := array(select x from unnest(heads || mbus.heads_apart(%2$s, others, free, 2 * few)) as x order by x.id);
        end if;
        foreach h in array heads loop
            continue when h.part = any (busy);
            -- After this many messages, a transaction locks whole parts, because the number of locks is limited.
            has_whole := held >= 64 and mbus.take_part(%2$s, h.part, true);
            if not has_whole and not mbus.take_part(%2$s, h.part, false) then
                busy := busy || h.part;
                continue;
            end if;
            if h.is_plain and (has_whole or pg_try_advisory_xact_lock(mbus.message_key(%5$s, h.id))) then
                bound := mbus.bound_now();
                continue looking when not mbus.settle(%5$s, %2$s, start, h, found.now, bound);
                number := h.id;
            else
                number := mbus.claim_from(mbus.queue_named(%1$L), %2$s, array[h.part], free, has_whole);
            end if;
            exit looking when number is not null;
            busy := busy || h.part;
        end loop;
        exit when heads = '{}';
        few := 2 * %6$s;
    end loop;
    if number is not null and not has_whole then
        perform set_config('mbus.held', (held + 1)::text, true);
    end if;
    -- A long stretch may have no message for this consumer. Then move its positions behind it from time to time, so that the
        -- log can be trimmed.
    if number is null and random() * 1000 < horizon - start.done then
        number := mbus.claim_from(
            mbus.queue_named(%1$L), %2$s, array(select p from unnest(%4$L::integer[]) as p where mbus.take_part(%2$s, p, false)), '{}', false);
    end if;
    -- A call without a message is likely to be followed by more. A higher level spares them the messages that were read, and
    -- the transactions that have ended.
    is_vain := number is null and busy = '{}'
        and (horizon > start.done or start.busy <> '{}' or not start.late_xids <@ mbus.open_in(found.now, 0));
    -- A higher level spares the next calls the messages that this call skipped.
    if (is_vain or coalesce(number, horizon) > start.done + 8) and random() < 0.25 then
        bound := coalesce(bound, mbus.bound_now());
        perform mbus.raise_level(%2$s, start, horizon, bound, mbus.find$%2$s(start, horizon, busy, 1), busy, number is not null);
    end if;
    return number;
end
$body$, known.qname, c.id, format('mbus.%I', 'seq$' || known.qname), known.parts, known.id, known.consumers_cnt),
        format(
            'Receive a single message of queue %s for consumer %s: the oldest that no session holds, locked by itself. Returns '
            'its number in the log.',
            known.qname, c.name),
        pinned => false);
end
$$;
