-- Writing dispatches. A match lists events that are for a subscription. It is written in slices: rows of pgmb.dispatched with up to
-- 280 ids of events each. The group of the subscription reads these rows.

-- The matches of the groups of which only a single subscription matched, one match for each group. Also whether there are other
-- groups.
create function pgmb.alone(matches pgmb.match[], out whole pgmb.match[], out has_shared boolean)
language plpgsql
set plan_cache_mode = force_generic_plan
set jit = off
as $$
begin
    with matched as materialized (
        select m.group_id, m.subscription_id, m.ids, count(*) over of_group as parts,
               min(m.subscription_id) over of_group <> max(m.subscription_id) over of_group as is_shared
        from unnest(matches) as m
        window of_group as (partition by m.group_id)
    ), merged as (
        select m.group_id, m.subscription_id, m.ids from matched as m where m.parts = 1
        union all
        -- One subscription with several topics.
        select m.group_id, min(m.subscription_id), array_agg(i.id order by i.id collate "C")
        from matched as m cross join lateral unnest(m.ids) as i(id)
        where m.parts > 1 and not m.is_shared
        group by m.group_id
    )
    select (select array_agg(row(m.group_id, m.subscription_id, m.ids)::pgmb.match) from merged as m),
           (select coalesce(bool_or(m.is_shared), false) from matched as m)
    into whole, has_shared;
end
$$;

-- The places at which events are cut into dispatches of a thousand: the first id of each dispatch except the first. ids must be
-- in order.
create function pgmb.cuts(ids text[]) returns text[]
language sql immutable as $$
    select array(select ids[g] collate "C" from generate_series(1001, cardinality(ids), 1000) as g)
$$;

-- Write the slices of the groups of which several subscriptions matched. Readers read a whole dispatch, so the events between two
-- cuts are a dispatch of their own. Returns how many pairs of event and subscription were dispatched.
create function pgmb.write_shared(matches pgmb.match[], base bigint, total bigint, cuts text[]) returns bigint
language plpgsql
set plan_cache_mode = force_generic_plan
set jit = off
as $$
declare
    written_events bigint;
begin
    with matched as (
        select m.group_id, m.subscription_id, m.ids from unnest(matches) as m
        where m.group_id in (
            select x.group_id from unnest(matches) as x group by x.group_id
            having min(x.subscription_id) <> max(x.subscription_id))
    ), pairs as (
        select distinct m.group_id, m.subscription_id, i.id,
               width_bucket(i.id collate "C", cuts) as slice
        from matched as m cross join lateral unnest(m.ids) as i(id)
    ), ranked as (
        select p.group_id, p.slice, count(distinct p.id) as ranks from pairs as p group by p.group_id, p.slice
    ), whole as (
        select p.group_id, p.subscription_id, p.slice, array_agg(p.id order by p.id collate "C") as ids
        from pairs as p group by p.group_id, p.subscription_id, p.slice
    ), written as (
        insert into pgmb.dispatched (id, group_id, subscription_id, event_ids, alone, total)
        select pgmb.cursor_at(base + w.slice, r.ranks), w.group_id, w.subscription_id, w.ids[g.first:g.first + 279], false,
               write_shared.total
        from whole as w
        join ranked as r on (r.group_id, r.slice) = (w.group_id, w.slice)
        cross join lateral generate_series(1, cardinality(w.ids), 280) as g(first)
        returning cardinality(event_ids) as n
    )
    select coalesce(sum(w.n), 0) into written_events from written as w;
    return written_events;
end
$$;

-- Replace the dispatcher's row, from which at was read, by a row with the next version. Write also the slices of groups, with
-- one match for each group, and with base as the time of their first dispatch. Both are one statement, because a statement
-- costs more than its rows. total is the number of events before these. Returns how many events were dispatched to these
-- groups. The caller holds the lock of pgmb.dispatch_key().
create function pgmb.move_dispatcher(
    inout at pgmb.dispatcher, matches pgmb.match[] default null, base bigint default null, total bigint default null, out written bigint
)
language plpgsql
set plan_cache_mode = force_generic_plan
set jit = off
as $$
begin
    at.version := at.version + 1;
    with gone as (
        delete from pgmb.dispatcher as d where d.version = at.version - 1
    ), moved as (
        insert into pgmb.dispatcher (
            version, snapshot, partial_txid, partial_seq, last_id, scheduled_upto, total, restored, restored_at)
        values (
            at.version, at.snapshot, at.partial_txid, at.partial_seq, at.last_id, at.scheduled_upto, at.total,
            at.restored, at.restored_at)
    ), slices as (
        insert into pgmb.dispatched (id, group_id, subscription_id, event_ids, alone, total)
        select pgmb.cursor_at(base, least(g.first + 279, cardinality(m.ids))), m.group_id, m.subscription_id,
               m.ids[g.first:g.first + 279], true, move_dispatcher.total
        from unnest(matches) as m cross join lateral generate_series(1, cardinality(m.ids), 280) as g(first)
        returning cardinality(event_ids) as n
    )
    select coalesce(sum(s.n), 0) into written from slices as s;
end
$$;

-- Dispatch events: write their matches as slices, and move the dispatcher past the events. ids: the events, in order. counted: by
-- how much the total of the log grows. pairs: how many pairs of event and subscription were written.
create function pgmb.write_matches(inout at pgmb.dispatcher, ids text[], matches pgmb.match[], counted bigint, out pairs bigint)
language plpgsql as $$
declare
    base constant bigint := greatest(pgmb.now_micros(), pgmb.micros(at.last_id) + 1);
    total constant bigint := at.total;
    parted record;
    moved record;
begin
    pairs := 0;
    if cardinality(matches) > 1 then
        parted := pgmb.alone(matches);
        if parted.has_shared then
            pairs := pgmb.write_shared(matches, base, total, pgmb.cuts(ids));
        end if;
        matches := parted.whole;
    end if;
    at.last_id := pgmb.cursor_at(base + coalesce(cardinality(ids) - 1, 0) / 1000, 0);
    at.total := total + counted;
    moved := pgmb.move_dispatcher(at, matches, base, total);
    at := moved.at;
    pairs := pairs + moved.written;
end
$$;
