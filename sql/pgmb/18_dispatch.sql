-- Dispatching: a poll takes the next chunk of published events, finds the subscriptions that get them, and writes their slices.

-- The approximate maximum of pairs of event and subscription that a poll dispatches. A pair takes 28 bytes, and a poll has it
-- in memory several times.
create function pgmb.most_pairs() returns bigint
language sql immutable as $$
    select 1000000::bigint
$$;

-- How many events a poll takes: poll_chunk_size, or fewer if more than a thousand subscriptions have conditions that do not read
-- their params.
create function pgmb.chunk_size() returns integer
language plpgsql stable
set enable_seqscan = off
as $$
declare
    size bigint;
    wide bigint;
begin
    select c.value, count(*) into size, wide
    from pgmb.config as c left join (select from pgmb.subscriptions limit 1001) as s on true
    where c.id = 'poll_chunk_size'
    group by c.value;
    if wide > 1000 then
        -- Each such condition is evaluated for every event.
        wide := (
            select count(*) from (
                select from unnest(pgmb.used_conditions()) as c join pgmb.subscriptions as s on s.condition_id = c.id
                where not c.by_params limit 1000000) as found_wide);
    end if;
    return greatest(10, size * 1000 / greatest(1000, wide));
end
$$;

-- The maximum number of events in a piece. It fits into memory even if every subscription gets all of the events.
create function pgmb.piece_size() returns integer
language sql stable as $$
    select greatest(10, pgmb.most_pairs() / greatest(1, (
        select count(*) from (select from pgmb.subscriptions limit 1000000) as found_subscriptions)))
$$;

-- Write which groups get the taken events, and move the dispatcher past them. ids must be in order. Returns how many pairs of
-- event and subscription there are. If there are more than most_pairs matches, unless null, pgmb.too_many() is raised.
create function pgmb.dispatch_taken(
    inout at pgmb.dispatcher, ids text[], addressed boolean, most_pairs bigint, out pairs bigint
)
language plpgsql as $$
declare
    part record;
    found_matches pgmb.match[];
    written record;
begin
    if cardinality(ids) > 0 then
        part := pgmb.matches(ids, addressed, most_pairs);
        if cardinality(part.faults) > 0 then
            perform pgmb.note_faults(part.faults);
        end if;
        found_matches := part.matches;
    end if;
    -- Call this even if nothing matches, because it also records how far the dispatcher has come.
    written := pgmb.write_matches(at, ids, found_matches, coalesce(cardinality(ids), 0));
    at := written.at;
    pairs := written.pairs;
end
$$;

-- Dispatch a chunk of due events and a chunk of published events.
create function pgmb.dispatch_some(
    inout at pgmb.dispatcher, upto pg_snapshot, chunk integer, most_pairs bigint, out events bigint, out pairs bigint, out more boolean
)
language plpgsql as $$
declare
    taken record := pgmb.take_published(at, upto, chunk);
    due record;
    written record;
begin
    events := 0;
    pairs := 0;
    more := false;
    if not taken.has_work then
        return;
    end if;
    if taken.has_due then
        due := pgmb.take_due(at, chunk);
        if due.late then
            -- Late events are left. Let published events wait, because only the dispatcher's present snapshot identifies the
            -- late events.
            taken.at := at;
            taken.ids := null;
        end if;
        -- Without late events, dispatch due and published events together, even if more events are due: the dispatcher knows
        -- due events by their ids.
        taken.ids := array(select i.id from unnest(due.ids || taken.ids) as i(id) order by i.id collate "C");
        taken.addressed := taken.addressed or cardinality(due.ids) > 0;
        taken.more := taken.more or due.more;
        at := taken.at;
        at.scheduled_upto := (due.at).scheduled_upto;
    else
        at := taken.at;
    end if;
    events := coalesce(cardinality(taken.ids), 0);
    more := taken.more;
    written := pgmb.dispatch_taken(at, taken.ids, coalesce(taken.addressed, false), most_pairs);
    at := written.at;
    pairs := written.pairs;
end
$$;

-- Dispatch up to the given number of events, by default chunk_size(), in pieces that fit into memory. Stop early if there are
-- enough pairs of event and subscription.
create function pgmb.dispatch_pieces(
    at pgmb.dispatcher, upto pg_snapshot, most integer, piece integer, most_pairs bigint, out events bigint, out pairs bigint,
    out more boolean
)
language plpgsql as $$
declare
    few constant record := pgmb.take_few(at, upto);
    part record;
begin
    events := coalesce(cardinality(few.ids), 0);
    pairs := 0;
    more := false;
    -- A chunk has at least ten events. So up to ten, its size need not be computed.
    if few.is_all and events <= least(piece, coalesce(most, case when events <= 10 then 10 else pgmb.chunk_size() end)) then
        if events > 0 then
            part := pgmb.dispatch_taken(few.at, few.ids, few.addressed, most_pairs);
            pairs := part.pairs;
        end if;
        return;
    end if;
    events := 0;
    most := coalesce(most, pgmb.chunk_size());
    loop
        part := pgmb.dispatch_some(at, upto, least(piece, (most - events)::integer), most_pairs);
        at := part.at;
        events := events + part.events;
        pairs := pairs + part.pairs;
        more := part.more;
        exit when not more or events >= most or pairs >= pgmb.most_pairs();
    end loop;
end
$$;

-- Dispatch the next chunk. Returns how many events it took, how many pairs of event and subscription it wrote, and whether there
-- are more. Does nothing while another transaction dispatches.
create function pgmb.dispatch(most integer default null, out events bigint, out pairs bigint, out more boolean)
language plpgsql volatile security definer as $$
declare
    at pgmb.dispatcher;
    upto pg_snapshot;
    now_id constant text := pgmb.create_event_id(clock_timestamp(), 0);
    done record;
begin
    events := 0;
    pairs := 0;
    more := false;
    perform pgchange.check_isolation();
    if most not between 1 and 1000000 then
        raise invalid_parameter_value using message = format('a poll dispatches 1 to 1000000 events, not %s', most),
            hint = 'a poll has all of them in memory at once; without a number it takes poll_chunk_size';
    end if;
    if not pg_try_advisory_xact_lock(pgmb.dispatch_key()) then
        return;
    end if;
    at := pgmb.dispatcher_now();
    if not pgmb.is_native() then
        -- The next transaction dispatches, because this transaction now has an id, and dispatching needs a snapshot from another
        -- transaction.
        perform pgmb.restamp_undispatched();
        more := true;
        return;
    end if;
    if pgmb.aside(now_id) and pgmb.publish_later(now_id, 10000) > 0 then
        -- The log was not maintained for a long time. This transaction publishes the events, and the next transaction dispatches
        -- them.
        more := true;
        return;
    end if;
    upto := pgmb.visible_now();
    if not pg_visible_in_snapshot(at.partial_txid, upto) then
        -- Another poll has dispatched a part of a transaction that is younger than this transaction. This poll reads older
        -- transactions only, so a later poll dispatches the rest.
        return;
    end if;
    begin
        begin
            done := pgmb.dispatch_pieces(at, upto, most, null, pgmb.most_pairs());
        exception when sqlstate 'PC014' then
            done := pgmb.dispatch_pieces(at, upto, most, pgmb.piece_size(), null);
        end;
    exception when query_canceled then
        raise exception using errcode = 'PC013',
            message = format('dispatching was cancelled, but not at a condition: %s', sqlerrm),
            hint = 'if a poll reached its time limit, set a smaller poll_chunk_size: each poll then has less to do';
    end;
    events := done.events;
    pairs := done.pairs;
    more := done.more;
end
$$;

create function pgmb.poll_for_events() returns integer
language plpgsql volatile as $$
declare
    part record;
begin
    -- If no subscription gets any event of a chunk, take the next chunk: 0 would mean that nothing is left.
    for i in 1..10 loop
        part := pgmb.dispatch();
        exit when part.pairs > 0 or not part.more;
    end loop;
    return part.pairs;
end
$$;
comment on function pgmb.poll_for_events() is
    'Dispatch the next chunk of events to the subscriptions whose conditions they fulfil. Returns how many pairs of event and '
    'subscription there were. Returns 0 if nothing is left, if no subscription gets any event of the next ten chunks, or while '
    'another poll runs. A poll holds its lock until its transaction ends, so give each poll a transaction of its own. '
    'pgmb.dispatch() also returns whether there are more events.';
