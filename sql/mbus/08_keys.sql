-- Messages with a key, in a queue that is ordered by a property. The key of a message is its value of the property. Messages with
-- the same key go to one worker of a consumer at a time, in order.
--
-- All messages of a key have ids of the same part, so the holder of that part is alone with the key: see 25_keyed_queues.sql. A
-- batch of a feed holds no part while it is in work. So a message stays apart while an earlier message of its key is apart, in a
-- batch or for another reason. It waits for the last of these. Each message waits for one message and is woken once, however many
-- there are. A claim that gets the first message of such a line also takes as many of the following as it wants.

-- The SQL expression of the key of a message, which has this name in a query; null if the queue is not ordered.
create function mbus.key_of(known mbus.queue, message text) returns text
language sql immutable as $$
    select case when known.ordered_by is null then 'null' else format('%s.properties -> %L', message, known.ordered_by) end
$$;

-- The message for which a message apart has to wait because both have the same key. It is the message in a batch, else the last
-- message apart before it. Returns no row if there is none.
create function mbus.line_before(c integer, whose_key text, own_id bigint) returns table (id bigint, until timestamptz)
language plpgsql stable rows 1 as $$
begin
    -- The condition `between` and `order by key`, here and below, make the planner use the index of keys. It then finds the
    -- last message of a key without reading all messages apart.
    return query
        select a.id, 'infinity'::timestamptz from mbus.apart as a
        where a.consumer = c and a.key between whose_key and whose_key and a.batch is not null and a.id <> own_id
        order by a.key desc, a.id desc limit 1;
    if not found then
        return query
            select a.id, coalesce(a.expires, 'infinity') from mbus.apart as a
            where a.consumer = c and a.key between whose_key and whose_key and not a.failed and a.id < own_id
              and coalesce(a.expires > clock_timestamp(), true)
            order by a.key desc, a.id desc limit 1;
    end if;
end
$$;

-- Of the messages that a consumer has reached, those that stay apart. aside: messages that stay apart for another reason. This
-- function adds each message whose key is that of an earlier message apart.
create function mbus.in_line(c integer, special mbus.picked[], aside mbus.apart[]) returns mbus.apart[]
language plpgsql as $$
begin
    return aside || array(
        with keyed as (
            select u.id, max(u.key) as key, max(u.part) as part, max(u.expires) as expires, max(u.after) as after, bool_or(u.is_aside) as is_aside
            from (
                select x.id, x.key, x.part, x.expires, x.after, false as is_aside from unnest(special) as x where x.key is not null and x.ok
                union all
                select a.id, a.key, a.part, a.expires, a.after, true from unnest(aside) as a where a.key is not null and not a.failed
            ) as u
            group by u.id
        ), lined as (
            select k.*, lag(k.id) over line as before, lag(k.expires) over line as before_expires,
                   coalesce(bool_or(k.is_aside) over (line rows between unbounded preceding and 1 preceding), false) as is_behind
            from keyed as k
            window line as (partition by k.key order by k.id)
        )
        select row(
            c, k.id, k.part, coalesce(case when k.is_first then t.until else k.before_expires end, 'infinity'), k.expires, k.after,
            c, -1, case when k.is_first then t.id else k.before end, false, null, k.key)::mbus.apart
        from (select l.*, l.before is null as is_first from lined as l) as k
        -- Look up the last message apart with the key. With offset 0, the plan is one lookup for each message.
        left join lateral (
            select a.id, case when a.batch is null then a.expires end as until from mbus.apart as a
            where a.consumer = c and a.key between k.key and k.key and not a.failed
              and (a.batch is not null or coalesce(a.expires > clock_timestamp(), true))
            order by a.key desc, a.id desc limit 1 offset 0
        ) as t on true
        where not k.is_aside and (k.is_behind or t.id is not null));
end
$$;

-- Messages apart that can be received, and after each the messages with its key that wait only for it, because one answer may
-- contain both. Returns at most this many.
create function mbus.with_followers(c integer, heads bigint[], most integer) returns bigint[]
language plpgsql as $$
declare
    followers bigint[];
    free bigint[];
begin
    -- The recursive query returns the message directly behind a head first, then the message behind that. So the limit never keeps
    -- a message without its predecessor.
    followers := array(
        with recursive line as (
            select a.id, a.key, 1 as step
            from unnest(heads) as h(id)
            cross join lateral (select x.id, x.key from mbus.apart as x where x.consumer = c and x.id = h.id offset 0) as a
            where a.key is not null
            union all
            select n.id, l.key, l.step + 1
            from line as l
            cross join lateral (
                select a.id from mbus.apart as a
                where a.consumer = c and a.wait_consumer = c and a.wait_part = -1 and a.wait_id between l.id and l.id
                  and a.key = l.key and a.after is null and not a.failed and coalesce(a.expires > clock_timestamp(), true)
                order by a.wait_id limit 1
            ) as n
            where l.step < most
        )
        select l.id from line as l where l.step > 1 limit most - cardinality(heads));
    free := array(
        select a.id
        from unnest(followers) as f(id)
        cross join lateral (select x.id from mbus.apart as x where x.consumer = c and x.id = f.id offset 0 for update skip locked) as a);
    -- Another session is taking one of the followers, so return only the heads. The followers come with a later answer.
    return case when cardinality(free) = cardinality(followers) then heads || free else heads end;
end
$$;
