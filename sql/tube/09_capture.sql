-- The capture of a table: each statement that inserts, updates or deletes rows, or truncates, touches the tube.
--
-- The trigger functions are written for the columns of one table, so that PostgreSQL keeps their plans. They belong to the
-- owner of the table and run with that owner's rights, so that a plain writer needs none of ours and a predicate can do no
-- more than its owner. They evaluate inside an exception block and write outside it: a write inside would cost every
-- statement a second transaction id.

-- The body of the trigger function for TRUNCATE: one control pod a transaction, that names the table.
create function tube.truncate_body(attached tube.attachment) returns text
language sql stable as $$
    select format($body$
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
        -- Every partition of a truncated table fires: one pod will do, where it can be seen.
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
    -- Left over from a tube, or a schema, that was dropped.
    if attached is not true then
        return null;
    end if;
    if open is not true then
        raise warning 'the truncation of %% is not captured: tube %% cannot be written', tg_relid::regclass, %2$L;
        begin
            perform tube.note_fault(%2$L, tg_relid, 0, 'a truncation is lost: the owner of the table may not write the pods');
        exception when others or assert_failure then
            null; -- Who may not note it either has warned already.
        end;
    elsif noted is not true then
        execute format('insert into %%s (op, shard, ids, payload) values (''T'', $1, ''{}'', $2)', pods)
        using %1$s, jsonb_build_object('type', 'truncate', 'tbl', name);
    end if;
    return null;
end
$body$, attached.shard, attached.tube, tube.full_name(attached.tbl))
$$;

-- The body of a trigger function of one table: an update touches the ids before and after it, if the predicate holds for either; a
-- row for which the predicate fails is touched all the same, and counted in tube.fault. The op is B where the application_name of the
-- session has backfill in it.
create function tube.capture_body(attached tube.attachment, op text) returns text
language plpgsql stable
set quote_all_identifiers = off
as $$
declare
    -- Nothing of the pods is read, so whatever is on them runs nothing.
    pods regclass := (select t.pods from tube.tube as t where t.name = attached.tube);
    kind text := format(
        'case when pg_catalog.strpos(pg_catalog.current_setting(''application_name''), ''backfill'') operator(pg_catalog.>) 0 '
        'then ''B'' else %L end', upper(left(op, 1)));
    added text := tube.ids_of('pgchange_added', attached);
    removed text := tube.ids_of('pgchange_removed', attached);
begin
    if op = 'truncate' then
        return tube.truncate_body(attached);
    end if;
    -- An update compares two arrays, and joins them only where they differ: in one query with the join PostgreSQL would read
    -- a transition table again for each place that names its array, and prepare a hash for nothing.
    return format($body$
#variable_conflict use_column
declare
    pgchange_touched %6$s[];
    pgchange_before %6$s[];
begin
    begin
        select %2$s where %1$s;
        %4$s
    exception when others or assert_failure then
        pgchange_touched := null;
    end;
%3$s    elsif (pg_catalog.cardinality(pgchange_touched) operator(pg_catalog.=) 0) is not true then
%5$s
    end if;
    return null;
end
$body$,
        -- Another table under the name of the pods is not written: its triggers would run with the owner's rights.
        format('%1$L::pg_catalog.regclass operator(pg_catalog.=) %2$s::pg_catalog.oid '
               'and (pg_catalog.has_table_privilege(%1$L::pg_catalog.regclass, ''insert'') '
               'or pg_catalog.has_column_privilege(%1$L::pg_catalog.regclass, ''op'', ''insert'') '
               'and pg_catalog.has_column_privilege(%1$L::pg_catalog.regclass, ''shard'', ''insert'') '
               'and pg_catalog.has_column_privilege(%1$L::pg_catalog.regclass, ''ids'', ''insert'')) '
               -- Nor pods of a schema tube that was dropped and installed again: they number themselves no more.
               'and ''tube.seq''::pg_catalog.regclass operator(pg_catalog.=) %3$s::pg_catalog.oid '
               'and pg_catalog.has_sequence_privilege(''tube.seq''::pg_catalog.regclass, ''usage'')',
               tube.full_name(pods), pods::oid, 'tube.seq'::regclass::oid)
            -- Nor are ids read from a column that has got the name of the column of ids.
            || format(E'\n            and (%s\n                 or coalesce(tube.key_names(tg_relid, %L) operator(pg_catalog.=) %L::pg_catalog.name[], false))',
                      (select string_agg(pgchange.key_check(attached.tbl, k.name, a.attnum), ' and ' order by k.place)
                       from unnest(attached.key) with ordinality as k(name, place)
                       left join pg_attribute as a on a.attrelid = attached.tbl and a.attname = k.name),
                      attached.tube, attached.key),
        case op when 'update' then format('%s, %s into pgchange_touched, pgchange_before', added, removed)
                else format('%s into pgchange_touched', case op when 'delete' then removed else added end) end,
        tube.put_body(attached, tube.full_name(pods), kind),
        case op when 'update' then $update$if pgchange_before operator(pg_catalog.<>) pgchange_touched then
            pgchange_touched := array(
                select pg_catalog.unnest(pgchange_touched) union select pg_catalog.unnest(pgchange_before));
        end if;$update$ end,
        tube.row_by_row_body(
            attached,
            case op when 'delete' then 'select r.* from pgchange_removed as r'
                    when 'insert' then 'select r.* from pgchange_added as r'
                    else 'select r.* from pgchange_added as r union all select r.* from pgchange_removed as r' end,
            kind),
        case when attached.key_types = '{bigint}' then 'bigint' else 'pg_catalog.text' end);
end
$$;
