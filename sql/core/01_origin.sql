-- Where the data of a database comes from. Positions count by transaction ids, which mean something in one place only.

create schema pgchange;
select pg_catalog.set_config('pgchange.path_before', pg_catalog.current_setting('search_path'), true);
set local search_path = pg_catalog, pgchange, pg_temp;
comment on schema pgchange is
    'What all feeds share: where the data of a database comes from, what a source knows of its consumers, and what these gave up.';

-- Give a schema of ours, by which it is known as such, the table of what was installed there.
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
        -- The installer notes its checksum by an update, which a publication refuses without an identity.
        alter table %1$I.installed replica identity full;
        insert into %1$I.installed (version) values (%3$s)
        $table$, schema, schema || '_of_airflow_pgchange', version);
end
$$;

select pgchange.keep_versions('pgchange', version => 1);

-- The cluster that this database is in now. Physical copies of a cluster share it.
create function pgchange.cluster() returns bigint
language plpgsql stable security definer as $$
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
-- Under a publication for all tables PostgreSQL refuses to change a table without a key, unless it has an identity.
alter table pgchange.origin replica identity full;
comment on table pgchange.origin is
    'What tells where the transaction ids in a schema come from. Each schema that keeps some has a table like this one, with one '
    'row. A dump brings the row along as text, so that it lies in another transaction than written_in, or in another table than '
    'written_as; where the data alone are restored into a schema that is there, it comes as a second row. Whatever copies the files '
    'of a cluster, as a base backup and pg_upgrade do, keeps both. Who sets a restored database right gives it another id.';

-- Note that the transaction ids in a schema are those of this cluster from now on.
create function pgchange.note_origin(origin regclass) returns void
language plpgsql as $$
begin
    execute format('lock table %s in share row exclusive mode', origin);
    execute format('delete from %s', origin);
    execute format('insert into %s default values', origin);
    execute format('update %s set written_in = xmin, written_as = tableoid', origin);
end
$$;

-- Whether the transaction ids in a schema are those of this cluster, by a row of its origin: it was neither restored from a dump nor
-- upgraded since they were noted.
create function pgchange.is_native(cluster bigint, written_in xid, xmin xid, written_as oid, tableoid oid) returns boolean
language plpgsql stable as $$
begin
    -- Once the table was rewritten, as by `set unlogged`, its row lies in the transaction that did that.
    return coalesce(
        cluster = pgchange.cluster() and written_as = tableoid
        and (written_in = xmin or pg_relation_filenode(tableoid) <> tableoid), false);
end
$$;

-- Refuse a schema whose origin has no row. Volatile, so that it is called where it stands and not when that is planned.
create function pgchange.refuse_empty(schema text) returns boolean
language plpgsql volatile as $$
begin
    raise exception using errcode = 'PC004',
        message = format('schema %s came without its data, as from pg_dump --schema-only', schema),
        hint = 'airflow pgchange uninstall, then airflow pgchange install; or restore the data with it';
end
$$;

-- The place where the transaction ids in a schema mean something, by the row of its origin: the noted id, the cluster and the
-- database. A database that is renamed, or goes on on a standby, stays where it is; its copies are other places.
create function pgchange.place(id uuid, cluster bigint) returns text
language plpgsql stable as $$
begin
    return (select concat_ws('/', id, cluster, d.oid) from pg_database as d where d.datname = current_database());
end
$$;

-- Whether what was noted in a place lies now, with all that it is about, in a copy of that database, or in the database itself.
create function pgchange.came_along(place text, here text) returns boolean
language plpgsql immutable as $$
begin
    return regexp_replace(place, '/[0-9]+$', '') = regexp_replace(here, '/[0-9]+$', '');
end
$$;

-- Whether a position is one of the changes here: it was taken here, or it lies beside them and was copied together with them, as by
-- `create database ... template`.
-- Without a search_path of its own, so that a claim's plans take it in.
create function pgchange.fits("position" jsonb, here text) returns boolean
language sql immutable as $$
    select coalesce(
        "position" ->> 'source' = here
            or "position" ->> 'database' = here and pgchange.came_along("position" ->> 'source', here),
        "position" ->> 'source' is null)
$$;

-- Give a schema that keeps transaction ids the table of where they come from, and the functions here() and is_native() that read it:
-- written for that table, so that PostgreSQL keeps their plans.
create function pgchange.keep_origin(schema name) returns void
language plpgsql as $$
begin
    execute format($origin$
        create table %1$I.origin (like pgchange.origin including all);
        comment on table %1$I.origin is 'Where the transaction ids in this schema come from.';
        -- Under a publication for all tables PostgreSQL refuses to change a table without a key, unless it has an identity.
        alter table %1$I.origin replica identity full;

        create function %1$I.here() returns text
        language plpgsql stable security definer
        set search_path = pg_catalog, pgchange, pg_temp
        as $body$
        begin
            -- Of what came along first, if anything did.
            return (
                select pgchange.place(o.id, o.cluster) from %1$I.origin as o
                order by o.written_as = o.tableoid, o.written_in = o.xmin limit 1);
        end
        $body$;
        comment on function %1$I.here() is 'The place where the transaction ids in this schema mean something.';

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
