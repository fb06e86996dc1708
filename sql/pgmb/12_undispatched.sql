-- Published events that are not dispatched yet: visible now, and not in the snapshot of the dispatcher.

-- The progress of dispatching.
create function pgmb.dispatcher_now() returns pgmb.dispatcher
language plpgsql stable as $$
begin
    return (select d from pgmb.dispatcher as d order by d.version desc limit 1);
end
$$;

-- The snapshot up to which a poll can dispatch now. Read the events in a later statement.
create function pgmb.visible_now() returns pg_snapshot
language plpgsql volatile as $$
begin
    if pg_current_xact_id_if_assigned() is null then
        return pg_current_snapshot();
    end if;
    -- This transaction can still publish. And after a crash that this transaction survives, the ids of transactions that began
    -- after it could be assigned again.
    return pgchange.snapshot_below(pg_current_snapshot(), pg_current_xact_id_if_assigned());
end
$$;

create function pgmb.undispatched(
    after pg_snapshot, partial_txid xid8, partial_seq bigint, upto pg_snapshot,
    high_txid xid8 default '18446744073709551615', high_seq bigint default 9223372036854775807
)
returns table (txid xid8, seq bigint, addressed boolean, ids text[])
language sql stable as $$
    (
        select q.txid, q.seq, q.addressed, q.ids
        from pg_catalog.pg_snapshot_xip(undispatched.after) as late(txid)
        cross join lateral (
            select p.txid, p.seq, p.addressed, p.ids
            from pgmb.published as p
            where p.txid = late.txid
              and (p.txid <> undispatched.partial_txid or p.seq > undispatched.partial_seq or undispatched.partial_txid is null)
              and (p.txid, p.seq) <= (undispatched.high_txid, undispatched.high_seq)
            order by p.txid, p.seq
        ) as q
        where pg_catalog.pg_visible_in_snapshot(late.txid, undispatched.upto)
        order by late.txid, q.seq
    )
    union all
    (
        select p.txid, p.seq, p.addressed, p.ids
        from pgmb.published as p
        where p.txid >= greatest(pg_catalog.pg_snapshot_xmax(undispatched.after), undispatched.partial_txid)
          and p.txid < pg_catalog.pg_snapshot_xmax(undispatched.upto)
          and (p.txid, p.seq) > (
              greatest(pg_catalog.pg_snapshot_xmax(undispatched.after), undispatched.partial_txid),
              case when undispatched.partial_txid >= pg_catalog.pg_snapshot_xmax(undispatched.after)
                   then undispatched.partial_seq else -1 end)
          and (p.txid, p.seq) <= (undispatched.high_txid, undispatched.high_seq)
          and pg_catalog.pg_visible_in_snapshot(p.txid, undispatched.upto)
        order by p.txid, p.seq
    )
$$;
comment on function pgmb.undispatched is
    'The slices that upto sees and a dispatcher has not dispatched, in order of (txid, seq). First come those of transactions '
    'that were open in its snapshot, then the range after it. The cost depends on neither backlog nor history.';

create view pgmb.unread_events as
select i.id::pgmb.event_id as event_id
from pgmb.dispatcher_now() as d
cross join lateral pgmb.undispatched(d.snapshot, d.partial_txid, d.partial_seq, pg_current_snapshot()) as u
cross join lateral unnest(u.ids) as i(id)
union all
select s.event_id from pgmb.scheduled as s
union all
select l.id from pgmb.later as l;
comment on view pgmb.unread_events is 'Events that are not dispatched yet, including those in the future.';

-- The scheduled events before an id that became visible to a dispatcher when their time was already over, by transaction and then
-- by their time. They are found by the index on txid, so that events taken before are not read again.
create function pgmb.late(after pg_snapshot, scheduled_upto text, before text) returns table (event_id text, place tid)
language sql stable as $$
    (
        select q.event_id, q.place
        from pg_catalog.pg_snapshot_xip(late.after) as o(txid)
        cross join lateral (
            select s.event_id, s.ctid as place from pgmb.scheduled as s
            where s.txid = o.txid and s.event_id <= late.scheduled_upto and s.event_id < late.before
            order by s.txid, s.event_id
        ) as q
    )
    union all
    (
        select s.event_id, s.ctid as place from pgmb.scheduled as s
        where s.txid >= pg_catalog.pg_snapshot_xmax(late.after)
          and s.event_id <= late.scheduled_upto and s.event_id < late.before
        order by s.txid, s.event_id
    )
$$;

-- Whether scheduled events before an id, which is not in the future, have yet to be dispatched.
create function pgmb.due_by(at pgmb.dispatcher, before text) returns boolean
language plpgsql
set plan_cache_mode = force_generic_plan
set jit = off
set enable_sort = off
set enable_seqscan = off
set enable_bitmapscan = off
as $$
begin
    return exists (select from pgmb.scheduled as s where s.event_id > at.scheduled_upto and s.event_id < before)
        or exists (select from pgmb.late(at.snapshot, at.scheduled_upto, before));
end
$$;
