-- What a consumer comes upon in a log, and how far it has come.

create function mbus.xid_bound() returns bigint
language plpgsql volatile
set search_path from current
as $$
declare
    step bigint := 8;
    above bigint := pg_snapshot_xmax(pg_current_snapshot())::text::bigint;
begin
    -- Transactions at work may have ids above a snapshot's xmax without being listed in it. An id that was never given out cannot be
    -- asked about: this finds one without spending one.
    loop
        perform pg_xact_status((above + step)::text::xid8);
        step := step * 4;
    end loop;
exception when invalid_parameter_value then
    return above + step;
end
$$;
comment on function mbus.xid_bound() is 'A number above every transaction id that was given out so far, and not far above.';

create function mbus.at(consumer integer, parts integer[]) returns mbus.position[]
language plpgsql stable
set search_path from current
set enable_seqscan = off
set jit = off
as $$
begin
    return array(
        select p from unnest(parts) as g(part)
        cross join lateral (
            select p.* from mbus.position as p where p.consumer = "at".consumer and p.part = g.part order by p.version desc limit 1
        ) as p);
end
$$;
comment on function mbus.at(integer, integer[]) is 'Where a consumer stands in some parts.';

create function mbus.moved(
    p mbus.position, done bigint, open xid8[], cut_late boolean, finished xid8[], upto bigint
) returns mbus.position
language plpgsql stable
set search_path from current
as $$
begin
    if cut_late then
        p.late_ids := array(
            select case when l.xid = any (finished) then greatest(l.upto, moved.upto) else l.upto end
            from unnest(p.late_xids, p.late_ids) with ordinality as l(xid, upto, n) order by l.n);
    else
        p.done := greatest(p.done, moved.done);
        if p.late_xids <> '{}' or open <> '{}' then
            p.late_ids := array(
                select coalesce(l.upto, 0) from unnest(open) with ordinality as o(xid, n)
                left join unnest(p.late_xids, p.late_ids) as l(xid, upto) on l.xid = o.xid
                order by o.n);
            p.late_xids := open;
        end if;
    end if;
    return p;
end
$$;
comment on function mbus.moved(mbus.position, bigint, xid8[], boolean, xid8[], bigint) is
    'A position after a look at the log: all was seen up to done but what open transactions have; or, where cut_late, of what finished '
    'transactions have below done, only that up to an id.';

create function mbus.keep(ats mbus.position[]) returns void
language plpgsql
set search_path from current
set enable_seqscan = off
set jit = off
as $$
begin
    insert into mbus.position (consumer, part, version, done, late_xids, late_ids, began, began_xids, began_ids)
    select a.consumer, a.part, a.version + 1, a.done, a.late_xids, a.late_ids,
           case when mine then p.began else p.done end, case when mine then p.began_xids else p.late_xids end,
           case when mine then p.began_ids else p.late_ids end
    from unnest(ats) as a
    join mbus.position as p on p.consumer = a.consumer and p.part = a.part and p.version = a.version
    cross join lateral (select p.txid = pg_current_xact_id()) as m(mine);
    delete from mbus.position as p using unnest(ats) as a
    where p.consumer = a.consumer and p.part = a.part and p.version = a.version;
end
$$;
comment on function mbus.keep(mbus.position[]) is 'Put new positions in the place of those that they were made from.';

create function mbus.make_pick_function(known mbus.queue, c mbus.consumer, safe boolean) returns void
language plpgsql
set search_path from current
as $$
declare
    -- The selector sees a message's columns by their names, alone and behind the alias t, and no other.
    source text := format($sql$(
            select l.id, l.added::timestamp as added, coalesce(l.iid, %2$L || l.id) as iid, l.delayed_until::timestamp as delayed_until,
                   l.expires::timestamp as expires, null::integer[] as received, l.headers, l.properties, l.data,
                   l.expires as pgchange_expires, l.delayed_until as pgchange_due, l.txid as pgchange_txid,
                   l.special as pgchange_special, l.only_for as pgchange_only
            from mbus.%1$I as l)$sql$, 'log$' || known.qname, known.qname || '.');
    wanted text := format($sql$
            (t.pgchange_expires is null or t.pgchange_expires > clock_timestamp())
            and (t.pgchange_only is null or %s = any (t.pgchange_only))
            and t.id <> all (gone)%s$sql$, c.id,
        case when c.selector is null or safe then '' else format(E' and (%s\n)', c.selector) end);
    picked text := format($sql$mod(t.id, %s)::integer, t.pgchange_txid, case when t.pgchange_special then t.pgchange_due end,
            case when t.pgchange_special then t.pgchange_expires end,
            case when t.pgchange_special then t.headers -> 'consume_after' end, %s$sql$, known.consumers_cnt,
        case when safe then format(
            'mbus.%I((t.id, t.added, t.iid, t.delayed_until, t.expires, t.received, t.headers, t.properties, t.data)::mbus.qt_model)',
            'match$' || c.id) else 'true' end);
begin
    perform mbus.place(
        case when safe then 'safe$' else 'pick$' end || c.id,
        'above bigint, upto bigint, dones bigint[], late_xids xid8[], late_parts integer[], late_ids bigint[], gone bigint[], most integer',
        'setof mbus.picked',
        'language plpgsql stable set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set jit = off '
        'set max_parallel_workers_per_gather = 0 set plan_cache_mode = force_generic_plan',
        format($body$
#variable_conflict use_column
declare
    got bigint := 0;
    highest bigint;
begin
    if late_xids <> '{}' then
        highest := (select max(dones[1 + p]) from unnest(late_parts) as p);
        return query
        select t.id, true, %3$s
        from (select distinct e.xid from unnest(late_xids) as e(xid)) as e
        cross join lateral (select t.* from %1$s as t where t.pgchange_txid = e.xid and t.id <= highest offset 0) as t
        join unnest(late_xids, late_parts, late_ids) as p(xid, part, above) on p.xid = e.xid and p.part = mod(t.id, %4$s)
        where t.id > p.above and t.id <= dones[1 + p.part] and %2$s
        order by t.id
        limit most;
        get diagnostics got = row_count;
    end if;
    return query
    select t.id, false, %3$s
    from %1$s as t
    where t.id > above and t.id <= upto and t.id > dones[1 + mod(t.id, %4$s)] and %2$s
    order by t.id
    limit most - got;
end
$body$, source, wanted, picked, known.consumers_cnt),
        format('What consumer %s comes upon in the log of queue %s.', c.name, known.qname));
end
$$;
comment on function mbus.make_pick_function(mbus.queue, mbus.consumer, boolean) is
    'Write a consumer''s own query of the log, in which its selector stands; the safe one looks at each message by itself.';

create function mbus.make_match_function(c mbus.consumer) returns void
language plpgsql
set search_path from current
as $$
begin
    perform mbus.place('match$' || c.id, 'message mbus.qt_model', 'boolean', 'language plpgsql stable',
        format($body$
#variable_conflict use_column
begin
    return (select coalesce((%s
        ), false) from (select ($1).*) as t);
exception when others or assert_failure then
    return null;
end
$body$, coalesce(c.selector, 'true')),
        format('Whether the selector of consumer %s matches a message; null where it fails.', c.name));
end
$$;
comment on function mbus.make_match_function(mbus.consumer) is 'Write the selector of a consumer as a function that cannot fail.';
