-- A group's next batch. The lock, the cursor and the ack are where the results are; the claim is where the events are.

-- The address of a group, as its claim and its dead letters record it.
create function pgmb.address(gid text) returns jsonb
language sql stable as $$
    select pg_catalog.jsonb_build_object('group', gid)
$$;

-- The cursor of a position, in the form that a claim records.
create function pgmb.at("position" jsonb) returns jsonb
language sql stable as $$
    select pg_catalog.to_jsonb(coalesce("position" ->> 'cursor', ''))
$$;

-- Whether a group at one cursor has read all events before another.
create function pgmb.covers(at jsonb, upto jsonb) returns boolean
language sql immutable as $$
    select (at #>> '{}') collate "C" >= (upto #>> '{}') collate "C"
$$;

-- The next dispatched events of a group, at most the given number, as a batch; null if there are none.
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

-- The next batch of a group, or null if nothing is ready. If fewer events are ready than the batch may have, it dispatches first.
-- The function has no search_path of its own, which would slow down every claim.
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
        -- Dispatching in a restored log gives the log a new place. More events are left then, so the loop comes here again.
        source := jsonb_build_object('source', pgmb.here());
    end loop;
    -- Do this after the dispatch. Otherwise, if a condition does not end, its subscription could not be removed meanwhile.
    perform pgmb.keep_alive(gid);
    return choice || jsonb_build_object('lsn', pg_current_wal_insert_lsn(), 'bounds', choice -> 'bounds' || source);
end
$$;

-- The recorded batch of a group, in the form for a retry.
create function pgmb.again(gid text, batch jsonb) returns jsonb
language plpgsql volatile as $$
begin
    perform pgmb.keep_alive(gid);
    -- The first attempt's dispatch was committed after the lsn that the attempt recorded.
    return batch || jsonb_build_object('lsn', pg_current_wal_insert_lsn());
end
$$;
