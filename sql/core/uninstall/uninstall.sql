-- Take out the schema pgchange: what all feeds share.

do $$
declare
    needed_by text := (
        select string_agg(n.nspname, ', ' order by n.nspname)
        from pg_catalog.pg_class as c
        join pg_catalog.pg_namespace as n on n.oid = c.relnamespace
        join pg_catalog.pg_attrdef as a on a.adrelid = c.oid
        where c.relname = 'origin' and n.nspname <> 'pgchange'
          and pg_catalog.pg_get_expr(a.adbin, a.adrelid) = 'pgchange.cluster()');
begin
    if needed_by is not null then
        raise invalid_parameter_value using
            message = pg_catalog.format('%s %s core', needed_by, case when needed_by like '%,%' then 'need' else 'needs' end),
            hint = pg_catalog.format('remove %s first, or all at once', needed_by);
    end if;
end
$$;
drop schema pgchange cascade;
