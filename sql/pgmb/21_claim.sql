-- A group's next batch. The lock, the cursor and the ack are where the results are; the claim is where the events are.

-- What a group's claim and its dead letters are known by.
create function pgmb.address(gid text) returns jsonb
language sql stable as $$
    select pg_catalog.jsonb_build_object('group', gid)
$$;

-- The cursor of a position, as a claim has it.
create function pgmb.at("position" jsonb) returns jsonb
language sql stable as $$
    select pg_catalog.to_jsonb(coalesce("position" ->> 'cursor', ''))
$$;

-- Whether a group at one cursor has read all before another.
create function pgmb.covers(at jsonb, upto jsonb) returns boolean
language sql immutable as $$
    select (at #>> '{}') collate "C" >= (upto #>> '{}') collate "C"
$$;

-- The next dispatched events of a group, at most so many, as a batch; null if there are none.
create function pgmb.dispatched_batch(gid text, after text, max_changes integer) returns jsonb
language plpgsql volatile as $$
declare
    ready constant record := pgmb.next_events(gid, after, max_changes, greatest(10000, max_changes / 256));
begin
    if ready.count = 0 then
        return null;
    end if;
    return jsonb_build_object(
        'count', ready.count, 'slices', ready.runs, 'oldest', pgmb.extract_date_from_event_id(ready.lowest),
        'bounds', jsonb_build_object(
            'after', after, 'upto', ready.upto, 'alone', ready.alone, 'lowest', ready.lowest, 'highest', ready.highest));
end
$$;

-- The next batch of a group, or null if nothing is ready. Where too little is ready it dispatches first.
-- Without a search_path of its own: a claim waits for this.
create function pgmb.choose(gid text, "position" jsonb, max_changes integer) returns jsonb
language plpgsql volatile as $$
declare
    after constant text := coalesce("position" ->> 'cursor', '');
    choice jsonb := pgmb.dispatched_batch(gid, after, max_changes);
    polled record;
    source jsonb := '{}';
begin
    while coalesce((choice ->> 'count')::bigint, 0) < max_changes loop
        polled := pgmb.dispatch();
        if polled.pairs > 0 then
            choice := pgmb.dispatched_batch(gid, after, max_changes);
        end if;
        exit when not polled.more;
        -- The dispatch of a restored log, after which there is more to do, gives the log a new place.
        source := jsonb_build_object('source', pgmb.here());
    end loop;
    -- After the dispatch: removing a subscription whose condition does not end must not wait for that condition.
    perform pgmb.keep_alive(gid);
    return choice || jsonb_build_object('lsn', pg_current_wal_insert_lsn(), 'bounds', choice -> 'bounds' || source);
end
$$;

-- The recorded batch of a group, as a retry gets it.
create function pgmb.again(gid text, batch jsonb) returns jsonb
language plpgsql volatile as $$
begin
    perform pgmb.keep_alive(gid);
    -- What the first attempt dispatched was committed after the point that it noted.
    return batch || jsonb_build_object('lsn', pg_current_wal_insert_lsn());
end
$$;
