-- What an event about a change in a table says: its topic, its payload, and what of a row has changed.

create function pgmb.create_topic(schema_name text, table_name text, kind text) returns text
language sql immutable as $$
    select lower(schema_name || '.' || table_name || '.' || kind)
$$;
comment on function pgmb.create_topic(text, text, text) is
    'The topic of the changes in a table, schema.table.insert, update or delete, all in lower case.';

create function pgmb.serialise_record_for_event(tabl oid, op text, record record, out serialised jsonb, out emit boolean)
language plpgsql stable as $$
begin
    serialised := pg_catalog.to_jsonb(record);
    emit := true;
end
$$;
comment on function pgmb.serialise_record_for_event(oid, text, record) is
    'What the events of a table say about one of its rows, and whether there is to be an event at all. op is INSERT, UPDATE or '
    'DELETE; for an update it is asked about the row before and after, and the event is sent if either is to be. The owner of '
    'schema pgmb may replace it, to leave columns out or to send some rows only. It runs with the rights of the owner of the '
    'table, with search_path pg_catalog, pgmb: name functions of your own with their schema.';

create function pgmb.jsonb_diff(a jsonb, b jsonb) returns jsonb
language plpgsql immutable
-- A plan for these very values would hold copies of them.
set plan_cache_mode = force_generic_plan
as $$
begin
    if a = b then
        return null;
    end if;
    if jsonb_typeof(a) = 'object' and jsonb_typeof(b) = 'object' then
        -- By their keys: what lists values too copies each of them, and some may be very large.
        return (
            select jsonb_object_agg(k.key, a -> k.key)
            from (
                select jsonb_object_keys(a)
                union all
                select o.key from jsonb_object_keys(b) as o(key) where not a ? o.key
            ) as k(key)
            where a -> k.key is distinct from b -> k.key or not b ? k.key);
    end if;
    return a;
end
$$;
comment on function pgmb.jsonb_diff(jsonb, jsonb) is
    'The entries of a that b lacks or has with another value, and null for each that only b has; null where nothing differs. '
    'Where they are not two objects, a itself.';

create type pgmb.serialised as (serialised jsonb, emit boolean, error text);
comment on type pgmb.serialised is 'A row as its events are to show it; or why that failed, and the row as it is.';

-- Ask serialise_record_for_event about a row and catch any error: nothing of ours must make a user's write fail.
create function pgmb.serialised(tbl oid, op text, one record) returns pgmb.serialised
language plpgsql stable as $$
declare
    told pg_catalog.record;
    answer pgmb.serialised;
begin
    begin
        -- An expression and no query: the plan of a query would hold a copy of the row.
        told := pgmb.serialise_record_for_event(tbl, op, one);
        answer.serialised := told.serialised;
        answer.emit := told.emit;
    exception when others or assert_failure then
        answer.error := sqlerrm;
    end;
    if answer.error is not null then
        begin
            answer.serialised := pg_catalog.to_jsonb(one);
        exception when others or assert_failure then
            begin
                -- What no jsonb can hold, such as a json with \u0000 in it, is kept as a text at least.
                answer.error := pg_catalog.format('%s: %s', answer.error, pg_catalog.row_to_json(one));
            exception when others or assert_failure then
                answer.serialised := null;
            end;
        end;
    end if;
    return answer;
end
$$;
