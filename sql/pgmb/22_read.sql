-- Reading: a group's events in the order of dispatch, after a cursor.

create view pgmb.subscription_events as
select d.id, d.group_id, i.id::pgmb.event_id as event_id, d.subscription_id
from pgmb.dispatched as d cross join lateral unnest(d.event_ids) as i(id);
comment on view pgmb.subscription_events is
    'The dispatched events, a row for each event and subscription; id is the cursor of the slice of the event.';

-- The slices of a group after a cursor up to another. before is the rank before the first event of each slice; low and high cut
-- the slice.
create function pgmb.slices(gid text, after text, upto text)
returns table (
    id text, dispatch text, subscription_ids text[], alone boolean, event_ids text[], before bigint, low bigint, high bigint
)
language sql stable as $$
    select d.id, pg_catalog.left(d.id, 15), array[d.subscription_id::text], d.alone, d.event_ids, b.before,
           case when pg_catalog.left(d.id, 15) = pg_catalog.left(slices.after, 15)
                then greatest(pgmb.rank_of(slices.after) - b.before, 0) else 0 end,
           case when pg_catalog.left(d.id, 15) = pg_catalog.left(slices.upto, 15)
                then pgmb.rank_of(slices.upto) - b.before else 1000000 end
    from pgmb.dispatched as d
    cross join lateral (
        select case when d.alone then pgmb.rank_of(d.id) - pg_catalog.cardinality(d.event_ids) else 0 end) as b(before)
    where d.group_id = slices.gid and d.id > slices.after
      and d.id <= pg_catalog.left(slices.upto, 15) || 'g'
      and (d.id <= slices.upto or b.before < pgmb.rank_of(slices.upto) or not d.alone)
    order by d.id
    offset 0
$$;

-- The events of a group after a cursor up to another, in order, if all slices between them are alone. The ids are between lowest
-- and highest, so that other partitions are not read.
create function pgmb.events_alone(gid text, after text, upto text, lowest text, highest text)
returns table (
    id text, topic varchar, payload jsonb, metadata jsonb, subscription_ids text[], dispatch text, rank bigint
)
language sql stable as $$
    -- In order without a sort: slices come in order, and each lists its ids in order.
    select e.id::text, e.topic, e.payload, e.metadata, d.subscription_ids, d.dispatch,
           d.before + d.low + e.n
    from pgmb.slices(events_alone.gid, events_alone.after, events_alone.upto) as d
    cross join lateral (
        select x.*, pg_catalog.row_number() over (order by x.id) as n
        from pgmb.events as x
        where x.id = any (d.event_ids[d.low + 1:d.high]) and x.id >= events_alone.lowest and x.id <= events_alone.highest
          -- PostgreSQL prunes no partitions by an array, but it does by the first and the last id of the array.
          and x.id >= d.event_ids[1] and x.id <= d.event_ids[pg_catalog.cardinality(d.event_ids)]
        order by x.id
        offset 0
    ) as e
$$;

-- The events of a group after a cursor up to another, in order, each once with the subscriptions that it was dispatched to.
create function pgmb.events_shared(gid text, after text, upto text, lowest text, highest text)
returns table (
    id text, topic varchar, payload jsonb, metadata jsonb, subscription_ids text[], dispatch text, rank bigint
)
language sql stable as $$
    select e.id::text, e.topic, e.payload, e.metadata, r.subscription_ids, r.dispatch, r.rank
    from (
        select g.*
        from (
            select d.id as slice_id, pg_catalog.min(d.dispatch) as dispatch, i.id,
                   pg_catalog.array_agg(d.subscription_ids[1] order by d.subscription_ids[1]) as subscription_ids,
                   pg_catalog.min(d.before) + pg_catalog.row_number() over (partition by d.id order by i.id collate "C") as rank,
                   pg_catalog.min(d.low + d.before) as low, pg_catalog.min(d.high + d.before) as high
            from pgmb.slices(events_shared.gid, events_shared.after, events_shared.upto) as d
            cross join lateral pg_catalog.unnest(d.event_ids) as i(id)
            group by d.id, i.id
        ) as g
        where g.rank > g.low and g.rank <= g.high
        order by g.slice_id collate "C", g.rank
        offset 0
    ) as r
    cross join lateral (
        select x.* from pgmb.events as x
        where x.id = r.id and x.id >= events_shared.lowest and x.id <= events_shared.highest offset 0) as e
$$;

-- The events of a group after a cursor up to another, in order. It is for few events: they are collected first, by a plan that
-- the session keeps.
create function pgmb.some_events(gid text, after text, upto text, lowest text, highest text, alone boolean)
returns table (
    id text, topic varchar, payload jsonb, metadata jsonb, subscription_ids text[], dispatch text, rank bigint
)
language plpgsql stable
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
begin
    if alone then
        return query select e.* from pgmb.events_alone(gid, after, upto, lowest, highest) as e;
    else
        return query select e.* from pgmb.events_shared(gid, after, upto, lowest, highest) as e;
    end if;
end
$$;
