-- The events that a poll takes: scheduled events whose time has come, and the next slices of published events.

-- Take at most the given number of scheduled events whose time has come, beginning with events that were committed too late.
-- late: more of the late events may be left. Then the dispatcher's snapshot must not move, and the dispatcher does not move past
-- events that are in time.
create function pgmb.take_due(
    inout at pgmb.dispatcher, most integer, out ids text[], out late boolean, out more boolean
)
language plpgsql
set plan_cache_mode = force_generic_plan
set jit = off
set enable_sort = off
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
declare
    now_id text := pgmb.due_before();
    n bigint;
    on_time text[];
    last_id text;
begin
    -- Delete the events by their ctid, so that each takes a single lookup, however few rows the planner expects.
    with next as (
        select l.place from pgmb.late(at.snapshot, at.scheduled_upto, now_id) as l limit most
    ), gone as (
        delete from pgmb.scheduled as s where s.ctid = any (array(select n.place from next as n)) returning s.txid, s.event_id
    )
    -- Count the rows that were found, not the rows that were deleted: maintenance may have set some of them aside between the
    -- two.
    select coalesce((select array_agg(g.event_id::text order by g.txid, g.event_id) from gone as g), '{}'), count(*) into ids, n
    from next as x;
    late := n >= most;
    more := late;
    if late then
        -- Keep the fields of at, because they separate the events that are left from those that were taken.
        return;
    end if;
    most := most - n;
    with next as (
        select s.event_id, s.ctid as place from pgmb.scheduled as s
        where s.event_id > at.scheduled_upto and s.event_id < now_id
        order by s.event_id limit most
    ), gone as (
        delete from pgmb.scheduled as s where s.ctid = any (array(select n.place from next as n)) returning s.event_id
    )
    select (select array_agg(g.event_id::text order by g.event_id) from gone as g), count(*) >= most, max(n.event_id)
    into on_time, more, last_id from next as n;
    at.scheduled_upto := case when more then last_id else now_id end;
    ids := ids || on_time;
end
$$;

-- Take all published events, if they are in a few slices of transactions behind the dispatcher's snapshot, and no other events
-- are due. The ids are returned in order, and are null if there are none. If the log is read at once, almost every poll needs
-- only this query. It costs half of that of take_published(), because it reads fewer tables. is_all: all were taken; otherwise
-- none.
create function pgmb.take_few(inout at pgmb.dispatcher, upto pg_snapshot, out ids text[], out addressed boolean, out is_all boolean)
language plpgsql
set plan_cache_mode = force_generic_plan
set jit = off
set enable_sort = off
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
    after constant xid8 := pg_snapshot_xmax(at.snapshot);
begin
    is_all := false;
    if at.partial_txid is null and pg_snapshot_xmin(at.snapshot) = after then
        -- No transaction was open at the last poll, so no late transaction can have published or scheduled events.
        select p.ids, p.addressed,
               p.slices <= 10 and at.scheduled_upto <= d.now_id
                   and not exists (select from pgmb.scheduled as s where s.txid >= after)
                   and not exists (select from pgmb.scheduled as s where s.event_id > at.scheduled_upto and s.event_id < d.now_id)
        into ids, addressed, is_all
        from (select pgmb.due_before() offset 0) as d(now_id)
        cross join (
            select array_agg(i.id order by i.id collate "C"), coalesce(bool_or(q.addressed), false), count(*) filter (where i.n = 1)
            from (
                select u.addressed, u.ids from pgmb.published as u
                where u.txid >= after and u.txid < pg_snapshot_xmax(upto) and pg_visible_in_snapshot(u.txid, upto)
                limit 11
            ) as q
            cross join lateral unnest(q.ids) with ordinality as i(id, n)
        ) as p(ids, addressed, slices);
        at.snapshot := pgchange.snapshot_union(at.snapshot, upto);
    end if;
end
$$;

-- Take the next slices, about the given number of events, and move the dispatcher past them. The ids are returned in order. If no
-- slice waits, the dispatcher moves to upto. upto must see a transaction that was dispatched in part. Nothing is written.
--
-- has_due: scheduled events are due. After the clock was set back it is true as well, because take_due() must set back
-- scheduled_upto before the dispatcher sees more transactions. has_work: there is any work. If transactions published only for
-- later, the dispatcher has to move past them, so that no poll searches them for late events again.
create function pgmb.take_published(
    inout at pgmb.dispatcher, upto pg_snapshot, most integer, out ids text[], out addressed boolean, out more boolean,
    out has_due boolean, out has_work boolean
)
language plpgsql
set plan_cache_mode = force_generic_plan
set jit = off
set enable_sort = off
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
    -- If a transaction was dispatched in part, take the rest of it first.
    only_txid xid8 := at.partial_txid;
    last bigint[];
    next_txid xid8;
begin
    -- A slice is taken if fewer than most events come before it. The first event behind the last slice taken is read, too, to know
    -- whether more is left. A slice has up to 280 events, so the limit is 280 higher than most. All this is a single query,
    -- because each query of a poll costs more than the rows that it reads.
    select p.ids, p.addressed, p.last, p.next_txid,
           at.scheduled_upto > d.now_id
               or exists (select from pgmb.scheduled as s where s.event_id > at.scheduled_upto and s.event_id < d.now_id)
               or exists (select from pgmb.late(at.snapshot, at.scheduled_upto, d.now_id)),
           p.ids is not null or only_txid is not null or exists (
               select from pgmb.scheduled as s
               where s.txid >= pg_snapshot_xmax(at.snapshot) and pg_visible_in_snapshot(s.txid, upto))
    into ids, addressed, last, next_txid, has_due, has_work
    from (select pgmb.due_before() offset 0) as d(now_id)
    cross join (
        select array_agg(q.id order by q.id collate "C") filter (where q.before < most),
               bool_or(q.addressed) filter (where q.before < most),
               max(array[q.txid::text::bigint, q.seq]) filter (where q.before < most and q.n = 1),
               min(q.txid) filter (where q.before >= most)
        from (
            select u.txid, u.seq, u.addressed, i.id, i.n, row_number() over () - i.n as before
            from pgmb.undispatched(
                at.snapshot, at.partial_txid, at.partial_seq, upto, high_txid => coalesce(only_txid, '18446744073709551615')) as u
            cross join lateral unnest(u.ids) with ordinality as i(id, n)
            where only_txid is null or u.txid = only_txid
            limit most + 280
        ) as q
    ) as p(ids, addressed, last, next_txid);
    has_work := has_work or has_due;
    more := next_txid is not null;
    if next_txid::text::bigint = last[1] then
        at.snapshot := case when only_txid is null
            then pgchange.snapshot_union(at.snapshot, pgchange.snapshot_below(upto, next_txid)) else at.snapshot end;
        at.partial_txid := next_txid;
        at.partial_seq := last[2];
        return;
    end if;
    at.snapshot := case
        when only_txid is not null then pgchange.snapshot_with(at.snapshot, only_txid)
        when more then pgchange.snapshot_union(
            at.snapshot, pgchange.snapshot_below(upto, (last[1] + 1)::text::xid8))
        else pgchange.snapshot_union(at.snapshot, upto) end;
    more := more or only_txid is not null;
    at.partial_txid := null;
    at.partial_seq := null;
end
$$;
