-- The feed of a consumer: batches that are claimed, stored with their attempts, read in parts, and received by the ack.
--
-- A claim is committed before its batch is processed. Its messages stay apart for the consumer, so no other claim hands them out,
-- and they count as received only after the ack. Each worker of a consumer holds a lock, its slot, and a batch belongs to the
-- slot of its worker. If no session holds the slot of a batch, the next claim of any worker gets this batch.

-- Take a free slot among the 64 of a consumer's feed, until the transaction ends. This reads no table, so that the transaction
-- holds no other lock.
create function mbus.take_lock(qname text, cname text) returns boolean
language plpgsql security definer as $$
begin
    for slot in 0..63 loop
        if pg_try_advisory_xact_lock(mbus.lock_key(qname, cname, slot)) then
            return true;
        end if;
    end loop;
    return false;
end
$$;

-- Whether any worker of a consumer's feed is at work.
create function mbus.locked(qname text, cname text) returns boolean
language sql stable security definer as $$
    select exists (select from mbus.held_slots(qname, cname))
$$;

-- The consumer of a feed. Raises an error if the caller may not consume by it.
create function mbus.feed_consumer(caller name, qname text, cname text) returns mbus.consumer
language plpgsql stable as $$
declare
    c mbus.consumer := (select x from mbus.consumer as x where x.qname = feed_consumer.qname and x.name = cname);
begin
    if c.id is null then
        raise exception using errcode = 'PC002',
            message = case when exists (select from mbus.queue as q where q.qname = feed_consumer.qname)
                           then format('unknown consumer:%s', cname) else format('Unknown queue:%s', qname) end,
            hint = 'mbus.create_queue() and mbus.create_consumer() make them, mbus.queue and mbus.consumer list them';
    end if;
    perform mbus.demand(caller, 'consume', qname, cname);
    return c;
end
$$;

-- Take a slot of a consumer's feed by which the caller may consume, unless this session already has a slot.
create function mbus.take_idle(caller pgchange.caller, qname text, cname text) returns void
language plpgsql as $$
begin
    perform mbus.feed_consumer(caller, qname, cname);
    perform pgchange.check_taken(
        mbus.name_of(qname, cname),
        exists (select from mbus.held_slots(take_idle.qname, take_idle.cname) as h where h.mine) or mbus.take_lock(qname, cname));
end
$$;

-- The consumer, the slot that this session holds, and a version, which changes with each claim of new messages. Null if there is
-- no consumer of this name.
create function mbus.position(qname text, cname text) returns jsonb
language plpgsql stable security definer as $$
begin
    return (
        select jsonb_build_object(
            'schema', (select max(i.version) from mbus.installed as i), 'consumer', c.id,
            'slot', (select min(h.slot) from mbus.held_slots("position".qname, "position".cname) as h where h.mine),
            'version', (select sum(p.version) from unnest(q.parts) as g(part) cross join mbus.stands_at(c.id, g.part) as p))
        from mbus.consumer as c join mbus.queue as q using (qname) where c.qname = "position".qname and c.name = "position".cname);
end
$$;

-- Whether a batch is leased.
create function mbus.is_leased(mark mbus.batch) returns boolean
language sql volatile as $$
    select coalesce(mark.leased_until > pg_catalog.clock_timestamp(), false)
$$;

-- The batches of a consumer that were claimed and are not at work. The batch of the given slot comes first.
create function mbus.pending(qname text, c mbus.consumer, slot integer) returns setof mbus.batch
language plpgsql stable as $$
begin
    return query
        select b.* from mbus.batch as b
        where b.consumer = c.id
          and (b.slot = pending.slot or b.slot not in (select h.slot from mbus.held_slots(pending.qname, c.name) as h))
          and not mbus.is_leased(b)
        order by b.slot is distinct from pending.slot, b.number;
end
$$;

-- Dissolve a batch, some of whose messages were taken or deleted: return the others to the consumer.
create function mbus.dissolve(known mbus.queue, mark mbus.batch) returns void
language plpgsql as $$
declare
    ids bigint[];
begin
    if known.ordered_by is not null then
        ids := array(
            select a.id from mbus.apart as a
            where a.consumer = mark.consumer and a.batch = mark.number and a.id between mark.lowest and mark.highest);
    end if;
    execute format(
        'update mbus.apart as a set batch = null, due = ''-infinity'', '
        'expires = (select l.expires from mbus.%I as l where l.id = a.id) '
        'where a.consumer = $1 and a.batch = $2 and a.id between $3 and $4', 'log$' || known.qname)
    using mark.consumer, mark.number, mark.lowest, mark.highest;
    delete from mbus.batch as b where b.number = mark.number;
    if known.ordered_by is not null then
        perform mbus.reconsider(mark.consumer, ids);
    end if;
end
$$;
