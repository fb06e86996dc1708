-- The feed of a consumer: batches that are claimed, kept with their attempts, read in parts, and received at the ack.
--
-- A claim is committed before its batch is processed: its messages stay apart for the consumer, so no other hands them out, and
-- they count as received only when the batch is acked. Each worker of a consumer holds one lock, its slot; a batch belongs to
-- the slot of its worker. A batch whose slot nobody holds is the next that is claimed, whoever claims.

-- Take one of the 64 places that workers of a consumer's feed have, until the transaction ends. It reads no table, so that nothing
-- but the lock is held.
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

-- The consumer of a feed, by whom the caller may consume; any other is refused.
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

-- Take a lock of a consumer's feed by which the caller may consume, unless this session holds one.
create function mbus.take_idle(caller pgchange.caller, qname text, cname text) returns void
language plpgsql as $$
begin
    perform mbus.feed_consumer(caller, qname, cname);
    perform pgchange.check_taken(
        mbus.name_of(qname, cname),
        exists (select from mbus.held_slots(take_idle.qname, take_idle.cname) as h where h.mine) or mbus.take_lock(qname, cname));
end
$$;

-- A consumer, the slot that this session holds, and version, which is another after each claim of new messages; null where there is
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

-- The batches of a consumer that were claimed and are not at work, that of a slot first.
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

-- Hand the messages of a batch back to its consumer: some of them were taken from it, or deleted, so it is no longer the same.
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
