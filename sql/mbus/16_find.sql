-- Single messages and small batches. They are found by one index in the order of all parts, and received by receipts, or from
-- their part.
--
-- A level says where the search begins. So the cost of a message depends neither on the number of received messages nor on the
-- number of parts. A level only repeats what follows from the positions. To raise a level, a session reads the messages from the
-- last level to the first that is not received, in one snapshot. It also records what the snapshot could not see: open
-- transactions, and parts in use by others. A new level replaces lower levels. Without busy parts it also replaces levels with
-- busy parts. No session waits for another, and a claim that is rolled back takes its level with it.
--
-- A message is received under the lock of its part, if the part is still at the position that the snapshot saw. Messages that
-- have to wait, or that are apart, are received in the same way as batches.

create type mbus.start as (
    version bigint, whole bigint, whole_xids xid8[], whole_ids bigint[],
    done bigint, late_xids xid8[], busy integer[], froms bigint[], has_apart boolean
);
comment on type mbus.start is
    'Where the search for a single message begins: the position of all parts without a younger position, the level, and whether '
    'there are messages apart.';

create type mbus.head as (id bigint, part integer, version bigint, is_plain boolean);
comment on type mbus.head is
    'A message that a consumer may receive next, and the version of the position of its part in which it was seen. If is_plain is '
    'false, it is received in the same way as a batch.';

create type mbus.found as (now pg_snapshot, heads mbus.head[]);
comment on type mbus.found is 'The messages that a consumer may receive next, in order, and the snapshot in which they were seen.';

-- Where the search for the next single message of a consumer begins.
create function mbus.starts_at(c integer) returns setof mbus.start
language sql stable rows 1 as $$
    select coalesce(w.version, 0), w.done, w.late_xids, w.late_ids, greatest(l.done, w.done),
           case when l.done < w.done then w.late_xids else l.late_xids end, case when l.done < w.done then '{}' else l.busy end,
           case when l.done < w.done then '{}' else l.froms end,
           exists (select from mbus.apart as a where a.consumer = c)
    from mbus.level as l
    left join lateral (
        select p.version, p.done, p.late_xids, p.late_ids from mbus.position as p
        where p.consumer = c and p.part between -1 and -1
        order by p.part desc, p.version desc limit 1
    ) as w on true
    where l.consumer = c
    order by l.done desc limit 1
$$;

-- Create a consumer's query for single messages, which contains its selector. If the selector fails, every message is received in
-- the same way as a batch, which handles the failure.
create function mbus.make_find_function(known mbus.queue, c mbus.consumer) returns void
language plpgsql as $$
declare
    -- %%1$s is the FROM clause, %%2$s its condition, %%3$s the condition of the consumer, and %%4$s an order that only the right
    -- index has.
    seek text := $sql$
            select row(t.id, mod(t.id, %1$s)::integer, coalesce(p.version, start.version), %2$s)::mbus.head as head
            from %%1$s as t
            left join lateral (
                select p.version, p.done, p.late_xids, p.late_ids from mbus.position as p
                where p.consumer = %3$s and p.part between mod(t.id, %1$s)::integer and mod(t.id, %1$s)::integer and p.version > start.version
                order by p.part desc, p.version desc limit 1
            ) as p on true
            where %%2$s and mod(t.id, %1$s)::integer <> all (busy) and %%3$s
              -- Check the positions first: they have passed most messages, which then need no lookup of a receipt.
              and case when coalesce(
                      mbus.passed(t.id, t.pgchange_txid, p.done, p.late_xids, p.late_ids),
                      mbus.passed(t.id, t.pgchange_txid, start.whole, start.whole_xids, start.whole_ids)) then false
                  else not exists (
                      select from mbus.receipt as r
                      where r.queue = %4$s and coalesce(r.consumer, 0) = any (array[0, %3$s]) and r.id = t.id offset 0) end
            order by %%4$s$sql$;
    body text := $body$
    if start.late_xids <> '{}' or start.busy <> '{}' then
        found.heads := array(
            select x.head
            from (
                select s.head
                from unnest(start.late_xids) as e(xid)
                cross join lateral (%1$s
                    limit most
                ) as s
                where pg_visible_in_snapshot(e.xid, found.now) or e.xid = pg_current_xact_id_if_assigned()
                union all
                select s.head
                from unnest(start.busy, start.froms) as b(part, above)
                cross join lateral (%2$s
                    limit 1
                ) as s
                where b.part <> all (busy)
            ) as x
            order by (x.head).id
            limit most);
    end if;
    if cardinality(found.heads) < most then
        found.heads := found.heads || array(%3$s
            limit most - cardinality(found.heads));
    end if;
    return found;$body$;
    rows_of_log text := mbus.selectable(known);
    texts text[];
    is_safe boolean;
    made text;
    wanted text;
begin
    foreach is_safe in array array[false, true] loop
        made := format(seek, known.consumers_cnt, case when is_safe then 'false' else 'not t.pgchange_special' end, c.id, known.id);
        wanted := mbus.wanted_of(c, is_safe);
        texts := texts || format(body,
            format(made, rows_of_log, 't.pgchange_txid = e.xid and t.id + 0 <= start.done', wanted, 't.pgchange_txid, t.id + 0'),
            format(made, rows_of_log,
                format('t.id > b.above and t.id <= start.done and mod(t.id, %s) = b.part', known.consumers_cnt), wanted, 't.id'),
            format(made, rows_of_log, 't.id > start.done and t.id <= horizon', wanted, 't.id'));
    end loop;
    perform mbus.place('find$' || c.id, 'start mbus.start, horizon bigint, busy integer[], most integer', 'mbus.found',
        'language plpgsql stable' || case when c.selector is not null then ' ' || pgchange.settings() else '' end,
        format($body$
#variable_conflict use_column
declare
    found mbus.found := row(pg_current_snapshot(), '{}');
begin%1$s%2$s
end
$body$, texts[1], case when c.selector is not null then format($body$
exception when others or assert_failure then
    if sqlstate ~ '^(40|53|57)' then
        raise;
    end if;
    found.heads := '{}';%s$body$, texts[2]) end),
        format('The messages that consumer %s of queue %s may receive next, one at a time.', c.name, known.qname),
        pinned => false);
end
$$;

-- The messages apart that a consumer may receive next, one for each part. This includes messages that mbus.set_free() found.
create function mbus.heads_apart(c integer, parts integer[], free bigint[], most integer) returns mbus.head[]
language plpgsql stable as $$
begin
    return array(
        select row(min(h.id), h.part, null, false)::mbus.head
        from (
            (select a.id, a.part from mbus.apart as a
             where a.consumer = c and a.wait_consumer is null and not a.failed and a.due = '-infinity' and a.part = any (parts)
             order by a.id limit most)
            union all
            select (a.message).id, (a.message).part from mbus.apart_at(c, free) as a
        ) as h
        group by h.part
        order by min(h.id));
end
$$;
