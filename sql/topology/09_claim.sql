-- The batch of a consumer: claimed and read in the database of the catalogue, acked in the database of the results.

-- Choose the next batch of a consumer; null if nothing is ready. Raises an error if events were trimmed before it processed them.
create function topology.choose(consumer_id text, "position" jsonb, max_changes integer) returns jsonb
language plpgsql stable security definer as $$
declare
    began_at bigint := ("position" ->> 'version')::bigint;
    at bigint[] := array[("position" ->> 'term')::bigint, ("position" ->> 'index')::bigint];
    gone topology.trimmed := topology.trimmed_behind(at[1], at[2]);
    slices jsonb;
begin
    -- A consumer that was moved to the beginning starts with the oldest event that is left, so trimmed events are no error.
    if gone.term is not null and began_at > 0 and not (at = '{0,0}' and exists (
        select from pgchange.claim as c
        where c.kind = 'topology' and c.consumer = topology.name_of(choose.consumer_id) and c.batch is null
          and c.version = began_at and c.upto = '[0, 0]'))
    then
        raise exception using errcode = 'PC005',
            message = format('events up to (%s, %s) were trimmed, which %s has not processed', gone.term, gone.index,
                             topology.name_of(consumer_id)),
            hint = format('move it to now: airflow-pgchange move %s --to now, or drop it: then it begins with the oldest event left',
                          pgchange.shell_quoted(topology.name_of(consumer_id)));
    end if;
    slices := topology.slices(at[1], at[2], max_changes);
    if slices is null then
        return null;
    end if;
    return jsonb_build_object(
        'count', (select sum((s ->> 'count')::bigint) from jsonb_array_elements(slices) as s),
        'slices', slices,
        'bounds', jsonb_build_object('after', to_jsonb(at), 'upto', slices -> -1 -> 'upto'),
        'lsn', pg_current_wal_insert_lsn(),
        'oldest', (
            select l.written_at from topology.log as l where (l.term, l.index) > (at[1], at[2]) order by l.term, l.index limit 1));
end
$$;

-- Move a consumer to a place. If was or before is given, only if the consumer is at that version and place. Returns whether it
-- moved. The function has no search_path of its own, which would slow down every ack.
create function topology.put(
    consumer_id text, at jsonb, version bigint, source text, was bigint, before jsonb
) returns boolean
language plpgsql as $$
begin
    update topology.consumer as c set
        version = put.version, term = (at ->> 0)::bigint, index = (at ->> 1)::bigint, source = put.source, updated_at = now()
    where c.consumer_id = put.consumer_id
      and (was is null or c.version = was)
      and (before is null or (c.term, c.index) = ((before ->> 0)::bigint, (before ->> 1)::bigint));
    return found;
end
$$;

-- The point after everything that is committed now.
create function topology.point() returns jsonb
language sql stable security definer as $$
    select jsonb_build_object('term', n.term, 'index', n.index, 'source', topology.here())
    from topology.now_at() as n
$$;

-- Whether a consumer has reached a point.
create function topology.passed("position" jsonb, goal jsonb) returns jsonb
language plpgsql stable security definer as $$
begin
    perform topology.check_position("position");
    return jsonb_build_object('goal', goal, 'passed', not exists (
        select from topology.log as l
        where (l.term, l.index) > (coalesce(("position" ->> 'term')::bigint, 0), coalesce(("position" ->> 'index')::bigint, 0))
          and (l.term, l.index) <= ((goal ->> 'term')::bigint, (goal ->> 'index')::bigint)));
end
$$;
