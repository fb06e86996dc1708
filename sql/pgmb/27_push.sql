-- Publishing the mutations of tables, with writers running, and mending what the capture has become.

create function pgmb.lock_for_capture(tbl regclass, to_drop boolean default false) returns void
language plpgsql
set search_path = pg_catalog, pgmb, pg_temp
set lock_timeout = '5s'
as $$
begin
    execute format('lock table %s in %s mode', tbl, case when to_drop then 'access exclusive' else 'share row exclusive' end);
exception when lock_not_available then
    raise lock_not_available using
        message = format('%s is being %s by transactions that do not end', tbl, case when to_drop then 'used' else 'written' end),
        hint = 'try again when they have ended; nothing was changed';
end
$$;
comment on function pgmb.lock_for_capture(regclass, boolean) is
    'Wait at most 5 s for the writers of a table, or, to drop a trigger, for everybody who uses it: a lock that waits longer '
    'would stop all that come after it.';

create function pgmb.check_pushable(tbl regclass) returns void
language plpgsql stable
set search_path = pg_catalog, pgmb, pg_temp
as $$
declare
    class pg_class := (select c from pg_class as c where c.oid = tbl);
    schema_name name := (select n.nspname from pg_namespace as n where n.oid = class.relnamespace);
    owner_name name := pg_get_userbyid(class.relowner);
begin
    if class is null then
        perform pgmb.refuse('there is no such table', 'name a table that is there');
    end if;
    if class.relkind not in ('r', 'p') then
        perform pgmb.refuse(format('%s is not a table', tbl), 'push the mutations of the tables behind it');
    end if;
    if class.relpersistence = 't' then
        perform pgmb.refuse(format('%s is a temporary table', tbl), 'push those of a permanent one');
    end if;
    if class.relispartition then
        perform pgmb.refuse(format('%s is a partition', tbl), 'push the mutations of the partitioned table');
    end if;
    if exists (
        select from pgmb.descendants(tbl) as d(relid) join pg_class as c on c.oid = d.relid where c.relkind = 'f'
    ) then
        perform pgmb.refuse(format('%s has a foreign table as a partition', tbl), 'foreign tables cannot be captured');
    end if;
    if schema_name in ('pgmb', 'pg_catalog', 'information_schema') then
        perform pgmb.refuse(format('%s is not a table of your own', tbl), 'push the mutations of one that is');
    end if;
    if not pg_has_role(current_user, class.relowner, 'usage') then
        raise insufficient_privilege using
            message = format('only the owner of %s, %I, may publish its mutations', tbl, owner_name),
            hint = format('connect as %I, or set role %I', owner_name, owner_name);
    end if;
    if not has_schema_privilege(owner_name, schema_name, 'create') then
        perform pgmb.refuse(
            format('%I, the owner of %s, may not create a function in schema %I', owner_name, tbl, schema_name),
            format('grant create on schema %I to %I', schema_name, owner_name));
    end if;
    if not (
        has_schema_privilege(owner_name, 'pgmb', 'usage')
        and has_column_privilege(owner_name, 'pgmb.events', 'payload', 'insert')
        and has_column_privilege(owner_name, 'pgmb.push_fault', 'message', 'insert')
    ) then
        raise insufficient_privilege using
            message = format('%I, the owner of %s, may not publish events', owner_name, tbl),
            hint = format('let the owner of schema pgmb run: select pgmb.grant_pusher(%L)', owner_name);
    end if;
end
$$;
comment on function pgmb.check_pushable(regclass) is 'Refuse, with the reason, a table whose mutations cannot be published.';

create function pgmb.place_push_function(tbl regclass, op text) returns text
language plpgsql
set search_path = pg_catalog, pgmb, pg_temp
as $$
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
    execute format(
        'create or replace function %s() returns trigger language plpgsql security definer '
        'set search_path = pg_catalog, pgmb, pg_temp '
        -- A row says the same in every session that writes it.
        '%s set quote_all_identifiers = off as %L',
        function, pgchange.settings(), pgmb.push_body(tbl, op));
    execute format('revoke all on function %s() from public', function);
    execute format('comment on function %s() is %L', function, 'Publishes mutations of a table.');
    execute format('alter function %s() owner to %I', function, pg_get_userbyid(class.relowner));
    return function;
end
$$;
comment on function pgmb.place_push_function(regclass, text) is
    'Write one of the trigger functions of a table, or overwrite it if it is there and belongs to the owner of the table: the '
    'caller may have the right to overwrite any function, and one of another owner is not ours, whatever trigger calls it.';

create function pgmb.drop_guards(tbl regclass, former_only boolean default false) returns void
language plpgsql
set search_path = pg_catalog, pgmb, pg_temp
as $$
declare
    guard name;
begin
    for guard in select g.guard from pgmb.push_guards(tbl) as g where not (former_only and g.by_owner) loop
        perform pgmb.lock_for_capture(tbl, to_drop => true);
        execute format('drop trigger %I on %s', guard, tbl);
    end loop;
end
$$;
comment on function pgmb.drop_guards(regclass, boolean) is
    'Take the guards off a table, or only those that call a function of a former owner.';

create function pgmb.place_guard(tbl regclass, function text) returns void
language plpgsql
set search_path = pg_catalog, pgmb, pg_temp
as $$
begin
    perform pgmb.drop_guards(tbl, former_only => true);
    -- To triggers of a partitioned table PostgreSQL (15 to 18) shows what a MERGE updates as the row that it inserted last;
    -- but not where partitions have a trigger that comes before each row is inserted: this one never fires.
    if (select c.relkind = 'p' from pg_class as c where c.oid = tbl) and pgmb.push_guard(tbl) is null then
        execute format(
            'create trigger pgmb_push_guard_%s before insert on %s for each row when (false) execute function %s()',
            left(md5(concat(tbl::oid, clock_timestamp(), random())), 12), tbl, function);
    end if;
end
$$;
comment on function pgmb.place_guard(regclass, text) is
    'See to it that triggers are shown what a MERGE on a partitioned table updates; its partitions get the guard by themselves.';

create function pgmb.place_push(tbl regclass, op text) returns integer
language plpgsql
set search_path = pg_catalog, pgmb, pg_temp
as $$
declare
    calls text := pgmb.place_push_function(tbl, op);
    captured oid[] := array(
        select p.relid from pgmb.pushes(tbl) as p where p.op = place_push.op and p.function::regproc::text = calls);
    part regclass;
    placed integer := 0;
begin
    for part in select d.relid from pgmb.descendants(tbl) as d(relid) where d.relid <> all (captured) loop
        execute format(
            'create or replace trigger pgmb_push_%1$s after %1$s on %2$s %3$s for each statement execute function %4$s(%5$s)',
            op, part,
            case op when 'insert' then 'referencing new table as pgchange_added'
                    when 'update' then 'referencing old table as pgchange_removed new table as pgchange_added'
                    else 'referencing old table as pgchange_removed' end,
            calls, case when part <> tbl then quote_literal('part') end);
        placed := placed + 1;
    end loop;
    if op = 'update' then
        perform pgmb.place_guard(tbl, calls);
    end if;
    return placed;
end
$$;
comment on function pgmb.place_push(regclass, text) is
    'Write the capture of one kind of mutation again, and put it on every partition that lacks it; returns on how many.';

create function pgmb.drop_push(tbl regclass, ops text[], departed_only boolean default false) returns void
language plpgsql
set search_path = pg_catalog, pgmb, pg_temp
as $$
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
        where p.op = any (ops) and not (departed_only and p.relid in (select d.relid from pgmb.descendants(tbl) as d(relid)))
        order by p.relid
    loop
        perform pgmb.lock_for_capture(placed.relid, to_drop => true);
        execute format('drop trigger pgmb_push_%s on %s', placed.op, placed.relid);
    end loop;
    if 'update' = any (ops) and not departed_only then
        perform pgmb.drop_guards(tbl);
    end if;
    foreach function in array functions loop
        if not exists (select from pg_trigger as t where t.tgfoid = function) then
            execute format('drop function %s', function::regprocedure);
        end if;
    end loop;
end
$$;
comment on function pgmb.drop_push(regclass, text[], boolean) is
    'Take the capture of some kinds of mutation off a table, or only off the former partitions that have left it.';

create function pgmb.note_push(tbl regclass) returns void
language plpgsql
set search_path = pg_catalog, pgmb, pg_temp
as $$
declare
    ops text[] := array(
        select p.op from pgmb.pushes(tbl) as p
        join pg_proc as f on f.oid = p.function
        join pg_class as c on c.oid = p.relid
        where p.relid = note_push.tbl and f.proowner = c.relowner
    );
begin
    if ops = '{}' then
        delete from pgmb.push_fault as f
        where f.op = 'ATTACH' and f.tbl in (select d.relid from pgmb.descendants(note_push.tbl) as d(relid));
        delete from pgmb.pushed_table as t where t.tbl = note_push.tbl;
        return;
    end if;
    insert into pgmb.pushed_table (tbl, name, inserts, updates, deletes)
    values (tbl, tbl::text, 'insert' = any (ops), 'update' = any (ops), 'delete' = any (ops))
    on conflict on constraint pushed_table_pkey do update
        set name = excluded.name, inserts = excluded.inserts, updates = excluded.updates, deletes = excluded.deletes;
end
$$;
comment on function pgmb.note_push(regclass) is
    'Note which mutations of a table are published. It believes the triggers, not the caller.';

create function pgmb.told_missed(tbl regclass, part regclass) returns text
language sql stable
set search_path = pg_catalog, pgmb, pg_temp
as $$
    select format('%s: rows of %s may have been there before it was captured, and are in no event', tbl, part)
$$;
comment on function pgmb.told_missed(regclass, regclass) is 'What a partition misses that came with rows.';

create function pgmb.bring_missed(part regclass) returns text
language sql stable
set search_path = pg_catalog, pgmb, pg_temp
as $$
    select format('as its owner: select pgmb.publish_attached(%L)', part)
$$;
comment on function pgmb.bring_missed(regclass) is 'What publishes the rows that came with a partition.';

create function pgmb.note_missed(tbl regclass, came regclass[]) returns void
language plpgsql
set search_path = pg_catalog, pgmb, pg_temp
as $$
declare
    part regclass;
begin
    for part in
        select r from unnest(came) as r
        -- By its size: what reads a table may run code of its owner.
        where exists (select from pgmb.descendants(r) as d(relid) where pg_relation_size(d.relid) > 0)
          and not exists (select from pg_inherits as i where i.inhrelid = r and i.inhparent = any (came))
        order by r
    loop
        insert into pgmb.push_fault (tbl, op, message) values (part, 'ATTACH', 'its rows were there before it was captured');
        raise notice using message = pgmb.told_missed(tbl, part), hint = pgmb.bring_missed(part);
    end loop;
end
$$;
comment on function pgmb.note_missed(regclass, regclass[]) is
    'Note which of the partitions that the capture came to late have rows that may be in no event, and say so.';

create function pgmb.push_table_mutations(
    tbl regclass, insert boolean default true, delete boolean default true, update boolean default true
) returns void
language plpgsql
set search_path = pg_catalog, pgmb, pg_temp
as $$
declare
    wanted text[] := array_remove(array[
        case when $2 then 'insert' end, case when $3 then 'delete' end, case when $4 then 'update' end], null);
    unwanted text[] := array(select o from unnest('{insert,delete,update}'::text[]) as o where o <> all (wanted));
    op text;
    came regclass[];
begin
    perform pgmb.check_pushable(tbl);
    if wanted = '{}' then
        perform pgmb.refuse(
            format('no mutation of %s is to be published', tbl), format('select pgmb.stop_table_mutations_push(%L)', tbl));
    end if;
    perform pgmb.lock_for_capture(tbl);
    if 'insert' = any (wanted) and (select t.inserts from pgmb.pushed_table as t where t.tbl = push_table_mutations.tbl) then
        came := array(
            select d.relid from pgmb.descendants(tbl) as d(relid)
            where d.relid <> tbl and d.relid not in (select p.relid from pgmb.pushes(tbl) as p where p.op = 'insert'));
    end if;
    perform pgmb.drop_push(tbl, unwanted);
    perform pgmb.drop_push(tbl, wanted, departed_only => true);
    foreach op in array wanted loop
        perform pgmb.place_push(tbl, op);
    end loop;
    perform pgmb.note_missed(tbl, came);
    perform pgmb.note_push(tbl);
end
$$;
comment on function pgmb.push_table_mutations(regclass, boolean, boolean, boolean) is
    'Publish an event for each row that is inserted into a table, deleted from it or updated in it, in the transaction that '
    'does it. Its topic is schema.table.insert, delete or update in lower case. The payload is the row; of an update the '
    'columns that changed, with the row as it was in the metadata under old; an update that changes nothing sends no event. '
    'Called again, it changes which are published and mends the capture. Not captured: TRUNCATE, what is written under '
    'session_replication_role = replica or by logical replication.';

create function pgmb.stop_table_mutations_push(tbl regclass) returns void
language plpgsql
set search_path = pg_catalog, pgmb, pg_temp
as $$
begin
    perform pgmb.drop_push(tbl, '{insert,delete,update}');
    perform pgmb.note_push(tbl);
end
$$;
comment on function pgmb.stop_table_mutations_push(regclass) is
    'Publish nothing more about a table; does nothing where nothing is published. Events that were published stay.';
