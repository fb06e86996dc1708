-- Repairing the capture of mutations after a partition was attached, or a table renamed or dropped.

create function pgmb.pushing()
returns table (
    tbl regclass, inserts boolean, updates boolean, deletes boolean, untriggered regclass[], disabled regclass[], stale boolean,
    faults bigint, missed regclass[]
)
language sql stable security definer as $$
    select t.tbl, t.inserts, t.updates, t.deletes,
           array(
               select d.relid from pgchange.descendants(t.tbl) as d(relid)
               left join pgmb.pushes(t.tbl) as p on p.relid = d.relid
               group by d.relid having count(p.op) < t.inserts::integer + t.updates::integer + t.deletes::integer
               order by d.relid
           ),
           array(select distinct p.relid from pgmb.pushes(t.tbl) as p where not p.enabled),
           exists (
               select from pgmb.pushes(t.tbl) as p
               join pg_proc as f on f.oid = p.function
               where f.prosrc <> pgmb.push_body(t.tbl, p.op) or f.proowner <> c.relowner
                  or p.relid not in (select d.relid from pgchange.descendants(t.tbl) as d(relid))
           ) or c.relkind = 'p' and (t.updates and pgmb.push_guard(t.tbl) is null or pgmb.push_bar(t.tbl) is null),
           (select count(*) from (select from pgmb.push_fault as f where f.tbl = t.tbl limit 1000) as bounded),
           array(
               select distinct f.tbl from pgmb.push_fault as f
               where f.op = 'ATTACH' and f.tbl in (select d.relid from pgchange.descendants(t.tbl) as d(relid))
               order by f.tbl)
    from pgmb.pushed_table as t
    join pg_class as c on c.oid = t.tbl
$$;
comment on function pgmb.pushing() is
    'Every table whose mutations are published, with the problems of its capture. untriggered: partitions without a trigger. '
    'disabled: disabled triggers. stale: the table was renamed, has another owner, or lost a partition. faults: counted up to '
    '1000. missed: partitions that had rows before they were captured. pgmb.recapture() repairs untriggered and stale.';

-- The tables of the caller whose capture pgmb.recapture() can repair, with their full names.
create function pgmb.to_recapture() returns table (tbl regclass, name text)
language sql stable as $$
    select p.tbl, p.tbl::text from pgmb.pushing() as p join pg_class as c on c.oid = p.tbl
    where pg_has_role(current_user, c.relowner, 'usage') and (p.untriggered <> '{}' or p.stale)
$$;

create function pgmb.recapture(tbl regclass) returns void
language plpgsql as $$
declare
    known pgmb.pushed_table := (select t from pgmb.pushed_table as t where t.tbl = recapture.tbl);
begin
    perform pgmb.push_table_mutations(tbl, known.inserts, known.deletes, known.updates);
end
$$;
comment on function pgmb.recapture(regclass) is 'Repair the capture of a table. The same mutations are published as before.';

create function pgmb.recapture() returns setof text
language plpgsql as $$
declare
    pushed record;
begin
    for pushed in select m.* from pgmb.to_recapture() as m loop
        begin
            if pgchange.foreign_child(pushed.tbl) is not null and exists (select from pgmb.pushes(pushed.tbl)) then
                perform pgmb.drop_push(pushed.tbl, '{insert,delete,update}');
                return next format('%s: the capture of its mutations was taken off, because the foreign table %s is a child of it',
                                   pushed.name, pgchange.foreign_child(pushed.tbl));
                continue;
            end if;
            perform pgmb.recapture(pushed.tbl);
            return next format('%s: the capture of its mutations was repaired', pushed.name);
            return query
                select format('%s; %s', pgchange.told_missed(p.tbl, m, 'event'), pgchange.bring_missed(m, 'pgmb', 'publish_attached'))
                from pgmb.pushing() as p cross join lateral unnest(p.missed) as m where p.tbl = pushed.tbl;
        exception
            when lock_not_available then
                return next format('%s: postponed, it is being written', pushed.name);
            when others then
                return next format('%s: the capture of its mutations cannot be repaired: %s', pushed.name, sqlerrm);
        end;
    end loop;
end
$$;
comment on function pgmb.recapture() is
    'Repair the capture of the tables of the caller, for example after a new partition or a rename. Returns a line for each '
    'table, with the reason if it cannot be repaired. The capture is removed if a table got a foreign table as a child, because '
    'PostgreSQL would refuse updates and deletes through it.';

-- Drop the trigger functions of dropped tables, if the caller may. Dropping a table drops its triggers, but not their functions.
create function pgmb.drop_left_over() returns void
language plpgsql as $$
declare
    left_over regprocedure;
begin
    for left_over in
        select p.oid from pg_proc as p
        where p.proname like 'pgchange\_push\_%' and p.prorettype = 'trigger'::regtype
          and obj_description(p.oid, 'pg_proc') = 'Publishes mutations of a table.'
          and pg_has_role(current_user, p.proowner, 'usage')
          and not exists (select from pg_depend as d where (d.refclassid, d.refobjid) = ('pg_proc'::regclass, p.oid))
    loop
        execute format('drop function %s', left_over);
    end loop;
end
$$;

-- Delete the records of dropped tables whose mutations were published, with their faults and trigger functions.
create function pgmb.forget_dropped() returns setof text
language plpgsql security definer as $$
declare
    gone pgmb.pushed_table;
begin
    -- A dump contains the oid of a dropped table, which in the restored database can belong to another table.
    for gone in select t.* from pgmb.pushed_table as t where not exists (select from pg_class as c where c.oid = t.tbl) loop
        delete from pgmb.push_fault as f where f.tbl = gone.tbl;
        delete from pgmb.pushed_table as t where t.tbl = gone.tbl;
        return next format(
            '%s was dropped, so its mutations are no longer published; if another table has taken its place: select '
            'pgmb.push_table_mutations(%L)', gone.name, gone.name);
    end loop;
    perform pgmb.drop_left_over();
end
$$;
