-- Code of users: whose code a query of a table runs, and the settings under which that code has the same result in every session.

-- A table with its partitions and inheritance children: PostgreSQL fires only the statement triggers of the table that a
-- statement names.
create function pgchange.descendants(tbl regclass) returns setof regclass
language plpgsql stable rows 4
set plan_cache_mode = force_generic_plan
-- PostgreSQL makes the plan while the catalogues are small, and keeps it while they grow.
set enable_seqscan = off
as $$
begin
    return query
        with recursive tree(relid) as (
            select tbl::oid
            union
            select i.inhrelid from tree join pg_inherits as i on i.inhparent = tree.relid
        )
        select relid::regclass from tree;
end
$$;

-- Code of another role that any query of a table may run. It is a function, operator or type in an index, statistics, a check or
-- the partition key. Code of superusers does not count. Null if there is none, or if the caller owns the table.
create function pgchange.code_in(tbl regclass) returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    with tree(relid) as (
        select d.relid::oid from pgchange.descendants(tbl) as d(relid)
    ), trusted(id) as (
        -- Code of the caller is trusted. So is that of superusers, who have all rights anyway.
        select r.oid from pg_roles as r where r.rolname = current_user or r.rolsuper
    ), part(class, id) as (
        -- The table itself, because the expressions of a partition key are dependencies of the table.
        select 'pg_class'::regclass, t.relid from tree as t
        union all
        select 'pg_class'::regclass, i.indexrelid from tree as t join pg_index as i on i.indrelid = t.relid
        union all
        select 'pg_statistic_ext'::regclass, s.oid from tree as t join pg_statistic_ext as s on s.stxrelid = t.relid
        union all
        select 'pg_constraint'::regclass, c.oid from tree as t join pg_constraint as c on c.conrelid = t.relid and c.contype = 'c'
    )
    -- Only code of users is found, because PostgreSQL's own functions, types and operators have no rows in pg_depend.
    select min(format('%s of %I in %s', i.identity, pg_get_userbyid(o.owner), p.identity))
    from part
    join pg_depend as d on (d.classid, d.objid, d.objsubid) = (part.class, part.id, 0)
    cross join lateral (
        select f.proowner from pg_proc as f where d.refclassid = 'pg_proc'::regclass and f.oid = d.refobjid
        union all
        select f.oprowner from pg_operator as f where d.refclassid = 'pg_operator'::regclass and f.oid = d.refobjid
        union all
        select f.typowner from pg_type as f where d.refclassid = 'pg_type'::regclass and f.oid = d.refobjid
    ) as o(owner)
    cross join lateral pg_identify_object(d.refclassid, d.refobjid, 0) as i
    cross join lateral pg_identify_object(part.class, part.id, 0) as p
    where o.owner not in (select t.id from trusted as t)
      and (select pg_get_userbyid(c.relowner) from pg_class as c where c.oid = tbl) <> current_user
$$;

-- Refuse to read a table if another role's code would run with the rights of a caller that does not own the table. or_else: what
-- else the caller can do.
create function pgchange.check_code(tbl regclass, or_else text default null) returns void
language plpgsql stable as $$
declare
    owner_name name := (select pg_get_userbyid(c.relowner) from pg_class as c where c.oid = tbl);
    code text := pgchange.code_in(tbl);
begin
    if code is not null then
        raise insufficient_privilege using
            message = format(
                '%s is read with the rights of its owner, %I, and no others, because reading it may run code of others: %s',
                tbl, owner_name, code),
            hint = concat_ws(', or ', format('connect as %1$I, or let %1$I drop that object', owner_name), or_else);
    end if;
end
$$;

-- Revoke all rights on a table, view or sequence from everybody but its owner. Default privileges may have granted some when it
-- was created.
create function pgchange.keep_to_owner(relation regclass) returns void
language plpgsql as $$
declare
    grantee text;
begin
    for grantee in
        select distinct case when a.grantee = 0 then 'public' else a.grantee::regrole::text end
        from pg_class as c cross join lateral aclexplode(c.relacl) as a
        where c.oid = relation and a.grantee <> c.relowner
    loop
        execute format('revoke all on table %s from %s', relation, grantee);
    end loop;
end
$$;

-- Create or replace a function by executing its definition. Only its owner may call a new function; a replaced function keeps its
-- grants. The signature includes the schema.
create function pgchange.place_function(signature text, definition text, note text) returns void
language plpgsql as $$
declare
    name constant text[] := parse_ident(signature, strict => false);
    known constant oid[] := array(
        select p.oid from pg_proc as p where p.pronamespace = quote_ident(name[1])::regnamespace and p.proname = name[2]);
    granted record;
begin
    execute definition;
    -- A replaced function keeps the rights that people have granted. A new function has the rights of PUBLIC and of default
    -- privileges.
    for granted in
        select p.oid::regprocedure as function, case when a.grantee = 0 then 'public' else a.grantee::regrole::text end as grantee
        from pg_proc as p cross join lateral aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) as a
        where p.pronamespace = quote_ident(name[1])::regnamespace and p.proname = name[2]
          and p.oid <> all (known) and a.grantee <> p.proowner
    loop
        execute format('revoke all on function %s from %s', granted.function, granted.grantee);
    end loop;
    execute format('comment on function %s is %L', signature, note);
end
$$;

do $$
declare
    -- Stemming is a property of the database, so this keeps the session's text search configuration. A configuration that a user
    -- made can be dropped. Then every call of a function that pins it would fail, and so would the user's writes.
    search_config text := 'pg_catalog.simple';
begin
    begin
        search_config := (
            select format('pg_catalog.%I', c.cfgname) from pg_catalog.pg_ts_config as c
            where c.oid = pg_catalog.get_current_ts_config() and c.cfgnamespace = 'pg_catalog'::regnamespace);
    exception when undefined_object then
        null; -- The setting names a configuration that does not exist.
    end;
    execute format(
        $function$
        create function pgchange.pinned_settings() returns table (name text, value text)
        language sql immutable
        as $body$
            values
                ('timezone', 'UTC'), ('datestyle', 'ISO, MDY'), ('intervalstyle', 'postgres'),
                ('extra_float_digits', '1'), ('bytea_output', 'hex'), ('xmlbinary', 'base64'), ('xmloption', 'content'),
                ('lc_monetary', 'C'), ('lc_numeric', 'C'), ('lc_time', 'C'), ('array_nulls', 'on'), ('transform_null_equals', 'off'),
                ('quote_all_identifiers', 'off'), ('standard_conforming_strings', 'on'), ('backslash_quote', 'on'),
                ('default_text_search_config', %L), ('gin_fuzzy_search_limit', '0'), ('row_security', 'on'),
                ('plpgsql.check_asserts', 'on')
        $body$
        $function$, coalesce(search_config, 'pg_catalog.simple'));
end
$$;
comment on function pgchange.pinned_settings() is
    'The settings that can change the result of a user''s expression, with the values that they have wherever such an expression '
    'is evaluated. The text search configuration is that of the session that installed this schema if PostgreSQL provides it, '
    'else simple.';

-- The settings of functions that contain a user's expression, as clauses of create function. With them, the expression has the
-- same result in every session.
create function pgchange.settings() returns text
language sql immutable as $$
    select string_agg(format('set %s = %L', s.name, s.value), ' ') from pgchange.pinned_settings() as s
$$;

-- Set pgchange.settings() on functions, because the statements that they build contain a user's expression.
create function pgchange.pin_settings(variadic functions regprocedure[]) returns void
language plpgsql as $$
declare
    function regprocedure;
begin
    foreach function in array functions loop
        execute format('alter function %s %s', function, pgchange.settings());
    end loop;
end
$$;

-- Pinned as well, so that a session without EXECUTE on this function can read the settings from its row in pg_proc.
select pgchange.pin_settings('pgchange.pinned_settings()');
