-- What people ask and do: status, repair, move, drop, trim.

create function topology.take_idle(consumer_id text) returns topology.consumer
language plpgsql volatile
set search_path = pg_catalog, topology, pg_temp
as $$
declare
    known topology.consumer;
begin
    select c.* into known from topology.consumer as c where c.consumer_id = take_idle.consumer_id;
    perform pgchange.take_idle(
        topology.name_of(consumer_id), topology.consumer_key(consumer_id), known.consumer_id is not null,
        'select consumer_id from topology.consumer');
    -- Under the lock: whoever held it may have moved the consumer.
    select c.* into known from topology.consumer as c where c.consumer_id = take_idle.consumer_id;
    return known;
end
$$;
comment on function topology.take_idle(text) is 'Take the lock of a consumer that exists and is not at work, or say so.';

create function topology.is_known(consumer_id text) returns boolean
language sql stable security definer
set search_path = pg_catalog, topology, pg_temp
as $$
    select pgchange.mark('topology', topology.name_of(consumer_id)) is not null
$$;
comment on function topology.is_known(text) is 'Whether a consumer has claimed here, wherever its progress is.';

do $$
begin
    perform pgchange.register('topology', 'topology');
end
$$;

create function topology.status(upto integer default 1000) returns setof pgchange.consumer_status
language plpgsql stable security definer
set search_path = pg_catalog, topology, pg_temp
as $$
declare
    one topology.consumer;
    is_here boolean;
    at jsonb;
    lag jsonb;
    mark pgchange.claim;
    told text;
    advice text;
begin
    for one in select c.* from topology.consumer as c order by c.consumer_id loop
        at := topology.position(one.consumer_id);
        lag := null;
        told := null;
        is_here := coalesce(one.source = topology.here(), true) or topology.is_known(one.consumer_id);
        if is_here then
            mark := topology.pending(one.consumer_id, at);
            begin
                lag := topology.lag(at, upto);
            exception when sqlstate 'PC003' or sqlstate 'PC004' then
                get stacked diagnostics told = message_text, advice = pg_exception_hint;
                told := told || ': ' || advice;
            end;
        else
            mark := null;
        end if;
        return query select
            'topology', topology.name_of(one.consumer_id), jsonb_build_object('consumer_id', one.consumer_id), one.version,
            (lag ->> 'ready')::bigint, (lag ->> 'ready_exact')::boolean, (lag ->> 'ready_age')::double precision,
            (lag ->> 'waiting')::bigint, (lag ->> 'faults')::bigint,
            topology.locked(one.consumer_id), mark.batch_id, mark.attempt, mark.error, mark.claimed_at, one.updated_at,
            told, case when not is_here then 'changes' end;
    end loop;
end
$$;
comment on function topology.status(integer) is
    'Every consumer whose progress is here, as pgchange.status() shows it. Where its catalogue is in another database the lag is '
    'null: ask there. Where a person must decide first, held_back_by says what.';

create function topology.skip(consumer_id text, batch jsonb, reason text) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, topology, dead_letter, pg_temp
as $$
begin
    perform topology.take_idle(consumer_id);
    perform topology.advance(consumer_id, batch);
    return dead_letter.give_up('topology', topology.name_of(consumer_id), topology.address(consumer_id), batch, reason);
end
$$;
comment on function topology.skip(text, jsonb, text) is
    'Give up a claimed batch, as topology.in_work() of the source has it: it becomes a dead letter, or goes back to the one that '
    'it was sent from, whose number is returned; the consumer goes on behind it.';

create function topology.mark(consumer_id text) returns jsonb
language plpgsql volatile security definer
set search_path = pg_catalog, topology, pgchange, pg_temp
as $$
declare
    known jsonb := pgchange.mark('topology', topology.name_of(consumer_id));
begin
    if not topology.is_native() then
        perform pgchange.note_origin('topology.origin');
    end if;
    if exists (
        select from topology.now_at() as n
        where ((known -> 'upto' ->> 0)::bigint, (known -> 'upto' ->> 1)::bigint) > (n.term, n.index))
    then
        raise exception using errcode = 'PC004',
            message = format('what this catalogue knows of consumer topology:%s is beyond the log: it was restored without it', consumer_id),
            hint = format('restore the whole dump; or choose a point: airflow pgchange move topology:%s', consumer_id);
    end if;
    return known || jsonb_build_object('source', topology.here());
end
$$;
comment on function topology.mark(text) is
    'What this catalogue knows of a consumer: where the batch that it claimed last begins and ends. A restored catalogue takes its '
    'new place with the first that is asked about.';

create function topology.adopt_mark(consumer_id text, mark jsonb) returns text
language plpgsql volatile security definer
set search_path = pg_catalog, topology, pg_temp
as $$
declare
    consumer topology.consumer := topology.take_idle(consumer_id);
    known bigint := coalesce((mark ->> 'version')::bigint, 0);
    unacked boolean := consumer.version = (mark ->> 'from_version')::bigint;
    found_at jsonb := mark -> case when unacked then 'after' else 'upto' end;
    at bigint[] := array[coalesce((found_at ->> 0)::bigint, 0), coalesce((found_at ->> 1)::bigint, 0)];
begin
    if not unacked and consumer.version < known then
        raise exception using errcode = 'PC009',
            message = format('consumer topology:%s is at batch %s, before the last claim that the catalogue knows', consumer_id, consumer.version),
            hint = format('choose a point: airflow pgchange move topology:%s --to beginning, or --to now', consumer_id);
    end if;
    -- Where the catalogue lost what it knew, the consumer may have been moved back or begun anew since.
    if consumer.version > known then
        at := least(at, array[consumer.term, consumer.index]);
    end if;
    update topology.consumer as c set
        version = case when unacked then (mark ->> 'from_version')::bigint else known end,
        term = at[1], index = at[2], source = mark ->> 'source', updated_at = now()
    where c.consumer_id = adopt_mark.consumer_id;
    perform topology.void_letters(consumer_id, 'its consumer was repaired, and its events come by themselves');
    return case when unacked or consumer.version = known then 'exactly once' else 'at least once' end;
end
$$;
comment on function topology.adopt_mark(text, jsonb) is
    'Go on from what topology.mark() of the catalogue says, or from the beginning where it knows nothing; returns the guarantee: '
    'at least once where the catalogue lost batches that were processed.';

create function topology.check_point(point jsonb) returns void
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
begin
    if point is not null and point ->> 'source' is null then
        raise invalid_parameter_value using message = 'the point does not say where it was taken',
            hint = 'give what topology.point() returned, whole, or null for the beginning';
    end if;
end
$$;
comment on function topology.check_point(jsonb) is 'Refuse what is no point to move a consumer to.';

create function topology.note_move(consumer_id text, "position" jsonb, point jsonb) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, topology, pgchange, pg_temp
as $$
declare
    mark pgchange.claim;
begin
    perform topology.check_point(point);
    if point ->> 'source' <> topology.here() or point is null and not pgchange.fits("position", topology.here()) then
        raise exception using errcode = 'PC004',
            message = format('consumer topology:%s is moved to a point of another catalogue than this one', consumer_id),
            hint = 'the catalogue notes a move first: topology.note_move() there gives the version for topology.move_consumer()';
    end if;
    if exists (
        select from topology.now_at() as n
        where ((point ->> 'term')::bigint, (point ->> 'index')::bigint) > (n.term, n.index))
    then
        raise invalid_parameter_value using
            message = format('the point %s/%s lies in the future: the log has not come there', point ->> 'term', point ->> 'index'),
            hint = 'topology.point() gives the point of now';
    end if;
    mark := pgchange.record(
        'topology', topology.name_of(consumer_id), topology.address(consumer_id), "position",
        topology.at("position"), topology.at(point), topology.here(), null);
    return mark.version;
end
$$;
comment on function topology.note_move(text, jsonb, jsonb) is
    'In the database of the catalogue: note that a consumer is moved from its position to a point, as a claim notes a batch, and '
    'return the version for topology.move_consumer().';

create function topology.move_consumer(consumer_id text, point jsonb, version bigint default null) returns void
language plpgsql volatile security definer
set search_path = pg_catalog, topology, pg_temp
as $$
begin
    perform topology.take_idle(consumer_id);
    perform topology.check_point(point);
    if version is null then
        version := topology.note_move(consumer_id, topology.position(consumer_id), point);
    end if;
    update topology.consumer as c set
        version = move_consumer.version,
        term = coalesce((point ->> 'term')::bigint, 0), index = coalesce((point ->> 'index')::bigint, 0),
        source = coalesce(point ->> 'source', c.source), updated_at = now()
    where c.consumer_id = move_consumer.consumer_id;
    perform topology.void_letters(consumer_id, 'its consumer was moved before it, and its events come by themselves');
end
$$;
comment on function topology.move_consumer(text, jsonb, bigint) is
    'Move a consumer to a point, as topology.point() gives it, or with null to the beginning of the log. Where the catalogue is in '
    'another database, topology.note_move() there gives the version.';

create function topology.drop_consumer(consumer_id text) returns void
language plpgsql volatile security definer
set search_path = pg_catalog, topology, dead_letter, pg_temp
as $$
declare
    claims boolean;
begin
    if not topology.take_lock(consumer_id) then
        perform topology.take_idle(consumer_id);
    end if;
    claims := pgchange.forget_claim('topology', topology.name_of(consumer_id));
    perform dead_letter.drop_of('topology', topology.address(consumer_id));
    delete from topology.consumer as c where c.consumer_id = drop_consumer.consumer_id;
    if not found and claims is null then
        perform topology.take_idle(consumer_id);
    end if;
end
$$;
comment on function topology.drop_consumer(text) is
    'Forget a consumer, its claim and its dead letters, of which a database has all or one: under the same name it begins anew. One that '
    'nobody knows is refused.';

create function topology.trim_log(keep interval) returns text
language plpgsql volatile security definer
set search_path = pg_catalog, topology, dead_letter, pg_temp
as $$
declare
    gone record;
begin
    if coalesce(keep < interval '0', true) then
        raise invalid_parameter_value using message = 'keep must be an interval that is not negative', hint = 'write it as ''30 days''';
    end if;
    perform pg_advisory_xact_lock(topology.lock_key());
    with needed as (
        select c.term, c.index from topology.consumer as c
        union all
        select (m.after ->> 0)::bigint, (m.after ->> 1)::bigint from pgchange.claim as m
        where m.kind = 'topology' and not exists (
            select from topology.consumer as c where c.consumer_id = m.address ->> 'consumer_id')
        union all
        select (m.upto ->> 0)::bigint, (m.upto ->> 1)::bigint from pgchange.claim as m
        where m.kind = 'topology' and m.batch is null
        union all
        -- A letter at rest holds nothing back; one that is on its way is to arrive.
        select (l.content -> 'slices' -> 0 -> 'after' ->> 0)::bigint, (l.content -> 'slices' -> 0 -> 'after' ->> 1)::bigint
        from dead_letter.letter as l
        where l.kind = 'topology' and l.on_its_way
    ), old as (
        -- Clocks are set back, and those of two servers differ: what comes before an old event is older, whatever it says.
        select l.term, l.index from topology.log as l
        where l.written_at < now() - keep
        order by l.term desc, l.index desc
        limit 1
    ), gone_events as (
        delete from topology.log as l
        where exists (select from old as o where (l.term, l.index) <= (o.term, o.index))
          and not exists (select from needed as n where (n.term, n.index) < (l.term, l.index))
        returning l.term, l.index
    )
    select count(*) as events, (max(array[g.term, g.index])) as upto into gone from gone_events as g;
    if gone.events = 0 then
        return null;
    end if;
    insert into topology.trimmed (term, index, events) values (gone.upto[1], gone.upto[2], gone.events);
    return format('trimmed %s events of the catalogue''s log', gone.events);
end
$$;
comment on function topology.trim_log(interval) is
    'Remove events up to the last that is older than an age, as far as every consumer has processed them, one whose progress '
    'is elsewhere by its last claim; says how many, null for none. A new consumer begins with what is left.';
