-- Messages that cannot be handed out in the log's order, because they are not yet due or wait for others.
-- A message waits until one consumer has received one other message, its predecessor. If the predecessor is in the log, the
-- consumer's position will pass it. Comparing two numbers for each part then finds all messages that become free, without
-- reading the others.
-- If the predecessor is itself apart, or in the dmq, the session that removes it wakes the messages behind it. That session may
-- not see some of them yet. So some are checked from time to time, and whenever there is nothing else to receive.

create type mbus.obstacle as (consumer integer, part integer, id bigint, until timestamptz);
comment on type mbus.obstacle is
    'The obstacle of a message: a consumer has yet to receive another message. part is -1 if that message is apart. The obstacle '
    'ends at until at the latest.';

-- The first consumer that has not received one of these messages yet. Null if all have received them, also for unknown ids.
create function mbus.obstacle(after text[]) returns mbus.obstacle
language plpgsql stable
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
    each_iid text;
    known mbus.queue;
    e record;
    dead_id bigint;
begin
    foreach each_iid in array coalesce(after, '{}') loop
        known := mbus.queue_of(each_iid);
        if known.id is not null then
            e := mbus.awaited(known, each_iid);
            if e.id is not null then
                return row(
                    e.consumer,
                    case when exists (select from mbus.apart as a where a.consumer = e.consumer and a.id = e.id) then -1
                         else mod(e.id, known.consumers_cnt) end,
                    e.id, e.until)::mbus.obstacle;
            end if;
        end if;
        dead_id := (select min(d.id) from mbus.dmq as d where d.iid = each_iid);
        if dead_id is not null then
            return row(0, -1, dead_id, 'infinity')::mbus.obstacle;
        end if;
    end loop;
    return null;
end
$$;

-- Of some messages, those that are apart for a consumer, with their ctid. The ctid is valid only in a later statement than the
-- one that locked the row.
create function mbus.apart_at(c integer, ids bigint[]) returns table (place tid, message mbus.apart)
language sql stable as $$
    -- Without offset 0, a plan could read all messages apart for each id if the planner expects few rows.
    select a.place, a.message
    from (select distinct u.id from unnest(ids) as u(id)) as i
    cross join lateral (
        select x.ctid as place, x as message from mbus.apart as x where x.consumer = c and x.id = i.id offset 0
    ) as a
$$;

-- Determine the obstacles of these messages again if they are due or waiting. Messages without an obstacle can be received.
create function mbus.reconsider(consumer integer, ids bigint[]) returns void
language plpgsql
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
begin
    -- Determine each obstacle once, although many messages may have it. A join with these messages would cost the square of
    -- their number.
    with obstacles as materialized (
        select array_agg(x.place) as places, mbus.obstacle((x.message).after::text[]) as o
        from mbus.apart_at(reconsider.consumer, ids) as x
        group by (x.message).after
    )
    update mbus.apart as a set
        wait_consumer = (o.o).consumer, wait_part = (o.o).part, wait_id = (o.o).id,
        due = coalesce((o.o).until, '-infinity')
    from obstacles as o cross join lateral unnest(o.places) as w(place)
    where a.ctid = w.place
      and (a.wait_consumer is not null or a.due <= clock_timestamp());
    if exists (
        select from mbus.consumer as c join mbus.queue as q using (qname)
        where c.id = reconsider.consumer and q.ordered_by is not null)
    then
        update mbus.apart as a set wait_consumer = a.consumer, wait_part = -1, wait_id = f.id, due = f.until
        from mbus.apart_at(reconsider.consumer, ids) as x
        cross join lateral mbus.line_before(reconsider.consumer, (x.message).key, (x.message).id) as f
        where a.ctid = x.place and a.wait_consumer is null and a.due = '-infinity' and not a.failed;
    end if;
end
$$;

-- The consumers and parts of the messages that a consumer's messages wait for.
create function mbus.waits(c integer) returns table (whom integer, place integer)
language sql stable as $$
    with recursive waits as (
        (select a.wait_consumer, a.wait_part from mbus.apart as a where a.consumer = c and a.wait_consumer is not null
         order by a.wait_consumer, a.wait_part limit 1)
        union all
        select n.* from waits as w cross join lateral (
            select a.wait_consumer, a.wait_part from mbus.apart as a
            where a.consumer = c and a.wait_consumer is not null
              and (a.wait_consumer, a.wait_part) > (w.wait_consumer, w.wait_part)
            order by a.wait_consumer, a.wait_part limit 1
        ) as n
    )
    select * from waits
$$;

-- Messages apart that have to be checked again: they are due, were woken, their predecessor has expired, or a position has passed
-- it. With thorough, also those that nobody woke. Null if no message apart can be received at all. The cost does not grow with
-- the number of messages that go on waiting.
create function mbus.set_free(c integer, parts integer[], most integer, thorough boolean) returns bigint[]
language plpgsql stable as $$
declare
    -- The moment is a constant, because PostgreSQL does not use a volatile function as a bound of an index scan.
    moment timestamptz := clock_timestamp();
    some_due boolean;
    some_waiting boolean;
    free bigint[] := '{}';
begin
    select exists (
               select from mbus.apart as a
               where a.consumer = c and a.wait_consumer is null and not a.failed and a.due <= moment)
               or exists (select from mbus.wake as w where w.consumer = c),
           -- Only the index of this consumer has this order. Another index would make the query read all messages that wait.
           coalesce((
               select true from mbus.apart as a
               where a.consumer = c and a.wait_consumer is not null
               order by a.wait_consumer, a.wait_part, a.wait_id limit 1), false)
    into some_due, some_waiting;
    if some_due then
        -- These messages are due and were not checked since they became due.
        free := array(
            select a.id from mbus.apart as a
            where a.consumer = c and a.wait_consumer is null and not a.failed
              and a.due > '-infinity' and a.due <= moment and a.part = any (parts)
            order by a.due, a.id
            limit most)
            || array(select w.id from mbus.wake as w where w.consumer = c and w.part = any (parts) limit most);
    end if;
    if not some_waiting then
        return case when some_due then free end;
    end if;
    free := free || array(
        select x.id
        from mbus.waits(c) as w
        cross join lateral (
            select a.id from mbus.apart as a
            where a.consumer = c and a.wait_consumer = w.whom and a.wait_part = w.place and w.place >= 0
              and a.wait_id <= coalesce((select p.done from mbus.stands_at(w.whom, w.place) as p), 9223372036854775807)
              and a.part = any (parts)
            order by a.wait_id
            limit most
        ) as x)
        -- Check messages whose predecessor has expired, because no session wakes them.
        || array(
            select a.id from mbus.apart as a
            where a.consumer = c and a.wait_consumer is not null and a.due < 'infinity' and a.due <= moment
              and a.part = any (parts)
            order by a.due
            limit most);
    if thorough then
        free := free || array(
            select f from mbus.waits(c) as w cross join lateral unnest(mbus.freed_apart(c, w.whom, w.place, parts, most)) as f);
    end if;
    return case when some_due or free <> '{}' then free end;
end
$$;

-- Messages that wait although their predecessor was received out of order, or has left the dmq. The session that received the
-- predecessor wakes only the messages that it sees. This function finds the others, a few at a time.
create function mbus.freed_apart(c integer, waited_for integer, place integer, parts integer[], most integer) returns bigint[]
language plpgsql stable as $$
declare
    -- Begin at a random predecessor, so that each is checked at some time if there are many.
    start bigint := (
        select lo + (random() * (hi - lo))::bigint
        from (
            select a.wait_id from mbus.apart as a
            where a.consumer = c and a.wait_consumer = waited_for and a.wait_part = place
            order by a.wait_id limit 1
        ) as x(lo) cross join (
            select a.wait_id from mbus.apart as a
            where a.consumer = c and a.wait_consumer = waited_for and a.wait_part = place
            order by a.wait_id desc limit 1
        ) as y(hi));
    sample integer := case when place = -1 then 50 else 5 end;
    freed bigint[];
begin
    with recursive ahead as (
        (select a.wait_id, 1 as step from mbus.apart as a
         where a.consumer = c and a.wait_consumer = waited_for and a.wait_part = place and a.wait_id >= start
         order by a.wait_id limit 1)
        union all
        select n.wait_id, s.step + 1 from ahead as s cross join lateral (
            select a.wait_id from mbus.apart as a
            where a.consumer = c and a.wait_consumer = waited_for and a.wait_part = place and a.wait_id > s.wait_id
            order by a.wait_id limit 1
        ) as n
        where s.step < sample
    ), lowest as (
        -- The planner knows the constant 50. If the query had only the variable sample, the planner would expect a tenth of all
        -- messages that wait.
        select x.wait_id from (
            select a.wait_id from mbus.apart as a
            where a.consumer = c and a.wait_consumer = waited_for and a.wait_part = place
            order by a.wait_id limit 50
        ) as x
        limit sample
    )
    select array_agg(s.wait_id) into freed
    from (select h.wait_id from ahead as h union select w.wait_id from lowest as w) as s
    -- Without offset 0, a plan could hash all receipts or all messages apart, which costs more with each of them.
    where case when waited_for = 0 then not exists (select from mbus.dmq as d where d.id = s.wait_id offset 0)
               else place = -1
                    and not exists (select from mbus.apart as a where a.consumer = waited_for and a.id = s.wait_id offset 0)
                    or exists (select from mbus.receipt as r where r.id = s.wait_id and (r.consumer is null or r.consumer = waited_for)
                               and r.queue = (select q.id from mbus.consumer as x join mbus.queue as q using (qname)
                                              where x.id = waited_for) offset 0) end;
    -- Look up the messages of each predecessor separately. With one condition for all predecessors, a plan may read every
    -- message that waits.
    return array(
        select w.id from unnest(freed) as f(id) cross join lateral (
            select a.id from mbus.apart as a
            where a.consumer = c and a.wait_consumer = waited_for and a.wait_part = place and a.wait_id = f.id
              and a.part = any (parts)
            limit most
        ) as w
        limit most);
end
$$;

-- Let consumers check the messages again that wait for these consumers to receive these messages. The messages are recorded in
-- mbus.wake, because only the consumer of a message apart changes its row.
create function mbus.wake_up(consumers integer[], ids bigint[]) returns void
language plpgsql
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
begin
    insert into mbus.wake (consumer, id, part)
    select a.consumer, a.id, a.part
    from unnest(consumers) as c(id) cross join unnest(ids) as i(id)
    cross join lateral (select x.* from mbus.apart as x where x.wait_consumer = c.id and x.wait_id = i.id offset 0) as a;
end
$$;

-- Of the messages that a consumer has reached, those that it cannot receive yet or on which its selector failed, as rows for
-- mbus.set_apart().
create function mbus.not_yet(c integer, special mbus.picked[]) returns mbus.apart[]
language plpgsql
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
    moment timestamptz := clock_timestamp();
    aside mbus.apart[];
begin
    aside := (
        with obstacles as materialized (
            select array_agg(x) as messages, case when x.after is not null and bool_or(x.ok) then mbus.obstacle(x.after::text[]) end as o
            from unnest(special) as x
            group by x.after
        ), judged as (
            select s.id, s.part, s.due, s.expires, s.after, s.ok, s.key, s.ok and coalesce(s.due <= moment, true) as is_due, o.o
            from obstacles as o cross join lateral unnest(o.messages) as s
        )
        select coalesce(array_agg(row(
            c, j.id, j.part, coalesce(case when j.is_due then (j.o).until else j.due end, '-infinity'), j.expires, j.after,
            case when j.is_due then (j.o).consumer end, case when j.is_due then (j.o).part end, case when j.is_due then (j.o).id end,
            j.ok is null, null, j.key)::mbus.apart), '{}')
        from judged as j
        where j.ok is null
           or j.ok and (
               j.due > moment or (j.o).consumer is not null
               or exists (select from mbus.apart as a where a.consumer = c and a.id = j.id)));
    if exists (select from unnest(special) as s where s.key is not null) then
        return mbus.in_line(c, special, aside);
    end if;
    return aside;
end
$$;

-- Store messages that a consumer passed without receiving them, and report those on which its selector failed.
create function mbus.set_apart(known mbus.queue, c integer, messages mbus.apart[]) returns void
language plpgsql as $$
begin
    with kept as (
        insert into mbus.apart select m.* from unnest(messages) as m
        on conflict do nothing
        returning id, failed
    )
    insert into mbus.fault (qname, consumer, message_id, message)
    select known.qname, x.name, k.id, 'the selector fails on this message: ' || x.selector
    from kept as k join mbus.consumer as x on x.id = c
    where k.failed;
end
$$;
