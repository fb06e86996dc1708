-- Which tables can be attached, under which shard; and which workers there can be.

create function tube.inferred_shard(tbl regclass) returns integer
language plpgsql stable
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    digits text := substring(tube.schema_of(tbl) from '([0-9]+)$');
begin
    if digits is null or length(ltrim(digits, '0')) > 9 then
        perform tube.refuse(
            format('the name of the schema of %s does not end in a shard''s number', tbl),
            'give the shard: tube.tube_table_ensure_attached(tube, tbl, shard => ...)');
    end if;
    return digits::integer;
end
$$;
comment on function tube.inferred_shard(regclass) is 'The shard that the trailing digits of a table''s schema name.';

create function tube.check_table(tbl regclass) returns void
language plpgsql stable
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    class pg_class := (select c from pg_class as c where c.oid = tbl);
    owner_name name := pg_get_userbyid(class.relowner);
begin
    if class is null then
        perform tube.refuse('there is no such table', 'name a table that is there');
    end if;
    if class.relkind not in ('r', 'p') then
        perform tube.refuse(format('%s is not a table', tbl), 'attach the tables behind it');
    end if;
    if class.relpersistence = 't' then
        perform tube.refuse(format('%s is a temporary table', tbl), 'attach a permanent one');
    end if;
    if class.relispartition then
        perform tube.refuse(format('%s is a partition', tbl), 'attach the partitioned table');
    end if;
    if exists (
        select from tube.descendants(tbl) as d(relid) join pg_class as c on c.oid = d.relid where c.relkind = 'f'
    ) then
        perform tube.refuse(format('%s has a foreign table as a partition', tbl), 'foreign tables cannot be captured');
    end if;
    if exists (select from tube.tube as t where t.pods = tbl)
       or tube.schema_of(tbl) in ('tube', 'pg_catalog', 'information_schema')
    then
        perform tube.refuse(format('%s is not a table of your own', tbl), 'attach one that is');
    end if;
    if not pg_has_role(current_user, class.relowner, 'usage') then
        raise insufficient_privilege using
            message = format('only the owner of %s, %I, may attach it', tbl, owner_name),
            hint = format('connect as %I, or set role %I', owner_name, owner_name);
    end if;
    if not has_schema_privilege(owner_name, class.relnamespace, 'create') then
        perform tube.refuse(
            format('%I, the owner of %s, may not create a function in schema %I', owner_name, tbl, tube.schema_of(tbl)),
            format('grant create on schema %I to %I', tube.schema_of(tbl), owner_name));
    end if;
end
$$;
comment on function tube.check_table(regclass) is 'Refuse, with the reason, a table that cannot be attached to any tube.';

create function tube.check_key(tbl regclass, id_column name) returns smallint
language plpgsql stable
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    key pg_attribute := (
        select a from pg_attribute as a
        where a.attrelid = tbl and a.attname = id_column and a.attnum > 0 and not a.attisdropped
    );
begin
    if key is null then
        perform tube.refuse(
            format('%s has no column %I', tbl, id_column),
            'name the column of its ids: tube.tube_table_ensure_attached(..., id_column => ...)');
    end if;
    if key.atttypid not in ('bigint'::regtype, 'integer'::regtype, 'smallint'::regtype) then
        perform tube.refuse(
            format('column %I of %s is %s', id_column, tbl, format_type(key.atttypid, key.atttypmod)),
            'ids are bigint or integer');
    end if;
    if not key.attnotnull then
        perform tube.refuse(format('column %I of %s may be null', id_column, tbl), 'add not null, or a primary key');
    end if;
    return key.attnum;
end
$$;
comment on function tube.check_key(regclass, name) is
    'Refuse, with the reason, a column that cannot hold a table''s ids; returns its number, which a rename keeps.';

create function tube.check_rights(tbl regclass, known tube.tube) returns void
language plpgsql stable
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    owner_name name := (select pg_get_userbyid(c.relowner) from pg_class as c where c.oid = tbl);
begin
    if not (
        has_schema_privilege(owner_name, 'tube', 'usage')
        and has_table_privilege(owner_name, known.pods, 'insert')
        and has_sequence_privilege(owner_name, 'tube.seq', 'usage')
        and has_column_privilege(owner_name, 'tube.fault', 'message', 'insert')
        and has_schema_privilege(owner_name, (select c.relnamespace from pg_class as c where c.oid = known.pods), 'usage')
    ) then
        raise insufficient_privilege using
            message = format('%I, the owner of %s, may not put pods into tube %I', owner_name, tbl, known.name),
            hint = format('let their owners run: select tube.grant_use(%L); grant usage on schema %I to %I; grant insert on %s to %I',
                          owner_name, tube.schema_of(known.pods), owner_name, known.pods, owner_name);
    end if;
end
$$;
comment on function tube.check_rights(regclass, tube.tube) is 'Refuse a table whose owner may not write the pods.';

create function tube.check_workers(known tube.tube, workers integer, worker integer) returns void
language plpgsql stable
set search_path = pg_catalog, tube, pg_temp
as $$
begin
    if workers is distinct from known.partitions then
        raise exception using errcode = 'PC006',
            message = format('tube %I is shared by %s workers now, and this is one of %s', known.name, known.partitions, workers),
            hint = format('make the feeds anew: TubeFeed(%L, worker, workers=%s)', known.name, known.partitions);
    end if;
    perform tube.check_worker(workers, worker);
end
$$;
comment on function tube.check_workers(tube.tube, integer, integer) is 'Refuse a worker that the tube does not have.';

create function tube.check_worker(workers integer, worker integer) returns void
language plpgsql immutable
set search_path = pg_catalog, tube, pg_temp
as $$
begin
    if coalesce(workers not between 1 and 999 or worker not between 0 and workers - 1, true) then
        perform tube.refuse(format('there is no worker %s of %s', worker, workers), 'there are 1 to 999, numbered from 0');
    end if;
end
$$;
comment on function tube.check_worker(integer, integer) is 'Refuse a worker that cannot be.';
