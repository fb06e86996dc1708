-- Receiving messages.

-- Wait until no session holds these messages for these consumers, and keep others from receiving them until this transaction
-- ends.
create function mbus.held_back(known mbus.queue, ids bigint[], consumers integer[]) returns void
language plpgsql as $$
begin
    -- Lock in the same order in all sessions, so that two takes of the same messages do not deadlock.
    perform pg_advisory_xact_lock_shared(k)
    from (
        select distinct mbus.part_key(c, mod(i, known.consumers_cnt)::integer) as k from unnest(ids) as i, unnest(consumers) as c
        order by k
    ) as keys;
    perform pg_advisory_xact_lock(k) from (select mbus.message_key(known.id, i) as k from unnest(ids) as i order by k) as keys;
    -- Look for batches only after waiting for the messages. The session that held a message may have claimed it meanwhile, and be
    -- at work on the batch.
    perform pg_advisory_xact_lock_shared(k)
    from (
        select distinct mbus.lock_key(known.qname, c.name, b.slot) as k
        from mbus.apart as a
        join mbus.batch as b on b.number = a.batch
        join mbus.consumer as c on c.id = a.consumer
        where a.consumer = any (consumers) and a.id = any (ids)
        order by k
    ) as keys;
    -- If another worker has adopted the batch of that slot meanwhile, its ack waits for this lock.
    perform from mbus.apart as a where a.consumer = any (consumers) and a.id = any (ids) order by a.consumer, a.id for update;
    -- No session holds the slot of a leased batch, except a transaction that acks it. The lease may last for hours, so refuse
    -- instead of waiting.
    perform pgchange.check_lease(mbus.name_of(c.qname, c.name), b.batch ->> 'id', b.leased_by, b.leased_until)
    from mbus.apart as a
    join mbus.batch as b on b.number = a.batch
    join mbus.consumer as c on c.id = a.consumer
    where a.consumer = any (consumers) and a.id = any (ids) and b.leased_until is not null
      and not exists (
          select from pg_locks as l
          where l.locktype = 'advisory' and l.objsubid = 1 and l.pid = pg_backend_pid() and l.mode = 'ExclusiveLock'
            and (l.classid::bigint << 32 | l.objid::bigint) = mbus.lock_key(c.qname, c.name, b.slot));
end
$$;

-- Delete messages that were taken from those apart, and count them for the batches of this session that had them.
create function mbus.take_apart(ids bigint[], consumers integer[]) returns void
language plpgsql as $$
begin
    with gone as (
        delete from mbus.apart as a where a.id = any (ids) and a.consumer = any (consumers) returning a.batch
    ), taken as (
        select g.batch, count(*) as counted from gone as g where g.batch is not null group by g.batch
    )
    -- If a worker takes messages of its own batch by their ids, its ack covers the other messages. If the ack were refused,
    -- every retry would be refused, too.
    update mbus.batch as b set
        taken = t.counted + case when b.taken_by = pg_current_xact_id() then b.taken else 0 end, taken_by = pg_current_xact_id()
    from taken as t
    where b.number = t.batch and exists (
        select from mbus.consumer as c cross join lateral mbus.held_slots(c.qname, c.name) as h
        where c.id = b.consumer and h.slot = b.slot and h.mine);
end
$$;

-- Receive a message by its id for a consumer, or remove it for all if c is null. Waits for sessions that hold it.
create function mbus.take_for(known mbus.queue, msgiid text, c integer) returns mbus.qt_model
language plpgsql as $$
declare
    number bigint;
    message mbus.qt_model;
    ids bigint[] := array(select e.id from mbus.entries(known, msgiid) as e where not e.gone and (c is null or c = any (e.wanted)));
begin
    perform pgchange.check_isolation();
    if ids = '{}' then
        return null;
    end if;
    perform mbus.held_back(known, ids, case when c is null
        then array(select x.id from mbus.consumer as x where x.qname = known.qname) else array[c] end);
    ids := array(
        select e.id from mbus.entries(known, msgiid) as e
        where not e.gone and e.id = any (ids)
          and (c is null or c = any (e.wanted) and c <> all (e.received)));
    if ids = '{}' then
        return null;
    end if;
    number := ids[1];
    message := mbus.message_of(known, number, (select e.received from mbus.entries(known, msgiid) as e where e.id = number));
    insert into mbus.receipt (queue, id, consumer, pending)
    select known.id, e.id, c, array(select w from unnest(e.wanted) as w where w <> all (e.received))
    from mbus.entries(known, msgiid) as e where e.id = any (ids) and (c is null or e.id = number);
    perform mbus.take_apart(
        case when c is null then ids else array[number] end,
        case when c is null then array(select x.id from mbus.consumer as x where x.qname = known.qname) else array[c] end);
    perform mbus.wake_up(
        case when c is null then array(select x.id from mbus.consumer as x where x.qname = known.qname) else array[c] end, ids);
    message.headers := message.headers || hstore('destination', known.qname);
    return message;
end
$$;

-- Create the functions consume_, consumen_ and take_from_<queue>_by_<consumer>.
create function mbus.make_consume_functions(known mbus.queue, c mbus.consumer) returns void
language plpgsql as $$
declare
    -- The maker of a temporary consumer may lose the rights by which it was made, but keeps the grant on the function. So check
    -- these rights, too.
    asks boolean := known.is_roles_security_model or c.temporary;
    guard text := case when asks
                       then mbus.guard('consume', known.qname, c.name) else '' end;
    options text := mbus.as_receiver('language plpgsql security definer');
    -- SQL: the columns of l, a message of the log.
    columns text := format($sql$l.id, l.added::timestamp, coalesce(l.iid, %1$L || l.id), l.delayed_until::timestamp, l.expires::timestamp,
               null::integer[], l.headers || %2$L::hstore, l.properties, l.data$sql$, known.qname || '.', hstore('destination', known.qname)::text);
    message text := format($sql$
        select %1$s
        from mbus.%2$I as l$sql$, columns, 'log$' || known.qname);
    trimming text := format($body$
        if random() * 1000 < counted then
            perform mbus.trim_sometimes(mbus.queue_named(%L), counted);
        end if;$body$, known.qname);
    quick text := mbus.quick_text(known, c, columns, trimming);
    variables text := case when quick is not null then '
    start mbus.start;
    horizon bigint;
    is_native boolean;
    is_awaited boolean;
    moment timestamptz;
    is_first boolean;
    held integer;
    is_raised boolean;
    bound bigint;' end;
    single text := format($body$
declare
    amt constant integer := 1;
    ids bigint[];
    counted integer := 1;%6$s
begin
    %4$s%5$s
    ids := array[mbus.single$%2$s()];
    if ids[1] is not null then
        return query%3$s
        where l.id = ids[1];%1$s
    end if;
end
$body$, trimming, c.id, message, guard, quick, variables);
    many text := format($body$
declare
    ids bigint[];
    counted integer;%6$s
begin
    %4$s%5$s
    ids := mbus.claim_ids(mbus.queue_named(%7$L), %2$s, amt);
    counted := cardinality(ids);
    if counted = 0 then
        return;
    end if;
    if ids[counted] - ids[1] + 1 = counted then
        return query%3$s
        where l.id >= ids[1] and l.id <= ids[counted]
        order by l.id;
    else
        return query%3$s
        where l.id = any (ids)
        order by l.id;
    end if;%1$s
end
$body$, trimming, c.id, message, guard, quick, variables, known.qname);
begin
    perform mbus.place_asking(asks, mbus.function_name('consumen', known.qname, c.name), 'amt integer', 'setof mbus.qt_model', options, many,
        format('Receive up to amt messages of queue %s for consumer %s.', known.qname, c.name));
    perform mbus.place_asking(asks, mbus.function_name('consume', known.qname, c.name), '', 'setof mbus.qt_model', options, single,
        format('Receive a message of queue %s for consumer %s.', known.qname, c.name));
    perform mbus.place('receive$' || c.id, '', 'setof mbus.qt_model', options, case when guard = '' then single else replace(single, guard, '') end,
        format('Receive a message of queue %s for consumer %s, for a caller that a view admits.', known.qname, c.name));

    perform mbus.place_asking(asks, mbus.function_name('take_from', known.qname, c.name), 'msgid text', 'mbus.qt_model',
        'language plpgsql security definer',
        format($body$
begin
    %1$s
    return mbus.take_for(mbus.queue_named(%2$L), msgid, %3$s);
end
$body$, guard, known.qname, c.id),
        format('Receive a message of queue %s by its iid for consumer %s. Waits for sessions that hold it.', known.qname, c.name));
end
$$;

create function mbus.consume(qname text, cname text default 'default') returns setof mbus.qt_model
language plpgsql as $$
declare
    function text := pg_catalog.format('mbus.%I', pg_catalog.concat('consume_', qname, '_by_', coalesce(cname, 'default')));
    received record;
begin
    if pg_catalog.to_regproc(function) is not null then
        -- A call in the select list is planned faster than in the from clause.
        execute pg_catalog.format('select %s() as message', function) into received;
        if (received.message).id is not null then
            return next received.message;
        end if;
    elsif pg_catalog.starts_with(qname, 'temp.') then
        return query select * from mbus.consume_temp(qname);
    elsif pg_catalog.to_regprocedure(pg_catalog.format('mbus.%I(text)', pg_catalog.concat('peek_', qname))) is null then
        raise undefined_object using
            message = pg_catalog.format('Queue %s does not exists', qname), hint = 'mbus.create_queue() makes a queue';
    else
        raise undefined_object using
            message = pg_catalog.format('unknown consumer:%s', cname), hint = 'mbus.create_consumer() makes a consumer';
    end if;
end
$$;
comment on function mbus.consume(text, text) is 'Receive a message of a queue, also of a temporary queue, for a consumer.';

create function mbus_sealed.take(caller pgchange.caller, msgiid text) returns mbus.qt_model
language plpgsql security definer as $$
declare
    known mbus.queue := mbus.queue_of(msgiid);
    message mbus.qt_model;
begin
    if known.id is not null then
        perform mbus.demand(caller, 'consume', known.qname);
        message := mbus.take_for(known, msgiid, null);
    end if;
    if message.id is null and mbus.is_admin(caller) then
        delete from mbus.dmq as d where d.id = (select min(x.id) from mbus.dmq as x where x.iid = msgiid)
        returning d.id, d.added, d.iid, d.delayed_until, d.expires, d.received, d.headers, d.properties, d.data into message;
    end if;
    if message.id is null then
        delete from mbus.tempq as t where t.iid = msgiid
        returning t.id, t.added, t.iid, t.delayed_until, t.expires, t.received, t.headers, t.properties, t.data into message;
    end if;
    return message;
end
$$;
comment on function mbus_sealed.take(pgchange.caller, text) is
    'Remove a message by its id for every consumer, and return it; null if there is none. Its delay and expiry do not matter. '
    'Waits for sessions that hold it.';

create function mbus_sealed.retry_faults(caller pgchange.caller, qname text, cname text default 'default') returns bigint
language plpgsql security definer
set timezone = 'UTC'
as $$
declare
    known mbus.queue := mbus.queue_named(qname);
    c mbus.consumer := mbus.consumer_named(qname, cname);
    failed bigint[];
    matching bigint[];
    others bigint[];
begin
    perform mbus.demand(caller, 'consume', qname, cname);
    failed := array(select a.id from mbus.apart as a where a.consumer = c.id and a.failed);
    execute format(
        'select coalesce(array_agg(m.id) filter (where v.matches), ''{}''), coalesce(array_agg(m.id) filter (where not v.matches), ''{}'') '
        'from mbus.%I as m cross join lateral (select mbus.%I('
        '(m.id, m.added, m.iid, m.delayed_until, m.expires, m.received, m.headers, m.properties, m.data)::mbus.qt_model) as matches offset 0'
        ') as v where m.id = any ($1)',
        'all$' || qname, 'match$' || c.id)
    into matching, others using failed;
    update mbus.apart as a set failed = false where a.consumer = c.id and a.failed and a.id = any (matching);
    perform mbus.reconsider(c.id, matching);
    delete from mbus.apart as a where a.consumer = c.id and a.id = any (others);
    perform mbus.wake_up(array[c.id], others);
    -- Other messages may have been taken, or have expired.
    delete from mbus.fault as f
    where f.qname = known.qname and f.consumer = c.name
      and not exists (select from mbus.apart as a where a.consumer = c.id and a.id = f.message_id and a.failed);
    return cardinality(matching);
end
$$;
comment on function mbus_sealed.retry_faults(pgchange.caller, text, text) is
    'Evaluate a consumer''s selector again for the messages on which it failed. Returns how many match now, and can be received.';
