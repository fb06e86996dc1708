-- Dispatching: a poll takes the next chunk of what is published, finds who gets it, and writes their slices.

create function pgmb.due_by(at pgmb.dispatcher, before text) returns boolean
language plpgsql
set search_path = pg_catalog, pgmb, pg_temp
set plan_cache_mode = force_generic_plan
set jit = off
set enable_sort = off
set enable_seqscan = off
set enable_bitmapscan = off
as $$
begin
    return exists (select from pgmb.scheduled as s where s.event_id > at.scheduled_upto and s.event_id < before)
        or exists (
            select from pgmb.scheduled as s
            where s.event_id <= at.scheduled_upto and s.event_id < before
              and (s.txid = any (array(select x from pg_snapshot_xip(at.snapshot) as x)) or s.txid >= pg_snapshot_xmax(at.snapshot)));
end
$$;
comment on function pgmb.due_by(pgmb.dispatcher, text) is
    'Whether scheduled events before an id, which is not in the future, are still to be dispatched.';

create function pgmb.anything(at pgmb.dispatcher, upto pg_snapshot) returns boolean
language plpgsql
set search_path = pg_catalog, pgmb, pg_temp
set plan_cache_mode = force_generic_plan
set jit = off
set enable_sort = off
set enable_seqscan = off
set enable_bitmapscan = off
as $$
begin
    return at.partial_txid is not null
        or exists (select from pgmb.undispatched(at.snapshot, at.partial_txid, at.partial_seq, upto))
        or pgmb.due_by(at, 'pm' || to_hex((date_part('epoch', clock_timestamp()) * 1000000)::bigint) || 'g');
end
$$;
comment on function pgmb.anything(pgmb.dispatcher, pg_snapshot) is 'Whether there is something to dispatch.';

create function pgmb.take_due(
    inout at pgmb.dispatcher, upto pg_snapshot, most integer, out ids text[], out more boolean
)
language plpgsql
set search_path = pg_catalog, pgmb, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
as $$
declare
    now_id text := 'pm' || to_hex((date_part('epoch', clock_timestamp()) * 1000000)::bigint) || 'g';
    late text[];
    last_id text;
begin
    -- Those that became visible when their time was over already; deleted ones are not stepped over again.
    with gone as (
        delete from pgmb.scheduled as s
        where s.event_id <= at.scheduled_upto
          and (s.txid = any (array(select x from pg_snapshot_xip(at.snapshot) as x)) or s.txid >= pg_snapshot_xmax(at.snapshot))
        returning s.event_id
    )
    select array_agg(g.event_id::text) into late from gone as g;
    with next as (
        select s.event_id from pgmb.scheduled as s
        where s.event_id > at.scheduled_upto and s.event_id < now_id
        order by s.event_id limit most
    ), gone as (
        delete from pgmb.scheduled as s using next as n where s.event_id = n.event_id returning s.event_id
    )
    -- By those that were found: somebody may have set some of them aside before they could be taken.
    select (select array_agg(g.event_id::text) from gone as g), count(*) >= most, max(n.event_id) into ids, more, last_id
    from next as n;
    at.scheduled_upto := case when more then last_id else now_id end;
    ids := coalesce(late, '{}') || coalesce(ids, '{}');
end
$$;
comment on function pgmb.take_due(pgmb.dispatcher, pg_snapshot, integer) is
    'Take the scheduled events whose time has come, at most so many and those that were committed too late.';

create function pgmb.take_published(
    inout at pgmb.dispatcher, upto pg_snapshot, most integer, out ids text[], out direct boolean, out more boolean
)
language plpgsql
set search_path = pg_catalog, pgmb, pg_temp
set plan_cache_mode = force_generic_plan
set jit = off
set enable_sort = off
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
    -- The transaction that was dispatched in part is finished first.
    only_txid xid8 := at.partial_txid;
    high_txid xid8 := coalesce(only_txid, '18446744073709551615');
    high_seq bigint := 9223372036854775807;
    taken bigint := 0;
    last record;
    slice record;
begin
    more := false;
    for slice in
        select u.txid, u.seq, cardinality(u.ids) as n
        from pgmb.undispatched(at.snapshot, at.partial_txid, at.partial_seq, upto, high_txid => high_txid) as u
        where only_txid is null or u.txid = only_txid
    loop
        more := taken >= most;
        exit when more;
        taken := taken + slice.n;
        last := slice;
    end loop;
    if taken = 0 and only_txid is null then
        return;
    end if;
    if taken > 0 then
        high_txid := last.txid;
        high_seq := last.seq;
        select array_agg(i.id order by i.id collate "C"), bool_or(u.direct) into ids, direct
        from pgmb.undispatched(at.snapshot, at.partial_txid, at.partial_seq, upto, high_txid, high_seq) as u
        cross join lateral unnest(u.ids) as i(id)
        where only_txid is null or u.txid = only_txid;
    end if;
    if more and slice.txid = last.txid then
        at.snapshot := case when only_txid is null
            then pgmb.snapshot_union(at.snapshot, pgmb.snapshot_below(upto, last.txid)) else at.snapshot end;
        at.partial_txid := last.txid;
        at.partial_seq := last.seq;
        return;
    end if;
    at.snapshot := case
        when only_txid is not null then pgmb.snapshot_with(at.snapshot, only_txid)
        when more then pgmb.snapshot_union(
            at.snapshot, pgmb.snapshot_below(upto, (last.txid::text::bigint + 1)::text::xid8))
        else pgmb.snapshot_union(at.snapshot, upto) end;
    more := more or only_txid is not null;
    at.partial_txid := null;
    at.partial_seq := null;
end
$$;
comment on function pgmb.take_published(pgmb.dispatcher, pg_snapshot, integer) is
    'Take the next slices, about so many events, and move the dispatcher behind them; the ids come in order.';

create function pgmb.dispatch_key() returns bigint
language sql immutable
as $$
    select pg_catalog.hashtextextended('pgchange dispatch pgmb', 0)
$$;
comment on function pgmb.dispatch_key() is 'The advisory lock of who dispatches, held until the transaction ends: dispatches are committed in order.';

create function pgmb.chunk_size() returns integer
language plpgsql stable
set search_path = pg_catalog, pgmb, pg_temp
as $$
declare
    -- Each may get every event, and all that a poll dispatches is in memory at once.
    wide bigint := (
        select count(*) from (
            select from pgmb.used_conditions() as c join pgmb.subscriptions as s on s.condition_id = c.id
            where not c.by_params limit 1000000) as found_wide);
begin
    return greatest(10, pgmb.get_config_value('poll_chunk_size')::bigint * 1000 / greatest(1000, wide));
end
$$;
comment on function pgmb.chunk_size() is
    'How many events a poll takes: poll_chunk_size, and less where more than a thousand subscriptions may get each of them.';

create function pgmb.dispatch(most integer default null, out events bigint, out pairs bigint, out more boolean)
language plpgsql volatile security definer
set search_path = pg_catalog, pgmb, pg_temp
as $$
declare
    chunk integer;
    at pgmb.dispatcher;
    upto pg_snapshot;
    due record;
    fresh record;
    ids text[];
    found_pairs record;
    base bigint;
    cuts text[];
begin
    events := 0;
    pairs := 0;
    more := false;
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception using errcode = 'PC007',
            message = 'events are dispatched in a read committed transaction: under a stricter level one would not see what '
                      'another poll has just committed',
            hint = 'begin isolation level read committed';
    end if;
    if most not between 1 and 1000000 then
        raise invalid_parameter_value using message = format('a poll dispatches 1 to 1000000 events, not %s', most),
            hint = 'all of them are in memory at once; without a number it is poll_chunk_size';
    end if;
    if not pg_try_advisory_xact_lock(pgmb.dispatch_key()) then
        return;
    end if;
    at := pgmb.dispatcher_now();
    if at.source <> pgmb.system_identifier() then
        -- Another snapshot for another cluster: this transaction has an id now, and the next one dispatches.
        perform pgmb.stamp_anew();
        more := true;
        return;
    end if;
    if pgmb.take_back(pgmb.create_event_id(clock_timestamp(), 0), 10000) > 0 then
        -- Nobody has maintained the log for long. This transaction publishes now, and the next one dispatches it.
        more := true;
        return;
    end if;
    upto := pgmb.visible_now();
    if not pgmb.anything(at, upto) then
        return;
    end if;
    chunk := coalesce(most, pgmb.chunk_size());
    due := pgmb.take_due(at, upto, chunk);
    fresh := pgmb.take_published(due.at, upto, chunk);
    ids := case when cardinality(due.ids) = 0 then fresh.ids
                else array(select i.id from unnest(due.ids || fresh.ids) as i(id) order by i.id collate "C") end;
    events := coalesce(cardinality(ids), 0);
    more := due.more or fresh.more;
    if events = 0 and (fresh.at).partial_txid is not distinct from at.partial_txid then
        return;
    end if;
    at := fresh.at;
    base := greatest((date_part('epoch', clock_timestamp()) * 1000000)::bigint, pgmb.micros(at.last_id) + 1);
    if fresh.ids is null and not more then
        at.snapshot := pgmb.snapshot_union(at.snapshot, upto);
    end if;
    if events > 0 then
        found_pairs := pgmb.matches(ids, coalesce(fresh.direct, true) or cardinality(due.ids) > 0);
        perform pgmb.note_faults(found_pairs.faults);
        cuts := array(select ids[g] collate "C" from generate_series(1001, events, 1000) as g);
        pairs := pgmb.write_alone(found_pairs.matches, base, at.total);
        if exists (
            select from unnest(found_pairs.matches) as m group by m.group_id having min(m.subscription_id) <> max(m.subscription_id))
        then
            pairs := pairs + pgmb.write_shared(found_pairs.matches, base, at.total, cuts);
        end if;
    end if;
    insert into pgmb.dispatcher (
        version, snapshot, partial_txid, partial_seq, last_id, scheduled_upto, total, source, restored)
    values (
        at.version + 1, at.snapshot, at.partial_txid, at.partial_seq,
        pgmb.cursor_at(base + coalesce(cardinality(cuts), 0), 0), at.scheduled_upto, at.total + events, at.source, at.restored);
    delete from pgmb.dispatcher as d where d.version = at.version;
end
$$;
comment on function pgmb.dispatch(integer) is
    'Dispatch the next chunk: how many events it took, how many pairs of event and subscription it wrote, and whether more is '
    'there. Nothing while another transaction dispatches.';

create function pgmb.poll_for_events() returns integer
language plpgsql volatile
set search_path = pg_catalog, pgmb, pg_temp
as $$
declare
    part record;
begin
    -- Nobody may want a whole chunk: 0 is not to say so at once.
    for i in 1..10 loop
        part := pgmb.dispatch();
        exit when part.pairs > 0 or not part.more;
    end loop;
    return part.pairs;
end
$$;
comment on function pgmb.poll_for_events() is
    'Dispatch the next chunk of events to the subscriptions whose conditions they fulfil; returns how many pairs of event and '
    'subscription that were. 0 where nothing is left, or nobody wants any of the next ten chunks, and while another poll runs: '
    'its lock is held until its transaction ends, so poll in transactions of their own. pgmb.dispatch() says whether more is there.';
