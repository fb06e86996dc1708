-- Remove the capture from users' tables if schema pgmb was dropped manually.

do $$
declare
    capture regprocedure;
    alone record;
begin
    for alone in
        select t.tgname as name, t.tgrelid::regclass as tbl from pg_catalog.pg_trigger as t
        where t.tgparentid = 0 and t.tgname ~ '^pgmb_push_(guard|bar)_[0-9a-f]{12}$'
          and t.tgfoid = 'pg_catalog.suppress_redundant_updates_trigger'::regproc
    loop
        execute format('drop trigger %I on %s', alone.name, alone.tbl);
    end loop;
    for capture in
        select p.oid from pg_catalog.pg_proc as p
        where p.proname like 'pgchange\_push\_%' and p.prorettype = 'trigger'::regtype
          and obj_description(p.oid, 'pg_proc') = 'Publishes mutations of a table.'
    loop
        execute format('drop function %s cascade', capture);
    end loop;
end
$$;
