-- Where the data of a database comes from: from its own transactions, from a dump, or from a copy of the cluster's files. The
-- positions of consumers hold transaction ids. These ids have a meaning only in the cluster that assigned them, so a position must
-- not be used in another.

create schema pgchange;
select pg_catalog.set_config('pgchange.path_before', pg_catalog.current_setting('search_path'), true);
set local search_path = pg_catalog, pgchange, pg_temp;
comment on schema pgchange is
    'The parts that all feeds share: the origin of the data of a database, the claims of consumers at their source, and dead '
    'letters.';

-- Create the table installed in a schema of ours, which records each installed version. The name of its constraint identifies the
-- schema as ours.
create function pgchange.keep_versions(schema name, version integer) returns void
language plpgsql as $$
begin
    execute format(
        $table$
        create table %1$I.installed (
            version integer not null,
            checksum text,
            installed_at timestamptz not null default now(),
            constraint %2$I check (version >= 0)
        );
        comment on table %1$I.installed is
            'One row for each version of this schema that was installed here, the newest last.';
        -- The installer updates the checksum. Under a publication PostgreSQL refuses an update without a replica identity.
        alter table %1$I.installed replica identity full;
        insert into %1$I.installed (version) values (%3$s)
        $table$, schema, schema || '_of_airflow_pgchange', version);
end
$$;

select pgchange.keep_versions('pgchange', version => 1);

-- The system identifier of the cluster that this database is in now. Physical copies of a cluster have the same identifier. It
-- does not change while a server runs, so the function is immutable. PostgreSQL then reads the control file when it plans a
-- query, not at each call.
create function pgchange.cluster() returns bigint
language plpgsql immutable security definer as $$
begin
    return (pg_control_system()).system_identifier;
end
$$;

create table pgchange.origin (
    id uuid not null default gen_random_uuid(),
    cluster bigint not null default pgchange.cluster(),
    written_in xid,
    written_as oid,
    noted_at timestamptz not null default clock_timestamp()
);
-- The table has no key, so give it a replica identity. Without either, PostgreSQL would refuse updates under a publication for all
-- tables.
alter table pgchange.origin replica identity full;
comment on table pgchange.origin is
    'Shows whether the transaction ids in a schema were assigned by this cluster. Each schema that keeps transaction ids has such '
    'a table, with one row. A restored dump inserts the row again, so its xmin differs from written_in, or its tableoid from '
    'written_as. If only the data are restored into an existing schema, the row of the dump is a second row. A copy of the '
    'cluster''s files, such as a base backup or pg_upgrade, changes neither. A rebase after a restore writes a row with another '
    'id.';

-- Record that the transaction ids in a schema are those of this cluster from now on.
create function pgchange.note_origin(origin regclass) returns void
language plpgsql as $$
begin
    execute format('lock table %s in share row exclusive mode', origin);
    execute format('delete from %s', origin);
    execute format('insert into %s default values', origin);
    execute format('update %s set written_in = xmin, written_as = tableoid', origin);
end
$$;

-- Whether the transaction ids in a schema are those of this cluster, by a row of its table origin. False if the schema was restored
-- from a dump or upgraded since that row was written. The function has no search_path of its own, so that the planner inlines it.
create function pgchange.is_native(cluster bigint, written_in xid, xmin xid, written_as oid, tableoid oid) returns boolean
language sql stable as $$
    -- A rewrite of the table, as by `set unlogged`, changes the xmin of its row. Then the file of the table has another number.
    select coalesce(
        cluster = pgchange.cluster() and written_as = tableoid
        and (written_in = xmin or pg_catalog.pg_relation_filenode(tableoid) <> tableoid), false)
$$;

-- Refuse a schema whose table origin has no row. Volatile, because the planner may evaluate a stable function in advance.
create function pgchange.refuse_empty(schema text) returns boolean
language plpgsql volatile as $$
begin
    raise exception using errcode = 'PC004',
        message = format('schema %s came without its data, as by pg_dump --schema-only', schema),
        hint = 'run airflow-pgchange uninstall, then airflow-pgchange install; or restore the data with it';
end
$$;

-- Whether place, the source that a record names, is this database. True also if this database is a copy of that source, with the
-- record in it.
create function pgchange.came_along(place text, here text) returns boolean
language plpgsql immutable as $$
begin
    return regexp_replace(place, '/[0-9]+$', '') = regexp_replace(here, '/[0-9]+$', '');
end
$$;

-- Whether a position is valid for the changes here. It is if it was taken here. It also is if it was copied together with the
-- changes, as by `create database ... template`. The function has no search_path of its own, so that the planner inlines it into
-- claims.
create function pgchange.fits("position" jsonb, here text) returns boolean
language sql immutable as $$
    select coalesce(
        "position" ->> 'source' = here
            or "position" ->> 'database' = here and pgchange.came_along("position" ->> 'source', here),
        "position" ->> 'source' is null)
$$;

-- Give a schema that keeps transaction ids its table origin, and the functions here() and is_native() that read the table. The name
-- of the table stands in their bodies, so PostgreSQL can keep their plans.
create function pgchange.keep_origin(schema name) returns void
language plpgsql as $$
begin
    execute format($origin$
        create table %1$I.origin (like pgchange.origin including all);
        comment on table %1$I.origin is 'Where the transaction ids in this schema come from.';
        -- The table has no key, so give it a replica identity. Without either, PostgreSQL would refuse updates under a publication
        -- for all tables.
        alter table %1$I.origin replica identity full;

        create function %1$I.here() returns text
        language plpgsql stable security definer
        set search_path = pg_catalog, pgchange, pg_temp
        as $body$
        begin
            -- If a restore has brought a second row, that row comes first.
            return (
                select concat_ws('/', o.id, o.cluster, (select d.oid from pg_database as d where d.datname = current_database()))
                from %1$I.origin as o
                order by o.written_as = o.tableoid, o.written_in = o.xmin limit 1);
        end
        $body$;
        comment on function %1$I.here() is
            'The place in which the transaction ids in this schema are valid. It consists of the id and the cluster in its table '
            'origin, and the oid of this database. If the database is renamed, or a standby promoted, the place stays the same. A '
            'copy of a database is another place.';

        create function %1$I.is_native() returns boolean
        language plpgsql stable security definer
        set search_path = pg_catalog, pgchange, pg_temp
        as $body$
        begin
            return coalesce(
                (select bool_and(pgchange.is_native(o.cluster, o.written_in, o.xmin, o.written_as, o.tableoid))
                 from %1$I.origin as o),
                pgchange.refuse_empty(%1$L));
        end
        $body$;
        comment on function %1$I.is_native() is 'Whether the transaction ids in this schema are those of this cluster.'
        $origin$, schema);
    perform pgchange.note_origin(format('%I.origin', schema)::regclass);
end
$$;
