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

create function pgchange.unregister(schema name) returns void
language sql
set search_path = pg_catalog, pgchange, pg_temp
as $$
    delete from pgchange.claim as c
    where c.kind = (select r.kind from pgchange.registered as r where r.schema = unregister.schema);
    delete from pgchange.registered as r where r.schema = unregister.schema
$$;
comment on function pgchange.unregister(name) is 'Forget a schema that goes, with what its consumers have in work.';

create function pgchange.ours(schema name) returns boolean
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    owner oid := (select n.nspowner from pg_namespace as n where n.nspname = schema);
begin
    if owner is null then
        return false;
    end if;
    if owner <> (select n.nspowner from pg_namespace as n where n.nspname = 'pgchange')
       and not (select r.rolsuper from pg_roles as r where r.oid = owner)
    then
        raise warning 'schema % is left out: it belongs to %, and pgchange does not', schema, pg_get_userbyid(owner);
        return false;
    end if;
    return true;
end
$$;
comment on function pgchange.ours(name) is
    'Whether a schema that was registered is there, and not another that somebody has made since: its functions run as whoever asks.';

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
