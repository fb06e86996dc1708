-- Checks and triggers that every feed uses when it begins to capture a table.

-- The triggers that call a function. pg_depend has an index by which they are found, and pg_trigger has none.
create function pgchange.triggers_of(variadic functions oid[]) returns setof pg_trigger
language plpgsql stable rows 4
set plan_cache_mode = force_generic_plan
-- PostgreSQL makes the plan while the catalogues are small, and keeps it while they grow.
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
begin
    return query
        select t.*
        from pg_depend as d
        join pg_trigger as t on t.oid = d.objid and t.tgfoid = d.refobjid
        where d.refclassid = 'pg_proc'::regclass and d.refobjid = any (functions);
end
$$;

-- A foreign table that is a partition or a child of a table, or null. If a trigger with a transition table captures writes,
-- PostgreSQL refuses to write through the table into a foreign table.
create function pgchange.foreign_child(tbl regclass) returns regclass
language plpgsql stable
set plan_cache_mode = force_generic_plan
as $$
begin
    return (
        select d.relid from pgchange.descendants(tbl) as d(relid) join pg_class as c on c.oid = d.relid where c.relkind = 'f'
        order by d.relid limit 1);
end
$$;

-- Refuse a table whose changes cannot be captured, with the reason. deed: the action of the caller, such as attach. ours: schemas
-- of this project, whose tables are refused.
create function pgchange.check_capturable(tbl regclass, deed text, variadic ours name[]) returns void
language plpgsql stable as $$
declare
    class pg_class := (select c from pg_class as c where c.oid = tbl);
    schema_name name := (select n.nspname from pg_namespace as n where n.oid = class.relnamespace);
    owner_name name := pg_get_userbyid(class.relowner);
begin
    if class is null then
        perform pgchange.refuse('there is no such table', 'name an existing table');
    end if;
    if class.relkind not in ('r', 'p') then
        perform pgchange.refuse(format('%s is not a table', tbl), deed || ' the tables behind it');
    end if;
    if class.relpersistence = 't' then
        perform pgchange.refuse(format('%s is a temporary table', tbl), deed || ' a permanent table');
    end if;
    if class.relispartition then
        perform pgchange.refuse(format('%s is a partition', tbl), deed || ' the partitioned table');
    end if;
    if pgchange.foreign_child(tbl) is not null then
        perform pgchange.refuse(
            format('%s has the foreign table %s as a partition or child', tbl, pgchange.foreign_child(tbl)),
            'foreign tables cannot be captured');
    end if;
    if schema_name = any (ours || '{pg_catalog,information_schema}') then
        perform pgchange.refuse(format('%s is not a table of your own', tbl), deed || ' a table of your own');
    end if;
    perform pgchange.check_owner(tbl, deed || ' it');
    if not has_schema_privilege(owner_name, schema_name, 'create') then
        perform pgchange.refuse(
            format('%I, the owner of %s, needs the right to create functions in schema %I', owner_name, tbl, schema_name),
            format('grant create on schema %I to %I', schema_name, owner_name));
    end if;
end
$$;

-- Refuse a table that another system captures, too: one of its triggers writes into a schema that is ours now. The function of
-- such a trigger uses the name sign, or has an object of that name in its schema.
create function pgchange.check_captured_once(tbl regclass, schema name, sign name) returns void
language plpgsql stable as $$
declare
    other record;
begin
    -- Search the sources of the functions. If the schema of the other system was renamed, they still contain its old name, which
    -- is that of our schema.
    select t.tgname as trigger, t.tgrelid::regclass as relid, p.oid::regprocedure as function into other
    from pgchange.descendants(tbl) as d(relid)
    join pg_trigger as t on t.tgrelid = d.relid
    join pg_proc as p on p.oid = t.tgfoid
    where not t.tgisinternal and t.tgparentid = 0 and t.tgenabled <> 'D' and p.proname !~ '^pgchange_'
      and concat_ws(' ', p.prosrc, p.proconfig::text) ~ ('\m' || schema || '\M')
      and (p.prosrc ~ ('\m' || sign || '\M')
           or exists (select from pg_proc as f where f.pronamespace = p.pronamespace and f.proname = sign)
           or exists (select from pg_class as c where c.relnamespace = p.pronamespace and c.relname = sign))
    order by 2, 1
    limit 1;
    if found then
        perform pgchange.refuse(
            format('%s is captured by another system, too: trigger %I on %s calls %s, so each change would come twice',
                   tbl, other.trigger, other.relid, other.function),
            format('drop the trigger of the other system: drop trigger %I on %s', other.trigger, other.relid));
    end if;
end
$$;

-- Whether the column of a table with this number has this name. Declared immutable, so that the planner evaluates it. When the
-- columns of a table change, PostgreSQL makes new plans for queries of it and for its row triggers.
create function pgchange.is_named(rel oid, number smallint, name name) returns boolean
language sql immutable as $$
    select coalesce(
        (pg_catalog.pg_identify_object_as_address(1259, rel, number)).object_names[3] operator(pg_catalog.=) name::pg_catalog.text, false)
$$;

-- The current name of a key column. seen: the name that a query of pg_attribute has found, with its number; name, number: those
-- that were recorded. The two can differ if the column was renamed. A repeatable read transaction sees the catalogues as they were
-- when it began, but writes into the table as it is now. Then the key is the name that is in the replica identity, which is always
-- seen as it is now. Null if neither is in it.
create function pgchange.key_now(rel oid, seen name, seen_number smallint, name name, number smallint) returns name
language sql stable as $$
    select case when pgchange.is_named(rel, seen_number, seen) then seen else (
        select c.name from (values
            (1, (pg_identify_object_as_address('pg_class'::regclass, rel, number)).object_names[3]::name), (2, key_now.name)
        ) as c(rank, name)
        where exists (
            select from generate_series(1, 32) as n
            where pg_get_indexdef(pg_get_replica_identity_index(rel), n, false) = quote_ident(c.name))
        order by c.rank
        limit 1) end
$$;

-- Whether the columns of a table with these numbers have these names, like pgchange.is_named() for a single column.
create function pgchange.are_named(rel oid, numbers smallint[], names name[]) returns boolean
language sql immutable as $$
    select pg_catalog.bool_and(pgchange.is_named(rel, numbers[k.place], names[k.place]))
    from pg_catalog.generate_subscripts(names, 1) as k(place)
$$;

-- The arguments of pgchange.are_named() in a trigger function that reads the key columns by these names.
create function pgchange.key_check(rel oid, key name[], numbers smallint[]) returns text
language plpgsql immutable as $$
begin
    return format('%s, %L, %L', rel, numbers, key);
end
$$;

-- Keep foreign tables from being attached to a captured partitioned table, because PostgreSQL would then refuse inserts into that
-- partition. This trigger never fires. PostgreSQL creates a constraint trigger on each partition, and a foreign table cannot have
-- it, so the attachment fails. The role that creates a partition needs EXECUTE on the function; everybody has it on this function
-- of PostgreSQL.
create function pgchange.place_bar(tbl regclass, bar name) returns void
language plpgsql as $$
begin
    if (select c.relkind = 'p' from pg_class as c where c.oid = tbl)
        and not exists (select from pg_trigger as t where t.tgrelid = tbl and t.tgname = bar)
    then
        execute format(
            'create constraint trigger %I after delete on %s for each row when (false) '
            'execute function pg_catalog.suppress_redundant_updates_trigger()', bar, tbl);
    end if;
end
$$;

-- Let statement triggers see the rows that a MERGE updates on a partitioned table. PostgreSQL (15 to 18) passes them the row that
-- was inserted last, unless the partitions have a row trigger before insert. This trigger never fires.
create function pgchange.place_guard(tbl regclass, guard name) returns void
language plpgsql as $$
begin
    if (select c.relkind = 'p' from pg_class as c where c.oid = tbl)
        and not exists (select from pg_trigger as t where t.tgrelid = tbl and t.tgname = guard)
    then
        execute format(
            'create trigger %I before insert on %s for each row when (false) '
            'execute function pg_catalog.suppress_redundant_updates_trigger()', guard, tbl);
    end if;
end
$$;

-- Those of the partitions that may have brought rows with them, because they were attached before the capture knew them. Partitions
-- of a partition in the list are left out.
create function pgchange.came_with_rows(came regclass[]) returns setof regclass
language sql stable as $$
    select r from unnest(came) as r
    -- Check the size of the files, because reading a table may run code of its owner.
    where exists (select from pgchange.descendants(r) as d(relid) where pg_relation_size(d.relid) > 0)
      and not exists (select from pg_inherits as i where i.inhrelid = r and i.inhparent = any (came))
    order by r
$$;

-- The message about a partition that was attached with rows. change: what the feed calls a change.
create function pgchange.told_missed(tbl regclass, part regclass, change text) returns text
language sql stable as $$
    select format('%s: rows of %s may have been there before it was captured, and are in no %s', tbl, part, change)
$$;

-- The command that adds to the feed the rows of a partition that was attached with rows.
create function pgchange.bring_missed(part regclass, schema name, function name) returns text
language sql stable as $$
    select format('as its owner: select %I.%I(%L)', schema, function, part)
$$;

-- Raise a notice for each partition whose rows may be in no change, and return these partitions.
create function pgchange.tell_missed(tbl regclass, came regclass[], change text, schema name, function name) returns setof regclass
language plpgsql as $$
declare
    part regclass;
begin
    for part in select r from pgchange.came_with_rows(came) as r loop
        raise notice using message = pgchange.told_missed(tbl, part, change), hint = pgchange.bring_missed(part, schema, function);
        return next part;
    end loop;
end
$$;
