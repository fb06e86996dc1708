-- The status of every consumer of every feed, in one table.

create type pgchange.consumer_status as (
    kind text, consumer text, feed jsonb, version bigint,
    ready bigint, ready_exact boolean, oldest_seconds double precision, waiting bigint, faults bigint,
    at_work boolean, batch_id uuid, attempt integer, error text, claimed_at timestamptz, updated_at timestamptz,
    held_back_by text, elsewhere text, part_of uuid, leased_by text, leased_until timestamptz
);
comment on type pgchange.consumer_status is
    'The status of a consumer. kind, consumer: its kind and its name; feed: further names of its feed. version counts its batches '
    'and moves. ready: the changes that a claim would return now, exact or a lower bound; oldest_seconds: the age of the oldest. '
    'waiting: changes that cannot be claimed yet; faults: changes that the capture could not place. at_work: a session holds its '
    'lock, or its batch is leased. batch_id, attempt, error, claimed_at: the batch that was claimed and not acked. held_back_by: '
    'the obstacle that it waits for. elsewhere: ''changes'' or ''progress'' if these are in another database, as far as this '
    'database knows. part_of: the batch that was split, if batch_id is a part of it. leased_by, leased_until: the owner and the '
    'end of the lease, while a batch is leased.';

-- The whole batch of which a batch is a part; null for a whole batch, and for that of a dead letter.
create function pgchange.whole_of(batch jsonb) returns uuid
language sql immutable as $$
    select case when not batch -> 'bounds' ? 'letter' then (batch #>> '{bounds,split,parts_of,0}')::uuid end
$$;

-- The status of a consumer from its position, its lag and the batch that it has in work, all as far as they are known.
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

-- The size of a table with its indexes and its TOAST table as of the last vacuum; 0 before the first vacuum. Reads no file and
-- waits for no lock.
create function pgchange.estimated_size(tbl oid) returns bigint
language sql stable as $$
    select coalesce(sum(greatest(c.relpages, 0)), 0)::bigint * pg_catalog.current_setting('block_size')::bigint
    from pg_catalog.pg_class as c
    where c.oid in (
        select tbl
        union all select t.reltoastrelid from pg_catalog.pg_class as t where t.oid = tbl
        union all select i.indexrelid from pg_catalog.pg_index as i where i.indrelid = tbl)
$$;

-- The text of an error of a feed. If the caller lacks a right, the text names the grant of the feed's consumers, or of its
-- maintainers if its consumers have none.
create function pgchange.with_grant(system name, code text, told text) returns text
language sql stable as $$
    select told || coalesce((
        select format(', role %I: let the owner of schema %I run: select %I.%I(%L)', current_user, system, system, p.proname,
                      quote_ident(current_user))
        from pg_proc as p join pg_namespace as n on n.oid = p.pronamespace
        where code = '42501' and n.nspname = system and p.proname in ('grant_consumer', 'grant_maintainer')
        order by p.proname limit 1), '')
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
        raise invalid_parameter_value using message =
            'the status cannot be shown: upto must not be negative or null; give the number up to which ready changes are counted';
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
            -- The caller can retry after a serialization failure, a deadlock or a lock timeout.
            if code like '40%' or code = '55P03' then
                raise;
            end if;
            raise warning 'consumers of kind % are left out: %', known.kind, pgchange.with_grant(known.schema, code, told);
        end;
    end loop;
    if told is not null and not seen then
        raise exception using errcode = code, message = told, hint = advice;
    end if;
end
$$;
comment on function pgchange.status(integer, text) is
    'The status of every consumer that the caller may see, of every feed or of one kind. ready is exact up to a number, so the '
    'cost does not grow with the backlog. Consumers whose status cannot be read are left out with a warning.';
