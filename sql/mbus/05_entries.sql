-- The messages in a queue: those that a consumer is still to receive, and those that no selector matches.

-- Whether a position has passed a message.
create function mbus.passed(id bigint, txid xid8, done bigint, late_xids xid8[], late_ids bigint[]) returns boolean
language sql immutable as $$ select id <= done and coalesce(id <= late_ids[array_position(late_xids, txid)], true) $$;

-- The position of a consumer in each part.
create function mbus.dones(consumer integer) returns bigint[]
language sql stable as $$
    select array(
        select p.done
        from unnest((
            select q.parts from mbus.consumer as c join mbus.queue as q using (qname) where c.id = dones.consumer)) as g(part)
        left join mbus.stands_at(dones.consumer, g.part) as p on true
        order by g.part)
$$;

-- The transactions that were still open when a consumer's position passed their messages, for the consumers of a queue.
create function mbus.lates(queue text) returns table (consumer integer, part integer, xid xid8, upto bigint)
language sql stable rows 10 as $$
    select c.id, g.part, l.xid, l.upto
    from mbus.queue as q
    join mbus.consumer as c using (qname)
    cross join unnest(q.parts) as g(part)
    cross join mbus.stands_at(c.id, g.part) as p
    cross join unnest(p.late_xids, p.late_ids) as l(xid, upto)
    where q.qname = lates.queue
$$;

-- The SQL join that adds m.message to l, a message of the log. It has the form for consumers, or with to_match the form for
-- selectors, with times in UTC.
create function mbus.as_message(known mbus.queue, to_match boolean default false) returns text
language sql immutable as $$
    select format($sql$
        cross join lateral (
            select row(l.id, l.added%1$s, coalesce(l.iid, %2$L || l.id), l.delayed_until%1$s, l.expires%1$s, null,
                       l.headers, l.properties, l.data)::mbus.qt_model as message
        ) as m$sql$, case when to_match then ' at time zone ''UTC''' else '::timestamp' end, known.qname || '.')
$$;

-- The SQL joins that add w.wanted to l, a message of the log. w.wanted is the array of the consumers that are to receive the
-- message.
create function mbus.wanted_by(known mbus.queue) returns text
language plpgsql stable as $$
begin
    return mbus.as_message(known, to_match => true) || format($sql$
        cross join lateral (select array_remove(array[%s]::integer[], null) as wanted offset 0) as w$sql$, (
            select string_agg(format(
                'case when (l.not_for is null or %1$s <> all (l.not_for)) and %2$s then %1$s end', c.id,
                case when c.selector is null then 'true' else format('coalesce(mbus.%I(m.message), true)', 'match$' || c.id) end),
                ', ' order by c.id)
            from mbus.consumer as c where c.qname = known.qname));
end
$$;

-- Whether a consumer's selector matches a message, or fails on it. For few consumers, this is cheaper than a query that calls
-- each function by name.
create function mbus.matches(c integer, message mbus.qt_model) returns boolean
language plpgsql stable as $$
declare
    verdict boolean;
begin
    execute format('select coalesce(mbus.%I($1), true)', 'match$' || c) into verdict using message;
    return verdict;
end
$$;

-- Which of these consumers have received a message. The result is the same as that of the view of all messages. A query that
-- needs only the first row does not evaluate the others.
create function mbus.reception(queue integer, consumers integer[], part integer, id bigint, txid xid8)
returns table (consumer integer, received boolean)
language sql stable as $$
    -- Without offset 0, a plan could hash all messages apart, which costs more with each of them.
    select c,
           exists (
               select from mbus.stands_at(c, part) as p
               where mbus.passed(reception.id, reception.txid, p.done, p.late_xids, p.late_ids))
           and not exists (select from mbus.apart as a where a.consumer = c and a.id = reception.id offset 0)
           or exists (
               select from mbus.receipt as r
               where r.queue = reception.queue and coalesce(r.consumer, 0) = c and r.id = reception.id offset 0)
    from unnest(consumers) as c
$$;

-- Create the functions behind mbus.entries() and mbus.awaited() for a queue.
create function mbus.make_entries_function(known mbus.queue) returns void
language plpgsql as $$
declare
    options text := 'language plpgsql stable set enable_seqscan = off set jit = off set plan_cache_mode = force_generic_plan';
    entries text := format($sql$(
            select x.* from mbus.%1$I as x where x.id = $1 and x.iid is null
            union all
            select x.* from mbus.%1$I as x where x.iid = $2
        )$sql$, 'log$' || known.qname);
    consumers integer[] := array(select c.id from mbus.consumer as c where c.qname = known.qname order by c.id);
    unselective integer[] := array(select c.id from mbus.consumer as c where c.qname = known.qname and c.selector is null);
begin
    -- The two functions below keep their plans in a session. A query of the view would be planned at each call.
    perform mbus.place('entries$' || known.id, 'number bigint, iid text',
        'table (id bigint, txid xid8, wanted integer[], received integer[], gone boolean, expired boolean, not_for integer[])',
        options,
        format($body$
#variable_conflict use_column
begin
    return query
    select l.id, l.txid, w.wanted, s.received,
           exists (select from mbus.receipt as r where r.queue = %2$s and r.id = l.id and r.consumer is null offset 0)
           or case when w.wanted = '{}' then coalesce(l.not_for <> '{}', false) else w.wanted <@ s.received end,
           coalesce(l.expires < clock_timestamp(), false), l.not_for
    from %1$s as l%4$s
    cross join lateral (
        select array(
            select r.consumer from mbus.reception(%2$s, w.wanted, mod(l.id, %3$s)::integer, l.id, l.txid) as r where r.received
        ) as received offset 0
    ) as s
    order by l.id;
end
$body$, entries, known.id, known.consumers_cnt, mbus.wanted_by(known)),
        format('The messages of queue %s with an iid; messages without an iid are found by their number.', known.qname));
    perform mbus.place('awaited$' || known.id, 'number bigint, iid text', 'table (id bigint, consumer integer, until timestamptz)', options,
        format($body$
#variable_conflict use_column
begin
    return query
    -- If a batch has claimed the message, the message does not expire, and others wait for it without a limit.
    select l.id, f.consumer, case when l.expires >= clock_timestamp() then l.expires else 'infinity' end
    from %1$s as l%4$s
    cross join lateral (
        -- Evaluate selectors last, and one at a time.
        select r.consumer
        from (
            select x.consumer from mbus.reception(%2$s, %5$L, mod(l.id, %3$s)::integer, l.id, l.txid) as x where not x.received offset 0
        ) as r
        where (l.not_for is null or r.consumer <> all (l.not_for))
          and (r.consumer = any (%6$L) or mbus.matches(r.consumer, m.message))
          -- An expired message still goes to the consumer that claimed it before.
          and (l.expires is null or l.expires >= clock_timestamp() or exists (
              select from mbus.apart as a where a.consumer = r.consumer and a.id = l.id and a.batch is not null offset 0))
        limit 1
    ) as f
    where not exists (
        select from mbus.receipt as r where r.queue = %2$s and r.id = l.id and coalesce(r.consumer, 0) = 0 offset 0)
    order by l.id
    limit 1;
end
$body$, entries, known.id, known.consumers_cnt, mbus.as_message(known, to_match => true), consumers, unselective),
        format(
            'The first message of queue %s with an iid, or with a number and no iid, that a consumer is still to receive.',
            known.qname));
end
$$;

-- The number in an id that the queue assigned to a message; null for another id.
create function mbus.number_in(qname text, iid text) returns bigint
language sql immutable as $$ select case when starts_with(iid, qname || '.') then substring(iid from '[.]([0-9]{1,18})$')::bigint end $$;

-- The messages with an iid in the log of a queue: the original, and another each time that it was put back.
create function mbus.entries(known mbus.queue, iid text)
returns table (id bigint, txid xid8, wanted integer[], received integer[], gone boolean, expired boolean, not_for integer[])
language plpgsql stable as $$
begin
    return query execute format('select * from mbus.%I($1, $2)', 'entries$' || known.id)
    using mbus.number_in(known.qname, iid), iid;
end
$$;

-- The first message with an iid that a consumer of its queue is still to receive. Returns its number, this consumer, and when
-- the message expires. All are null if there is no such message.
create function mbus.awaited(known mbus.queue, iid text, out id bigint, out consumer integer, out until timestamptz)
language plpgsql stable as $$
begin
    execute format('select * from mbus.%I($1, $2)', 'awaited$' || known.id) into id, consumer, until
    using mbus.number_in(known.qname, iid), iid;
end
$$;

-- A message of the log with the consumers that have received it. It reads the log and not a view, because a session that
-- replaces or drops the view could then deadlock with this transaction.
create function mbus.message_of(known mbus.queue, number bigint, received integer[]) returns mbus.qt_model
language plpgsql stable as $$
declare
    message mbus.qt_model;
begin
    execute format('select (m.message).* from mbus.%I as l%s where l.id = $1', 'log$' || known.qname, mbus.as_message(known))
    into message using number;
    if message.id is not null then
        message.received := message_of.received;
    end if;
    return message;
end
$$;
