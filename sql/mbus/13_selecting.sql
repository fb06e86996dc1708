-- The query of the log that is made for each consumer and contains its selector.

create type mbus.seen as (now pg_snapshot, finished xid8[], ids bigint[], late_count integer, special mbus.picked[]);
comment on type mbus.seen is
    'The messages that a consumer reaches next. ids: their ids, late messages first; an id is negative if special has more on the '
    'message. now: the snapshot in which they were seen; finished: the late transactions that have ended in it.';

-- The log of a queue as a table for selectors.
create function mbus.selectable(known mbus.queue) returns text
language sql immutable as $$
    -- The selector sees exactly the columns of a message, by their names alone and with the alias t.
    select format($sql$(
            select l.id, l.added::timestamp as added, coalesce(l.iid, %2$L || l.id) as iid, l.delayed_until::timestamp as delayed_until,
                   l.expires::timestamp as expires, null::integer[] as received, l.headers, l.properties, l.data,
                   l.expires as pgchange_expires, l.delayed_until as pgchange_due, l.txid as pgchange_txid,
                   l.special as pgchange_special, l.not_for as pgchange_not_for
            from mbus.%1$I as l)$sql$, 'log$' || known.qname, known.qname || '.')
$$;

-- The SQL condition that t, a message of the log, is for a consumer. It must match the selector, must not have expired, and must
-- not exclude the consumer. With safe, the selector is left out, because it has failed and is evaluated separately.
create function mbus.wanted_of(c mbus.consumer, safe boolean) returns text
language sql immutable as $$
    select format($sql$
            (t.pgchange_expires is null or t.pgchange_expires > clock_timestamp())
            and (t.pgchange_not_for is null or %s <> all (t.pgchange_not_for))%s$sql$, c.id,
        case when c.selector is null or safe then '' else format(E' and (%s\n)', c.selector) end)
$$;

-- Create a consumer's query of the log, which contains its selector. If the selector fails, the safe query evaluates it
-- separately for each message.
create function mbus.make_look_function(known mbus.queue, c mbus.consumer, safe boolean) returns void
language plpgsql as $$
declare
    source text := mbus.selectable(known);
    wanted text := mbus.wanted_of(c, safe);
    verdict text := case when safe then format(
        'mbus.%I((t.id, t.added, t.iid, t.delayed_until, t.expires, t.received, t.headers, t.properties, t.data)::mbus.qt_model)',
        'match$' || c.id) else 'true' end;
    number text := case when safe then '-t.id' else 'case when t.pgchange_special then -t.id else t.id end' end;
    rescue text := case when safe or c.selector is null then '' else format($sql$
exception when others or assert_failure then
    if sqlstate ~ '^(40|53|57)' then
        raise;
    end if;
    return mbus.%I(stands, horizon, gone, most);$sql$, 'safe$' || c.id) end;
begin
    perform mbus.place(
        case when safe then 'safe$' else 'look$' end || c.id,
        'stands mbus.standing, horizon bigint, gone int8multirange, most integer',
        'mbus.seen',
        'language plpgsql stable ' || pgchange.settings(),
        format($body$
#variable_conflict use_column
declare
    seen mbus.seen;
    late xid8[];
    highest bigint;
    none_gone boolean := isempty(gone);
    is_level boolean := stands.low = stands.high;
begin
    -- All queries of this function see the snapshot of the statement that called it.
    seen.now := pg_current_snapshot();
    seen.finished := '{}';
    seen.ids := '{}';
    seen.special := '{}';
    if stands.late_xids <> '{}' then
        seen.finished := array(
            select distinct e.xid from unnest(stands.late_xids) as e(xid)
            where pg_visible_in_snapshot(e.xid, seen.now) or e.xid = pg_current_xact_id_if_assigned());
        highest := (select max(stands.dones[1 + p]) from unnest(stands.late_parts) as p);
        late := array(
            select e.xid from unnest(seen.finished) as e(xid)
            where exists (select from mbus.%5$I as l where l.txid = e.xid and l.id + 0 <= highest offset 0));
    end if;
    if late <> '{}' then
        seen.ids := array(
            select %3$s
            from (
                select p.xid, array_agg(p.part) as parts, array_agg(p.above) as aboves, min(p.above) as lowest
                from unnest(stands.late_xids, stands.late_parts, stands.late_ids) as p(xid, part, above)
                where p.xid = any (late)
                group by p.xid
            ) as e
            cross join lateral (
                select t.*
                from %1$s as t
                -- Begin at the lowest id of the late transaction that may be left, so that its received messages are not read
                -- again.
                where t.pgchange_txid = e.xid and t.id + 0 > e.lowest and t.id + 0 <= highest
                  and t.id > e.aboves[array_position(e.parts, mod(t.id, %4$s)::integer)]
                  and t.id <= stands.dones[1 + mod(t.id, %4$s)]
                  -- Look up the receipt of each message separately, because messages above the lowest id may have been received
                  -- long ago.
                  and not exists (
                      select from mbus.receipt as r
                      where r.queue = %8$s and coalesce(r.consumer, 0) = any (array[0, %9$s]) and r.id = t.id offset 0)
                  and %2$s
                order by t.pgchange_txid, t.id + 0
                limit most
            ) as t
            order by t.id
            limit most);
    end if;
    seen.late_count := cardinality(seen.ids);
    seen.ids := seen.ids || array(
        select %3$s
        from %1$s as t
        where t.id > stands.low and t.id <= horizon and (is_level or t.id > stands.dones[1 + mod(t.id, %4$s)])
          and (none_gone or not gone @> t.id) and %2$s
        order by t.id
        limit most - seen.late_count);
    if 0 > any (seen.ids) then
        seen.special := array(
            select row(t.id, mod(t.id, %4$s)::integer, case when t.pgchange_special then t.pgchange_due end, t.pgchange_expires,
                       case when t.pgchange_special then t.headers -> 'consume_after' end, %6$s, %10$s)::mbus.picked
            from %1$s as t
            where t.id = any (array(select -i from unnest(seen.ids) as i where i < 0)));
    end if;
    return seen;%7$s
end
$body$, source, wanted, number, known.consumers_cnt, 'log$' || known.qname, verdict, rescue, known.id, c.id,
            mbus.key_of(known, 't')),
        format('The messages that consumer %s reaches next in the log of queue %s.', c.name, known.qname),
        pinned => false);
end
$$;

-- Create a function for the selector of a consumer that returns null instead of failing.
create function mbus.make_match_function(c mbus.consumer) returns void
language plpgsql as $$
begin
    perform mbus.place('match$' || c.id, 'message mbus.qt_model', 'boolean', 'language plpgsql stable ' || pgchange.settings(),
        format($body$
#variable_conflict use_column
begin
    return (select coalesce((%s
        ), false) from (select ($1).*) as t);
exception when others or assert_failure then
    return null;
end
$body$, coalesce(c.selector, 'true')),
        format('Whether the selector of consumer %s matches a message, which has its times in UTC; null if it fails.', c.name));
end
$$;
