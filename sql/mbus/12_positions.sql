-- The position of a consumer in a log.

-- A number above every transaction id that was assigned so far, and not far above.
create function mbus.xid_bound() returns bigint
language plpgsql volatile as $$
declare
    step bigint := 0;
    above bigint := pg_snapshot_xmax(pg_current_snapshot())::text::bigint;
begin
    -- Open transactions may have ids above a snapshot's xmax that are not listed in it. pg_xact_status() raises an error for an
    -- id that was never assigned, so this finds such an id without using one up.
    loop
        perform pg_xact_status((above + step)::text::xid8);
        step := greatest(1, 2 * step);
    end loop;
exception when invalid_parameter_value then
    return above + step;
end
$$;

-- A number above every transaction id that was assigned so far. Assigns this transaction an id if it has none.
create function mbus.bound_now() returns bigint
language plpgsql volatile as $$
begin
    return case when pg_current_xact_id_if_assigned() is null then pg_current_xact_id()::text::bigint else mbus.xid_bound() end;
end
$$;

-- The transactions below a bound that a snapshot does not see, without this transaction.
create function mbus.open_in(now pg_snapshot, bound bigint) returns xid8[]
language plpgsql stable as $$
declare
    upper bigint := pg_snapshot_xmax(now)::text::bigint;
begin
    if bound <= upper and pg_snapshot_xmin(now) = pg_snapshot_xmax(now) then
        return '{}';
    end if;
    return array(
        select x from pg_snapshot_xip(now) as x where x is distinct from pg_current_xact_id_if_assigned()
        union all
        select g::text::xid8 from generate_series(upper, bound - 1) as g
        where g::text::xid8 is distinct from pg_current_xact_id_if_assigned());
end
$$;

-- Whether the position of a consumer in a part has passed a message.
create function mbus.went_past(c integer, part integer, id bigint, xid xid8) returns boolean
language plpgsql stable as $$
begin
    return exists (
        select from mbus.stands_at(c, part) as p where mbus.passed(went_past.id, went_past.xid, p.done, p.late_xids, p.late_ids));
end
$$;

create type mbus.standing as (
    parts integer[], whole bigint, versions bigint[], dones bigint[], low bigint, high bigint,
    late_xids xid8[], late_parts integer[], late_ids bigint[]
);
comment on type mbus.standing is
    'The position of a consumer in parts. It was read from rows with these versions; whole is the version of the row for all '
    'parts. dones has a number for every part of the queue, and the greatest bigint for parts that are not in parts. low, high: '
    'the lowest and highest of dones. late_xids, late_parts, late_ids: the late transactions, for each part.';

-- The position of a consumer of a queue with n parts in some of the parts.
create function mbus.stand(c integer, n integer, parts integer[]) returns mbus.standing
language plpgsql stable as $$
declare
    newest mbus.position;
    found mbus.standing;
    has_late boolean;
begin
    select p.* into newest from mbus.position as p where p.consumer = c order by p.version desc limit 1;
    if newest.part = -1 and newest.late_xids = '{}' and cardinality(parts) = n then
        -- In most cases all parts have the same position.
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

-- Move the single position of a consumer whose parts are all at the same place.
create function mbus.keep_together(c integer, s mbus.standing, reached bigint, open xid8[]) returns void
language plpgsql as $$
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

-- Replace the different positions of parts by a single position. began is the consumer's position at the begin of this
-- transaction; null stands for the position of the part that is farthest behind.
create function mbus.keep_joined(c integer, s mbus.standing, reached bigint, open xid8[], began bigint) returns void
language plpgsql as $$
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
           coalesce(keep_joined.began, min(case when g.txid = pg_current_xact_id() then g.began else g.done end))
    from gone as g;
    -- If every part had a position of its own, the last position for all parts still exists, so delete it.
    delete from mbus.position as p where p.consumer = c and p.part = -1 and p.version = s.whole;
end
$$;

-- Replace the positions of a consumer by new positions, a row for each part.
create function mbus.keep_apart(
    c integer, s mbus.standing, reached bigint, open xid8[], cut_late boolean, finished xid8[], upto bigint
) returns void
language plpgsql as $$
begin
    with old as (
        select g.part, g.version, p.done, p.late_xids, p.late_ids, p.began, p.began_xids, p.began_ids, p.txid
        from unnest(s.parts, s.versions) as g(part, version)
        left join mbus.position as p
            on p.consumer = c and p.part = case when g.version = s.whole then -1 else g.part end and p.version = g.version
    ), gone as (
        -- Look up each part by the index. A join could read the positions of all parts.
        delete from mbus.position as p
        where p.ctid = any (array(
            select x.place from unnest(s.parts, s.versions) as g(part, version)
            cross join lateral (
                select y.ctid as place from mbus.position as y
                where y.consumer = c and y.part = g.part and y.version <= g.version offset 0
            ) as x))
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

-- Replace the positions of a consumer after it read the log. It has seen everything up to reached, except messages of open
-- transactions. With cut_late, it has seen messages of finished transactions below that only up to an id.
create function mbus.keep(
    c integer, s mbus.standing, reached bigint, open xid8[], cut_late boolean, finished xid8[], upto bigint
) returns void
language plpgsql as $$
begin
    if cut_late or s.late_xids <> '{}' or reached < s.high then
        perform mbus.keep_apart(c, s, reached, open, cut_late, finished, upto);
    elsif s.whole = all (s.versions) then
        perform mbus.keep_together(c, s, reached, open);
    else
        perform mbus.keep_joined(c, s, reached, open, null);
    end if;
end
$$;
