-- The feed of the log: a consumer reads the events after its position (term, index). Lock, position and ack are in the database
-- of the results; the claim is in the database of the catalogue.
--
-- Events are committed in the order of their numbers, so a number is a safe position here, unlike in the other feeds.

-- This schema has its own mark(): it also records that the catalogue was restored, and refuses a claim beyond the end of the log.
select pgchange.offer(
    'topology', 'topology', 'consumer_id text', 'topology:%s', traits => '{position,recorded letters}', own => '{mark}');

-- Register a consumer at the beginning of the log. Returns true if it is new; null if it exists or its lock is taken.
create function topology.register(consumer_id text) returns boolean
language sql volatile security definer as $$
    insert into topology.consumer (consumer_id)
    select register.consumer_id where topology.take_lock(register.consumer_id)
    on conflict do nothing
    returning true
$$;

-- The position of a consumer, with the next dead letter that it has to process; null if the consumer has not begun.
create function topology.position(consumer_id text) returns jsonb
language plpgsql stable security definer as $$
begin
    return (
        select jsonb_build_object(
            'schema', (select max(i.version) from topology.installed as i),
            'consumer', topology.name_of(c.consumer_id), 'version', c.version, 'term', c.term, 'index', c.index, 'source', c.source,
            'database', topology.here(), 'updated_at', c.updated_at,
            'letter', pgchange.next_letter('topology', topology.name_of(c.consumer_id)))
        from topology.consumer as c where c.consumer_id = "position".consumer_id);
end
$$;

-- Raise an error if this catalogue does not know the batches of a position: it was restored or lost its latest transactions.
create function topology.check_position("position" jsonb) returns void
language plpgsql stable security definer as $$
begin
    perform pgchange.check_known('topology', "position" ->> 'consumer', "position", topology.here(), topology.is_native());
end
$$;

-- The lag of a consumer in events, with the events of a dead letter that is being sent again. Exact up to the limit upto. Beyond it
-- an estimate, which assumes that the rest of the log has as many gaps as the counted part. Failed transactions leave gaps in
-- the index. Events of this feed are ready at once, so none is waiting.
create function topology.lag("position" jsonb, upto integer) returns jsonb
language plpgsql stable security definer as $$
declare
    counted bigint;
    exact boolean;
    low bigint;
    high bigint;
    sent bigint := coalesce(("position" -> 'letter' -> 'batch' ->> 'count')::bigint, 0);
    oldest timestamptz;
begin
    if coalesce(upto < 0, true) then
        raise invalid_parameter_value using message = 'upto must not be negative';
    end if;
    perform topology.check_position("position");
    select count(*), min(u.written_at), min(u.index), max(u.index) into counted, oldest, low, high
    from (
        select l.written_at, l.index from topology.log as l
        where (l.term, l.index) > (coalesce(("position" ->> 'term')::bigint, 0), coalesce(("position" ->> 'index')::bigint, 0))
        order by l.term, l.index
        limit upto::bigint + 1
    ) as u;
    exact := counted <= upto;
    if not exact then
        counted := counted + (
            select greatest(0, l.index - high) * counted / (high - low + 1)
            from topology.log as l order by l.term desc, l.index desc limit 1);
    end if;
    return jsonb_build_object(
        'ready', counted + sent, 'ready_exact', exact, 'ready_age', extract(epoch from clock_timestamp() - oldest),
        'waiting', 0, 'waiting_exact', true, 'waiting_age', null, 'faults', 0);
end
$$;

-- The place [term, index] of a position or of a point.
create function topology.at("position" jsonb) returns jsonb
language sql stable as $$
    select pg_catalog.jsonb_build_array(coalesce(("position" ->> 'term')::bigint, 0), coalesce(("position" ->> 'index')::bigint, 0))
$$;

-- Whether a consumer at the place at has processed everything up to the place upto.
create function topology.covers(at jsonb, upto jsonb) returns boolean
language sql immutable as $$
    select ((at ->> 0)::bigint, (at ->> 1)::bigint) >= ((upto ->> 0)::bigint, (upto ->> 1)::bigint)
$$;

-- The next events after a position, as slices {count, after, upto} of at most 10,000 events; null if there are none.
create function topology.slices(after_term bigint, after_index bigint, max_changes integer) returns jsonb
language sql stable security definer as $$
    with chosen as (
        select l.term, l.index, (row_number() over (order by l.term, l.index) - 1) / 10000 as slice
        from topology.log as l
        where (l.term, l.index) > (after_term, after_index)
        order by l.term, l.index
        limit max_changes
    ), ends as (
        select distinct on (c.slice)
            c.slice, count(*) over (partition by c.slice) as counted, jsonb_build_array(c.term, c.index) as upto
        from chosen as c
        order by c.slice, c.term desc, c.index desc
    ), runs as (
        select e.slice, jsonb_build_object(
            'count', e.counted,
            'after', coalesce(lag(e.upto) over (order by e.slice), jsonb_build_array(after_term, after_index)),
            'upto', e.upto) as run
        from ends as e
    )
    select jsonb_agg(r.run order by r.slice) from runs as r
$$;

-- The events after one place [term, index] up to another, in order.
create function topology.changes("after" jsonb, upto jsonb)
returns table (id text, term bigint, index bigint, event jsonb, written_at timestamptz)
language sql stable security definer as $$
    select l.term || '/' || l.index, l.term, l.index, l.event::jsonb, l.written_at
    from topology.log as l
    where (l.term, l.index) > (("after" ->> 0)::bigint, ("after" ->> 1)::bigint)
      and (l.term, l.index) <= ((upto ->> 0)::bigint, (upto ->> 1)::bigint)
    order by l.term, l.index
$$;
