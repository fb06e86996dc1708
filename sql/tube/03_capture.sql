-- Attaching tables: each statement that inserts, updates or deletes rows, or truncates, touches the tube.
--
-- The trigger functions are written for the columns of one table, so that PostgreSQL keeps their plans. They belong to the
-- owner of the table and run with that owner's rights, so that a plain writer needs none of ours and a predicate can do no
-- more than its owner. They evaluate inside an exception block and write outside it: a write inside would cost every
-- statement a second transaction id.

create function tube.id_column(rel oid, tube text) returns name
language sql stable security definer
set search_path = pg_catalog, tube, pg_temp
as $$
    with recursive line(relid) as (
        select rel
        union
        select i.inhparent from line join pg_inherits as i on i.inhrelid = line.relid
    )
    select c.attname
    from line
    join tube.attachment as a on a.tbl = line.relid and a.tube = id_column.tube
    join pg_attribute as c on c.attrelid = a.tbl and c.attnum = a.id_number and not c.attisdropped
    limit 1
$$;
comment on function tube.id_column(oid, text) is 'Today''s name of the column of ids of an attached table or of a partition of it.';

create function tube.descendants(tbl regclass) returns setof regclass
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    with recursive tree(relid) as (
        select tbl::oid
        union
        select i.inhrelid from tree join pg_inherits as i on i.inhparent = tree.relid
    )
    select relid::regclass from tree
$$;
comment on function tube.descendants(regclass) is
    'A table with its partitions and inheritance children: a statement trigger fires only on the one that a statement names.';

create function tube.capture_name(tbl regclass, tube text, op text) returns name
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select case
        when length(c.relname || tube) <= 38 then format('%s_%s_after_%s_trigger', c.relname, tube, op)
        else format('%s_%s_after_%s_trigger', left(c.relname || '_' || tube, 30), left(md5(c.relname || '/' || tube), 8), op)
    end::name
    from pg_class as c where c.oid = tbl
$$;
comment on function tube.capture_name(regclass, text, text) is
    'The name of a trigger and its function: <table>_<tube>_after_<op>_trigger, shortened where it would not fit.';

create function tube.inferred_shard(tbl regclass) returns integer
language plpgsql stable
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    digits text := substring(tube.schema_of(tbl) from '([0-9]+)$');
begin
    if digits is null or length(ltrim(digits, '0')) > 9 then
        perform tube.refuse(
            format('the name of the schema of %s does not end in a shard''s number', tbl),
            'give the shard: tube.tube_table_ensure_attached(tube, tbl, shard => ...)');
    end if;
    return digits::integer;
end
$$;
comment on function tube.inferred_shard(regclass) is 'The shard that the trailing digits of a table''s schema name.';

create function tube.check_attachable(tbl regclass, id_column name, pods regclass) returns void
language plpgsql stable
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    class pg_class := (select c from pg_class as c where c.oid = tbl);
    owner_name name := pg_get_userbyid(class.relowner);
    key pg_attribute := (
        select a from pg_attribute as a
        where a.attrelid = tbl and a.attname = id_column and a.attnum > 0 and not a.attisdropped
    );
begin
    if class.relkind not in ('r', 'p') then
        perform tube.refuse(format('%s is not a table', tbl), 'attach the tables behind it');
    end if;
    if class.relpersistence = 't' then
        perform tube.refuse(format('%s is a temporary table', tbl), 'attach a permanent one');
    end if;
    if class.relispartition then
        perform tube.refuse(format('%s is a partition', tbl), 'attach the partitioned table');
    end if;
    if exists (
        select from tube.descendants(tbl) as d(relid) join pg_class as c on c.oid = d.relid where c.relkind = 'f'
    ) then
        perform tube.refuse(format('%s has a foreign table as a partition', tbl), 'foreign tables cannot be captured');
    end if;
    if exists (select from tube.tube as t where t.pods = tbl) then
        perform tube.refuse(format('%s holds the pods of a tube', tbl), 'attach a table of your own');
    end if;
    if key is null then
        perform tube.refuse(
            format('%s has no column %I', tbl, id_column),
            'name the column of its ids: tube.tube_table_ensure_attached(..., id_column => ...)');
    end if;
    if key.atttypid not in ('bigint'::regtype, 'integer'::regtype, 'smallint'::regtype) then
        perform tube.refuse(
            format('column %I of %s is %s', id_column, tbl, format_type(key.atttypid, key.atttypmod)),
            'ids are bigint or integer');
    end if;
    if not key.attnotnull then
        perform tube.refuse(format('column %I of %s may be null', id_column, tbl), 'add not null, or a primary key');
    end if;
    if not pg_has_role(current_user, class.relowner, 'usage') then
        raise insufficient_privilege using
            message = format('only the owner of %s, %I, may attach it', tbl, owner_name),
            hint = format('connect as %I, or set role %I', owner_name, owner_name);
    end if;
    if not has_schema_privilege(owner_name, class.relnamespace, 'create') then
        perform tube.refuse(
            format('%I, the owner of %s, may not create a function in schema %I', owner_name, tbl, tube.schema_of(tbl)),
            format('grant create on schema %I to %I', tube.schema_of(tbl), owner_name));
    end if;
    if not (
        has_table_privilege(owner_name, pods, 'insert')
        and has_sequence_privilege(owner_name, 'tube.seq', 'usage')
        and has_schema_privilege(owner_name, 'tube', 'usage')
        and has_schema_privilege(owner_name, (select c.relnamespace from pg_class as c where c.oid = pods), 'usage')
    ) then
        raise insufficient_privilege using
            message = format('%I, the owner of %s, may not put pods into %s', owner_name, tbl, pods),
            hint = format('select tube.grant_use(%L), and grant insert on %s to %I', owner_name, pods, owner_name);
    end if;
end
$$;
comment on function tube.check_attachable(regclass, name, regclass) is 'Refuse, with the reason, a table that cannot be attached.';

create function tube.check_predicate(predicate text, tbl regclass) returns void
language plpgsql stable
set search_path = pg_catalog, tube, pg_temp
as $$
begin
    execute format('select from %s as %I where (%s) limit 0', tbl,
                   (select c.relname from pg_class as c where c.oid = tbl), predicate);
exception when others then
    perform tube.refuse(
        format('the predicate %L does not fit %s: %s', predicate, tbl, sqlerrm),
        'write an SQL condition over the columns of one row; name functions with their schema');
end
$$;
comment on function tube.check_predicate(text, regclass) is 'Refuse a predicate that a table cannot answer.';

create function tube.ids_of(rows text, attached tube.attachment, predicate text) returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select format(
        'array(select %I::bigint from %I as %I%s limit 10000001)', attached.id_column, rows,
        (select c.relname from pg_class as c where c.oid = attached.tbl), coalesce(' where (' || predicate || ')', ''))
$$;
comment on function tube.ids_of(text, tube.attachment, text) is
    'The expression of the ids in a transition table: up to ten million, as an array may not pass a gigabyte.';

create function tube.capture_body(attached tube.attachment, op text) returns text
language plpgsql stable
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    known tube.tube := tube.named(attached.tube);
    rows text := case op when 'delete' then 'removed' else 'added' end;
begin
    if op = 'truncate' then
        return format($body$
begin
    insert into %s (op, shard, ids, payload)
    values ('T', %s, '{}', pg_catalog.jsonb_build_object('type', 'truncate', 'tbl', %L));
    return null;
end
$body$, known.pods, attached.shard, attached.tbl::text);
    end if;
    return format($body$
#variable_conflict use_column
declare
    pgchange_kind character(1) := case
        when pg_catalog.strpos(pg_catalog.current_setting('application_name'), 'backfill') operator(pg_catalog.>) 0 then 'B'
        else %1$L end;
    pgchange_touched bigint[];
    pgchange_before bigint[];
    pgchange_id_column name;
    pgchange_id text;
begin
    begin
        pgchange_touched := %2$s;
        pgchange_before := %3$s;
        if pg_catalog.array_ne(pgchange_touched, pgchange_before) then
            pgchange_touched := array(select pg_catalog.unnest(pgchange_touched) union select pg_catalog.unnest(pgchange_before));
        end if;
        if pg_catalog.cardinality(pgchange_touched) operator(pg_catalog.>) 10000000 then
            pgchange_touched := null;
        end if;
    exception when others then
        insert into tube.fault (tube, tbl, ids, message) select %4$L, tg_relid, pg_catalog.count(*), sqlerrm from %5$I;
        pgchange_touched := null;
    end;
    if pgchange_touched is null then
        pgchange_touched := '{}';
        pgchange_id_column := tube.id_column(tg_relid, %4$L);
        for pgchange_id in %6$s loop
            if pgchange_id operator(pg_catalog.~) '^-?[0-9]{1,18}$' then
                pgchange_touched := pg_catalog.array_append(pgchange_touched, pgchange_id::bigint);
            else
                insert into tube.fault (tube, tbl, ids, message) values (%4$L, tg_relid, 0, 'a row without an id');
            end if;
            if pg_catalog.cardinality(pgchange_touched) operator(pg_catalog.=) 900 then
                insert into %7$s (op, shard, ids) values (pgchange_kind, %8$s, pgchange_touched);
                pgchange_touched := '{}';
            end if;
        end loop;
    end if;
    if pg_catalog.cardinality(pgchange_touched) operator(pg_catalog.>) 900 then
        insert into %7$s (op, shard, ids)
        select pgchange_kind, %8$s, pgchange_touched[i : pg_catalog.int4pl(i, 899)]
        from pg_catalog.generate_series(1, pg_catalog.cardinality(pgchange_touched), 900) as i;
    elsif pg_catalog.cardinality(pgchange_touched) operator(pg_catalog.>) 0 then
        insert into %7$s (op, shard, ids) values (pgchange_kind, %8$s, pgchange_touched);
    end if;
    return null;
end
$body$,
        upper(left(op, 1)),
        tube.ids_of(rows, attached, known.predicate),
        case op when 'update' then tube.ids_of('removed', attached, known.predicate) else 'pgchange_touched' end,
        attached.tube,
        rows,
        format('select pg_catalog.to_jsonb(r) operator(pg_catalog.->>) pgchange_id_column::text from %I as r', rows)
            || case op when 'update' then format(
                ' union all select pg_catalog.to_jsonb(r) operator(pg_catalog.->>) pgchange_id_column::text from %I as r', 'removed')
               else '' end,
        known.pods,
        attached.shard);
end
$$;
comment on function tube.capture_body(tube.attachment, text) is
    'The body of a trigger function of one table: an update touches the ids before and after it, if the predicate holds for '
    'either; a row for which the predicate fails is touched all the same, and counted in tube.fault.';

create function tube.place_capture(attached tube.attachment) returns void
language plpgsql
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    known tube.tube := tube.named(attached.tube);
    op text;
    trigger name;
    part regclass;
begin
    if known.predicate is not null then
        perform tube.check_predicate(known.predicate, attached.tbl);
    end if;
    foreach op in array array['insert', 'update', 'delete', 'truncate'] loop
        trigger := tube.capture_name(attached.tbl, attached.tube, op);
        -- Without a predicate every name in the body has its schema, and pinning the path would be the dearest part of it.
        execute format(
            'create or replace function %I.%I() returns trigger language plpgsql security definer %s as %L',
            tube.schema_of(attached.tbl), trigger,
            case when known.predicate is not null then format('set search_path = pg_catalog, %I, pg_temp',
                                                              tube.schema_of(attached.tbl)) end,
            tube.capture_body(attached, op));
        execute format('revoke all on function %I.%I() from public', tube.schema_of(attached.tbl), trigger);
        execute format(
            'alter function %I.%I() owner to %I', tube.schema_of(attached.tbl), trigger,
            (select pg_get_userbyid(c.relowner) from pg_class as c where c.oid = attached.tbl));
        for part in
            select d.relid from tube.descendants(attached.tbl) as d(relid)
            where not exists (select from pg_trigger as t where t.tgrelid = d.relid and t.tgname = trigger)
        loop
            execute format(
                'create trigger %I after %s on %s %s for each statement execute function %I.%I()',
                trigger, op, part,
                case op when 'insert' then 'referencing new table as added'
                        when 'update' then 'referencing old table as removed new table as added'
                        when 'delete' then 'referencing old table as removed' else '' end,
                tube.schema_of(attached.tbl), trigger);
        end loop;
    end loop;
end
$$;
comment on function tube.place_capture(tube.attachment) is
    'Write the capture of a table anew, and put it on every partition that lacks it.';

create function tube.lock_for_capture(tbl regclass) returns void
language plpgsql
set search_path = pg_catalog, tube, pg_temp
set lock_timeout = '5s'
as $$
begin
    execute format('lock table %s in share row exclusive mode', tbl);
exception when lock_not_available then
    raise lock_not_available using
        message = format('%s is being written by transactions that do not end', tbl),
        hint = 'try again when they have ended; nothing was changed';
end
$$;
comment on function tube.lock_for_capture(regclass) is
    'Wait at most 5 s for the writers of a table: a lock that waits longer would stop everybody behind it.';

create function tube.tube_table_ensure_attached(
    tube text, tbl regclass, shard integer default null, id_column name default null
) returns void
language plpgsql
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    known tube.tube := tube.named(tube);
    before tube.attachment := (
        select a from tube.attachment as a where a.tube = known.name and a.tbl = tube_table_ensure_attached.tbl
    );
    wanted tube.attachment;
begin
    wanted := (
        known.name, tbl, coalesce(shard, before.shard, tube.inferred_shard(tbl)), coalesce(id_column, before.id_column, 'id'),
        0, now());
    perform tube.check_attachable(tbl, wanted.id_column, known.pods);
    wanted.id_number := (select a.attnum from pg_attribute as a where a.attrelid = tbl and a.attname = wanted.id_column);
    if before.shard <> wanted.shard then
        perform tube.hold_still(known.name);
    end if;
    perform tube.lock_for_capture(tbl);
    if before.shard <> wanted.shard then
        insert into tube.moved (tube, from_shard, to_shard, upto)
        values (known.name, before.shard, wanted.shard, nextval('tube.seq'));
    end if;
    insert into tube.attachment values (wanted.*)
    on conflict on constraint attachment_pkey do update
        set shard = excluded.shard, id_column = excluded.id_column, id_number = excluded.id_number;
    perform tube.place_capture(wanted);
    perform tube.place_touch(tbl);
end
$$;
comment on function tube.tube_table_ensure_attached(text, regclass, integer, name) is
    'Let a table touch a tube: each of its inserts, updates, deletes and truncates from now on, under a shard (given, or the '
    'trailing digits of its schema''s name), by the ids in id_column (id). Again, it mends the capture, and changes what is '
    'given; another shard when no worker is at work.';

create function tube.detach(tube text, tbl regclass) returns void
language plpgsql
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    op text;
    trigger name;
    part regclass;
begin
    if tube.schema_of(tbl) is not null then
        perform tube.lock_for_capture(tbl);
        foreach op in array array['insert', 'update', 'delete', 'truncate'] loop
            trigger := tube.capture_name(tbl, tube, op);
            for part in select d.relid from tube.descendants(tbl) as d(relid) loop
                execute format('drop trigger if exists %I on %s', trigger, part);
            end loop;
            execute format('drop function if exists %I.%I()', tube.schema_of(tbl), trigger);
        end loop;
    end if;
    delete from tube.attachment as a where a.tube = detach.tube and a.tbl = detach.tbl;
    perform tube.place_touch(tbl);
end
$$;
comment on function tube.detach(text, regclass) is 'Take the capture of one tube off one table.';

create function tube.tube_table_ensure_detached(in_tube text, in_tbl regclass) returns void
language sql
set search_path = pg_catalog, tube, pg_temp
as $$
    select tube.detach(a.tube, a.tbl)
    from tube.attachment as a
    where (in_tube is null or a.tube = in_tube) and (in_tbl is null or a.tbl = in_tbl)
    order by a.tbl, a.tube
$$;
comment on function tube.tube_table_ensure_detached(text, regclass) is
    'Stop a table from touching a tube; null means all tubes, or all tables. What it touched before stays.';
