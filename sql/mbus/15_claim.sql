-- The parts that a claim locks, and how. Locks of other transactions are skipped, never waited for.
--
-- The locks of a consumer's messages, held until the transaction ends. Each row takes them from left to right:
--
--                          part              turn        message            slot             rows of mbus.apart
--   a claim of many        exclusive                                                         for update, skips
--   a claim of one         shared            exclusive   exclusive                           for update, skips
--   ... of the 65th on     exclusive                                                         for update, skips
--   a claim by receipts    shared                        exclusive
--   a fold of receipts     shared, all       exclusive, all
--   take, take_from        shared, waits                 exclusive, waits   shared, waits    for update, waits
--   a worker of a feed                                                      exclusive        deletes them at its ack
--   drop_consumer          exclusive, waits                                                  deletes them
--
-- There is an exception: a claim of one locks the row of a message apart before the message. It waits for neither.
--
-- The transaction of a receipt moves no position. So other transactions can receive the other messages of its part, one at a time
-- or in batches of up to 64. A claim of one message that moves a position has the turn of the part, so the next claim goes to
-- another part. A fold moves all positions.

-- Lock a part for a consumer: as a whole, or shared for a single message. Returns false if another transaction holds it, and
-- never waits.
create function mbus.take_part(c integer, part integer, whole boolean) returns boolean
language plpgsql as $$
begin
    if whole then
        return pg_try_advisory_xact_lock(mbus.part_key(c, part));
    end if;
    return pg_try_advisory_xact_lock_shared(mbus.part_key(c, part)) and pg_try_advisory_xact_lock(mbus.turn_key(c, part));
end
$$;

-- A fold: replace the positions of all parts, and the receipts up to an id, by one position at this id. reached and open are
-- the id and the open transactions of a level, which was found in the snapshot now. Do nothing if another transaction is moving
-- a position. The locks that keep others from moving a position last until this transaction ends.
create function mbus.fold(c integer, reached bigint, open xid8[], now pg_snapshot) returns void
language plpgsql as $$
declare
    known mbus.queue := (select q from mbus.queue as q join mbus.consumer as x using (qname) where x.id = c);
    stands mbus.standing;
begin
    begin
        if exists (select from unnest(known.parts) as p where not mbus.take_part(c, p, false)) then
            raise lock_not_available;
        end if;
        stands := mbus.stand(c, known.consumers_cnt, known.parts);
        -- A fold needs every position to be at or below the level, because the level does not know which messages above it are
        -- received. It also needs that this transaction has moved no position: mbus.got_now() could not tell messages received
        -- by that position from those of others.
        if reached < stands.high or exists (
            select from (
                select distinct case when g.version = stands.whole then -1 else g.part end as part, g.version
                from unnest(stands.parts, stands.versions) as g(part, version)
            ) as g
            cross join lateral (
                select p.txid from mbus.position as p where p.consumer = c and p.part = g.part and p.version = g.version offset 0
            ) as p
            where p.txid = pg_current_xact_id_if_assigned())
        then
            raise lock_not_available;
        end if;
    exception when lock_not_available then
        -- The rollback of this block has released the locks that were taken.
        return;
    end;
    perform mbus.keep_joined(c, stands, reached, open, reached);
    -- Keep some receipts. Receipts that the snapshot did not see may be of messages of open transactions. Receipts of this
    -- transaction are needed to put its messages back. Messages apart with a receipt would be handed out again.
    delete from mbus.receipt as r
    where r.queue = known.id and coalesce(r.consumer, 0) = c and r.id > stands.low and r.id <= reached
      and r.txid <> pg_current_xact_id() and pg_visible_in_snapshot(r.txid, now)
      and not exists (select from mbus.apart as a where a.consumer = c and a.id = r.id offset 0);
end
$$;

-- The parts that may have messages for a consumer, the part with the oldest message first. free is the result of
-- mbus.set_free(), or null if it was not called.
create function mbus.parts_at(
    known mbus.queue, c integer, among integer[], amt integer, most integer, thorough boolean,
    out parts integer[], out free bigint[]
)
language plpgsql as $$
declare
    stands mbus.standing;
    seen mbus.seen;
    upto bigint := coalesce(pg_sequence_last_value(known.seq), 0);
begin
    -- If there are many messages behind the position, every part is likely to have some.
    if amt > 1 and upto >= 4 * known.consumers_cnt
        + (select p.done from mbus.position as p where p.consumer = c order by p.version desc limit 1)
    then
        parts := among;
        return;
    end if;
    stands := mbus.stand(c, known.consumers_cnt, among);
    seen := mbus.look(known, c, stands, 9223372036854775807, most);
    free := mbus.set_free(c, among, greatest(amt, most), thorough or seen.ids = '{}');
    parts := array(
        select h.part from (
            select mod(abs(i), known.consumers_cnt)::integer as part, abs(i) as id from unnest(seen.ids) as i
            union all
            (select a.part, a.id from mbus.apart as a
             where a.consumer = c and a.wait_consumer is null and not a.failed and a.due = '-infinity'
               and a.part = any (among)
             order by a.id limit most)
            union all
            select (a.message).part, (a.message).id from mbus.apart_at(c, free) as a
        ) as h
        group by h.part order by min(h.id));
    -- A long stretch of the log has no message for this consumer. Move the positions behind it, so that it is not read again.
    if parts = '{}' and upto > stands.low + 1000 then
        parts := among;
    end if;
end
$$;

-- Whether another session took a message for a consumer. Receipts of this transaction do not count.
create function mbus.was_taken(queue integer, c integer, id bigint) returns boolean
language plpgsql stable as $$
begin
    return exists (
        select from mbus.receipt as r
        where r.queue = was_taken.queue and r.id = was_taken.id
          and (r.consumer is null or r.consumer = c and r.txid is distinct from pg_current_xact_id_if_assigned()));
end
$$;

-- The next single message in parts that a consumer has locked; null if there is none. The message gets a lock of its own unless
-- its part is locked as a whole.
create function mbus.claim_from(known mbus.queue, c integer, parts integer[], free bigint[], has_whole boolean) returns bigint
language plpgsql as $$
declare
    ids bigint[];
begin
    loop
        ids := mbus.from_apart(known, c, parts, 1, free);
        if ids = '{}' then
            ids := mbus.from_log(known, c, parts, 1);
        else
            perform mbus.receive_apart(known, c, ids);
        end if;
        if ids = '{}' or has_whole then
            return ids[1];
        end if;
        -- Each message is checked by a new statement, which sees whether the session that took it has committed.
        if not pg_try_advisory_xact_lock(mbus.message_key(known.id, ids[1])) then
            -- Another session is taking the message and may roll back. So set the message apart, to be checked again soon.
            execute format(
                'insert into mbus.apart (consumer, id, part, due, expires, key) '
                'select $1, l.id, $2, clock_timestamp() + interval ''20 ms'', l.expires, %s from mbus.%I as l where l.id = $3 '
                'on conflict do nothing', mbus.key_of(known, 'l'), 'log$' || known.qname)
            using c, mod(ids[1], known.consumers_cnt)::integer, ids[1];
        elsif not mbus.was_taken(known.id, c, ids[1]) then
            return ids[1];
        end if;
        -- Delete the receipt that this call has written. The other session's receipt stays.
        delete from mbus.receipt as r
        where r.queue = known.id and r.consumer = c and r.id = ids[1] and r.txid = pg_current_xact_id();
    end loop;
end
$$;

-- Receive up to amt messages for a consumer. Returns their ids, in order.
create function mbus.claim_ids(known mbus.queue, c integer, amt integer) returns bigint[]
language plpgsql as $$
declare
    prospect record;
    remaining integer[] := known.parts;
    parts integer[] := '{}';
    ids bigint[];
    aside bigint[];
begin
    if amt is null or amt < 1 then
        raise invalid_parameter_value using message = format('%s messages cannot be consumed', amt),
            hint = 'give a number of at least 1';
    end if;
    perform pgchange.check_isolation();
    perform mbus.check_origin(known);
    while amt > 1 and parts = '{}' and remaining <> '{}' loop
        prospect := mbus.parts_at(known, c, remaining, amt, 2 * known.consumers_cnt, random() < 0.1);
        exit when prospect.parts = '{}';
        parts := array(select p from unnest(prospect.parts) as p where pg_try_advisory_xact_lock(mbus.part_key(c, p)));
        remaining := array(select p from unnest(remaining) as p where p <> all (prospect.parts));
    end loop;
    if parts = '{}' then
        -- Other transactions hold messages of every part, and may go on doing so. So receive a single message, which needs no
        -- whole part.
        execute format('select array_remove(array[mbus.%I()], null)', 'single$' || c) into ids;
    else
        aside := mbus.from_apart(
            known, c, parts, amt, coalesce(prospect.free, mbus.set_free(c, parts, greatest(amt, 1000), random() < 0.1)));
        if aside = '{}' then
            return mbus.from_log(known, c, parts, amt);
        elsif cardinality(aside) < amt then
            ids := mbus.from_log(known, c, parts, amt - cardinality(aside));
        end if;
        -- Receive the messages apart only after the log was read. Otherwise a message of the log that waits for one of them
        -- would count as ready, and be in the same batch.
        perform mbus.receive_apart(known, c, aside);
        ids := array(select unnest(aside) union select unnest(ids) order by 1);
    end if;
    return ids;
end
$$;
