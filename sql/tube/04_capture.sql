-- The capture of a table: each statement that inserts, updates or deletes rows, or truncates, touches the tube.
--
-- The trigger functions are written for the columns of one table, so that PostgreSQL keeps their plans. They belong to the
-- owner of the table and run with that owner's rights, so that a plain writer needs none of ours and a predicate can do no
-- more than its owner. They evaluate inside an exception block and write outside it: a write inside would cost every
-- statement a second transaction id.

create function tube.ids_of(rows text, tbl regclass, id_column name, predicate text) returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select format(
        'array(select %I::bigint from %I as %I%s limit 10000001)', id_column, rows,
        (select c.relname from pg_class as c where c.oid = tbl), E' where (' || predicate || E'\n)')
$$;
comment on function tube.ids_of(text, regclass, name, text) is
    'The expression of the ids in a transition table: up to ten million, as an array may not pass a gigabyte.';

create function tube.truncate_body(attached tube.attachment, pods regclass) returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select format($body$
declare
    open boolean := false;
    name text := %4$L;
begin
    begin
        open := has_table_privilege(%1$L, 'insert') and has_sequence_privilege('tube.seq', 'usage');
        name := coalesce(tube.attached_name(tg_relid, %3$L), name);
        -- Every partition of a truncated table fires: one pod will do, where it can be seen.
        if has_table_privilege(%1$L, 'select') then
            if exists (
                select from %1$s as p
                where p.txid = pg_current_xact_id() and p.ids = '{}' and p.payload ->> 'type' = 'truncate'
                  and p.payload ->> 'tbl' = name)
            then
                return null;
            end if;
        end if;
    exception when others or assert_failure then
        null;
    end;
    if open is not true then
        raise warning 'the truncation of %% is not captured: tube %% cannot be written', tg_relid::regclass, %3$L;
        return null;
    end if;
    insert into %1$s (op, shard, ids, payload)
    values ('T', %2$s, '{}', jsonb_build_object('type', 'truncate', 'tbl', name));
    return null;
end
$body$, pods, attached.shard, attached.tube, attached.tbl::text)
$$;
comment on function tube.truncate_body(tube.attachment, regclass) is
    'The body of the trigger function for TRUNCATE: one control pod a transaction, that names the table.';

create function tube.row_by_row_body(attached tube.attachment, known tube.tube, rows text, kind text) returns text
language sql stable
set search_path = pg_catalog, tube, pg_temp
as $$
    select format($body$
        declare
            pgchange_open boolean := false;
            pgchange_row pg_catalog.record;
            pgchange_id bigint;
            pgchange_wanted boolean;
            pgchange_failed bigint := 0;
            pgchange_lost bigint := 0;
            pgchange_message pg_catalog.text;
        begin
            begin
                pgchange_open := pg_catalog.has_table_privilege(%1$L, 'insert')
                    and pg_catalog.has_sequence_privilege('tube.seq', 'usage');
            exception when others or assert_failure then
                pgchange_message := sqlerrm;
            end;
            if pgchange_open is not true then
                raise warning 'a change of %% is not captured: tube %% cannot be written', tg_relid::pg_catalog.regclass, %2$L;
                return null;
            end if;
            pgchange_touched := '{}';
            for pgchange_row in %3$s loop
                pgchange_id := null;
                pgchange_wanted := true;
                begin
                    pgchange_id := pg_catalog.to_jsonb(pgchange_row)
                        operator(pg_catalog.->>) tube.id_column(tg_relid, %2$L)::pg_catalog.text;
                    %4$s
                exception when others or assert_failure then
                    pgchange_wanted := true;
                    pgchange_message := sqlerrm;
                    pgchange_failed := pg_catalog.int8inc(pgchange_failed);
                end;
                if pgchange_id is null then
                    pgchange_lost := pg_catalog.int8inc(pgchange_lost);
                elsif pgchange_wanted then
                    pgchange_touched := pg_catalog.array_append(pgchange_touched, pgchange_id);
                end if;
                if pg_catalog.cardinality(pgchange_touched) operator(pg_catalog.=) 900 then
                    insert into %1$s (op, shard, ids) values (%5$s, %6$s, pgchange_touched);
                    pgchange_touched := '{}';
                end if;
            end loop;
            if pgchange_touched operator(pg_catalog.<>) '{}' then
                insert into %1$s (op, shard, ids) values (%5$s, %6$s, pgchange_touched);
            end if;
            begin
                if pgchange_failed operator(pg_catalog.>) 0 then
                    insert into tube.fault (tube, tbl, ids, message) values (%2$L, tg_relid, pgchange_failed, pgchange_message);
                end if;
                if pgchange_lost operator(pg_catalog.>) 0 then
                    insert into tube.fault (tube, tbl, ids, message)
                    values (%2$L, tg_relid, pgchange_lost, 'ids could not be told: the column of ids is gone or no number');
                end if;
            exception when others or assert_failure then
                raise warning 'a fault of the capture of %% could not be noted: %%', tg_relid::pg_catalog.regclass, sqlerrm;
            end;
        end;
$body$,
        known.pods, known.name, rows,
        case when known.predicate is not null then format(
            E'select (%s\n) into strict pgchange_wanted\n'
            '                    from pg_catalog.jsonb_populate_record(null::%s, pg_catalog.to_jsonb(pgchange_row)) as %I;',
            known.predicate, attached.tbl, (select c.relname from pg_class as c where c.oid = attached.tbl)) end,
        kind, attached.shard)
$$;
comment on function tube.row_by_row_body(tube.attachment, tube.tube, text, text) is
    'The part of a trigger function that takes each row by itself: where the capture of all of them failed, or where there are '
    'more than ten million.';

create function tube.capture_body(attached tube.attachment, op text) returns text
language plpgsql stable
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    known tube.tube := tube.named(attached.tube);
    kind text := format(
        'case when pg_catalog.strpos(pg_catalog.current_setting(''application_name''), ''backfill'') operator(pg_catalog.>) 0 '
        'then ''B'' else %L end', upper(left(op, 1)));
    added text := tube.ids_of('pgchange_added', attached.tbl, attached.id_column, known.predicate);
    removed text := tube.ids_of('pgchange_removed', attached.tbl, attached.id_column, known.predicate);
begin
    if op = 'truncate' then
        return tube.truncate_body(attached, known.pods);
    end if;
    -- An update compares two arrays, and joins them only where they differ: in one query with the join PostgreSQL would read
    -- a transition table again for each place that names its array, and prepare a hash for nothing.
    return format($body$
#variable_conflict use_column
declare
    pgchange_touched bigint[];
    pgchange_before bigint[];
begin
    begin
        pgchange_touched := case when %1$s then %2$s end;
        %6$s
    exception when others or assert_failure then
        pgchange_touched := null;
    end;
    if pg_catalog.cardinality(pgchange_touched) operator(pg_catalog.>) 0
        and pg_catalog.cardinality(pgchange_touched) operator(pg_catalog.<=) 900
    then
        insert into %3$s (op, shard, ids) values (%4$s, %5$s, pgchange_touched);
    elsif pg_catalog.cardinality(pgchange_touched) operator(pg_catalog.>) 900
        and pg_catalog.cardinality(pgchange_touched) operator(pg_catalog.<=) 10000000
    then
        insert into %3$s (op, shard, ids)
        select %4$s, %5$s, pgchange_touched[i : pg_catalog.int4pl(i, 899)]
        from pg_catalog.generate_series(1, pg_catalog.cardinality(pgchange_touched), 900) as i;
    elsif (pg_catalog.cardinality(pgchange_touched) operator(pg_catalog.=) 0) is not true then
%7$s
    end if;
    return null;
end
$body$,
        format('pg_catalog.has_table_privilege(%L, ''insert'') and pg_catalog.has_sequence_privilege(''tube.seq'', ''usage'')',
               known.pods),
        case op when 'delete' then removed else added end,
        known.pods,
        kind,
        attached.shard,
        case op when 'update' then format($update$pgchange_before := %s;
        if pgchange_before operator(pg_catalog.<>) pgchange_touched then
            pgchange_touched := array(
                select pg_catalog.unnest(pgchange_touched) union select pg_catalog.unnest(pgchange_before));
        end if;$update$, removed) end,
        tube.row_by_row_body(
            attached, known,
            case op when 'delete' then 'select r.* from pgchange_removed as r'
                    when 'insert' then 'select r.* from pgchange_added as r'
                    else 'select r.* from pgchange_added as r union all select r.* from pgchange_removed as r' end,
            kind));
end
$$;
comment on function tube.capture_body(tube.attachment, text) is
    'The body of a trigger function of one table: an update touches the ids before and after it, if the predicate holds for '
    'either; a row for which the predicate fails is touched all the same, and counted in tube.fault.';

create function tube.place_function(attached tube.attachment, op text) returns text
language plpgsql
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    owner_name name := (select pg_get_userbyid(c.relowner) from pg_class as c where c.oid = attached.tbl);
    has_predicate boolean := (tube.named(attached.tube)).predicate is not null;
    function text := (
        select c.function::regproc::text from tube.captures(attached.tbl, attached.tube) as c where c.op = place_function.op limit 1
    );
begin
    if function is null then
        function := format('%I.%I', tube.schema_of(attached.tbl), format(
            'pgchange_touch_%s_%s_%s', (select left(c.relname, 8) from pg_class as c where c.oid = attached.tbl), op,
            left(md5(concat(attached.tube, attached.tbl::oid, clock_timestamp(), random())), 12)));
    end if;
    -- Without a predicate every name in the body has its schema, types and operators too, or a writer's own would run with
    -- the owner's rights. Pinning the path instead would be the dearest part of it.
    execute format(
        'create or replace function %s() returns trigger language plpgsql security definer %s as %L', function,
        case when has_predicate or op = 'truncate' then 'set search_path = pg_catalog, tube, pg_temp' end,
        tube.capture_body(attached, op));
    execute format('revoke all on function %s() from public', function);
    execute format('comment on function %s() is %L', function, format('Capture of %s for tube %s.', attached.tbl, attached.tube));
    execute format('alter function %s() owner to %I', function, owner_name);
    return function;
end
$$;
comment on function tube.place_function(tube.attachment, text) is 'Write one of the trigger functions of a table, anew if it is there.';

create function tube.place_capture(attached tube.attachment) returns integer
language plpgsql
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    known tube.tube := tube.named(attached.tube);
    kind text;
    function text;
    part regclass;
    captured oid[];
    placed integer := 0;
begin
    if known.predicate is not null then
        perform tube.check_predicate(known.predicate, attached.tbl);
    end if;
    foreach kind in array array['insert', 'update', 'delete', 'truncate'] loop
        function := tube.place_function(attached, kind);
        captured := array(select c.relid from tube.captures(attached.tbl, attached.tube) as c where c.op = kind);
        for part in select d.relid from tube.descendants(attached.tbl) as d(relid) where d.relid <> all (captured) loop
            if placed = 0 then
                perform tube.lock_for_capture(attached.tbl);
            end if;
            execute format(
                'create trigger %I after %s on %s %s for each statement execute function %s(%L)',
                tube.capture_name(attached.tbl, attached.tube, kind), kind, part,
                case kind when 'insert' then 'referencing new table as pgchange_added'
                        when 'update' then 'referencing old table as pgchange_removed new table as pgchange_added'
                        when 'delete' then 'referencing old table as pgchange_removed' else '' end,
                function, attached.tube);
            placed := placed + 1;
        end loop;
    end loop;
    return placed;
end
$$;
comment on function tube.place_capture(tube.attachment) is
    'Write the capture of a table anew, and put it on every partition that lacks it; returns how many triggers that took.';
