-- Declarations that every function of a schema needs: its search path, the roles that may call it, and no rights for PUBLIC.
--
-- A schema's first file sets the search path under which the schema loads, and stores the former path in pgchange.path_before.
-- Its last file declares its roles with pgchange.add_role() and ends with pgchange.close_schema(), which sets the former path
-- again.

-- The functions of a schema that a list names, separated by white space. An entry is a name, which stands for all functions of
-- this name, or a name with argument types. An entry * stands for all functions but those that grant.
create function pgchange.routines(of_schema name, names text) returns setof regprocedure
language plpgsql as $$
declare
    named text;
    matching regprocedure[];
begin
    for named in select m[1] from regexp_matches(names, '[^\s(]+(?:\([^)]*\))?', 'g') as m loop
        matching := case when named like '%(%'
            then array[format('%I.%s', of_schema, named)::regprocedure]
            else array(
                select p.oid from pg_proc as p
                where p.pronamespace = quote_ident(of_schema)::regnamespace
                  and (p.proname = named or named = '*' and p.proname !~ '^grant_')
                order by p.oid) end;
        if matching = '{}' then
            raise undefined_function using message = format('schema %I has no function %s', of_schema, named);
        end if;
        return query select m from unnest(matching) as m;
    end loop;
end
$$;

-- Refuse null in place of a role, because GRANT would fail with a worse message.
create function pgchange.check_role(role regrole) returns void
language plpgsql as $$
begin
    if role is null then
        perform pgchange.refuse('nothing was granted: null is not a role', 'name a role, as in ''reader''');
    end if;
end
$$;

-- Declare a role of a schema: create the function grant_<role>, which grants a role of the database these rights. includes names
-- other roles, each with its schema. objects lists rights on tables and the like in the form of GRANT.
create function pgchange.add_role(
    of_schema name, role text, told text, includes text default '', objects text[] default '{}', functions text default ''
) returns void
language plpgsql as $$
declare
    statements constant text := format('grant usage on schema %I to %%1$s', of_schema)
        || (select coalesce(string_agg('; grant ' || o || ' to %1$s', '' order by n), '') from unnest(objects) with ordinality as a(o, n))
        || (select coalesce('; grant execute on routine ' || string_agg(r::text, ', ') || ' to %1$s', '')
            from pgchange.routines(of_schema, functions) as r);
begin
    execute format(
        'create function %I.%I(role regrole) returns void language plpgsql as %L', of_schema, 'grant_' || role,
        format(
            E'begin\n    perform pgchange.check_role(role);\n%s    perform pgchange.open_given(%L, %L, role);\n'
            '    execute pg_catalog.format(%L, role);\nend',
            (select string_agg(format(E'    perform %s(role);\n', regexp_replace(i[1], '(\w+)$', 'grant_\1')), '' order by n)
             from regexp_matches(includes, '\S+', 'g') with ordinality as a(i, n)),
            of_schema, role, statements));
    execute format('comment on function %I.%I(regrole) is %L', of_schema, 'grant_' || role, told);
end
$$;

-- End the load of a schema. Refuse a schema that lacks a function that it promised by pgchange.offer(). Pin the search path of
-- its functions to that of the load. Mark functions without a comment as internal. Revoke all rights from everybody but its
-- owner; grants come later. Functions in unpinned keep the path of their caller, which is pinned. They are called for each row or
-- ack, or must be inlined.
create function pgchange.close_schema(of_schema name, types text default '', unpinned text default '') returns void
language plpgsql as $$
declare
    here constant regnamespace := pg_catalog.quote_ident(of_schema)::regnamespace;
    path constant text := pg_catalog.current_setting('search_path');
    kept constant regprocedure[] := array(select r from pgchange.routines(of_schema, unpinned) as r);
    routine regprocedure;
    grantee text;
    type text;
begin
    perform pgchange.check_offer(of_schema);
    for routine in
        select p.oid from pg_catalog.pg_proc as p
        where p.pronamespace::regnamespace::text in (pg_catalog.quote_ident(of_schema), pg_catalog.quote_ident(of_schema || '_sealed'))
          -- The names in a body that was parsed when it was written do not depend on the path.
          and p.prosqlbody is null and p.prolang <> (select l.oid from pg_catalog.pg_language as l where l.lanname = 'c')
          and p.oid <> all (kept)
          and not exists (select from pg_catalog.unnest(p.proconfig) as s where s like 'search\_path=%')
          -- Functions of pgchange.offer() have their own path, or name everything with its schema.
          and not exists (
              select from pgchange.given as g
              where g.schema = of_schema and pg_catalog.to_regprocedure(g.signature) = p.oid)
    loop
        execute pg_catalog.format('alter routine %s set search_path = %s', routine, path);
    end loop;
    for routine in
        select p.oid from pg_catalog.pg_proc as p
        where p.pronamespace = here and pg_catalog.obj_description(p.oid, 'pg_proc') is null
    loop
        execute pg_catalog.format('comment on routine %s is %L', routine, 'Internal to schema ' || of_schema || '.');
    end loop;
    -- Roles to which default privileges have granted rights on the new objects. There are no other grants yet.
    for grantee in
        select 'public'
        union
        select a.grantee::pg_catalog.regrole::text
        from (
            select p.proacl, p.proowner from pg_catalog.pg_proc as p where p.pronamespace = here
            union all
            select c.relacl, c.relowner from pg_catalog.pg_class as c where c.relnamespace = here
            union all
            select t.typacl, t.typowner from pg_catalog.pg_type as t where t.typnamespace = here
            union all
            select n.nspacl, n.nspowner from pg_catalog.pg_namespace as n where n.oid = here
        ) as made(acl, owner)
        cross join lateral pg_catalog.aclexplode(made.acl) as a
        where a.grantee not in (0, made.owner)
    loop
        for type in select m[1] from pg_catalog.regexp_matches(types, '\S+', 'g') as m loop
            execute pg_catalog.format('revoke all on type %I.%I from %s', of_schema, type, grantee);
        end loop;
        execute pg_catalog.format(
            'revoke all on all routines in schema %1$I from %2$s; revoke all on all tables in schema %1$I from %2$s; '
            'revoke all on all sequences in schema %1$I from %2$s; revoke all on schema %1$I from %2$s', of_schema, grantee);
    end loop;
    perform pg_catalog.set_config('search_path', pg_catalog.current_setting('pgchange.path_before'), true);
end
$$;
