-- The caller of a function that runs as its owner. Inside such a function PostgreSQL knows session_user and the owner, and
-- neither need be the caller. In an autovacuum worker, during a DBA's analyze, or in a security definer function, the code of
-- another role runs.
--
-- So a function that checks rights takes the caller as its first argument, a pgchange.caller. PostgreSQL checks such a value
-- where it is made, before the function switches to its owner. So no role can make a value of another role. Such functions are in
-- schemas of their own, <schema>_sealed, on which nobody has USAGE. The public face of each is a function of the same name in the
-- schema itself: it runs as its caller and passes current_user. Its body was parsed when its owner made it, so the caller needs
-- no right to the sealed schema. Members of pg_read_all_data can call functions in there all the same, as themselves. So a sealed
-- function checks the rights of its caller for everything it does, even if the caller could not execute its face.

create domain pgchange.caller as name not null constraint is_the_current_user check (value = current_user);
comment on domain pgchange.caller is
    'The caller of a function, as a value that only that role can make.';
-- A role with this right could make a table with a column of the type. If another role wrote its own name there, the first could
-- pass that value as the caller.
revoke all on type pgchange.caller from public;

-- Create the sealed schema of a schema of this project.
create function pgchange.make_sealed(of_schema name) returns void
language plpgsql as $$
declare
    sealed name := of_schema || '_sealed';
    granted record;
begin
    -- Drop a sealed schema that was left behind when its schema was dropped manually. If the schema belongs to somebody else,
    -- creating it fails.
    if obj_description(to_regnamespace(quote_ident(sealed)), 'pg_namespace') like 'pgchange: %'
       and pgchange.ours(sealed, tell => false)
    then
        execute format('drop schema %I cascade', sealed);
    end if;
    execute format('create schema %I', sealed);
    execute format(
        'comment on schema %I is %L', sealed,
        format(
            'pgchange: functions of schema %s that get their caller as an argument. Nobody is granted USAGE here: others call the '
            'functions of the same names in schema %1$s.', of_schema));
    -- Default privileges of the database may grant rights on every new schema.
    for granted in
        select case when a.grantee = 0 then 'public' else a.grantee::regrole::text end as grantee
        from pg_namespace as n cross join lateral aclexplode(n.nspacl) as a
        where n.nspname = sealed and a.grantee <> n.nspowner
    loop
        execute format('revoke all on schema %I from %s', sealed, granted.grantee);
    end loop;
end
$$;

-- Create the public face of a sealed function. It runs as its caller and passes current_user. Nobody has EXECUTE on it yet.
create function pgchange.show(sealed_function regprocedure) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    known pg_proc := (select p from pg_proc as p where p.oid = sealed_function);
    shown_in name := regexp_replace(known.pronamespace::regnamespace::text, '_sealed$', '');
    -- The public function has all arguments of the sealed function but the first, the caller.
    arguments text := regexp_replace(pg_get_function_arguments(known.oid), '^caller pgchange.caller(, )?', '');
    types text := (select string_agg(format_type(t, null), ', ' order by n) from unnest(known.proargtypes) with ordinality as a(t, n) where n > 1);
    -- Without the explicit collation, the function would take over the collation C of type name for all its texts. Then it would
    -- use no index on texts.
    called text := format(
        '%s.%I(%s)', known.pronamespace::regnamespace, known.proname,
        array_to_string(array['(current_user collate "default")::pgchange.caller'] || array(select '$' || i from generate_series(1, known.pronargs - 1) as i), ', '));
begin
    perform pgchange.place_function(
        format('%I.%I(%s)', shown_in, known.proname, types),
        format(
            'create or replace function %I.%I(%s) returns %s language sql %s %s begin atomic select %s; end',
            shown_in, known.proname, arguments, pg_get_function_result(known.oid),
            case known.provolatile when 'i' then 'immutable' when 's' then 'stable' else 'volatile' end,
            case when known.proretset then 'rows ' || known.prorows end,
            case when known.proretset then '* from ' || called else called end),
        obj_description(known.oid, 'pg_proc'));
    execute format('grant execute on function %s to public', sealed_function);
end
$$;

-- Refuse a caller that may not execute the public face of a sealed function. Members of pg_read_all_data can call the sealed
-- function directly, but a role that may only read must not write.
create function pgchange.check_face(caller name, face regprocedure) returns void
language plpgsql stable as $$
begin
    if has_function_privilege(caller, face, 'execute') is not true then
        raise insufficient_privilege using message = format('permission denied for function %s', face);
    end if;
end
$$;

-- Create the public faces of all functions of a sealed schema.
create function pgchange.show_sealed(of_schema name) returns void
language plpgsql as $$
begin
    perform pgchange.show(p.oid::regprocedure) from pg_proc as p where p.pronamespace = to_regnamespace(quote_ident(of_schema || '_sealed'));
end
$$;

select pgchange.make_sealed('pgchange');
