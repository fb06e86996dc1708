-- Touching by hand: ids that someone knows, or the result of a query.

create function tube.checked_op(op text) returns text
language plpgsql immutable
set search_path = pg_catalog, tube, pg_temp
as $$
begin
    if op is null or op not in ('I', 'U', 'D', 'T', 'B') then
        perform tube.refuse(format('op %L is no kind of touch', op), 'I, U, D, T, or B for a backfill');
    end if;
    return case when strpos(current_setting('application_name'), 'backfill') > 0 then 'B' else op end;
end
$$;
comment on function tube.checked_op(text) is 'The kind of a touch; B for all that a backfill does.';

create function tube.checked_chunk(chunk_size integer) returns integer
language plpgsql immutable
set search_path = pg_catalog, tube, pg_temp
as $$
begin
    if chunk_size is null or chunk_size not between 1 and 900 then
        perform tube.refuse(format('%s ids do not fit a pod', chunk_size), 'a pod holds from 1 to 900 ids');
    end if;
    return chunk_size;
end
$$;
comment on function tube.checked_chunk(integer) is 'How many ids a pod gets: as many as a page can hold at most.';

create function tube.touch(
    tube text, shard integer, ids bigint[], op text, payload jsonb default null, chunk_size integer default 250
) returns void
language plpgsql
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    pods regclass := (tube.named(tube)).pods;
    known_ids bigint[] := array_remove(coalesce(ids, '{}'), null);
begin
    if shard is null then
        perform tube.refuse('a touch needs a shard');
    end if;
    perform tube.checked_op(op), tube.checked_chunk(chunk_size);
    if known_ids = '{}' and payload is null then
        return;
    end if;
    execute format(
        'insert into %s (op, shard, ids, payload) '
        'select $1, $2, $3[i : i + $5 - 1], $4 from generate_series(1, greatest(cardinality($3), 1), $5) as i', pods)
    using tube.checked_op(op), shard, known_ids, payload, chunk_size;
end
$$;
comment on function tube.touch(text, integer, bigint[], text, jsonb, integer) is
    'Touch ids of a shard in a tube, in pods of chunk_size ids, each with the payload; without ids the payload makes a control '
    'pod, and without both nothing is done.';

create function tube.touch_table(tbl regclass, ids bigint[], op text, payload jsonb, chunk_size integer) returns void
language sql
set search_path = pg_catalog, tube, pg_temp
as $$
    select tube.touch(a.tube, a.shard, ids, op, payload, chunk_size)
    from tube.attachment as a
    where a.tbl = touch_table.tbl
    order by a.tube
$$;
comment on function tube.touch_table(regclass, bigint[], text, jsonb, integer) is
    'Touch ids of a table in every tube that it is attached to.';

create function tube.place_touch(tbl regclass) returns void
language plpgsql
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    relation name := (select c.relname from pg_class as c where c.oid = tbl);
    signature text := format('%I.%I(bigint[], character, jsonb, integer)', tube.schema_of(tbl), left(relation, 57) || '_touch');
begin
    if relation is null then
        return;
    end if;
    if not exists (select from tube.attachment as a where a.tbl = place_touch.tbl) then
        execute format('drop function if exists %s', signature);
        return;
    end if;
    execute format($function$
        create or replace function %I.%I(
            ids bigint[], op character default 'T', payload jsonb default null, chunk_size integer default 250
        ) returns void
        language sql
        as $body$ select tube.touch_table(%s::regclass, ids, op, payload, chunk_size) $body$
    $function$, tube.schema_of(tbl), left(relation, 57) || '_touch', tbl::oid);
    execute format('revoke all on function %s from public', signature);
    execute format(
        'comment on function %s is %L', signature, format('Touch ids of %s in every tube that it is attached to.', tbl));
end
$$;
comment on function tube.place_touch(regclass) is
    'Make a table''s own function <table>_touch beside it, or drop it where the table is attached to nothing.';

create function tube.named_all(tube_or_tubes text) returns setof tube.tube
language sql stable
set search_path = pg_catalog, tube, pg_temp
as $$
    select known.*
    from unnest(string_to_array(trim(both '{}' from tube_or_tubes), ',')) as n(name)
    cross join lateral tube.named(trim(n.name)) as known
$$;
comment on function tube.named_all(text) is 'Several tubes by their names, with commas between them.';

create function tube.insert_pods(pods regclass[], op text, shard integer, ids bigint[], chunk_size integer) returns void
language plpgsql
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    each_pods regclass;
begin
    foreach each_pods in array pods loop
        execute format(
            'insert into %s (op, shard, ids) '
            'select $1, $2, $3[i : i + $4 - 1] from generate_series(1, cardinality($3), $4) as i', each_pods)
        using op, shard, ids, chunk_size;
    end loop;
end
$$;
comment on function tube.insert_pods(regclass[], text, integer, bigint[], integer) is
    'Put ids into several tubes, in pods of chunk_size.';

create function tube.tube_pods_insert(
    tube_or_tubes text, query text, shard integer, op character default 'B', approx_size bigint default null,
    fetch_chunk_size integer default 20000, insert_chunk_size integer default 250
) returns void
language plpgsql
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    pods regclass[] := array(select t.pods from tube.named_all(tube_or_tubes) as t);
    kind text := tube.checked_op(op);
    chunk integer := tube.checked_chunk(insert_chunk_size);
    each_id bigint;
    ids bigint[] := '{}';
    done bigint := 0;
begin
    if shard is null then
        perform tube.refuse('a touch needs a shard');
    end if;
    if fetch_chunk_size is null or fetch_chunk_size < chunk then
        perform tube.refuse('fetch_chunk_size must be at least insert_chunk_size');
    end if;
    for each_id in execute format('select q.id from (%s) as q(id, n)', query) loop
        continue when each_id is null;
        ids := array_append(ids, each_id);
        if cardinality(ids) = fetch_chunk_size then
            perform tube.insert_pods(pods, kind, shard, ids, chunk);
            done := done + fetch_chunk_size;
            ids := '{}';
            raise debug '% of about % ids', done, approx_size;
        end if;
    end loop;
    perform tube.insert_pods(pods, kind, shard, ids, chunk);
end
$$;
comment on function tube.tube_pods_insert(text, text, integer, character, bigint, integer, integer) is
    'Touch the ids that a query gives, one row (id, its number from 1) each, in the order in which they come: in one tube or, '
    'with commas, in several. They are fetched fetch_chunk_size at a time and make pods of insert_chunk_size. The query runs '
    'with the caller''s rights.';
