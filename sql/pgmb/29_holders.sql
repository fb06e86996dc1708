-- Which groups still need which events. An event is kept until every group has read it, whatever its age.

-- How far each group has certainly read, and when it last moved. An empty cursor is the beginning.
create function pgmb.cursors() returns table (group_id pgmb.group_id, cursor pgmb.event_id, since timestamptz)
language sql stable as $$
    -- For a group whose cursor is in another database, the last claim shows where the cursor was, or where it was moved back to.
    select g.id, coalesce(case when c.elsewhere then least(c.after, case when c.batch is null then c.upto end) else g.last_read_event_id end, ''),
           case when c.elsewhere then c.claimed_at else g.updated_at end
    from pgmb.subscription_groups as g
    left join pgmb.claims as c on c.group_id = g.id
$$;

-- The retries that name events in a range of ids, read or not. Such events are needed until the retry is read.
create function pgmb.retries(lower pgmb.event_id, upper pgmb.event_id)
returns table (id pgmb.event_id, group_id pgmb.group_id, event_id text)
language sql stable as $$
    select e.id, s.group_id, i.id
    from (
        select x.* from pgmb.events as x where x.topic = 'pgmb-retry'
        union all
        select x.* from pgmb.later as x where x.topic = 'pgmb-retry'
    ) as e
    join pgmb.subscriptions as s on s.id = e.subscription_id
    cross join lateral pg_catalog.jsonb_array_elements_text(
        case when pg_catalog.jsonb_typeof(e.payload -> 'ids') = 'array' then e.payload -> 'ids' else '[]' end) as i(id)
    where i.id >= lower and i.id < upper
$$;

-- Why events in a range of ids must be kept although every group has read them, a row for each event and holder. Reasons: a
-- condition failed for the event (fault); a retry that is still to be read names it.
create function pgmb.needs_after_read(lower pgmb.event_id, upper pgmb.event_id)
returns table (kind text, holder text, event_id text, since timestamptz)
language sql stable as $$
    select 'fault', f.group_id, i.id, f.occurred_at
    from pgmb.fault as f
    join pgmb.subscriptions as s on s.id = f.subscription_id
    cross join lateral pg_catalog.unnest(f.event_ids) as i(id)
    where i.id >= lower and i.id < upper
    union all
    -- A group with retries may have many unread events. They are read once, not for each retry.
    select 'retry', g.group_id, r.event_id, pgmb.extract_date_from_event_id(r.id)
    from (
        select x.group_id, pg_catalog.min(x.id) as lowest, pg_catalog.max(x.id) as highest
        from pgmb.retries(lower, upper) as x group by x.group_id
    ) as g
    cross join lateral (
        select u.event_id::text as id from pgmb.unread_events as u
        where u.event_id >= g.lowest and u.event_id <= g.highest
        union all
        select i.id
        from pgmb.cursors() as c
        join pgmb.dispatched as d on d.group_id = c.group_id and d.id > c.cursor
        cross join lateral pg_catalog.unnest(d.event_ids) as i(id)
        where c.group_id = g.group_id and i.id >= g.lowest and i.id <= g.highest
          and d.event_ids[1] <= g.highest and d.event_ids[pg_catalog.cardinality(d.event_ids)] >= g.lowest
    ) as w
    cross join lateral (
        select x.* from pgmb.retries(lower, upper) as x where x.id = w.id and x.group_id = g.group_id offset 0
    ) as r
$$;

-- Why dispatched events in a range of ids must be kept, a row for each event and holder. Reasons: the group has not read the
-- event; a condition failed for it (fault); a retry that is still to be read names it. The function has no search_path of its
-- own, so that PostgreSQL inlines it. Then each branch of the union stops reading as soon as its caller has enough rows.
create function pgmb.needs_after_dispatch(lower pgmb.event_id, upper pgmb.event_id)
returns table (kind text, holder text, event_id text, since timestamptz)
language sql stable as $$
    select 'unread', c.group_id, i.id, c.since
    from pgmb.cursors() as c
    -- Read dispatches from each cursor on, so that events which all groups have read are not read again.
    cross join lateral (
        select x.event_ids from pgmb.dispatched as x
        where x.group_id = c.group_id and x.id > c.cursor and x.event_ids[1] < upper
          and x.event_ids[pg_catalog.cardinality(x.event_ids)] >= lower
        offset 0
    ) as d
    cross join lateral pg_catalog.unnest(d.event_ids) as i(id)
    where i.id >= lower and i.id < upper
    union all
    select n.* from pgmb.needs_after_read(lower, upper) as n
$$;

-- Why events in a range of ids must be kept, a row for each event and holder. The event is undispatched, or needed after its
-- dispatch.
create function pgmb.needs(lower pgmb.event_id, upper pgmb.event_id)
returns table (kind text, holder text, event_id text, since timestamptz)
language sql stable as $$
    select 'undispatched', null, u.event_id, null::timestamptz
    from pgmb.unread_events as u
    where u.event_id >= lower and u.event_id < upper
    union all
    select n.* from pgmb.needs_after_dispatch(lower, upper) as n
$$;

-- The dispatches in a range that a group has not read, a row for each.
create function pgmb.unread_dispatches(lower pgmb.event_id, upper pgmb.event_id)
returns table (kind text, holder text, event_id text, since timestamptz)
language sql stable as $$
    select 'unread', c.group_id, d.event_ids[1], c.since
    from pgmb.cursors() as c
    cross join lateral (
        select x.event_ids from pgmb.dispatched as x
        where x.group_id = c.group_id and x.id > c.cursor and x.id >= lower and x.id < upper
        offset 0
    ) as d
$$;

-- One reason why a range of events or of dispatches must be kept; null if there is none. all_dispatched: all events in the range
-- are known to be dispatched, so undispatched events, which can be very many, are not searched. all_read: unread events are not
-- searched either.
create function pgmb.holder_of(
    tbl regclass, lower pgmb.event_id, upper pgmb.event_id, all_dispatched boolean default false, all_read boolean default false
) returns text
language plpgsql stable
set plan_cache_mode = force_generic_plan
set enable_hashjoin = off
set enable_mergejoin = off
set enable_seqscan = off
set jit = off
as $$
declare
    need record;
begin
    if tbl = 'pgmb.dispatched'::regclass then
        select n.* into need from pgmb.unread_dispatches(lower, upper) as n limit 1;
    elsif all_read then
        select n.* into need from pgmb.needs_after_read(lower, upper) as n limit 1;
    else
        -- Most events are dispatched when they are published. So a group that has not read some events of the range is mostly
        -- found by the dispatches of that time. Otherwise the search would first read all older unread events of the group.
        select n.* into need from pgmb.unread_dispatches(lower, upper) as n
        where n.event_id >= lower and n.event_id < upper limit 1;
        if need.kind is null and not all_dispatched then
            select n.* into need from pgmb.needs(lower, upper) as n limit 1;
        elsif need.kind is null then
            select n.* into need from pgmb.needs_after_dispatch(lower, upper) as n limit 1;
        end if;
    end if;
    return case need.kind
        when 'unread' then format('group %I has not read it', need.holder)
        when 'undispatched' then 'not all in it is dispatched'
        when 'fault' then format('a condition of group %I failed for events in it: see pgmb.fault', need.holder)
        when 'retry' then format('group %I is to read events in it again', need.holder)
    end;
end
$$;

-- The default partition, divided into the spans of ids below upto (by default all) from which it has rows. Each span is as long
-- as a partition would be, and has no ids that another partition takes.
create function pgmb.default_spans(tbl regclass, upto pgmb.event_id default 'pn')
returns table (partition_id regclass, lower_bound pgmb.event_id, upper_bound pgmb.event_id)
language plpgsql stable as $$
declare
    width interval := pgmb.setting_as_interval('partition_interval');
    others text[];
begin
    partition_id := pgmb.default_partition(tbl);
    upper_bound := '';
    loop
        execute format('select id from %s where id >= $1 and id < $2 order by id limit 1', partition_id)
        into lower_bound using upper_bound, upto;
        exit when lower_bound is null;
        others := coalesce(others, array(select p.lower_bound::text from pgmb.get_partitions_and_bounds(tbl) as p));
        upper_bound := least(
            upto,
            (select min(o.bound collate "C") from unnest(others) as o(bound)
             where o.bound collate "C" > default_spans.lower_bound),
            -- The last time that an id can express is not an end, because further ids have that time.
            nullif(
                pgmb.create_event_id(pgmb.end_of_partition(pgmb.extract_date_from_event_id(lower_bound), width), 0),
                pgmb.create_event_id('infinity', 0)));
        return next;
    end loop;
end
$$;

create function pgmb.holders()
returns table (partition regclass, reason text, holder text, events bigint, oldest_event_id text, since timestamptz)
language sql stable security definer
set enable_hashjoin = off
set enable_mergejoin = off
set enable_seqscan = off
set jit = off
as $$
    select p.partition_id, n.kind, n.holder, count(distinct n.event_id), min(n.event_id),
           coalesce(min(n.since), pgmb.extract_date_from_event_id(min(n.event_id)))
    from (
        select * from pgmb.get_partitions_and_bounds('pgmb.events'::regclass)
        union all
        select * from pgmb.default_spans('pgmb.events')
    ) as p
    cross join lateral pgmb.needs(p.lower_bound, p.upper_bound) as n
    group by 1, 2, 3
    order by 1, 2, 3
$$;
comment on function pgmb.holders() is
    'Why each partition of the events, the default partition too, cannot be emptied. Reasons are undispatched events, groups that '
    'have not read their events (unread), failed conditions (fault), and pending retries (retry). Also how many events, the '
    'oldest of them, and since when. It counts every event, so do not call it from a sensor.';

-- The id below which rows are older than partition_retention_period.
create function pgmb.retained_from(current_ts timestamptz) returns pgmb.event_id
language sql stable as $$
    select pgmb.create_event_id(current_ts - pgmb.setting_as_interval('partition_retention_period'), 0)
$$;

-- The id below which events lie beyond the newest retention_bytes or retention_count of the log; null if the log is within these
-- limits.
create function pgmb.excess_from(retention_bytes bigint, retention_count bigint) returns pgmb.event_id
language sql stable as $$
    with summed as (
        select e.upper_bound, sum(pg_total_relation_size(e.partition_id) + coalesce(pg_total_relation_size(d.partition_id), 0)) over newer as bytes,
               sum(case when retention_count is not null then pgchange.estimated_rows(e.partition_id) end) over newer as events
        from pgmb.get_partitions_and_bounds('pgmb.events'::regclass) as e
        left join pgmb.get_partitions_and_bounds('pgmb.dispatched'::regclass) as d on d.lower_bound = e.lower_bound
        window newer as (order by e.upper_bound collate "C" desc)
    )
    select max(s.upper_bound collate "C")::pgmb.event_id from summed as s
    where s.upper_bound collate "C" <= pgmb.create_event_id(now(), 0) and (s.bytes > retention_bytes or s.events > retention_count)
$$;

-- The partitions that have only events below an id, with their bounds.
create function pgmb.past_retention(tbl regclass, cut pgmb.event_id)
returns table (partition_id regclass, lower_bound pgmb.event_id, upper_bound pgmb.event_id)
language sql stable as $$
    select p.*
    from pgmb.partitions_in(tbl, '', cut) as p
    where p.upper_bound <= cut
    order by p.lower_bound
$$;

-- The ranges of events that have events which a group has not read, with the group. lows and ends are the bounds of the ranges, in
-- order. If the first and the last event of a dispatch are in the same range, its other events are not checked.
create function pgmb.unread_places(lows text[], ends text[]) returns table (place integer, group_id pgmb.group_id)
language plpgsql stable
set enable_hashjoin = off
set enable_mergejoin = off
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
begin
    return query
        select distinct e.place, d.group_id
        from (
            select c.group_id, x.event_ids, width_bucket(x.event_ids[1] collate "C", lows) as first,
                   width_bucket(x.event_ids[cardinality(x.event_ids)] collate "C", lows) as last
            from pgmb.cursors() as c
            cross join lateral (
                select y.event_ids from pgmb.dispatched as y where y.group_id = c.group_id and y.id > c.cursor offset 0) as x
            offset 0
        ) as d
        cross join lateral (
            select d.first, d.event_ids[1] where d.first = d.last
            union all
            select width_bucket(i.id collate "C", lows), i.id from unnest(d.event_ids) as i(id) where d.first < d.last
        ) as e(place, id)
        where e.place > 0 and e.id collate "C" < ends[e.place];
end
$$;

-- The partitions with rows that have only events below an id. Each has one reason why it must be kept, or null.
create function pgmb.old_partitions(tbl regclass, cut pgmb.event_id)
returns table (partition_id regclass, lower_bound pgmb.event_id, upper_bound pgmb.event_id, holder text)
language plpgsql stable
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
    parts regclass[];
    lowest text[];
    ends text[];
    waiting integer[] := '{}';
    unread jsonb := '{}';
begin
    select array_agg(p.partition_id), array_agg(p.lower_bound::text), array_agg(p.upper_bound::text) into parts, lowest, ends
    from pgmb.past_retention(tbl, cut) as p
    where pgmb.empty_ones(array[p.partition_id]) = '{}';
    if tbl = 'pgmb.events'::regclass and parts is not null then
        -- Undispatched events can be very many, so they are read once, and not for each partition.
        waiting := array(
            select distinct u.place from (
                select x.event_id, width_bucket(x.event_id::text collate "C", lowest) as place from pgmb.unread_events as x
                where x.event_id >= lowest[1] and x.event_id < ends[cardinality(ends)] offset 0
            ) as u
            where u.event_id < ends[u.place]);
        -- The unread events of a group can be very many, too, so its dispatches are also read once.
        unread := (
            select coalesce(jsonb_object_agg(h.place, h.group_id), '{}')
            from (
                select distinct on (u.place) u.place, u.group_id
                from pgmb.unread_places(lowest, ends) as u order by u.place, u.group_id) as h);
    end if;
    for n in 1..coalesce(cardinality(parts), 0) loop
        partition_id := parts[n];
        lower_bound := lowest[n];
        upper_bound := ends[n];
        holder := case when n = any (waiting) then 'not all in it is dispatched'
                       when unread ? n::text then format('group %I has not read it', unread ->> n::text)
                       else pgmb.holder_of(tbl, lower_bound, upper_bound, all_read => true) end;
        return next;
    end loop;
end
$$;

-- The partitions of events that are kept although they are older than partition_retention_period, each with one reason. The
-- default partition has the first reason for old rows in it. pgmb.holders() returns all reasons.
create function pgmb.overdue(current_ts timestamptz default now()) returns table (partition regclass, reason text)
language sql stable security definer as $$
    select p.partition_id, p.holder from pgmb.old_partitions('pgmb.events', pgmb.retained_from(current_ts)) as p where p.holder is not null
    union
    (select p.partition_id, n.reason
     from pgmb.default_spans('pgmb.events', pgmb.retained_from(current_ts)) as p
     cross join lateral pgmb.holder_of('pgmb.events', p.lower_bound, p.upper_bound) as n(reason)
     where n.reason is not null
     limit 1)
    order by 1, 2
$$;
