-- The batch of a consumer: claimed at the source, read there, acked with the results.

create function topology.next_batch(consumer_id text, at bigint[], max_changes integer) returns jsonb
language sql stable security definer
set search_path = pg_catalog, topology, pg_temp
as $$
    select jsonb_build_object(
        'id', md5(concat_ws('|', 'topology', topology.here(), consumer_id, at, s.slices -> -1 -> 'upto'))::uuid,
        'count', (select sum((n ->> 'count')::bigint) from jsonb_array_elements(s.slices) as n),
        'slices', s.slices,
        'bounds', jsonb_build_object(
            'after', to_jsonb(at), 'upto', s.slices -> -1 -> 'upto', 'source', topology.here()),
        'lsn', pg_current_wal_insert_lsn(),
        'oldest', (
            select l.written_at from topology.log as l where (l.term, l.index) > (at[1], at[2]) order by l.term, l.index limit 1))
    from topology.slices(at[1], at[2], max_changes) as s(slices)
    where s.slices is not null
$$;
comment on function topology.next_batch(text, bigint[], integer) is
    'What a consumer has to process next, behind an event; null where there is nothing.';

create function topology.claim(consumer_id text, "position" jsonb, max_changes integer, max_attempts integer default null)
returns jsonb
language plpgsql volatile security definer
set search_path = pg_catalog, topology, pg_temp
as $$
declare
    began_at bigint := ("position" ->> 'version')::bigint;
    at bigint[] := array[("position" ->> 'term')::bigint, ("position" ->> 'index')::bigint];
    mark pgchange.claim;
    gone topology.trimmed := topology.trimmed_behind(at[1], at[2]);
    batch jsonb;
begin
    perform topology.check_position("position");
    perform pgchange.check_claim(max_changes);
    mark := topology.pending(consumer_id, "position");
    if mark.version is not null then
        return pgchange.claim_again(mark, max_attempts);
    end if;
    -- The beginning that it was moved to is what is left.
    if gone.term is not null and began_at > 0 and not (at = '{0,0}' and exists (
        select from pgchange.claim as c
        where c.kind = 'topology' and c.consumer = topology.name_of(claim.consumer_id) and c.batch is null
          and c.version = began_at and c.upto = '[0, 0]'))
    then
        raise exception using errcode = 'PC005',
            message = format('events up to (%s, %s) were trimmed, which topology:%s has not processed', gone.term, gone.index, consumer_id),
            hint = format('move it to now: airflow pgchange move topology:%s --to now, or drop it: then it begins with what is left', consumer_id);
    end if;
    if jsonb_typeof("position" -> 'letter') = 'object' then
        batch := topology.letter_batch("position");
    else
        batch := jsonb_set(
            topology.next_batch(consumer_id, at, max_changes), '{bounds,from_version}', to_jsonb(began_at));
    end if;
    if batch is null then
        return null;
    end if;
    mark := pgchange.record(
        'topology', topology.name_of(consumer_id), topology.address(consumer_id), "position",
        to_jsonb(at), batch -> 'bounds' -> 'upto', topology.here(), batch);
    return mark.batch;
end
$$;
comment on function topology.claim(text, jsonb, integer, integer) is
    'Record and return the next batch of a consumer, or the one that it claimed and never acked, with the attempt counted; that of '
    'a dead letter that is to be sent again before the next; '
    'null when nothing is ready. Call it on the primary of the catalogue, in a transaction of its own, holding the lock.';

create function topology.in_work(consumer_id text, "position" jsonb) returns jsonb
language sql stable security definer
set search_path = pg_catalog, topology, pg_temp
as $$
    select pgchange.in_work(topology.pending(consumer_id, "position"))
$$;
comment on function topology.in_work(text, jsonb) is
    'At the source: the batch that a position has not acked yet, with its attempts and the error of the last one; or null.';

create function topology.note_failure(consumer_id text, batch jsonb, error text) returns void
language sql security definer
set search_path = pg_catalog, topology, pg_temp
as $$
    select pgchange.note_failure('topology', topology.name_of(consumer_id), batch, error)
$$;
comment on function topology.note_failure(text, jsonb, text) is
    'Note at the source what the attempt on a batch failed on, for its dead letter.';

create function topology.advance(consumer_id text, batch jsonb) returns void
language plpgsql volatile security definer
set search_path = pg_catalog, topology, pg_temp
as $$
declare
    bounds jsonb := batch -> 'bounds';
begin
    perform pgchange.check_claimed('topology', topology.name_of(consumer_id), batch);
    update topology.consumer as c set
        version = (batch ->> 'version')::bigint,
        term = (bounds -> 'upto' ->> 0)::bigint,
        index = (bounds -> 'upto' ->> 1)::bigint,
        source = bounds ->> 'source',
        updated_at = now()
    where c.consumer_id = advance.consumer_id
      and c.version = (bounds ->> 'from_version')::bigint
      and (c.term, c.index) = ((bounds -> 'after' ->> 0)::bigint, (bounds -> 'after' ->> 1)::bigint);
    if not found then
        raise exception using errcode = 'PC006',
            message = format('topology:%s is not where batch %s began', consumer_id, batch ->> 'id'),
            hint = 'somebody moved the consumer; roll back and claim again';
    end if;
end
$$;
comment on function topology.advance(text, jsonb) is 'Put a consumer behind a batch, if it is where the batch began.';

create function topology.ack(consumer_id text, batch jsonb) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, topology, pg_temp
as $$
begin
    perform topology.advance(consumer_id, batch);
    perform dead_letter.done('topology', topology.address(consumer_id), batch);
    return (batch ->> 'version')::bigint;
end
$$;
comment on function topology.ack(text, jsonb) is
    'Advance a consumer behind a batch, in the transaction that holds its lock and writes the results.';

create function topology.point() returns jsonb
language sql stable security definer
set search_path = pg_catalog, topology, pg_temp
as $$
    select jsonb_build_object('term', n.term, 'index', n.index, 'source', topology.here())
    from topology.now_at() as n
$$;
comment on function topology.point() is 'Everything that is committed now, as a goal.';

create function topology.passed("position" jsonb, goal jsonb) returns jsonb
language plpgsql stable security definer
set search_path = pg_catalog, topology, pg_temp
as $$
begin
    perform topology.check_position("position");
    return jsonb_build_object('goal', goal, 'passed', not exists (
        select from topology.log as l
        where (l.term, l.index) > (coalesce(("position" ->> 'term')::bigint, 0), coalesce(("position" ->> 'index')::bigint, 0))
          and (l.term, l.index) <= ((goal ->> 'term')::bigint, (goal ->> 'index')::bigint)));
end
$$;
comment on function topology.passed(jsonb, jsonb) is 'Whether a consumer has come to a point.';
