-- The parts of the capture of a table: how it finds ids and puts them into pods, and how it takes each row by itself.

-- The expression of the ids in a transition table, without those that are null: up to ten million, as an array may not pass a
-- gigabyte.
create function tube.ids_of(rows text, attached tube.attachment) returns text
language plpgsql stable as $$
begin
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

-- The part of a trigger function that puts the ids that it found into pods. The numbers are those of the ids that fit into one.
create function tube.put_body(attached tube.attachment, pods text, kind text) returns text
language plpgsql stable as $$
begin
    return case when attached.key_types = '{bigint}' then format($body$
    if pg_catalog.cardinality(pgchange_touched) operator(pg_catalog.>) 0
        and pg_catalog.cardinality(pgchange_touched) operator(pg_catalog.<=) 900
    then
        insert into %1$s (op, shard, ids) values (%2$s, %3$s, pgchange_touched);
    elsif pg_catalog.cardinality(pgchange_touched) operator(pg_catalog.>) 900
        and pg_catalog.cardinality(pgchange_touched) operator(pg_catalog.<=) 10000000
    then
        insert into %1$s (op, shard, ids)
        select %2$s, %3$s, pgchange_touched[i : pg_catalog.int4pl(i, 899)]
        from pg_catalog.generate_series(1, pg_catalog.cardinality(pgchange_touched), 900) as i;
$body$, pods, kind, attached.shard)
    else format($body$
    if pg_catalog.cardinality(pgchange_touched) operator(pg_catalog.=) 1
        or pg_catalog.cardinality(pgchange_touched) operator(pg_catalog.>) 0
        and pg_catalog.cardinality(pgchange_touched) operator(pg_catalog.<=) 900
        and pg_catalog.pg_column_size(pgchange_touched) operator(pg_catalog.<=) %4$s
    then
        insert into %1$s (op, shard, ids) values (%2$s, %3$s, pgchange_touched);
    elsif pg_catalog.cardinality(pgchange_touched) operator(pg_catalog.>) 0
        and pg_catalog.cardinality(pgchange_touched) operator(pg_catalog.<=) 10000000
    then
        insert into %1$s (op, shard, ids) select %2$s, %3$s, c.ids from (%5$s) as c;
$body$, pods, kind, attached.shard, tube.bytes_a_pod(), tube.cut_sql('pgchange_touched', '900')) end;
end
$$;

-- Today's name, with its schema, of the table of a tube's pods: a body that was written before it changed asks for it. Null where it
-- was dropped.
create function tube.pods_named(tube text) returns text
language sql stable
-- Asked by captures too, whatever a writer has set.
set row_security = on
as $$
    select tube.full_name(t.pods) from tube.tube as t where t.name = pods_named.tube and tube.are_pods(t.pods, t.name)
$$;

-- Whether the caller may write these columns of a table of pods.
create function tube.may_put(pods text, columns text[]) returns boolean
language sql stable as $$
    select has_table_privilege(pods, 'insert') or (select bool_and(has_column_privilege(pods, c, 'insert')) from unnest(columns) as c)
$$;

-- Note rows for which a capture failed, whatever a writer has set.
create function tube.note_fault(tube text, tbl oid, ids bigint, message text) returns void
language sql
set row_security = on
as $$
    insert into tube.fault (tube, tbl, ids, message) values (tube, tbl, ids, message)
$$;

-- The query of the text of the id of a row that is given as jsonb, by today's names of the columns of the ids; null of a row without an
-- id. Null if one of these columns is gone.
create function tube.key_query(rel oid, tube text) returns text
language sql stable
-- Asked by captures too, whatever a writer has set.
set row_security = on
as $$
    select format(
        'select case when %s then %s end from pg_catalog.jsonb_populate_record(null::%s, $1) as pgchange_row',
        (select string_agg(format('pgchange_row.%I is not null', k), ' and ') from unnest(n.names) as k),
        pgchange.key_text((tube.attachment_of(rel, key_query.tube)).key_types, n.names, 'pgchange_row'), tube.full_name(rel))
    from tube.key_names(rel, key_query.tube) as n(names)
    where n.names is not null
$$;

-- The part of a trigger function that takes each row by itself: where the capture of all of them failed, or where there are more than
-- ten million. The pods it finds whatever they are called now.
create function tube.row_by_row_body(attached tube.attachment, rows text, kind text) returns text
language plpgsql stable as $$
begin
    return format($body$
        declare
            pgchange_pods pg_catalog.text;
            pgchange_open boolean := false;
            pgchange_attached boolean := false;
            pgchange_column pg_catalog.text;
            pgchange_row pg_catalog.record;
            pgchange_id %6$s;
            pgchange_told boolean;
            pgchange_wanted boolean;
            pgchange_failed bigint := 0;
            pgchange_lost bigint := 0;
            pgchange_message pg_catalog.text;
        begin
            begin
                pgchange_attached := tube.is_attached(%2$L, tg_relid);
                pgchange_pods := tube.pods_named(%2$L);
                pgchange_open := tube.may_put(pgchange_pods, '{op, shard, ids}')
                    and pg_catalog.has_sequence_privilege('tube.seq', 'usage');
                pgchange_column := %7$s;
            exception
                when undefined_function or invalid_schema_name then
                    null;
                when others or assert_failure then
                    pgchange_attached := true;
                    pgchange_message := sqlerrm;
            end;
            -- Left over from a tube, or a schema, that was dropped.
            if pgchange_attached is not true then
                return null;
            end if;
            if pgchange_open is not true then
                raise warning 'a change of %% is not captured: tube %% cannot be written', tg_relid::pg_catalog.regclass, %2$L;
                begin
                    perform tube.note_fault(
                        %2$L, tg_relid, (select pg_catalog.count(*) from (%3$s) as pgchange_lost_rows),
                        'rows are lost: the owner of the table may not write the pods');
                exception when others or assert_failure then
                    null; -- Who may not note it either has warned already.
                end;
                return null;
            end if;
            pgchange_pods := pg_catalog.format('insert into %%s (op, shard, ids) values ($1, %5$s, $2)', pgchange_pods);
            pgchange_touched := '{}';
            for pgchange_row in %3$s loop
                pgchange_id := null;
                pgchange_told := false;
                pgchange_wanted := true;
                begin
                    %8$s
                    -- A row without an id is nothing to touch.
                    continue when pgchange_id is null and pgchange_told;
                    %4$s
                exception when others or assert_failure then
                    pgchange_wanted := true;
                    pgchange_message := sqlerrm;
                    pgchange_failed := pg_catalog.int8inc(pgchange_failed);
                end;
                if pgchange_told is not true then
                    pgchange_lost := pg_catalog.int8inc(pgchange_lost);
                elsif pgchange_wanted then
                    pgchange_touched := pg_catalog.array_append(pgchange_touched, pgchange_id);
                end if;
                if %9$s then
                    execute pgchange_pods using %1$s, pgchange_touched;
                    pgchange_touched := '{}';
                end if;
            end loop;
            if pgchange_touched operator(pg_catalog.<>) '{}' then
                execute pgchange_pods using %1$s, pgchange_touched;
            end if;
            begin
                if pgchange_failed operator(pg_catalog.>) 0 then
                    perform tube.note_fault(%2$L, tg_relid, pgchange_failed, pgchange_message);
                end if;
                if pgchange_lost operator(pg_catalog.>) 0 then
                    perform tube.note_fault(
                        %2$L, tg_relid, pgchange_lost, 'ids could not be told: the column of ids is gone or is not a number');
                end if;
            exception when others or assert_failure then
                raise warning 'a fault of the capture of %% could not be noted: %%', tg_relid::pg_catalog.regclass, sqlerrm;
            end;
        end;
$body$,
        kind, attached.tube, rows,
        case when attached.predicate is not null then format(
            E'select (%s\n) into strict pgchange_wanted\n'
            '                    from pg_catalog.jsonb_populate_record(null::%s, pg_catalog.to_jsonb(pgchange_row)) as %I;',
            attached.predicate, tube.full_name(attached.tbl), (select c.relname from pg_class as c where c.oid = attached.tbl)) end,
        attached.shard,
        case when attached.key_types = '{bigint}' then 'bigint' else 'pg_catalog.text' end,
        case when attached.key_types = '{bigint}' then format('(tube.key_names(tg_relid, %L))[1]', attached.tube)
             else format('tube.key_query(tg_relid, %L)', attached.tube) end,
        case when attached.key_types = '{bigint}'
            then 'pgchange_id := pg_catalog.to_jsonb(pgchange_row) operator(pg_catalog.->>) pgchange_column;
                    pgchange_told := pg_catalog.to_jsonb(pgchange_row) operator(pg_catalog.?) pgchange_column;'
            else 'if pgchange_column is not null then
                        execute pgchange_column using pg_catalog.to_jsonb(pgchange_row) into strict pgchange_id;
                        pgchange_told := true;
                    end if;' end,
        case when attached.key_types = '{bigint}' then 'pg_catalog.cardinality(pgchange_touched) operator(pg_catalog.=) 900'
             else format('pg_catalog.cardinality(pgchange_touched) operator(pg_catalog.=) 900
                    or pg_catalog.pg_column_size(pgchange_touched) operator(pg_catalog.>) %s', tube.bytes_a_pod()) end);
end
$$;
