-- Dead letters of the catalogue's log: on their way, the claim of their consumer hands the same events out again.

do $$
begin
    perform dead_letter.add_kind('topology', 'topology', elsewhere => true);
end
$$;

create function topology.letter_rights(address jsonb) returns text[]
language sql immutable
as $$
    select '{see,keep}'::pg_catalog.text[]
$$;
comment on function topology.letter_rights(jsonb) is 'What who may execute this may do with dead letters of the catalogue''s log.';

create function topology.check_readable(batch jsonb) returns void
language plpgsql stable security definer
set search_path = pg_catalog, topology, pg_temp
as $$
declare
    counted bigint;
begin
    if not topology.is_native() or not pgchange.came_along(batch -> 'bounds' ->> 'source', topology.here()) then
        raise exception using errcode = 'PC004',
            message = format('batch %s was given up in another catalogue than this one', batch ->> 'id'),
            hint = 'it cannot be sent again: airflow pgchange letters drop';
    end if;
    select count(*) into counted
    from jsonb_array_elements(batch -> 'slices') as s(slice)
    cross join lateral topology.changes(
        array[(s.slice -> 'after' ->> 0)::bigint, (s.slice -> 'after' ->> 1)::bigint],
        array[(s.slice -> 'upto' ->> 0)::bigint, (s.slice -> 'upto' ->> 1)::bigint]);
    if counted <> (batch ->> 'count')::bigint then
        raise exception using errcode = 'PC005',
            message = format('%s of the %s events of batch %s were trimmed', (batch ->> 'count')::bigint - counted,
                             batch ->> 'count', batch ->> 'id'),
            hint = 'it cannot be sent again: airflow pgchange letters drop';
    end if;
end
$$;
comment on function topology.check_readable(jsonb) is 'Refuse a recorded batch whose events this catalogue cannot give any more.';

create function topology.check_letter(address jsonb, content jsonb) returns void
language plpgsql stable security definer
set search_path = pg_catalog, topology, pg_temp
as $$
begin
    -- The catalogue is where the claims are.
    if exists (select from pgchange.claim as c where c.kind = 'topology' and c.consumer = topology.name_of(check_letter.address ->> 'consumer_id'))
    then
        perform topology.check_readable(content);
    end if;
end
$$;
comment on function topology.check_letter(jsonb, jsonb) is
    'Refuse a dead letter whose batch cannot be read any more, in the database of the catalogue.';

create function topology.redrive(letter bigint) returns void
language sql security definer
set search_path = pg_catalog, topology, pg_temp
as $$
    select dead_letter.put_before('topology', letter)
$$;
comment on function topology.redrive(bigint) is
    'Put a dead letter before its consumer: a claim hands out the letter''s batch once the batch in work is done.';

create function topology.letter_batch("position" jsonb) returns jsonb
language plpgsql stable
set search_path = pg_catalog, topology, pg_temp
as $$
declare
    batch jsonb := "position" -> 'letter' -> 'batch';
    at jsonb := jsonb_build_array("position" -> 'term', "position" -> 'index');
begin
    perform topology.check_readable(batch);
    return batch || jsonb_build_object('bounds', batch -> 'bounds' || jsonb_build_object(
        'letter', "position" -> 'letter' -> 'id', 'from_version', "position" -> 'version', 'after', at, 'upto', at));
end
$$;
comment on function topology.letter_batch(jsonb) is
    'The batch of the dead letter that a position carries: read by its recorded slices, acked where the position is now.';

create function topology.void_letters(consumer_id text, why text) returns void
language sql
set search_path = pg_catalog, topology, dead_letter, pg_temp
as $$
    update dead_letter.letter as l set void = why, on_its_way = false
    from topology.consumer as c
    where c.consumer_id = void_letters.consumer_id
      and l.kind = 'topology' and l.address = topology.address(c.consumer_id) and l.void is null
      and (l.content -> 'bounds' ->> 'source' is distinct from coalesce(c.source, l.content -> 'bounds' ->> 'source')
           or (c.term, c.index)
              < ((l.content -> 'bounds' -> 'upto' ->> 0)::bigint, (l.content -> 'bounds' -> 'upto' ->> 1)::bigint))
$$;
comment on function topology.void_letters(text, text) is
    'Never again send the letters of a consumer whose events come by themselves, or mean something else now, as it was moved.';
