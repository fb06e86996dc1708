-- Parts of the capture of a table: finding ids, putting them into pods, and handling rows one by one.

-- The expression of the ids in a transition table, without nulls. At most 10,000,001, because an array must be smaller than a
-- gigabyte. Only a predicate, or the text of a key, needs the name of the table.
create function tube.ids_of(rows text, attached tube.attachment) returns text
language plpgsql stable as $$
begin
    if attached.key_types = '{bigint}' and attached.predicate is null then
        return format('array(select %1$I::bigint from %2$I where %1$I is not null limit 10000001)', attached.key[1], rows);
    end if;
    return (
        select format(
            'array(select %1$s from %2$I as %3$I where %4$s%5$s limit 10000001)',
            case when attached.key_types = '{bigint}' then format('%I::bigint', attached.key[1])
                 else pgchange.key_text(attached.key_types, attached.key, c.relname::text) end,
            rows, c.relname,
            (select string_agg(format('%I.%I is not null', c.relname, k.name), ' and ' order by k.place)
             from unnest(attached.key) with ordinality as k(name, place)),
            E' and (' || attached.predicate || E'\n)')
        from pg_class as c where c.oid = attached.tbl);
end
$$;

-- Put the ids of a statement into several pods, and return false. target is an array: the oid of the pods, the op and the shard.
-- Null, without a call, if there are no ids.
create function tube.put_many(ids anyarray, target text[]) returns boolean
language plpgsql strict as $$
begin
    perform tube.put_pods(target[1]::pg_catalog.oid, tube.op_of(target[2]), target[3]::pg_catalog.int4, ids);
    return false;
end
$$;

-- Whether ids are few enough for a single pod, which the caller inserts. If they are more, put them into several pods. Null if there
-- are none. Inlined, like the next function. target is a single argument, because each constant adds to the plan that every
-- session keeps for each table.
create function tube.fit_into_one(ids bigint[], target text[]) returns boolean
language sql volatile as $$
    select pg_catalog.cardinality(ids) operator(pg_catalog.<=) 900 or tube.put_many(ids, target)
$$;

-- Like the function above for ids that are texts, which have to be few and short enough.
create function tube.fit_into_one(ids text[], target text[]) returns boolean
language sql volatile as $$
    select pg_catalog.cardinality(ids) operator(pg_catalog.=) 1
        or pg_catalog.cardinality(ids) operator(pg_catalog.<=) 900
           and pg_catalog.pg_column_size(ids) operator(pg_catalog.<=) 7000 -- The reason is at tube.bytes_a_pod().
        or tube.put_many(ids, target)
$$;

-- The op of the pods of a capture. Inlined.
create function tube.op_of(op text) returns text
language sql stable as $$
    select case when pg_catalog.current_setting('application_name') operator(pg_catalog.~~) '%backfill%' then 'B' else op end
$$;

-- The current name, with its schema, of the table of a tube's pods; null if the table was dropped. Captures written before the
-- name changed need it.
create function tube.pods_named(tube text) returns text
language sql stable
-- Capture triggers call it, too, with any setting of the writer.
set row_security = on
as $$
    select tube.full_name(t.pods) from tube.tube as t where t.name = pods_named.tube and tube.are_pods(t.pods, t.name)
$$;

-- Whether the caller may insert into these columns of a table of pods.
create function tube.may_put(pods text, columns text[]) returns boolean
language sql stable as $$
    select has_table_privilege(pods, 'insert') or (select bool_and(has_column_privilege(pods, c, 'insert')) from unnest(columns) as c)
$$;

-- Record rows for which a capture failed, with any setting of the writer.
create function tube.note_fault(tube text, tbl oid, ids bigint, message text) returns void
language sql
set row_security = on
as $$
    insert into tube.fault (tube, tbl, ids, message) values (tube, tbl, ids, message)
$$;

-- SQL that returns the id of a row as text. Its parameter $1 is the row as jsonb, with the current names of its columns. The SQL
-- returns null for a row without an id. This function returns null if an id column was dropped.
create function tube.key_query(rel oid, tube text) returns text
language sql stable
-- Capture triggers call it, too, with any setting of the writer.
set row_security = on
as $$
    select format(
        'select case when %s then %s end from pg_catalog.jsonb_populate_record(null::%s, $1) as pgchange_row',
        (select string_agg(format('pgchange_row.%I is not null', k), ' and ') from unnest(n.names) as k),
        pgchange.key_text((tube.attachment_of(rel, key_query.tube)).key_types, n.names, 'pgchange_row'), tube.full_name(rel))
    from tube.key_names(rel, key_query.tube) as n(names)
    where n.names is not null
$$;

-- Record the faults of the capture of a statement. Never let the statement fail.
create function tube.note_failed(tube text, tbl oid, failed bigint, lost bigint, message text) returns void
language plpgsql as $$
begin
    if failed > 0 then
        perform tube.note_fault(tube, tbl, failed, message);
    end if;
    if lost > 0 then
        perform tube.note_fault(tube, tbl, lost, 'ids are lost: the column of ids was dropped or is not a number');
    end if;
exception when others or assert_failure then
    raise warning 'a fault of the capture of % could not be recorded: %', tbl::regclass, sqlerrm;
end
$$;

create type tube.judged_row as (id text, is_lost boolean, message text);
comment on type tube.judged_row is
    'The result of judging a row. id: the id of the row as text, if it is to be touched. is_lost: whether its id could not be '
    'read. message: the error.';

-- Judge a row. If the predicate fails with an error, the row is touched all the same. column_or_query is the column of an id that
-- is a number, or the query of any other id.
create function tube.judge_row(changed record, column_or_query text, is_number boolean, predicate_query text) returns tube.judged_row
language plpgsql as $$
declare
    content jsonb;
    judged tube.judged_row;
    is_wanted boolean := true;
begin
    judged.is_lost := true;
    begin
        content := to_jsonb(changed);
        if is_number then
            judged.id := (content ->> column_or_query)::bigint;
            judged.is_lost := (content ? column_or_query) is not true;
        elsif column_or_query is not null then
            execute column_or_query into strict judged.id using content;
            judged.is_lost := false;
        end if;
        -- A row without an id touches nothing.
        if predicate_query is not null and (judged.id is not null or judged.is_lost) then
            execute predicate_query into strict is_wanted using content;
        end if;
    exception when others or assert_failure then
        is_wanted := true;
        judged.message := sqlerrm;
    end;
    if is_wanted is not true then
        judged.id := null;
    end if;
    return judged;
end
$$;

-- The query by which a trigger function handles rows one by one. It runs if the capture of all rows at once failed, or if there
-- are more than ten million. It finds the pods by their current name. In the predicate the row has the name alias.
create function tube.row_by_row_query(rel oid, tube text, op text, alias name) returns text
language plpgsql
-- Captures call it, with any setting of the writer.
set row_security = on
as $$
declare
    rows constant text := case op
        when 'insert' then 'select r.* from pgchange_added as r'
        when 'delete' then 'select r.* from pgchange_removed as r'
        else 'select r.* from pgchange_added as r union all select r.* from pgchange_removed as r' end;
    attached tube.attachment;
    pods text;
    is_open boolean;
    column_or_query text;
begin
    -- The trigger is left over from a tube that was dropped.
    if not tube.is_attached(tube, rel) then
        return 'select';
    end if;
    begin
        pods := tube.pods_named(tube);
        is_open := tube.may_put(pods, '{op, shard, ids}') and has_sequence_privilege('tube.seq', 'usage');
        attached := tube.attachment_of(rel, tube);
        column_or_query := case when attached.key_types = '{bigint}' then (tube.key_names(rel, tube))[1] else tube.key_query(rel, tube) end;
    exception when others or assert_failure then
        is_open := false;
    end;
    if is_open is not true then
        raise warning 'a change of % was not captured: tube % cannot be written', rel::regclass, tube;
        return format('select tube.note_lost(%L, %s, pg_catalog.count(*)) from (%s) as r', tube, rel, rows);
    end if;
    return format($query$
        with judged as materialized (
            select j.n, (j.row).* from (
                select pg_catalog.row_number() over () as n, tube.judge_row(pgchange_row, %1$L, %2$L, %3$L) as row
                from (%4$s) as pgchange_row
            ) as j
        )
        select tube.note_failed(%5$L, %6$s, f.failed, f.lost, f.message)
        from (
            select pg_catalog.count(j.message) as failed, pg_catalog.count(*) filter (where j.is_lost) as lost, pg_catalog.max(j.message) as message
            from judged as j
        ) as f
        cross join (
            select pg_catalog.count(*) from (
                select tube.put_pods(%7$L, %8$L, %9$s, pg_catalog.array_agg(i.id::%10$s order by i.n))
                from (
                    select j.id, pg_catalog.min(j.n) as n, pg_catalog.row_number() over (order by pg_catalog.min(j.n)) as place
                    from judged as j where j.id is not null group by j.id
                ) as i
                group by pg_catalog.int8div(i.place operator(pg_catalog.-) 1, 900)
                order by pg_catalog.min(i.n)
            ) as p
        ) as puts$query$,
        column_or_query, attached.key_types = '{bigint}',
        case when attached.predicate is not null then format(
            E'select (%s\n) from jsonb_populate_record(null::%s, $1) as %I', attached.predicate, tube.full_name(attached.tbl), alias) end,
        rows, tube, rel, pods, tube.op_of(upper(left(op, 1))), attached.shard, case when attached.key_types = '{bigint}' then 'pg_catalog.int8' else 'pg_catalog.text' end);
end
$$;

-- Record that rows are lost, if the owner of the table may record it.
create function tube.note_lost(tube text, tbl oid, rows bigint) returns void
language plpgsql as $$
begin
    perform tube.note_fault(tube, tbl, rows, 'rows are lost: the owner of the table may not insert pods');
exception when others or assert_failure then
    null; -- If the owner may not record it, the warning must do.
end
$$;
