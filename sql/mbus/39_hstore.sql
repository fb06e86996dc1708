-- Own names for the functions and operators of hstore. Other roles may be allowed to create functions in the schema of the
-- extension, often public. Such a function could fit a call of ours better than that of the extension. It would then run with the
-- rights of the owner of the queues.

set local search_path = pg_catalog, mbus, pg_temp;

do $$
declare
    found record;
begin
    for found in
        select format(
                   'create operator mbus.%s (function = %I.%I, %s rightarg = %s)', o.oprname, n.nspname, p.proname,
                   'leftarg = ' || nullif(o.oprleft, 0)::regtype || ',', o.oprright::regtype) as made,
               format('mbus.%s (%s, %s)', o.oprname, coalesce(nullif(o.oprleft, 0)::regtype::text, 'none'), o.oprright::regtype)
                   as signature
        from pg_extension as e
        join pg_depend as d on d.refclassid = 'pg_extension'::regclass and d.refobjid = e.oid and d.deptype = 'e'
        join pg_operator as o on d.classid = 'pg_operator'::regclass and o.oid = d.objid
        join pg_proc as p on p.oid = o.oprcode
        join pg_namespace as n on n.oid = p.pronamespace
        where e.extname = 'hstore'
    loop
        execute found.made;
        execute format('comment on operator %s is %L', found.signature, 'Like that of the extension hstore.');
    end loop;
    for found in
        select format('mbus.%I(%s)', p.proname, pg_get_function_identity_arguments(p.oid)) as signature,
               format('mbus.%I(%s) returns %s language sql immutable parallel safe begin atomic select %s %I.%I(%s); end',
                   p.proname, pg_get_function_arguments(p.oid), pg_get_function_result(p.oid),
                   case when p.proretset then '* from' end, n.nspname, p.proname,
                   (select string_agg('$' || i, ', ') from generate_series(1, p.pronargs) as i)) as made
        from pg_extension as e
        join pg_depend as d on d.refclassid = 'pg_extension'::regclass and d.refobjid = e.oid and d.deptype = 'e'
        join pg_proc as p on d.classid = 'pg_proc'::regclass and p.oid = d.objid
        join pg_namespace as n on n.oid = p.pronamespace
        where e.extname = 'hstore'
          -- Leave out functions that only indexes and the type itself use. They have arguments or a result of a pseudotype.
          and (p.proretset or (select t.typtype from pg_type as t where t.oid = p.prorettype) <> 'p')
          and not exists (select from unnest(p.proargtypes) as a join pg_type as t on t.oid = a where t.typtype = 'p')
    loop
        execute 'create function ' || found.made;
        execute format('comment on function %s is %L', found.signature, 'Like that of the extension hstore.');
    end loop;
    execute format('create domain mbus.hstore as %s', pg_typeof((null::mbus.qt_model).data));
end
$$;
comment on domain mbus.hstore is 'The type hstore, for selectors.';
