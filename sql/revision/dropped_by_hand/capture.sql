-- Remove the capture from users' tables if schema revision was dropped manually.

do $$
declare
    capture regprocedure;
    bar record;
begin
    for bar in
        select t.tgname as name, t.tgrelid::regclass as tbl from pg_catalog.pg_trigger as t
        where t.tgparentid = 0 and t.tgconstraint <> 0 and t.tgname ~ '^pgchange_capture_bar_[0-9a-f]{12}$'
    loop
        execute format('drop trigger %I on %s', bar.name, bar.tbl);
    end loop;
    for capture in
        select p.oid from pg_catalog.pg_proc as p
        where p.proname like 'pgchange\_capture\_%' and p.prorettype = 'trigger'::regtype
          and obj_description(p.oid, 'pg_proc') like 'Capture of % by revision.track.'
    loop
        execute format('drop function %s cascade', capture);
    end loop;
end
$$;
