-- Every consumer of every feed in one table. A feed is known here by a row: its schema brings status() and health().

create table pgchange.registered (
    schema name primary key,
    kind text unique
);
comment on table pgchange.registered is
    'The schemas that tell how things are: by health() setof pgchange.finding what a person should look at, where they know of '
    'more than their consumers say, and one with consumers, of the feeds of one kind, by status(upto integer) setof '
    'pgchange.consumer_status how they stand.';

create function pgchange.register(schema name, kind text default null) returns void
language sql
set search_path = pg_catalog, pgchange, pg_temp
as $$
    -- What an earlier schema of this name claimed is no more.
    delete from pgchange.claim as c where c.kind = register.kind;
    insert into pgchange.registered (schema, kind) values (schema, kind)
    on conflict on constraint registered_pkey do update set kind = excluded.kind
$$;
comment on function pgchange.register(name, text) is 'Note a schema that tells how things are, and the kind of its feeds if it has any; what an earlier schema of that kind had in '
    'work is forgotten.';

create type pgchange.consumer_status as (
    kind text, consumer text, feed jsonb, version bigint,
    ready bigint, ready_exact boolean, oldest_seconds double precision, waiting bigint, faults bigint,
    at_work boolean, batch_id uuid, attempt integer, error text, claimed_at timestamptz, updated_at timestamptz,
    held_back_by text, elsewhere text
);
comment on type pgchange.consumer_status is
    'How a consumer stands. kind, consumer: what it is and how people call it; feed: what else its feed is made of. version counts '
    'its batches and moves. ready: what a claim would return now, exact or at least so many, the oldest that many seconds old; '
    'waiting: what is there and cannot be claimed yet; faults: what its capture could not place. at_work: whether somebody holds '
    'its lock. batch_id, attempt, error, claimed_at: the batch that was claimed and not acked. held_back_by: whom or what it waits '
    'for. elsewhere: ''changes'' or ''progress'' where these are in another database, as far as is known here.';

create function pgchange.status(upto integer default 1000, of_kind text default null) returns setof pgchange.consumer_status
language plpgsql volatile
set search_path = pg_catalog, pgchange, pg_temp
as $$
declare
    known record;
    seen boolean := false;
    told text;
begin
    if coalesce(upto < 0, true) then
        raise invalid_parameter_value using message = 'upto must not be negative';
    end if;
    for known in
        select r.schema, r.kind from pgchange.registered as r
        where r.kind = coalesce(of_kind, r.kind) and to_regnamespace(quote_ident(r.schema)) is not null
        order by r.kind
    loop
        begin
            return query execute format('select * from %I.status($1)', known.schema) using upto;
            seen := true;
        exception when others then
            told := sqlerrm;
            raise warning 'consumers of kind % are left out: %', known.kind, told;
        end;
    end loop;
    if told is not null and not seen then
        raise insufficient_privilege using message = told;
    end if;
end
$$;
comment on function pgchange.status(integer, text) is
    'Every consumer that the caller may see, of every feed or of one kind; ready is exact up to a number, the cost does not grow '
    'with the backlog. What cannot be told is left out with a warning.';
