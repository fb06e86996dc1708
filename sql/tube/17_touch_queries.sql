-- Touching the ids that a query returns, in chunks.

-- Refuse a touch of many ids without a shard, or with a chunk size that is out of range.
create function tube.check_bulk(shard integer, fetch_chunk_size integer) returns void
language plpgsql immutable as $$
begin
    if shard is null then
        perform pgchange.refuse('a touch needs a shard', 'give the number under which the table is attached');
    end if;
    if fetch_chunk_size is null or fetch_chunk_size not between 1 and 10000000 then
        perform pgchange.refuse(format('the chunk size cannot be %s rows', fetch_chunk_size), 'use a number from 1 to 10000000');
    end if;
end
$$;

create type tube.progress as (
    approx_size bigint, began timestamptz, told_at timestamptz, ids bigint, insert_ms double precision
);
comment on type tube.progress is
    'The progress of a touch of many ids: how much of its time went into inserting pods, and when the last notice was raised.';

-- The progress at the beginning of a touch of about this many ids.
create function tube.begun(approx_size bigint) returns tube.progress
language sql volatile as $$
    select row(approx_size, clock_timestamp(), clock_timestamp(), 0, 0)::tube.progress
$$;

-- Count ids that were inserted as pods since a moment. Raise a notice every 2 s and at the end, in the format that clients parse.
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

-- Insert given ids as pods of a tube.
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

-- Insert the ids that a query returns as pods, of the type of like_id. The query is evaluated under the caller's search_path, so
-- this function has none of its own, and writes every name with its schema.
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
        perform pgchange.refuse('a touch of many ids needs a query, but none was given', 'give a query that returns the ids');
    end if;
    if bigints operator(pg_catalog.=) pg_catalog.cardinality(known) then
        perform tube.insert_pods(known, query, kind, shard, so_far, fetch_chunk_size, chunk, null::bigint, null::bigint[]);
    elsif bigints operator(pg_catalog.=) 0 then
        perform tube.insert_pods(known, query, kind, shard, so_far, fetch_chunk_size, chunk, null::pg_catalog.text, null::pg_catalog.text[]);
    else
        perform pgchange.refuse('the ids of these tubes have different types', 'touch the tubes separately');
    end if;
end
$$;
comment on function tube.tube_pods_insert(text, text, integer, character, bigint, integer, integer) is
    'Touch the ids that a query returns, one row (id, its number from 1) each, in the order of the rows. Several tubes are '
    'separated by commas. Ids are fetched fetch_chunk_size at a time and make pods of insert_chunk_size. The query runs with the '
    'caller''s rights. Notices report the progress every 2 s and at the end; approx_size is the total for their percentage.';
