-- Take off users' tables the capture that a schema revision has left there which was dropped by hand.

do $$
declare
    capture regprocedure;
begin
    for capture in
        select p.oid from pg_catalog.pg_proc as p
        where p.proname like 'pgchange\_capture\_%' and p.prorettype = 'trigger'::regtype
          and obj_description(p.oid, 'pg_proc') like 'Capture of % by revision.track.'
    loop
        execute format('drop function %s cascade', capture);
    end loop;
end
$$;
