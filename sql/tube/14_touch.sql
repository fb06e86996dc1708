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
    known tube.tube := tube.named(tube);
    known_ids bigint[];
    kind text := tube.checked_op(op);
    chunk integer := tube.checked_chunk(chunk_size);
begin
    if known.key <> '{bigint}' and cardinality(ids) > 0 then
        perform pgchange.refuse(
            format('the ids of tube %I are %s', known.name, array_to_string(known.key, ', ')),
            'give their texts to tube.touch_keys()');
    end if;
    if array_ndims(ids) > 1 then
        perform pgchange.refuse(format('the ids have %s dimensions', array_ndims(ids)), 'give an array of one dimension');
    end if;
    -- A new array: one that is given may begin at any subscript.
    known_ids := array(select i from unnest(ids) as i where i is not null);
    if shard is null then
        perform pgchange.refuse('a touch needs a shard', 'give the number under which the table is attached');
    end if;
    perform tube.put_pods(known.pods, kind, shard, known_ids, payload, chunk);
end
$$;
comment on function tube.touch(text, integer, bigint[], text, jsonb, integer) is
    'Touch ids of a shard in a tube, in pods of chunk_size ids (at most 900), each with the payload; without ids the payload '
    'makes a control pod, and without both nothing is done.';

-- The texts of ids of some types as a capture writes them; an id that none of them can be is refused.
create function tube.canonical_keys(types regtype[], keys text[]) returns text[]
language plpgsql as $$
declare
    canonical text[];
    parts text := (
        select string_agg(
            case when t.type = 'text'::regtype or (select p.typtype from pg_type as p where p.oid = t.type) = 'e' then part.text
                 when t.type = 'numeric'::regtype then format('trim_scale((%s)::numeric)::text', part.text)
                 else format('concat((%s)::%s)', part.text, format_type(t.type, -1)) end, ', ' order by t.place)
        from unnest(types) with ordinality as t(type, place)
        cross join lateral (
            select case when cardinality(types) = 1 then 'u.key' else format('(u.key::text[])[%s]', t.place) end) as part(text));
    odd text;
begin
    if cardinality(types) > 1 then
        select u.key into odd from unnest(keys) as u(key) where cardinality(u.key::text[]) <> cardinality(types) limit 1;
        if odd is not null then
            perform pgchange.refuse(
                format('%L is no id of %s', odd, array_to_string(types, ', ')), 'give the text of the array of the texts of its columns');
        end if;
        parts := format('array[%s]::text', parts);
    end if;
    execute format('select array(select %s from unnest($1) with ordinality as u(key, n) where u.key is not null order by u.n)', parts)
    using keys into canonical;
    return canonical;
end
$$;

select pgchange.pin_settings('tube.canonical_keys(regtype[], text[])');

create function tube.touch_keys(
    tube text, shard integer, keys text[], op text, payload jsonb default null, chunk_size integer default 250
) returns void
language plpgsql as $$
declare
    known tube.tube := tube.named(tube);
    kind text := tube.checked_op(op);
    chunk integer := tube.checked_chunk(chunk_size);
begin
    if known.key = '{bigint}' then
        perform tube.touch(tube, shard, keys::bigint[], op, payload, chunk_size);
        return;
    end if;
    if array_ndims(keys) > 1 then
        perform pgchange.refuse(format('the ids have %s dimensions', array_ndims(keys)), 'give an array of one dimension');
    end if;
    if shard is null then
        perform pgchange.refuse('a touch needs a shard', 'give the number under which the table is attached');
    end if;
    perform tube.put_pods(known.pods, kind, shard, tube.canonical_keys(known.key, keys), payload, chunk);
end
$$;
comment on function tube.touch_keys(text, integer, text[], text, jsonb, integer) is
    'As tube.touch(), for a tube whose ids are texts: the text of the one column, or that of the array of the texts of several.';

-- Touch ids of a table in every tube that it is attached to and whose ids are of this type: bigint or text.
create function tube.touch_table(tbl text, ids anyarray, op text, payload jsonb, chunk_size integer) returns void
language plpgsql as $$
declare
    relation regclass := to_regclass(tbl);
    attached tube.attachment;
    is_attached boolean := false;
begin
    perform tube.hold_shard(relation);
    for attached in
        select a.* from tube.attachment as a
        where a.tbl = relation and (a.key_types = '{bigint}') = (pg_typeof(ids) = 'bigint[]'::regtype)
        order by a.tube
    loop
        is_attached := true;
        if pg_typeof(ids) = 'bigint[]'::regtype then
            perform tube.touch(attached.tube, attached.shard, ids::bigint[], op, payload, chunk_size);
        else
            perform tube.touch_keys(attached.tube, attached.shard, ids::text[], op, payload, chunk_size);
        end if;
    end loop;
    if not is_attached then
        perform pgchange.refuse(
            format('%s is attached to no tube that you may use', tbl),
            'attach it (again if it was renamed), or have INSERT granted on the tube''s pods');
    end if;
end
$$;

-- Make a tube's own function <tube>_touch beside its pods.
create function tube.make_touch(schema_name name, tube text, key regtype[]) returns void
language plpgsql as $$
declare
    ids text := case when key = '{bigint}' then 'bigint[]' else 'text[]' end;
    signature text := format('%I.%I(integer, %s, character, jsonb, integer)', schema_name, tube || '_touch', ids);
begin
    if to_regprocedure(signature) is not null then
        perform pgchange.refuse(format('there is a function %s already', signature), 'drop or rename it');
    end if;
    perform pgchange.place_function(signature, format($function$
        create function %I.%I(
            shard integer, ids %s, op character, payload jsonb default null, chunk_size integer default 250
        ) returns void
        language sql
        as %L
    $function$, schema_name, tube || '_touch', ids, format(
        'select tube.%I(%L, shard, ids, op, payload, chunk_size)', case when key = '{bigint}' then 'touch' else 'touch_keys' end, tube)),
        'Touch ids of a shard in tube ' || tube || '.');
end
$$;

-- Make a table's own function <table>_touch for ids of a type, bigint[] or text[], or drop it where the table touches no tube with such ids.
create function tube.place_touch(tbl regclass, ids text) returns void
language plpgsql as $$
declare
    relation name := (select c.relname from pg_class as c where c.oid = tbl);
    owner_name name := (select pg_get_userbyid(c.relowner) from pg_class as c where c.oid = tbl);
    is_attached boolean := exists (
        select from tube.attachment as a
        where a.tbl = place_touch.tbl and (a.key_types = '{bigint}') = (place_touch.ids = 'bigint[]'));
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
    signature := format('%s(%s, character, jsonb, integer)', function, ids);
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
        if known is not null then
            execute format('drop function %s', known);
        end if;
        return;
    end if;
    perform pgchange.place_function(signature, format($function$
        create or replace function %s(
            ids %s, op character default 'T', payload jsonb default null, chunk_size integer default 250
        ) returns void
        language sql
        as %L
    $function$, function, ids, format('select tube.touch_table(%L, ids, op, payload, chunk_size)', tube.full_name(tbl))),
        format('Touch ids of %s in every tube that it is attached to.', tube.full_name(tbl)));
    execute format('alter function %s owner to %I', signature, owner_name);
end
$$;

-- Make a table's own function <table>_touch beside it, for its owner, or drop it where the table is attached to nothing; one for each
-- of the types, bigint[] and text[], that the ids of its tubes have.
create function tube.place_touch(tbl regclass) returns void
language sql as $$
    select tube.place_touch(tbl, k.ids) from unnest(array['bigint[]', 'text[]']) as k(ids)
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

-- Put ids that somebody gave among the pods of a tube.
create function tube.put_given(known tube.tube, kind text, shard integer, ids anyarray, chunk integer) returns void
language plpgsql as $$
begin
    if known.key = '{bigint}' then
        perform tube.put_pods(known.pods, kind, shard, ids, chunk_size => chunk);
    else
        perform tube.put_pods(known.pods, kind, shard, tube.canonical_keys(known.key, ids::text[]), chunk_size => chunk);
    end if;
end
$$;

-- Put the ids that a query gives into pods, of the type of like_id. The query is the caller's and means what it means under the
-- caller's search_path: so this function has none of its own, and every name in it has its schema.
create function tube.insert_pods(
    known tube.tube[], query text, kind text, shard integer, so_far tube.progress, fetch_chunk_size integer, chunk integer,
    like_id anyelement, like_ids anyarray
) returns void
language plpgsql as $$
declare
    each_id like_id%type;
    ids like_ids%type := '{}';
    since timestamptz;
begin
    for each_id in
        execute pg_catalog.format(
            E'select q.id::%s from (%s\n) as q(id)', pg_catalog.pg_typeof(like_id), pg_catalog.rtrim(query, E' ;\r\n\t'))
    loop
        if each_id is not null then
            ids := pg_catalog.array_append(ids, each_id);
            if pg_catalog.cardinality(ids) operator(pg_catalog.>=) fetch_chunk_size then
                since := pg_catalog.clock_timestamp();
                perform tube.put_given(t, kind, shard, ids, chunk) from pg_catalog.unnest(known) as t;
                so_far := tube.told(so_far, pg_catalog.cardinality(ids), since);
                ids := '{}';
            end if;
        end if;
    end loop;
    since := pg_catalog.clock_timestamp();
    perform tube.put_given(t, kind, shard, ids, chunk) from pg_catalog.unnest(known) as t;
    perform tube.told(so_far, pg_catalog.cardinality(ids), since, finished => true);
end
$$;

create function tube.tube_pods_insert(
    tube_or_tubes text, query text, shard integer, op character default 'B', approx_size bigint default null,
    fetch_chunk_size integer default 20000, insert_chunk_size integer default 250
) returns void
language plpgsql as $$
declare
    known tube.tube[] := array(select distinct on (t.pods) t from tube.named_all(tube_or_tubes) as t);
    kind pg_catalog.text := tube.checked_op(op);
    chunk integer := tube.checked_chunk(insert_chunk_size);
    bigints pg_catalog.int8 := (select pg_catalog.count(*) from pg_catalog.unnest(known) as t where t.key operator(pg_catalog.=) '{bigint}');
    so_far tube.progress := tube.begun(approx_size);
begin
    perform tube.check_bulk(shard, fetch_chunk_size);
    if pg_catalog.btrim(query, E' ;\r\n\t') operator(pg_catalog.<>) '' is not true then
        perform pgchange.refuse('a touch of many ids needs a query', 'give one that returns them');
    end if;
    if bigints operator(pg_catalog.=) pg_catalog.cardinality(known) then
        perform tube.insert_pods(known, query, kind, shard, so_far, fetch_chunk_size, chunk, null::bigint, null::bigint[]);
    elsif bigints operator(pg_catalog.=) 0 then
        perform tube.insert_pods(known, query, kind, shard, so_far, fetch_chunk_size, chunk, null::pg_catalog.text, null::pg_catalog.text[]);
    else
        perform pgchange.refuse('the ids of these tubes are of different types', 'touch them one by one');
    end if;
end
$$;
comment on function tube.tube_pods_insert(text, text, integer, character, bigint, integer, integer) is
    'Touch the ids that a query gives, one row (id, its number from 1) each, in the order in which they come: in one tube or, '
    'with commas, in several. They are fetched fetch_chunk_size at a time and make pods of insert_chunk_size. The query runs '
    'with the caller''s rights. Notices say how far it is, every 2 s and at the end; approx_size is what they give a percentage of.';
