-- The functions and triggers that publish the mutations of a table: placing and dropping them while others write.

-- Create a trigger function of a table, or replace it if it exists and belongs to the owner of the table. The caller may have the
-- right to replace any function. A function of another owner is not ours, whatever trigger calls it.
create function pgmb.place_push_function(tbl regclass, op text) returns text
language plpgsql as $$
declare
    class pg_class := (select c from pg_class as c where c.oid = tbl);
    function text := (
        select f.oid::regproc::text from pgmb.pushes(tbl) as p join pg_proc as f on f.oid = p.function
        where p.op = place_push_function.op and f.proowner = class.relowner limit 1);
begin
    if function is null then
        function := format('%I.%I', (select n.nspname from pg_namespace as n where n.oid = class.relnamespace), format(
            'pgchange_push_%s_%s_%s', left(class.relname, 8), op, left(md5(concat(tbl::oid, clock_timestamp(), random())), 12)));
    end if;
    perform pgchange.place_function(
        function || '()',
        format(
            'create or replace function %s() returns trigger language plpgsql security definer '
            'set search_path = pg_catalog, pgmb, pg_temp '
            -- Pinned settings, so that a row has the same content in every session that writes it.
            '%s as %L',
            function, pgchange.settings(), pgmb.push_body(tbl, op)),
        'Publishes mutations of a table.');
    execute format('alter function %s() owner to %I', function, pg_get_userbyid(class.relowner));
    return function;
end
$$;

-- Drop a guard or a bar of a table, if trigger is not null.
create function pgmb.drop_alone(tbl regclass, trigger name) returns void
language plpgsql as $$
begin
    if trigger is not null then
        perform pgchange.lock_family(tbl, 'access exclusive');
        execute format('drop trigger %I on %s', trigger, tbl);
    end if;
end
$$;

-- Create the capture of a kind of mutation again, and place it on every partition without it. Returns on how many.
create function pgmb.place_push(tbl regclass, op text) returns integer
language plpgsql as $$
declare
    calls text := pgmb.place_push_function(tbl, op);
    captured oid[] := array(
        select p.relid from pgmb.pushes(tbl) as p where p.op = place_push.op and p.function::regproc::text = calls);
    part regclass;
    placed integer := 0;
begin
    for part in select d.relid from pgchange.descendants(tbl) as d(relid) where d.relid <> all (captured) loop
        execute format(
            'create or replace trigger pgmb_push_%1$s after %1$s on %2$s %3$s for each statement execute function %4$s(%5$s)',
            op, part,
            case op when 'insert' then 'referencing new table as pgchange_added'
                    when 'update' then 'referencing old table as pgchange_removed new table as pgchange_added'
                    else 'referencing old table as pgchange_removed' end,
            calls, case when part <> tbl then quote_literal('part') end);
        placed := placed + 1;
    end loop;
    -- The name is unique to the table, because a partition that publishes by itself has a guard and a bar of its own.
    if op = 'update' and pgmb.push_guard(tbl) is null then
        perform pgchange.place_guard(tbl, 'pgmb_push_guard_' || left(md5(concat(tbl::oid, clock_timestamp(), random())), 12));
    end if;
    if pgmb.push_bar(tbl) is null then
        perform pgchange.place_bar(tbl, 'pgmb_push_bar_' || left(md5(concat(tbl::oid, clock_timestamp(), random())), 12));
    end if;
    return placed;
end
$$;

-- Remove the capture of some kinds of mutations from a table, or only from its former partitions.
create function pgmb.drop_push(tbl regclass, ops text[], departed_only boolean default false) returns void
language plpgsql as $$
declare
    placed record;
    functions oid[] := array(
        select distinct f.oid
        from pgmb.pushes(tbl) as p
        join pg_proc as f on f.oid = p.function
        join pg_class as c on c.relowner = f.proowner
        where c.oid = tbl and p.op = any (ops));
    function oid;
begin
    for placed in
        select p.relid, p.op from pgmb.pushes(tbl) as p
        where p.op = any (ops) and not (departed_only and p.relid in (select d.relid from pgchange.descendants(tbl) as d(relid)))
        order by p.relid
    loop
        perform pgchange.lock_family(placed.relid, 'access exclusive');
        execute format('drop trigger pgmb_push_%s on %s', placed.op, placed.relid);
    end loop;
    if 'update' = any (ops) and not departed_only then
        perform pgmb.drop_alone(tbl, pgmb.push_guard(tbl));
    end if;
    if not departed_only and not exists (select from pgmb.pushes(tbl)) then
        perform pgmb.drop_alone(tbl, pgmb.push_bar(tbl));
    end if;
    foreach function in array functions loop
        if not exists (select from pgchange.triggers_of(function)) then
            execute format('drop function %s', function::regprocedure);
        end if;
    end loop;
end
$$;
