-- The capture of table mutations: each statement that inserts, updates or deletes rows publishes an event for each of them.
--
-- A trigger function belongs to the owner of its table and runs with that owner's rights. So a writer needs no rights on schema
-- pgmb, and casts and the serialisation run as the owner. The function names no column of the table.

create table pgmb.pushed_table (
    tbl regclass primary key,
    name text not null,
    inserts boolean not null,
    updates boolean not null,
    deletes boolean not null,
    pushed_at timestamptz not null default now()
);
comment on table pgmb.pushed_table is
    'Tables whose mutations are published, and which kinds of mutations. name: the name of the table when its capture was placed '
    'or repaired.';

create table pgmb.push_fault (
    id bigint generated always as identity primary key,
    tbl regclass not null,
    op text not null,
    message text not null,
    before jsonb,
    after jsonb,
    occurred_at timestamptz not null default pg_catalog.statement_timestamp()
);
create index push_fault_by_table on pgmb.push_fault (tbl);
comment on table pgmb.push_fault is
    'Rows that were written but could not be made an event, as they were before and after. Once the cause is fixed: '
    'pgmb.replay_push_faults(tbl). op ATTACH: a partition that had rows before it was captured, until pgmb.publish_attached has '
    'published them.';

-- The triggers that publish the mutations of a table: on the table, its partitions and former partitions. They are found by the
-- function of the table's own triggers, also after a rename or a restore. The triggers of partitions have an argument.
create function pgmb.pushes(tbl regclass)
returns table (relid regclass, op text, function oid, enabled boolean)
language sql stable as $$
    select t.tgrelid::regclass, split_part(t.tgname, '_', 3), t.tgfoid, t.tgenabled in ('O', 'A')
    from pg_trigger as own
    join pgchange.triggers_of(own.tgfoid) as t on t.tgname = own.tgname
    where own.tgrelid = pushes.tbl and own.tgname in ('pgmb_push_insert', 'pgmb_push_update', 'pgmb_push_delete')
      and own.tgnargs = 0
      -- Any role with the right to create triggers on a table can create a trigger of this name.
      and (t.tgrelid in (select d.relid from pgchange.descendants(tbl) as d(relid)) or exists (
          select from pg_proc as f join pg_class as c on c.relowner = f.proowner where f.oid = t.tgfoid and c.oid = tbl))
$$;

-- The row trigger by which statement triggers see the rows that a MERGE updates on a partitioned table; null if the table has
-- none.
create function pgmb.push_guard(tbl regclass) returns name
language sql stable as $$
    -- Any role with the right to create triggers on the table can use this name. 7 is the type of a row trigger before insert.
    select t.tgname from pg_trigger as t
    where t.tgrelid = tbl and t.tgparentid = 0 and t.tgtype = 7 and t.tgname ~ '^pgmb_push_guard_[0-9a-f]{12}$'
    limit 1
$$;

-- The trigger that keeps foreign tables from being attached to a partitioned table, because inserts into them would fail; null if
-- there is none.
create function pgmb.push_bar(tbl regclass) returns name
language sql stable as $$
    select t.tgname from pg_trigger as t
    where t.tgrelid = tbl and t.tgparentid = 0 and t.tgconstraint <> 0 and t.tgname ~ '^pgmb_push_bar_[0-9a-f]{12}$'
    limit 1
$$;

-- The table whose mutations a trigger on a partition publishes; null if the table has lost its own trigger.
create function pgmb.pushed_by(relid oid, trigger name) returns oid
language sql stable as $$
    select own.tgrelid
    from pg_trigger as t
    join pgchange.triggers_of(t.tgfoid) as own on own.tgname = t.tgname and own.tgnargs = 0
    where t.tgrelid = relid and t.tgname = trigger
    limit 1
$$;

-- The topic of a kind of change of a table, from its current name.
create function pgmb.topic_of(tbl regclass, op text) returns text
language sql stable as $$
    select pgmb.create_topic(n.nspname, c.relname, op)
    from pg_class as c join pg_namespace as n on n.oid = c.relnamespace where c.oid = tbl
$$;

-- Record a row that could not be made an event. Returns false.
create function pgmb.note_push_fault(tbl oid, op text, message text, before jsonb, after jsonb) returns boolean
language plpgsql as $$
begin
    insert into pgmb.push_fault (tbl, op, message, before, after) values (tbl, op, message, before, after);
    return false;
end
$$;

-- The statement that publishes inserted or deleted rows.
create function pgmb.push_rows(tbl regclass, op text) returns text
language sql stable as $$
    select format($body$
    insert into pgmb.events (topic, payload)
    select %4$L, (m.s).serialised
    from (select pgmb.serialised(pgchange.tbl, %1$L, pgchange_row.*) as s from %2$s as pgchange_row offset 0) as m
    where case when (m.s).error is null then (m.s).emit and (m.s).serialised is not null
               else pgmb.note_push_fault(pgchange.tbl, %1$L, (m.s).error, %3$s) end;
$body$, upper(op), case op when 'insert' then 'pgchange_added' else 'pgchange_removed' end,
        case op when 'insert' then 'null, (m.s).serialised' else '(m.s).serialised, null' end, pgmb.topic_of(tbl, op))
$$;

-- The statement that publishes updated rows: the changed columns, and in the metadata the row before. pairs is the query of the
-- rows after and before, a and b, with their number i.
create function pgmb.push_pairs(tbl regclass, pairs text) returns text
language sql stable as $$
    select format($body$
    insert into pgmb.events (topic, payload, metadata)
    select %L, m.changed, case when m.before is null then '{}' else jsonb_build_object('old', m.before) end
    from (
        select p.i, (p.a).serialised as after, (p.b).serialised as before, (p.a).emit or (p.b).emit as emit,
               coalesce((p.a).error, (p.b).error) as error,
               pgmb.jsonb_diff(coalesce((p.a).serialised, '{}'), coalesce((p.b).serialised, '{}')) as changed
        from (%s) as p
        offset 0
    ) as m
    where case when m.error is null then m.emit and m.changed is not null
               else pgmb.note_push_fault(pgchange.tbl, 'UPDATE', m.error, m.before, m.after) end$body$,
        pgmb.topic_of(tbl, 'update'), pairs)
$$;

-- The statements that publish updated rows: for a single row and for many.
create function pgmb.push_update(tbl regclass) returns text
language sql stable as $$
    -- A single row is paired without numbering, aggregating and sorting, each of which would copy it, however large it is. The
    -- rows before and after are in the same order. A row that an update fails to move to another partition is only among the rows
    -- before. Then the rows cannot be paired.
    select format(E'    if (select count(*) from pgchange_added) = 1 and (select count(*) from pgchange_removed) = 1 then%s;\n'
                  '        return null;\n    end if;%s\n    order by m.i;\n',
        pgmb.push_pairs(tbl, $pair$
            select 1 as i, a.s as a, b.s as b
            from (
                select pgmb.serialised(pgchange.tbl, 'UPDATE', pgchange_row.*) as s from pgchange_added as pgchange_row offset 0
            ) as a
            cross join (
                select pgmb.serialised(pgchange.tbl, 'UPDATE', pgchange_row.*) as s from pgchange_removed as pgchange_row offset 0
            ) as b
        $pair$),
        pgmb.push_pairs(tbl, $pairs$
            select s.i, (array_agg(s.s) filter (where s.is_new))[1] as a,
                   (array_agg(s.s) filter (where not s.is_new))[1] as b
            from (
                select row_number() over () as i, true as is_new, pgmb.serialised(pgchange.tbl, 'UPDATE', pgchange_row.*) as s
                from pgchange_added as pgchange_row
                union all
                select row_number() over (), false, pgmb.serialised(pgchange.tbl, 'UPDATE', pgchange_row.*)
                from pgchange_removed as pgchange_row
                where (select count(*) from pgchange_added) = (select count(*) from pgchange_removed)
            ) as s
            group by s.i
        $pairs$))
$$;

-- The body of a trigger function of a table.
create function pgmb.push_body(tbl regclass, op text) returns text
language sql stable as $$
    select format($body$
#variable_conflict use_column
<<pgchange>>
declare
    -- The oid is not written into the function: in a restored database it could belong to another table.
    tbl oid := tg_relid;
    open boolean;
begin
    -- The schema was dropped, so there are no subscribers.
    if to_regnamespace('pgmb') is null then
        return null;
    end if;
    begin
        pgchange.open := has_schema_privilege('pgmb', 'usage') and has_table_privilege('pgmb.push_fault', 'delete')
            and has_column_privilege('pgmb.events', 'payload', 'insert');
    exception when others or assert_failure then
        pgchange.open := false;
    end;
    if pgchange.open is not true then
        raise warning 'a change of %% was not published: its owner may not publish events', tg_relid::regclass;
        return null;
    end if;
    if tg_nargs > 0 then
        pgchange.tbl := coalesce(pgmb.pushed_by(tg_relid, tg_name), tg_relid);
    end if;
%s
    return null;
end
$body$, case op when 'update' then pgmb.push_update(tbl) else pgmb.push_rows(tbl, op) end)
$$;
