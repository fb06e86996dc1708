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

-- Whether an event is dispatched to a group behind a cursor.
create function pgmb.is_ready(gid text, after text) returns boolean
language plpgsql stable
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set jit = off
as $$
begin
    return exists (
        select from pgmb.dispatched as d
        -- Partitions of the future are not looked into.
        where d.group_id = is_ready.gid and d.id > is_ready.after
          and d.id < (select left(l.last_id, 15) || 'g' from pgmb.dispatcher as l order by l.version desc limit 1)
        order by d.group_id, d.id limit 1);
end
$$;

-- The next dispatched events of a group, at most so many, as a batch.
create function pgmb.dispatched_batch(gid text, after text, max_changes integer) returns jsonb
language plpgsql volatile as $$
begin
    return (
        select jsonb_build_object(
            'count', coalesce(sum(r.count), 0)::bigint,
            'slices', coalesce(
                jsonb_agg(jsonb_build_object('count', r.count, 'after', r.low, 'upto', r.upto) order by r.upto collate "C"), '[]'),
            'oldest', pgmb.extract_date_from_event_id(min(r.lowest collate "C")),
            'bounds', jsonb_build_object(
                'after', dispatched_batch.after, 'upto', coalesce(max(r.upto collate "C"), dispatched_batch.after),
                'alone', coalesce(bool_and(r.alone), true),
                'lowest', min(r.lowest collate "C"), 'highest', max(r.highest collate "C")))
        from (
            select n.*, lag(n.upto, 1, dispatched_batch.after) over () as low
            from pgmb.next_runs(
                dispatched_batch.gid, dispatched_batch.after, max_changes, greatest(10000, max_changes / 256)) as n
        ) as r);
end
$$;

-- The next batch of a group, or null if nothing is ready. Where too little is ready it dispatches first.
-- Without a search_path of its own: a claim waits for this.
create function pgmb.choose(gid text, "position" jsonb, max_changes integer) returns jsonb
language plpgsql volatile as $$
declare
    after constant text := coalesce("position" ->> 'cursor', '');
    choice jsonb;
    polled record;
begin
    if pgmb.is_ready(gid, after) then
        choice := pgmb.dispatched_batch(gid, after, max_changes);
    end if;
    while coalesce((choice ->> 'count')::bigint, 0) < max_changes loop
        polled := pgmb.dispatch();
        if polled.pairs > 0 then
            choice := pgmb.dispatched_batch(gid, after, max_changes);
        end if;
        exit when not polled.more;
    end loop;
    -- After the dispatch: removing a subscription whose condition does not end must not wait for that condition.
    perform pgmb.keep_alive(gid);
    if coalesce(choice ->> 'count', '0') = '0' then
        return null;
    end if;
    -- The dispatch of a restored log gives the log its new place.
    return choice || jsonb_build_object(
        'lsn', pg_current_wal_insert_lsn(), 'bounds', choice -> 'bounds' || jsonb_build_object('source', pgmb.here()));
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
