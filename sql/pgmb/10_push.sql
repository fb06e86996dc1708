-- Starting and stopping to publish the mutations of tables.

-- Refuse a table whose mutations cannot be published, with the reason.
create function pgmb.check_pushable(tbl regclass) returns void
language plpgsql stable as $$
declare
    owner_name name := (select pg_get_userbyid(c.relowner) from pg_class as c where c.oid = tbl);
begin
    perform pgchange.check_capturable(tbl, 'publish', 'pgmb');
    perform pgchange.check_captured_once(tbl, 'pgmb', 'serialise_record_for_event');
    if not (
        has_schema_privilege(owner_name, 'pgmb', 'usage')
        and has_column_privilege(owner_name, 'pgmb.events', 'payload', 'insert')
        and has_column_privilege(owner_name, 'pgmb.push_fault', 'message', 'insert')
    ) then
        raise insufficient_privilege using
            message = format('%I, the owner of %s, may not publish events', owner_name, tbl),
            hint = format('let the owner of schema pgmb run: select pgmb.grant_owner(%L)', quote_ident(owner_name));
    end if;
end
$$;

-- Record which mutations of a table are published. It reads the triggers, because the caller may not be trusted.
create function pgmb.note_push(tbl regclass) returns void
language plpgsql as $$
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
        where f.op = 'ATTACH' and f.tbl in (select d.relid from pgchange.descendants(note_push.tbl) as d(relid));
        delete from pgmb.pushed_table as t where t.tbl = note_push.tbl;
        return;
    end if;
    insert into pgmb.pushed_table (tbl, name, inserts, updates, deletes)
    values (tbl, tbl::text, 'insert' = any (ops), 'update' = any (ops), 'delete' = any (ops))
    on conflict on constraint pushed_table_pkey do update
        set name = excluded.name, inserts = excluded.inserts, updates = excluded.updates, deletes = excluded.deletes;
end
$$;

create function pgmb.push_table_mutations(
    tbl regclass, insert boolean default true, delete boolean default true, update boolean default true
) returns void
language plpgsql as $$
declare
    wanted text[] := array_remove(array[
        case when $2 then 'insert' end, case when $3 then 'delete' end, case when $4 then 'update' end], null);
    unwanted text[] := array(select o from unnest('{insert,delete,update}'::text[]) as o where o <> all (wanted));
    op text;
    came regclass[];
begin
    perform pgmb.check_pushable(tbl);
    if wanted = '{}' then
        perform pgchange.refuse(
            format(
                'publishing no mutation of %s means to stop publishing',
                tbl), format('select pgmb.stop_table_mutations_push(%L)', tbl));
    end if;
    perform pgchange.lock_family(tbl, 'share row exclusive');
    if 'insert' = any (wanted) and (select t.inserts from pgmb.pushed_table as t where t.tbl = push_table_mutations.tbl) then
        came := array(
            select d.relid from pgchange.descendants(tbl) as d(relid)
            where d.relid not in (select p.relid from pgmb.pushes(tbl) as p where p.op = 'insert'));
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
    'Publish an event for each row that is inserted into a table, deleted from it or updated in it, in the same transaction. The '
    'topic is schema.table.insert, delete or update in lower case. The payload is the row. For an update it has the changed '
    'columns, and the metadata has the row before under old; an update that changes nothing publishes no event. Calling it again '
    'changes which mutations are published, and repairs the capture. Not captured: TRUNCATE, and writes under '
    'session_replication_role = replica or by logical replication.';

create function pgmb.stop_table_mutations_push(tbl regclass) returns void
language plpgsql as $$
begin
    perform pgmb.drop_push(tbl, '{insert,delete,update}');
    perform pgmb.note_push(tbl);
end
$$;
comment on function pgmb.stop_table_mutations_push(regclass) is
    'Stop publishing mutations of a table. Does nothing if none are published. Published events stay.';
