-- How every consumer of every feed stands, in one table.

create type pgchange.consumer_status as (
    kind text, consumer text, feed jsonb, version bigint,
    ready bigint, ready_exact boolean, oldest_seconds double precision, waiting bigint, faults bigint,
    at_work boolean, batch_id uuid, attempt integer, error text, claimed_at timestamptz, updated_at timestamptz,
    held_back_by text, elsewhere text, part_of uuid, leased_by text, leased_until timestamptz
);
comment on type pgchange.consumer_status is
    'How a consumer stands. kind, consumer: what it is and how people call it; feed: what else its feed is made of. version counts '
    'its batches and moves. ready: what a claim would return now, exact or at least so many, the oldest that many seconds old; '
    'waiting: what is there and cannot be claimed yet; faults: what its capture could not place. at_work: whether somebody holds '
    'its lock, or has a lease of its batch. batch_id, attempt, error, claimed_at: the batch that was claimed and not acked. held_back_by: whom or what it waits '
    'for. elsewhere: ''changes'' or ''progress'' where these are in another database, as far as is known here. part_of: the batch that was '
    'split, if batch_id is a part of it. leased_by, leased_until: the owner and the end of the lease, while a batch is leased.';

-- The whole batch of which a batch is a part; null for a whole batch, and for that of a dead letter.
create function pgchange.whole_of(batch jsonb) returns uuid
language sql immutable as $$
    select case when not batch -> 'bounds' ? 'letter' then (batch #>> '{bounds,split,parts_of,0}')::uuid end
$$;

-- How a consumer stands, by its position, its lag and the claim of the batch that it has in work, all as far as they are known.
create function pgchange.standing(
    kind text, consumer text, address jsonb, at jsonb, lag jsonb, work jsonb, at_work boolean, held_back_by text, elsewhere text
) returns pgchange.consumer_status
language plpgsql volatile as $$
declare
    leased_until constant timestamptz := work ->> 'leased_until';
    is_leased constant boolean := leased_until > clock_timestamp();
begin
    return row(
        kind, consumer, address, (at ->> 'version')::bigint,
        (lag ->> 'ready')::bigint, (lag ->> 'ready_exact')::boolean, (lag ->> 'ready_age')::double precision,
        (lag ->> 'waiting')::bigint, (lag ->> 'faults')::bigint, at_work,
        (work ->> 'batch_id')::uuid, (work ->> 'attempt')::integer, work ->> 'error', (work ->> 'claimed_at')::timestamptz,
        (at ->> 'updated_at')::timestamptz, held_back_by, elsewhere, pgchange.whole_of(coalesce(nullif(work -> 'batch', 'null'), work)),
        case when is_leased then work ->> 'leased_by' end, case when is_leased then leased_until end
    )::pgchange.consumer_status;
end
$$;

-- The size of a table with its indexes and its TOAST table as PostgreSQL knew it at the last vacuum: this reads no file and waits for no
-- lock. 0 before the first vacuum.
create function pgchange.estimated_size(tbl oid) returns bigint
language sql stable as $$
    select coalesce(sum(greatest(c.relpages, 0)), 0)::bigint * pg_catalog.current_setting('block_size')::bigint
    from pg_catalog.pg_class as c
    where c.oid in (
        select tbl
        union all select t.reltoastrelid from pg_catalog.pg_class as t where t.oid = tbl
        union all select i.indexrelid from pg_catalog.pg_index as i where i.indrelid = tbl)
$$;

create function pgchange.status(upto integer default 1000, of_kind text default null) returns setof pgchange.consumer_status
language plpgsql volatile
set client_min_messages = warning
as $$
declare
    known record;
    seen boolean := false;
    code text;
    told text;
    advice text;
begin
    if coalesce(upto < 0, true) then
        raise invalid_parameter_value using message = 'upto must not be negative';
    end if;
    for known in
        select r.schema, r.kind from pgchange.registered as r where r.kind = coalesce(of_kind, r.kind) order by r.kind
    loop
        continue when not pgchange.ours(known.schema);
        begin
            return query execute format('select * from %I.status($1)', known.schema) using upto;
            seen := true;
        exception when others then
            get stacked diagnostics code = returned_sqlstate, told = message_text, advice = pg_exception_hint;
            -- What another try mends is the caller's to try again.
            if code like '40%' or code = '55P03' then
                raise;
            end if;
            raise warning 'consumers of kind % are left out: %', known.kind, told;
        end;
    end loop;
    if told is not null and not seen then
        raise exception using errcode = code, message = told, hint = advice;
    end if;
end
$$;
comment on function pgchange.status(integer, text) is
    'Every consumer that the caller may see, of every feed or of one kind; ready is exact up to a number, the cost does not grow '
    'with the backlog. What cannot be told is left out with a warning.';
