-- What people ask and do: status, repair, move, drop, trim.

create function topology.take_idle(consumer_id text) returns topology.consumer
language plpgsql volatile
set search_path = pg_catalog, topology, pg_temp
as $$
declare
    known topology.consumer;
begin
    if not topology.take_lock(consumer_id) then
        raise lock_not_available using message = format('consumer topology:%s is at work', consumer_id),
            hint = 'stop it, or wait until its batch has ended';
    end if;
    select c.* into known from topology.consumer as c where c.consumer_id = take_idle.consumer_id;
    if known.consumer_id is null then
        raise exception using errcode = 'PC002', message = format('there is no consumer topology:%s here', consumer_id),
            hint = 'select consumer_id from topology.consumer lists them';
    end if;
    return known;
end
$$;
comment on function topology.take_idle(text) is 'Take the lock of a consumer that exists and is not at work, or say so.';

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
    mark topology.claim;
    told text;
    advice text;
begin
    for one in select c.* from topology.consumer as c order by c.consumer_id loop
        at := topology.position(one.consumer_id);
        lag := null;
        told := null;
        -- The catalogue is where the claims are.
        is_here := one.source is null or exists (select from topology.claim as c where c.consumer_id = one.consumer_id);
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
declare
    letter bigint := (batch -> 'bounds' ->> 'letter')::bigint;
    tried integer := coalesce((batch ->> 'attempt')::integer, 1);
begin
    perform topology.take_idle(consumer_id);
    if coalesce(trim(reason), '') = '' then
        raise invalid_parameter_value using message = 'say why the batch is skipped';
    end if;
    perform topology.advance(consumer_id, batch);
    if letter is null then
        return dead_letter.write(
            'topology', 'topology:' || consumer_id, topology.address(consumer_id), batch - array['attempt', 'error'],
            (batch ->> 'count')::bigint, reason, batch ->> 'error', tried, (batch ->> 'id')::uuid);
    end if;
    update dead_letter.letter as l set
        on_its_way = false, reason = skip.reason, error = coalesce(batch ->> 'error', l.error),
        attempts = l.attempts + tried, given_up_by = session_user, given_up_at = clock_timestamp()
    where l.id = letter and l.on_its_way and l.address = topology.address(skip.consumer_id);
    if not found then
        perform dead_letter.gone(letter);
    end if;
    return letter;
end
$$;
comment on function topology.skip(text, jsonb, text) is
    'Give up a claimed batch, as topology.in_work() of the source has it: it becomes a dead letter, or goes back to the one that '
    'it was sent from, whose number is returned; the consumer goes on behind it.';

create function topology.mark(consumer_id text) returns jsonb
language plpgsql volatile security definer
set search_path = pg_catalog, topology, pgchange, pg_temp
as $$
begin
    if not topology.is_native() then
        perform pgchange.note_origin('topology.origin');
    end if;
    if exists (
        select from topology.claim as c, topology.now_at() as n
        where c.consumer_id = mark.consumer_id and (c.term, c.index) > (n.term, n.index))
    then
        raise exception using errcode = 'PC004',
            message = format('what this catalogue knows of consumer topology:%s is beyond the log: it was restored without it', consumer_id),
            hint = format('restore the whole dump; or choose a point: airflow pgchange move topology:%s', consumer_id);
    end if;
    return (
        select jsonb_build_object(
            'source', topology.here(), 'version', c.version, 'from_version', c.from_version,
            'term', c.term, 'index', c.index, 'after_term', c.after_term, 'after_index', c.after_index)
        from topology.claim as c where c.consumer_id = mark.consumer_id);
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
    known topology.consumer := topology.take_idle(consumer_id);
    unacked boolean := known.version = (mark ->> 'from_version')::bigint;
    at bigint[] := array[
        coalesce((mark ->> case when unacked then 'after_term' else 'term' end)::bigint, 0),
        coalesce((mark ->> case when unacked then 'after_index' else 'index' end)::bigint, 0)];
begin
    if not unacked and known.version < (mark ->> 'version')::bigint then
        raise exception using errcode = 'PC009',
            message = format('consumer topology:%s is at batch %s, before the last claim that the catalogue knows', consumer_id, known.version),
            hint = format('choose a point: airflow pgchange move topology:%s --to beginning, or --to now', consumer_id);
    end if;
    -- Where the catalogue lost what it knew, the consumer may have been moved back or begun anew since.
    if known.version > coalesce((mark ->> 'version')::bigint, 0) then
        at := least(at, array[known.term, known.index]);
    end if;
    update topology.consumer as c set
        version = coalesce((mark ->> case when unacked then 'from_version' else 'version' end)::bigint, 0),
        term = at[1], index = at[2], source = mark ->> 'source', updated_at = now()
    where c.consumer_id = adopt_mark.consumer_id;
    perform topology.void_letters(consumer_id, 'its consumer was repaired, and its events come by themselves');
    return case when unacked or known.version = (mark ->> 'version')::bigint then 'exactly once' else 'at least once' end;
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
    began_at bigint := "position" ->> 'version';
    version bigint := pgchange.next_version(
        topology.name_of(consumer_id),
        greatest(began_at, (select c.version from topology.claim as c where c.consumer_id = note_move.consumer_id)));
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
    insert into topology.claim as c (
        consumer_id, version, from_version, attempt, after_term, after_index, term, index)
    values (
        note_move.consumer_id, version, began_at, 0, ("position" ->> 'term')::bigint, ("position" ->> 'index')::bigint,
        coalesce((point ->> 'term')::bigint, 0), coalesce((point ->> 'index')::bigint, 0))
    on conflict on constraint claim_pkey do update set
        version = excluded.version, from_version = excluded.from_version, batch_id = null, attempt = 0, error = null,
        batch = null, after_term = excluded.after_term, after_index = excluded.after_index, term = excluded.term,
        index = excluded.index, claimed_at = excluded.claimed_at;
    return version;
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
    delete from topology.claim as c where c.consumer_id = drop_consumer.consumer_id;
    claims := found;
    delete from dead_letter.letter as l where l.kind = 'topology' and l.address = topology.address(drop_consumer.consumer_id);
    delete from topology.consumer as c where c.consumer_id = drop_consumer.consumer_id;
    if not found and not claims then
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
        select m.after_term, m.after_index from topology.claim as m
        where not exists (select from topology.consumer as c where c.consumer_id = m.consumer_id)
        union all
        select m.term, m.index from topology.claim as m where m.batch is null
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
