-- Touching by hand: ids that someone knows, or the result of a query.

-- The kind of a touch; B where the application_name of the session has backfill in it.
create function tube.checked_op(op text) returns text
language plpgsql stable as $$
begin
    if op is null or op not in ('I', 'U', 'D', 'T', 'B') then
        perform pgchange.refuse(format('op %L is not a kind of touch', op), 'I, U, D, T, or B for a backfill');
    end if;
    return case when strpos(current_setting('application_name'), 'backfill') > 0 then 'B' else op end;
end
$$;

create function tube.touch(
    tube text, shard integer, ids bigint[], op text, payload jsonb default null, chunk_size integer default 250
) returns void
language plpgsql as $$
declare
    pods regclass := (tube.named(tube)).pods;
    known_ids bigint[];
    kind text := tube.checked_op(op);
    chunk integer := tube.checked_chunk(chunk_size);
begin
    if array_ndims(ids) > 1 then
        perform pgchange.refuse(format('the ids have %s dimensions', array_ndims(ids)), 'give an array of one dimension');
    end if;
    -- A new array: one that is given may begin at any subscript.
    known_ids := array(select i from unnest(ids) as i where i is not null);
    if shard is null then
        perform pgchange.refuse('a touch needs a shard', 'give the number under which the table is attached');
    end if;
    perform tube.put_pods(pods, kind, shard, known_ids, payload, chunk);
end
$$;
comment on function tube.touch(text, integer, bigint[], text, jsonb, integer) is
    'Touch ids of a shard in a tube, in pods of chunk_size ids (at most 900), each with the payload; without ids the payload '
    'makes a control pod, and without both nothing is done.';

-- Touch ids of a table in every tube that it is attached to.
create function tube.touch_table(tbl text, ids bigint[], op text, payload jsonb, chunk_size integer) returns void
language plpgsql as $$
declare
    relation regclass := to_regclass(tbl);
begin
    perform tube.hold_shard(relation);
    perform tube.touch(a.tube, a.shard, ids, op, payload, chunk_size)
    from tube.attachment as a
    where a.tbl = relation
    order by a.tube;
    if not found then
        perform pgchange.refuse(
            format('%s is attached to no tube that you may use', tbl),
            'attach it (again if it was renamed), or have INSERT granted on the tube''s pods');
    end if;
end
$$;

-- Make a tube's own function <tube>_touch beside its pods.
create function tube.make_touch(schema_name name, tube text) returns void
language plpgsql as $$
declare
    signature text := format('%I.%I(integer, bigint[], character, jsonb, integer)', schema_name, tube || '_touch');
begin
    if to_regprocedure(signature) is not null then
        perform pgchange.refuse(format('there is a function %s already', signature), 'drop or rename it');
    end if;
    perform pgchange.place_function(signature, format($function$
        create function %I.%I(
            shard integer, ids bigint[], op character, payload jsonb default null, chunk_size integer default 250
        ) returns void
        language sql
        as %L
    $function$, schema_name, tube || '_touch', format('select tube.touch(%L, shard, ids, op, payload, chunk_size)', tube)),
        'Touch ids of a shard in tube ' || tube || '.');
end
$$;

-- Make a table's own function <table>_touch beside it, for its owner, or drop it where the table is attached to nothing.
create function tube.place_touch(tbl regclass) returns void
language plpgsql as $$
declare
    relation name := (select c.relname from pg_class as c where c.oid = tbl);
    owner_name name := (select pg_get_userbyid(c.relowner) from pg_class as c where c.oid = tbl);
    is_attached boolean := exists (select from tube.attachment as a where a.tbl = place_touch.tbl);
    function text;
    signature text;
    known regprocedure;
    whose text;
    another regclass;
begin
    if relation is null then
        return;
    end if;
    function := format('%I.%I', tube.schema_of(tbl), tube.short_name(relation, '_touch'));
    signature := function || '(bigint[], character, jsonb, integer)';
    known := to_regprocedure(signature);
    whose := substring(obj_description(known, 'pg_proc') from '^Touch ids of (.*) in every tube that it is attached to[.]$');
    another := (select a.tbl from tube.attachment as a where a.tbl = tube.table_named(whose) and a.tbl <> place_touch.tbl limit 1);
    if known is not null and whose is null or another is not null then
        if is_attached then
            perform pgchange.refuse(
                format('there is a function %s already%s', signature, ', of table ' || another), 'drop or rename it');
        end if;
        return;
    end if;
    if not pg_has_role(current_user, (select p.proowner from pg_proc as p where p.oid = known), 'usage') then
        raise notice '% belongs to another owner, and stays as it is', signature using
            hint = format('let its owner drop it; attaching %s again then makes it', tbl);
        return;
    end if;
    if not is_attached then
        execute format('drop function if exists %s', signature);
        return;
    end if;
    perform pgchange.place_function(signature, format($function$
        create or replace function %s(
            ids bigint[], op character default 'T', payload jsonb default null, chunk_size integer default 250
        ) returns void
        language sql
        as %L
    $function$, function, format('select tube.touch_table(%L, ids, op, payload, chunk_size)', tube.full_name(tbl))),
        format('Touch ids of %s in every tube that it is attached to.', tube.full_name(tbl)));
    execute format('alter function %s owner to %I', signature, owner_name);
end
$$;

-- Drop the functions <table>_touch of tables that have got another name or schema since, or were dropped: they fail.
create function tube.drop_lost_touches() returns void
language plpgsql as $$
declare
    function regprocedure;
begin
    for function in
        select p.oid
        from pg_proc as p
        cross join lateral substring(
            obj_description(p.oid, 'pg_proc') from '^Touch ids of (.*) in every tube that it is attached to[.]$') as told(whose)
        where p.proname like '%\_touch' and pg_has_role(current_user, p.proowner, 'usage') and told.whose is not null
          and tube.table_named(told.whose) is null
    loop
        execute format('drop function %s', function);
    end loop;
end
$$;

-- Refuse a touch of many ids that makes no sense.
create function tube.check_bulk(shard integer, fetch_chunk_size integer) returns void
language plpgsql immutable as $$
begin
    if shard is null then
        perform pgchange.refuse('a touch needs a shard', 'give the number under which the table is attached');
    end if;
    if fetch_chunk_size is null or fetch_chunk_size not between 1 and 10000000 then
        perform pgchange.refuse(format('%s rows cannot be fetched at a time', fetch_chunk_size), 'from 1 to 10000000');
    end if;
end
$$;

create type tube.progress as (
    approx_size bigint, began timestamptz, told_at timestamptz, ids bigint, insert_ms double precision
);
comment on type tube.progress is 'How far a touch of many ids has come, how much of its time went into pods, and when it last said so.';

-- A touch of about so many ids, at its beginning.
create function tube.begun(approx_size bigint) returns tube.progress
language sql volatile as $$
    select row(approx_size, clock_timestamp(), clock_timestamp(), 0, 0)::tube.progress
$$;

-- Count ids that were made pods since a moment, and say every 2 s and at the end how many there are, in the words that clients wait
-- for.
create function tube.told(so_far tube.progress, ids bigint, since timestamptz, finished boolean default false)
returns tube.progress
language plpgsql volatile as $$
declare
    now timestamptz := clock_timestamp();
begin
    so_far.ids := so_far.ids + ids;
    so_far.insert_ms := so_far.insert_ms + extract(epoch from now - since) * 1000;
    if finished or now >= so_far.told_at + interval '2 s' then
        so_far.told_at := now;
        raise notice 'tube_pods_insert: approx_size=% fetch_ms=% insert_ids=% insert_finished=% insert_percent=% insert_ms=% insert_rps=%',
            so_far.approx_size, round(extract(epoch from now - so_far.began) * 1000 - so_far.insert_ms), so_far.ids, finished,
            case when finished then 100 else least(100, so_far.ids * 100 / nullif(so_far.approx_size, 0)) end,
            round(so_far.insert_ms), coalesce(round(so_far.ids * 1000 / nullif(so_far.insert_ms, 0)), 0);
    end if;
    return so_far;
end
$$;

-- The query is the caller's and means what it means under the caller's search_path: so this function has none of its own,
-- and every name in it has its schema.
create function tube.tube_pods_insert(
    tube_or_tubes text, query text, shard integer, op character default 'B', approx_size bigint default null,
    fetch_chunk_size integer default 20000, insert_chunk_size integer default 250
) returns void
language plpgsql as $$
declare
    pods pg_catalog.regclass[] := array(select distinct t.pods from tube.named_all(tube_or_tubes) as t);
    kind pg_catalog.text := tube.checked_op(op);
    chunk integer := tube.checked_chunk(insert_chunk_size);
    each_id bigint;
    ids bigint[] := '{}';
    so_far tube.progress := tube.begun(approx_size);
    since timestamptz;
begin
    perform tube.check_bulk(shard, fetch_chunk_size);
    if pg_catalog.btrim(query, E' ;\r\n\t') operator(pg_catalog.<>) '' is not true then
        perform pgchange.refuse('a touch of many ids needs a query', 'give one that returns them');
    end if;
    for each_id in
        execute pg_catalog.format(E'select q.id::bigint from (%s\n) as q(id)', pg_catalog.rtrim(query, E' ;\r\n\t'))
    loop
        if each_id is not null then
            ids := pg_catalog.array_append(ids, each_id);
            if pg_catalog.cardinality(ids) operator(pg_catalog.>=) fetch_chunk_size then
                since := pg_catalog.clock_timestamp();
                perform tube.put_pods(p, kind, shard, ids, chunk_size => chunk) from pg_catalog.unnest(pods) as p;
                so_far := tube.told(so_far, pg_catalog.cardinality(ids), since);
                ids := '{}';
            end if;
        end if;
    end loop;
    since := pg_catalog.clock_timestamp();
    perform tube.put_pods(p, kind, shard, ids, chunk_size => chunk) from pg_catalog.unnest(pods) as p;
    perform tube.told(so_far, pg_catalog.cardinality(ids), since, finished => true);
end
$$;
comment on function tube.tube_pods_insert(text, text, integer, character, bigint, integer, integer) is
    'Touch the ids that a query gives, one row (id, its number from 1) each, in the order in which they come: in one tube or, '
    'with commas, in several. They are fetched fetch_chunk_size at a time and make pods of insert_chunk_size. The query runs '
    'with the caller''s rights. Notices say how far it is, every 2 s and at the end; approx_size is what they give a percentage of.';
