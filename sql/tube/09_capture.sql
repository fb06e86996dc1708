-- The capture of a table: each statement that inserts, updates or deletes rows, or truncates the table, touches the tube.
--
-- The trigger functions are written for the columns of one table, so that PostgreSQL keeps their plans. They belong to the owner
-- of the table and run with that owner's rights. So a writer needs no rights on the tube, and a predicate can do no more than the
-- owner. They evaluate inside an exception block and write outside it, because a write inside would cost every statement a second
-- transaction id.

-- The body of the trigger function for TRUNCATE: a control pod for each transaction, with the name of the table.
create function tube.truncate_body(attached tube.attachment, full_name text) returns text
language plpgsql stable as $$
begin
    return format($body$
declare
    open boolean := false;
    attached boolean := false;
    pods text;
    name text := %3$L;
    noted boolean := false;
begin
    begin
        attached := tube.is_attached(%2$L, tg_relid);
        pods := tube.pods_named(%2$L);
        open := tube.may_put(pods, '{op, shard, ids, payload}') and has_sequence_privilege('tube.seq', 'usage');
        name := coalesce(tube.attached_name(tg_relid, %2$L), name);
        -- The trigger fires for every partition of a truncated table. One pod is enough, if the role may see it.
        if has_table_privilege(pods, 'select') then
            execute format(
                'select exists (
                    select from %%s as p
                    where p.txid = pg_current_xact_id() and p.ids = ''{}'' and p.payload ->> ''type'' = ''truncate''
                      and p.payload ->> ''tbl'' = $1)', pods) using name into noted;
        end if;
    exception
        when undefined_function or invalid_schema_name then
            null;
        when others or assert_failure then
            attached := true;
    end;
    -- The trigger is left over from a tube, or a schema, that was dropped.
    if attached is not true then
        return null;
    end if;
    if open is not true then
        raise warning 'the truncation of %% was not captured: tube %% cannot be written', tg_relid::regclass, %2$L;
        begin
            perform tube.note_fault(%2$L, tg_relid, 0, 'a truncation is lost: the owner of the table may not insert pods');
        exception when others or assert_failure then
            null; -- If the owner may not record it, the warning must do.
        end;
    elsif noted is not true then
        execute format('insert into %%s (op, shard, ids, payload) values (''T'', $1, ''{}'', $2)', pods)
        using %1$s, jsonb_build_object('type', 'truncate', 'tbl', name);
    end if;
    return null;
end
$body$, attached.shard, attached.tube, full_name);
end
$$;

-- Whether the caller may insert into the columns of pods that a capture writes. The function is in PL/pgSQL, because it runs
-- for each statement of some owners.
create function tube.may_put_ids(pods regclass) returns boolean
language plpgsql stable as $$
begin
    return pg_catalog.has_column_privilege(pods, 'op', 'insert') and pg_catalog.has_column_privilege(pods, 'shard', 'insert')
        and pg_catalog.has_column_privilege(pods, 'ids', 'insert');
end
$$;

-- Whether ids are few enough for a single array. Inlined, like the next functions.
create function tube.are_few(ids anyarray) returns boolean
language sql immutable as $$
    select pg_catalog.cardinality(ids) operator(pg_catalog.<=) 10000000
$$;

-- Whether a trigger function may write these ids to the pods, and read the columns for which it was written. numbers has the oids
-- of the pods, of tube.seq and of the attached table.
create function tube.still_fits(ids anyarray, pods regclass, numbers oid[], key_numbers smallint[], key name[]) returns boolean
language sql stable as $$
    -- Do not write to another table that has the name of the pods: its triggers would run with the owner's rights.
    select tube.are_few(ids) and pods operator(pg_catalog.=) numbers[1]
        and (pg_catalog.has_table_privilege(pods, 'insert') or tube.may_put_ids(pods))
        -- Nor to pods of a tube schema that was dropped and installed again, because they draw no numbers any more.
        and 'tube.seq'::pg_catalog.regclass operator(pg_catalog.=) numbers[2]
        and pg_catalog.has_sequence_privilege('tube.seq'::pg_catalog.regclass, 'usage')
        -- Nor read ids from another column that has got the name of the id column.
        and pgchange.are_named(numbers[3], key_numbers, key)
$$;

-- The ids that an insert or a delete touches; null if there are none. A body that is parsed now may use an operator by its name,
-- because the search_path of a writer does not matter to it. Such a function cannot be polymorphic.
create function tube.touched(ids bigint[]) returns bigint[]
language sql immutable
return nullif(ids, '{}');

-- Like the function above for ids that are texts.
create function tube.touched(ids text[]) returns text[]
language sql immutable
return nullif(ids, '{}');

-- The ids that an update touches: the ids of the rows after it, and those of the rows before it if they differ. Null if there are
-- none.
create function tube.touched(ids anyarray, before anyarray) returns anyarray
language sql immutable as $$
    select case when before operator(pg_catalog.<>) ids then tube.united(ids, before) when ids operator(pg_catalog.<>) '{}' then ids end
$$;

-- The ids that are in either array. The function is in PL/pgSQL, because otherwise each update would prepare a hash table for
-- nothing.
create function tube.united(ids anyarray, before anyarray) returns anyarray
language plpgsql immutable as $$
begin
    return array(select pg_catalog.unnest(ids) union select pg_catalog.unnest(before));
end
$$;

-- The bodies of the trigger functions of a table. An update touches the ids before and after it, if the predicate holds for either
-- row. If the predicate fails with an error, the row is touched all the same, and counted in tube.fault. The op is B if the
-- application_name of the session contains backfill.
--
-- Each session keeps the function and its plans for every table that it writes to, so it is short. PL/pgSQL keeps some 2 KB for
-- each declared variable, and 50 to 100 bytes for each name. Each query, and each condition of an "if", has a plan. So the ids are
-- a field of "new", which a trigger of a statement does not use otherwise. A single query reads the ids and checks whether the
-- function still fits. If it fails, or if there are more than ten million ids, tube.row_by_row_query() handles the rows.
--
-- The condition of the insert puts ids that are too many for one pod. "return old", which is null, needs no plan.
--
-- tube.health() compares them for each attached table. So one call returns all of them, and looks up the names only once.
create function tube.capture_bodies(attached tube.attachment) returns table (op text, body text)
language plpgsql stable rows 4
set plan_cache_mode = force_generic_plan
set quote_all_identifiers = off
as $$
declare
    -- The function reads no pods, so it runs no code of their owner.
    pods regclass := (select t.pods from tube.tube as t where t.name = attached.tube);
    pods_name text := tube.full_name(pods);
    table_name text := tube.full_name(attached.tbl);
    relname name := (select c.relname from pg_class as c where c.oid = attached.tbl);
    added text := tube.ids_of('pgchange_added', attached);
    removed text := tube.ids_of('pgchange_removed', attached);
    still_fits text := format(
        '%L, %L, %L, %L', pods_name, array[pods::oid, 'tube.seq'::regclass::oid, attached.tbl::oid], array(
            select a.attnum
            from unnest(attached.key) with ordinality as k(name, place)
            left join pg_attribute as a on a.attrelid = attached.tbl and a.attname = k.name
            order by k.place), attached.key);
    warning text := quote_literal(replace(format(
        'a change of %s was not captured: tube %s cannot be written', table_name, attached.tube), '%', '%%'));
begin
    op := 'truncate';
    body := tube.truncate_body(attached, table_name);
    return next;
    foreach op in array array['insert', 'update', 'delete'] loop
        -- Without "offset 0", PostgreSQL would read a transition table for each use of its array.
        body := format($body$
#variable_conflict use_column
begin
    begin
        select tube.touched(%1$s) as ids into strict new from (select %2$s offset 0) as i where %3$stube.still_fits(ids, %4$s);
    exception when others or assert_failure then
        begin
            execute tube.row_by_row_query(tg_relid, %5$s);
        exception
            -- The trigger is left over from a schema that was dropped.
            when undefined_function or invalid_schema_name then
                null;
            when insufficient_privilege then
                raise warning %6$s;
        end;
        return old;
    end;
    insert into %7$s (op, shard, ids) select tube.op_of(%8$L), %9$s, new.ids where tube.fit_into_one(new.ids, %10$L);
    return old;
end
$body$,
            case op when 'update' then 'ids, before' else 'ids' end,
            case op when 'update' then format('%s as ids, %s as before', added, removed)
                    when 'delete' then removed || ' as ids' else added || ' as ids' end,
            case op when 'update' then 'tube.are_few(before) and ' end,
            still_fits, format('%L, %L, %L', attached.tube, op, relname), warning,
            pods_name, upper(left(op, 1)), attached.shard, array[pods::oid::text, upper(left(op, 1)), attached.shard::text]);
        return next;
    end loop;
end
$$;

-- The body of the trigger function of a table for one kind of statement.
create function tube.capture_body(attached tube.attachment, op text) returns text
language sql stable as $$
    select b.body from tube.capture_bodies(attached) as b where b.op = capture_body.op
$$;

