-- Rows that could not be made an event, or came with a partition before it was captured: recording, reporting and publishing
-- them.

-- Refuse to make events of rows for anybody but the owner of their table.
create function pgmb.check_own_rows(tbl regclass) returns void
language plpgsql stable as $$
declare
    owner_name name := (select pg_get_userbyid(c.relowner) from pg_class as c where c.oid = tbl);
begin
    -- The owner of the table can put rows here, and types of the table can run code of that owner. It would run with the rights
    -- of the caller.
    if owner_name <> current_user then
        raise insufficient_privilege using
            message = format('rows of %s are made into events with the rights of its owner, %I, and no others', tbl, owner_name),
            hint = format('connect as %I', owner_name);
    end if;
end
$$;

create function pgmb.replay_push_faults(tbl regclass) returns bigint
language plpgsql as $$
declare
    failed pgmb.push_fault;
    before pgmb.serialised;
    after pgmb.serialised;
    payload jsonb;
    replayed bigint := 0;
begin
    perform pgmb.check_own_rows(tbl);
    for failed in select f.* from pgmb.push_fault as f where f.tbl = replay_push_faults.tbl order by f.id for update loop
        continue when failed.before is null and failed.after is null;
        before := null;
        after := null;
        begin
            if failed.before is not null then
                execute format('select s.* from pgmb.serialised($1, $2, jsonb_populate_record(null::%s, $3)) as s', tbl)
                using tbl::oid, failed.op, failed.before into before;
            end if;
            if failed.after is not null then
                execute format('select s.* from pgmb.serialised($1, $2, jsonb_populate_record(null::%s, $3)) as s', tbl)
                using tbl::oid, failed.op, failed.after into after;
            end if;
        exception when others or assert_failure then
            -- The columns of the table have changed, so the row does not fit.
            continue;
        end;
        continue when coalesce(before.error, after.error) is not null;
        payload := case failed.op when 'UPDATE' then pgmb.jsonb_diff(
            coalesce(after.serialised, '{}'), coalesce(before.serialised, '{}'))
            else coalesce(after.serialised, before.serialised) end;
        if (coalesce(before.emit, false) or coalesce(after.emit, false)) and payload is not null then
            insert into pgmb.events (topic, payload, metadata)
            values (pgmb.topic_of(tbl, failed.op), payload,
                    case when failed.op = 'UPDATE' and before.serialised is not null
                         then jsonb_build_object('old', before.serialised) else '{}' end);
        end if;
        delete from pgmb.push_fault as f where f.id = failed.id;
        replayed := replayed + 1;
    end loop;
    return replayed;
end
$$;
comment on function pgmb.replay_push_faults(regclass) is
    'Publish the rows of a table that could not be made into events, in order. Returns how many. Rows that fail again stay. For '
    'the owner of the table only.';

create function pgmb.publish_attached(part regclass) returns bigint
language plpgsql as $$
declare
    root regclass := (
        select t.tbl from pgmb.pushed_table as t
        where t.inserts and part in (select d.relid from pgchange.descendants(t.tbl) as d(relid)) order by t.tbl = part desc limit 1);
    published bigint;
begin
    if root is null then
        perform pgchange.refuse(
            format('%s is not a part of a table whose inserts are published', part),
                'list such parts: select tbl, missed from pgmb.pushing()');
    end if;
    perform pgmb.check_own_rows(part);
    delete from pgmb.push_fault as f where f.tbl = part and f.op = 'ATTACH';
    if not found then
        return 0;
    end if;
    execute format(
        'insert into pgmb.events (topic, payload)
         select $2, (m.s).serialised
         from (select pgmb.serialised($1, ''INSERT'', one.*) as s from %s as one offset 0) as m
         where case when (m.s).error is null then (m.s).emit and (m.s).serialised is not null
                    else pgmb.note_push_fault($1, ''INSERT'', (m.s).error, null, (m.s).serialised) end', part)
    using root::oid, pgmb.topic_of(root, 'insert');
    get diagnostics published = row_count;
    return published;
end
$$;
comment on function pgmb.publish_attached(regclass) is
    'Publish an event for each row that is now in a partition that came with rows, as for an insert. Returns how many. Rows that '
    'were inserted through the table since the partition came are published again. For the owner of the partition only.';

-- Publish with the same settings as the trigger functions, so that events have the same text.
select pgchange.pin_settings('pgmb.replay_push_faults(regclass)', 'pgmb.publish_attached(regclass)');

-- Record partitions that were attached with rows that may be in no event, and raise a notice for each.
create function pgmb.note_missed(tbl regclass, came regclass[]) returns void
language sql as $$
    insert into pgmb.push_fault (tbl, op, message)
    select m, 'ATTACH', 'its rows were there before it was captured'
    from pgchange.tell_missed(tbl, came, 'event', 'pgmb', 'publish_attached') as m
$$;
