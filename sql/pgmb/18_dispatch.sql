-- Dispatching: a poll takes the next chunk of published events, finds the subscriptions that get them, and writes their slices.

-- About how many pairs of event and subscription a poll dispatches at most: it has them in memory, 28 bytes each, several times over.
create function pgmb.most_pairs() returns bigint
language sql immutable as $$
    select 1000000::bigint
$$;

-- How many events a poll takes: poll_chunk_size, and fewer where there are more than a thousand subscriptions whose conditions do not
-- look at their params.
create function pgmb.chunk_size() returns integer
language plpgsql stable as $$
declare
    -- Each is evaluated for every event.
    wide bigint := (
        select count(*) from (
            select from pgmb.used_conditions() as c join pgmb.subscriptions as s on s.condition_id = c.id
            where not c.by_params limit 1000000) as found_wide);
begin
    return greatest(10, pgmb.get_config_value('poll_chunk_size')::bigint * 1000 / greatest(1000, wide));
end
$$;

-- How many events can be matched at once, should every subscription get them all.
create function pgmb.piece_size() returns integer
language sql stable as $$
    select greatest(10, pgmb.most_pairs() / greatest(1, (
        select count(*) from (select from pgmb.subscriptions limit 1000000) as found_subscriptions)))
$$;

-- Take a chunk of what is due and a chunk of what was published, write which groups get them, and move the dispatcher past them. Of
-- more than most_pairs, if not null, pgmb.too_many() is raised.
create function pgmb.dispatch_some(
    at pgmb.dispatcher, upto pg_snapshot, chunk integer, most_pairs bigint, out events bigint, out pairs bigint,
    out more boolean
)
language plpgsql as $$
declare
    due record;
    fresh record;
    ids text[];
    addressed boolean;
    found_pairs record;
    matches pgmb.match[] := '{}';
    written record;
begin
    due := pgmb.take_due(at, chunk);
    at := due.at;
    ids := due.ids;
    more := due.more;
    addressed := cardinality(ids) > 0;
    if not due.late then
        -- Also while more events are due: the dispatcher knows those that are left by their ids.
        fresh := pgmb.take_published(at, upto, chunk);
        at := fresh.at;
        ids := case when cardinality(ids) = 0 then fresh.ids
                    else array(select i.id from unnest(ids || fresh.ids) as i(id) order by i.id collate "C") end;
        more := more or fresh.more;
        addressed := addressed or coalesce(fresh.addressed, true);
    else
        ids := array(select i.id from unnest(ids) as i(id) order by i.id collate "C");
    end if;
    events := coalesce(cardinality(ids), 0);
    if events > 0 then
        found_pairs := pgmb.matches(ids, addressed, most_pairs);
        perform pgmb.note_faults(found_pairs.faults);
        matches := found_pairs.matches;
    end if;
    -- Without a match too: the dispatcher is to know the time that it has come to.
    written := pgmb.write_matches(at, ids, matches);
    at := written.at;
    pairs := written.pairs;
    at.total := at.total + events;
    perform pgmb.move_dispatcher(at);
end
$$;

-- Dispatch up to so many events, a piece after the other, until there are enough pairs of event and subscription.
create function pgmb.dispatch_pieces(
    upto pg_snapshot, most integer, piece integer, most_pairs bigint, out events bigint, out pairs bigint, out more boolean
)
language plpgsql as $$
declare
    part record;
begin
    events := 0;
    pairs := 0;
    loop
        part := pgmb.dispatch_some(pgmb.dispatcher_now(), upto, least(piece, (most - events)::integer), most_pairs);
        events := events + part.events;
        pairs := pairs + part.pairs;
        more := part.more;
        exit when not more or events >= most or pairs >= pgmb.most_pairs();
    end loop;
end
$$;

-- Dispatch the next chunk: how many events it took, how many pairs of event and subscription it wrote, and whether more is there.
-- Nothing while another transaction dispatches.
create function pgmb.dispatch(most integer default null, out events bigint, out pairs bigint, out more boolean)
language plpgsql volatile security definer as $$
declare
    at pgmb.dispatcher;
    upto pg_snapshot;
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
        -- Another snapshot for another cluster: this transaction has an id now, and the next one dispatches.
        perform pgmb.restamp_undispatched();
        more := true;
        return;
    end if;
    if pgmb.publish_later(pgmb.create_event_id(clock_timestamp(), 0), 10000) > 0 then
        -- The log was not maintained for long. This transaction publishes now, and the next one dispatches it.
        more := true;
        return;
    end if;
    upto := pgmb.visible_now();
    if not pg_visible_in_snapshot(at.partial_txid, upto) then
        -- This transaction has an older id, so it cannot finish a younger one that was dispatched in part. Another poll does.
        return;
    end if;
    if not pgmb.has_work(at, upto) then
        return;
    end if;
    most := coalesce(most, pgmb.chunk_size());
    begin
        begin
            select d.* into events, pairs, more
            from pgmb.dispatch_pieces(upto, most, most, pgmb.most_pairs()) as d;
        exception when sqlstate 'PC014' then
            select d.* into events, pairs, more
            from pgmb.dispatch_pieces(upto, most, pgmb.piece_size(), null) as d;
        end;
    exception when query_canceled then
        raise exception using errcode = 'PC013',
            message = format('dispatching was cancelled, but not at a condition: %s', sqlerrm),
            hint = 'if a poll reached its time limit, set a smaller poll_chunk_size: each poll then has less to do';
    end;
end
$$;

create function pgmb.poll_for_events() returns integer
language plpgsql volatile as $$
declare
    part record;
begin
    -- Perhaps nobody wants any event of a chunk: that alone must not return 0, which says that nothing is left.
    for i in 1..10 loop
        part := pgmb.dispatch();
        exit when part.pairs > 0 or not part.more;
    end loop;
    return part.pairs;
end
$$;
comment on function pgmb.poll_for_events() is
    'Dispatch the next chunk of events to the subscriptions whose conditions they fulfil; returns how many pairs of event and '
    'subscription that were. 0 where nothing is left, where no subscription wants any event of the next ten chunks, and while '
    'another poll runs: a poll holds its lock until its transaction ends, so give each poll a transaction of its own. '
    'pgmb.dispatch() says whether there is more.';
