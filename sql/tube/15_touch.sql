-- Touching ids manually.

-- The kind of a touch. It is B if the application_name of the session contains backfill.
create function tube.checked_op(op text) returns text
language plpgsql stable as $$
begin
    if op is null or op not in ('I', 'U', 'D', 'T', 'B') then
        perform pgchange.refuse(format('%L is not a kind of touch', op), 'use I, U, D, T, or B for a backfill');
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
            format('the ids of tube %I are %s, so they cannot be touched as bigint', known.name, array_to_string(known.key, ', ')),
            'pass their texts to tube.touch_keys()');
    end if;
    if array_ndims(ids) > 1 then
        perform pgchange.refuse(format(
            'the ids cannot be touched: their array has %s dimensions', array_ndims(ids)), 'pass an array of one dimension');
    end if;
    -- Build a new array, because the subscripts of a given array may begin at any number.
    known_ids := array(select i from unnest(ids) as i where i is not null);
    if shard is null then
        perform pgchange.refuse('a touch needs a shard', 'give the number under which the table is attached');
    end if;
    perform tube.put_pods(known.pods, kind, shard, known_ids, payload, chunk);
end
$$;
comment on function tube.touch(text, integer, bigint[], text, jsonb, integer) is
    'Touch ids of a shard in a tube, in pods of chunk_size ids (at most 900), each with the payload. A payload without ids makes '
    'a control pod. Without both, nothing is done.';

-- The texts of ids of these types, in the form that a capture writes. Raises an error for a text that is not such an id.
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
                format(
                    '%L is no id of %s',
                    odd, array_to_string(types, ', ')),
                    'give the text of the array of the texts of its columns');
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
        perform pgchange.refuse(format(
            'the ids cannot be touched: their array has %s dimensions', array_ndims(keys)), 'pass an array of one dimension');
    end if;
    if shard is null then
        perform pgchange.refuse('a touch needs a shard', 'give the number under which the table is attached');
    end if;
    perform tube.put_pods(known.pods, kind, shard, tube.canonical_keys(known.key, keys), payload, chunk);
end
$$;
comment on function tube.touch_keys(text, integer, text[], text, jsonb, integer) is
    'Like tube.touch(), for a tube whose ids are texts. An id of a single column is its text, an id of several columns the text '
    'of the array of their texts.';
