-- What a consumer comes upon in a log, and how far it has come.

create function mbus.xid_bound() returns bigint
language plpgsql volatile
as $$
declare
    step bigint := 0;
    above bigint := pg_snapshot_xmax(pg_current_snapshot())::text::bigint;
begin
    -- Transactions at work may have ids above a snapshot's xmax without being listed in it. An id that was never given out cannot be
    -- asked about: this finds one without spending one.
    loop
        perform pg_xact_status((above + step)::text::xid8);
        step := greatest(1, 2 * step);
    end loop;
exception when invalid_parameter_value then
    return above + step;
end
$$;
comment on function mbus.xid_bound() is 'A number above every transaction id that was given out so far, and not far above.';

create function mbus.bound_now() returns bigint
language plpgsql volatile
as $$
begin
    return case when pg_current_xact_id_if_assigned() is null then pg_current_xact_id()::text::bigint else mbus.xid_bound() end;
end
$$;
comment on function mbus.bound_now() is 'A number above every transaction id that was given out so far; this transaction has one from then on.';

create type mbus.seen as (now pg_snapshot, finished xid8[], ids bigint[], late_count integer, special mbus.picked[]);
comment on type mbus.seen is
    'What a consumer comes upon next: ids, those first that are late, and negative where there is more to say of a message in special; the '
    'snapshot by which that was seen, and those of its late transactions that are finished by it.';

create type mbus.standing as (
    parts integer[], whole bigint, versions bigint[], dones bigint[], low bigint, high bigint,
    late_xids xid8[], late_parts integer[], late_ids bigint[]
);
comment on type mbus.standing is
    'Where a consumer stands in parts, of which it reads versions, that of all parts together being whole: dones has a number for every '
    'part of the queue, one beyond all messages for those that are not its own, low and high are the ends of these; and the late '
    'transactions, part by part.';

create function mbus.stand(c integer, n integer, parts integer[]) returns mbus.standing
language plpgsql stable
as $$
declare
    newest mbus.position;
    found mbus.standing;
    has_late boolean;
begin
    select p.* into newest from mbus.position as p where p.consumer = c order by p.version desc limit 1;
    if newest.part = -1 and newest.late_xids = '{}' and cardinality(parts) = n then
        -- Mostly all parts stand together.
        return row(parts, newest.version, array_fill(newest.version, array[n]), array_fill(newest.done, array[n]),
                   newest.done, newest.done, newest.late_xids, '{}'::integer[], '{}'::bigint[])::mbus.standing;
    end if;
    select array_agg(g.part) filter (where g.mine), max(w.version),
           array_agg(coalesce(p.version, w.version, 0)) filter (where g.mine), array_agg(d.done), min(d.done), max(d.done),
           '{}', '{}', '{}', coalesce(bool_or(coalesce(p.late_xids, w.late_xids) <> '{}'), false)
    into found.parts, found.whole, found.versions, found.dones, found.low, found.high,
         found.late_xids, found.late_parts, found.late_ids, has_late
    from (values (0)) as one
    left join lateral (
        select p.version, p.done, p.late_xids from mbus.position as p
        where p.consumer = c and p.part between -1 and -1
        order by p.part desc, p.version desc limit 1
    ) as w on true
    cross join lateral (select g, g = any (parts) from generate_series(0, n - 1) as g) as g(part, mine)
    left join lateral (
        select p.version, p.done, p.late_xids from mbus.position as p
        where p.consumer = c and p.part between g.part and g.part and p.version > coalesce(w.version, 0) and g.mine
        order by p.part desc, p.version desc limit 1
    ) as p on true
    cross join lateral (
        select case when g.mine then coalesce(p.done, w.done, 0) else 9223372036854775807 end
    ) as d(done);
    if has_late then
        select coalesce(array_agg(l.xid), '{}'), coalesce(array_agg(g.part), '{}'), coalesce(array_agg(l.upto), '{}')
        into found.late_xids, found.late_parts, found.late_ids
        from unnest(found.parts, found.versions) as g(part, version)
        join mbus.position as p
            on p.consumer = c and p.part = case when g.version = found.whole then -1 else g.part end and p.version = g.version
        cross join unnest(p.late_xids, p.late_ids) as l(xid, upto);
    end if;
    return found;
end
$$;
comment on function mbus.stand(integer, integer, integer[]) is 'Where a consumer of a queue with n parts stands in some of them.';

create function mbus.keep_together(c integer, s mbus.standing, reached bigint, open xid8[]) returns void
language plpgsql
as $$
begin
    update mbus.position as p set
        version = p.version + 1, done = reached, late_xids = open, late_ids = array_fill(0::bigint, array[cardinality(open)]),
        began = case when p.txid = pg_current_xact_id() then p.began else p.done end,
        began_xids = case when p.txid = pg_current_xact_id() then p.began_xids else '{}' end,
        began_ids = case when p.txid = pg_current_xact_id() then p.began_ids else '{}' end,
        txid = pg_current_xact_id()
    where p.consumer = c and p.part = -1 and p.version = s.whole;
end
$$;
comment on function mbus.keep_together(integer, mbus.standing, bigint, xid8[]) is
    'Move on the one position of a consumer whose parts all stand together.';

create function mbus.keep_joined(c integer, s mbus.standing, reached bigint, open xid8[]) returns void
language plpgsql
as $$
begin
    with gone as (
        delete from mbus.position as p
        using (
            select distinct case when g.version = s.whole then -1 else g.part end, g.version
            from unnest(s.parts, s.versions) as g(part, version)
        ) as g(part, version)
        where p.consumer = c and p.part = g.part and p.version = g.version
        returning p.version, p.done, p.began, p.txid
    )
    insert into mbus.position (consumer, part, version, done, late_xids, late_ids, began)
    select c, -1, max(g.version) + 1, reached, open, array_fill(0::bigint, array[cardinality(open)]),
           min(case when g.txid = pg_current_xact_id() then g.began else g.done end)
    from gone as g;
    -- Where every part had moved on by itself, the last one for all is still there.
    delete from mbus.position as p where p.consumer = c and p.part = -1 and p.version = s.whole;
end
$$;
comment on function mbus.keep_joined(integer, mbus.standing, bigint, xid8[]) is
    'Put one position in the place of those of parts that stood apart, and stand together from now on.';

create function mbus.keep_apart(
    c integer, s mbus.standing, reached bigint, open xid8[], cut_late boolean, finished xid8[], upto bigint
) returns void
language plpgsql
as $$
begin
    with old as (
        select g.part, g.version, p.done, p.late_xids, p.late_ids, p.began, p.began_xids, p.began_ids, p.txid
        from unnest(s.parts, s.versions) as g(part, version)
        left join mbus.position as p
            on p.consumer = c and p.part = case when g.version = s.whole then -1 else g.part end and p.version = g.version
    ), gone as (
        delete from mbus.position as p using unnest(s.parts, s.versions) as g(part, version)
        where p.consumer = c and p.part = g.part and p.version <= g.version
    )
    insert into mbus.position (consumer, part, version, done, late_xids, late_ids, began, began_xids, began_ids)
    select c, p.part, p.version + 1,
           case when cut_late then p.done else greatest(p.done, reached) end,
           case when cut_late then p.late_xids else open end,
           case when cut_late then array(
                    select case when l.xid = any (finished) then greatest(l.upto, keep_apart.upto) else l.upto end
                    from unnest(p.late_xids, p.late_ids) with ordinality as l(xid, upto, n) order by l.n)
                when p.late_xids = '{}' then array_fill(0::bigint, array[cardinality(open)])
                else array(
                    select coalesce(l.upto, 0) from unnest(open) with ordinality as o(xid, n)
                    left join unnest(p.late_xids, p.late_ids) as l(xid, upto) on l.xid = o.xid
                    order by o.n) end,
           case when m.mine then p.began else p.done end, case when m.mine then p.began_xids else p.late_xids end,
           case when m.mine then p.began_ids else p.late_ids end
    from old as p cross join lateral (select p.txid = pg_current_xact_id() as mine) as m;
end
$$;
comment on function mbus.keep_apart(integer, mbus.standing, bigint, xid8[], boolean, xid8[], bigint) is
    'Put new positions, one a part, in the place of those that a consumer stood at.';

create function mbus.keep(
    c integer, s mbus.standing, reached bigint, open xid8[], cut_late boolean, finished xid8[], upto bigint
) returns void
language plpgsql
as $$
begin
    if cut_late or s.late_xids <> '{}' or reached < s.high then
        perform mbus.keep_apart(c, s, reached, open, cut_late, finished, upto);
    elsif s.whole = all (s.versions) then
        perform mbus.keep_together(c, s, reached, open);
    else
        perform mbus.keep_joined(c, s, reached, open);
    end if;
end
$$;
comment on function mbus.keep(integer, mbus.standing, bigint, xid8[], boolean, xid8[], bigint) is
    'Put new positions in the place of those that a consumer stood at, after a look at the log: all was seen up to reached but what open '
    'transactions have; or, where cut_late, of what finished transactions have below it, only that up to an id.';

create function mbus.selectable(known mbus.queue) returns text
language sql immutable
set search_path from current
as $$
    -- The selector sees a message's columns by their names, alone and behind the alias t, and no other.
    select format($sql$(
            select l.id, l.added::timestamp as added, coalesce(l.iid, %2$L || l.id) as iid, l.delayed_until::timestamp as delayed_until,
                   l.expires::timestamp as expires, null::integer[] as received, l.headers, l.properties, l.data,
                   l.expires as pgchange_expires, l.delayed_until as pgchange_due, l.txid as pgchange_txid,
                   l.special as pgchange_special, l.not_for as pgchange_not_for
            from mbus.%1$I as l)$sql$, 'log$' || known.qname, known.qname || '.')
$$;
comment on function mbus.selectable(mbus.queue) is 'The log of a queue as a table for selectors.';

create function mbus.wanted_of(c mbus.consumer, safe boolean) returns text
language sql immutable
set search_path from current
as $$
    select format($sql$
            (t.pgchange_expires is null or t.pgchange_expires > clock_timestamp())
            and (t.pgchange_not_for is null or %s <> all (t.pgchange_not_for))%s$sql$, c.id,
        case when c.selector is null or safe then '' else format(E' and (%s\n)', c.selector) end)
$$;
comment on function mbus.wanted_of(mbus.consumer, boolean) is
    'The condition under which a consumer wants t, a message of its log; the safe one leaves its selector out.';

create function mbus.make_look_function(known mbus.queue, c mbus.consumer, safe boolean) returns void
language plpgsql
set search_path from current
as $$
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
    -- All of this sees what the statement sees that calls it.
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
            where exists (select from mbus.%5$I as l where l.txid = e.xid and l.id <= highest));
    end if;
    if late <> '{}' then
        seen.ids := array(
            select %3$s
            from unnest(late) as e(xid)
            cross join lateral (select t.* from %1$s as t where t.pgchange_txid = e.xid and t.id <= highest offset 0) as t
            join (
                select p.* from unnest(stands.late_xids, stands.late_parts, stands.late_ids) as p(xid, part, above)
                where p.xid = any (late) offset 0
            ) as p on p.xid = e.xid and p.part = mod(t.id, %4$s)
            where t.id > p.above and t.id <= stands.dones[1 + p.part]
              -- Each by itself: what was received long ago is above the first of them too.
              and not exists (
                  select from mbus.receipt as r
                  where r.queue = %8$s and coalesce(r.consumer, 0) = any (array[0, %9$s]) and r.id = t.id offset 0)
              and %2$s
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
                       case when t.pgchange_special then t.headers -> 'consume_after' end, %6$s)::mbus.picked
            from %1$s as t
            where t.id = any (array(select -i from unnest(seen.ids) as i where i < 0)));
    end if;
    return seen;%7$s
end
$body$, source, wanted, number, known.consumers_cnt, 'log$' || known.qname, verdict, rescue, known.id, c.id),
        format('What consumer %s comes upon in the log of queue %s.', c.name, known.qname),
        pinned => false);
end
$$;
comment on function mbus.make_look_function(mbus.queue, mbus.consumer, boolean) is
    'Write a consumer''s own query of the log, in which its selector stands. Where that fails, the safe one asks it about each message '
    'by itself.';

create function mbus.make_match_function(c mbus.consumer) returns void
language plpgsql
set search_path from current
as $$
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
        format('Whether the selector of consumer %s matches a message, which has its times in UTC; null where it fails.', c.name));
end
$$;
comment on function mbus.make_match_function(mbus.consumer) is 'Write the selector of a consumer as a function that cannot fail.';
