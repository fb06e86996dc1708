-- The log above a consumer's (term, index): lock, claim, read, ack. The lock, the position and the ack are where the results
-- are; the claim is where the catalogue is.
--
-- Events are committed in the order of their numbers, so here, unlike in the other feeds, a position may be a number.

create function topology.consumer_key(consumer_id text) returns bigint
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
    select hashtextextended('pgchange topology ' || consumer_id, 0)
$$;
comment on function topology.consumer_key(text) is 'The advisory lock of a consumer.';

create function topology.take_lock(consumer_id text) returns boolean
language sql volatile
set search_path = pg_catalog, pg_temp
as $$
    select pg_try_advisory_xact_lock(hashtextextended('pgchange topology ' || consumer_id, 0))
$$;
comment on function topology.take_lock(text) is 'Take a consumer''s lock until the transaction ends, or say that another has it.';

create function topology.locked(consumer_id text) returns boolean
language sql stable
set search_path = pg_catalog, topology, pg_temp
as $$
    select pgchange.locked(topology.consumer_key(consumer_id))
$$;
comment on function topology.locked(text) is 'Whether a consumer is at work.';

create function topology.register(consumer_id text) returns boolean
language sql volatile security definer
set search_path = pg_catalog, topology, pg_temp
as $$
    insert into topology.consumer (consumer_id)
    select register.consumer_id where pg_try_advisory_xact_lock(topology.consumer_key(register.consumer_id))
    on conflict do nothing
    returning true
$$;
comment on function topology.register(text) is 'Make a consumer, at the beginning of the log, if it is not there yet.';

create function topology.name_of(consumer_id text) returns text
language sql immutable
as $$
    select 'topology:' || consumer_id
$$;
comment on function topology.name_of(text) is 'A consumer''s name, as status shows it.';

create function topology.address(consumer_id text) returns jsonb
language sql stable
as $$
    select pg_catalog.jsonb_build_object('consumer_id', consumer_id)
$$;
comment on function topology.address(text) is 'What a consumer''s claim and its dead letters are known by.';

create function topology.here() returns text
language plpgsql stable security definer
set search_path = pg_catalog, topology, pgchange, pg_temp
as $$
begin
    -- Of what came along first, if anything did.
    return (
        select pgchange.place(o.id, o.cluster) from topology.origin as o
        order by o.written_as = o.tableoid, o.written_in = o.xmin limit 1);
end
$$;
comment on function topology.here() is 'The place of this catalogue.';

create function topology.is_native() returns boolean
language plpgsql stable security definer
set search_path = pg_catalog, topology, pgchange, pg_temp
as $$
begin
    return coalesce(
        (select bool_and(pgchange.is_native(o.cluster, o.written_in, o.xmin, o.written_as, o.tableoid)) from topology.origin as o),
        pgchange.refuse_empty('topology'));
end
$$;
comment on function topology.is_native() is 'Whether this catalogue was neither restored from a dump nor upgraded.';

create function topology.position(consumer_id text) returns jsonb
language sql stable security definer
set search_path = pg_catalog, topology, dead_letter, pg_temp
as $$
    select jsonb_build_object(
        'schema', (select max(i.version) from topology.installed as i),
        'consumer', c.consumer_id, 'version', c.version, 'term', c.term, 'index', c.index, 'source', c.source,
        'database', topology.here(),
        'letter', dead_letter.first_on_its_way('topology', topology.name_of(c.consumer_id)))
    from topology.consumer as c where c.consumer_id = "position".consumer_id
$$;
comment on function topology.position(text) is 'How far a consumer has come, and the dead letter that it has before it; null for one that has not begun.';

create function topology.check_position("position" jsonb) returns void
language plpgsql stable security definer
set search_path = pg_catalog, topology, pg_temp
as $$
declare
    consumer text := "position" ->> 'consumer';
    native boolean := topology.is_native();
    known bigint;
begin
    if "position" ->> 'source' is not null and not (native and pgchange.fits("position", topology.here())) then
        raise exception using errcode = 'PC004', message = format('consumer %s belongs to another catalogue than this one', consumer),
            hint = 'if the catalogue was restored: airflow pgchange repair; else check the source''s connection';
    end if;
    -- A standby may only be late.
    if ("position" ->> 'version')::bigint > 0 and not pg_is_in_recovery() then
        known := coalesce((pgchange.mark('topology', topology.name_of(consumer)) ->> 'version')::bigint, 0);
        if ("position" ->> 'version')::bigint > known then
            raise exception using errcode = 'PC003',
                message = format('consumer %s has processed batch %s, of which this catalogue knows only up to %s',
                                 consumer, "position" ->> 'version', known),
                hint = format('the catalogue lost its latest transactions: airflow pgchange repair topology:%s', consumer);
        end if;
    end if;
end
$$;
comment on function topology.check_position(jsonb) is
    'Refuse a consumer whose batches this catalogue does not know: it was restored, or lost its tail.';

create function topology.lag("position" jsonb, upto integer) returns jsonb
language plpgsql stable security definer
set search_path = pg_catalog, topology, pg_temp
as $$
declare
    counted bigint;
    sent bigint := coalesce(("position" -> 'letter' -> 'batch' ->> 'count')::bigint, 0);
    oldest timestamptz;
begin
    if coalesce(upto < 0, true) then
        raise invalid_parameter_value using message = 'upto must not be negative';
    end if;
    perform topology.check_position("position");
    select count(*), min(u.written_at) into counted, oldest
    from (
        select l.written_at from topology.log as l
        where (l.term, l.index) > (coalesce(("position" ->> 'term')::bigint, 0), coalesce(("position" ->> 'index')::bigint, 0))
        order by l.term, l.index
        limit upto::bigint + 1
    ) as u;
    return jsonb_build_object(
        'ready', counted + sent, 'ready_exact', counted <= upto, 'ready_age', extract(epoch from clock_timestamp() - oldest),
        'waiting', 0, 'waiting_exact', true, 'waiting_age', null, 'faults', 0);
end
$$;
comment on function topology.lag(jsonb, integer) is
    'How many events a consumer has to process, exact up to a number, beyond it at least one more, and those of a '
    'dead letter on its way. None ever waits.';

create function topology.at("position" jsonb) returns jsonb
language sql stable
as $$
    select pg_catalog.jsonb_build_array(coalesce(("position" ->> 'term')::bigint, 0), coalesce(("position" ->> 'index')::bigint, 0))
$$;
comment on function topology.at(jsonb) is 'Where a position, or a point, is: [term, index].';

create function topology.pending(consumer_id text, "position" jsonb) returns pgchange.claim
language sql stable security definer
set search_path = pg_catalog, topology, pg_temp
as $$
    select pgchange.pending(
        'topology', topology.name_of(consumer_id), ("position" ->> 'version')::bigint, topology.at("position"),
        "position" -> 'letter' -> 'id')
$$;
comment on function topology.pending(text, jsonb) is 'The claim that a consumer has not acked yet, if there is one; that of a dead letter while the letter is to be sent.';

create function topology.slices(after_term bigint, after_index bigint, max_changes integer) returns jsonb
language sql stable security definer
set search_path = pg_catalog, topology, pg_temp
as $$
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
comment on function topology.slices(bigint, bigint, integer) is
    'The next events behind one, as slices of ten thousand: {count, after, upto}; null where there are none.';

create function topology.changes("after" bigint[], upto bigint[])
returns table (id text, term bigint, index bigint, event jsonb, written_at timestamptz)
language sql stable security definer
set search_path = pg_catalog, topology, pg_temp
as $$
    select l.term || '/' || l.index, l.term, l.index, l.event::jsonb, l.written_at
    from topology.log as l
    where (l.term, l.index) > ("after"[1], "after"[2]) and (l.term, l.index) <= (upto[1], upto[2])
    order by l.term, l.index
$$;
comment on function topology.changes(bigint[], bigint[]) is 'The events behind one, {term, index}, up to another, in order.';
