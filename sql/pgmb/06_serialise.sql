-- The content of an event about a change of a table: its topic, its payload, and the changed columns of a row.

create function pgmb.create_topic(schema_name text, table_name text, kind text) returns text
language sql immutable as $$
    select lower(schema_name || '.' || table_name || '.' || kind)
$$;
comment on function pgmb.create_topic(text, text, text) is
    'The topic of changes of a table: schema.table.insert, update or delete, in lower case.';

create function pgmb.serialise_record_for_event(tabl oid, op text, record record, out serialised jsonb, out emit boolean)
language plpgsql stable as $$
begin
    serialised := pg_catalog.to_jsonb(record);
    emit := true;
end
$$;
comment on function pgmb.serialise_record_for_event(oid, text, record) is
    'The content of a table''s events about a row, and whether an event is published. op is INSERT, UPDATE or DELETE. For an '
    'update it is called with the row before and after, and the event is published if emit is true for either. The owner of '
    'schema pgmb may replace this function, to leave out columns or rows. It runs with the rights of the owner of the table, and '
    'the search_path pg_catalog, pgmb. So name your own functions with their schema.';

create function pgmb.jsonb_diff(a jsonb, b jsonb) returns jsonb
language plpgsql immutable
-- A plan for the given values would contain copies of them.
set plan_cache_mode = force_generic_plan
as $$
begin
    if a = b then
        return null;
    end if;
    if jsonb_typeof(a) = 'object' and jsonb_typeof(b) = 'object' then
        -- List keys only: a function that lists values, too, copies each of them, and some may be very large.
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
    'The entries of a that b does not have, or has with another value. A key that only b has is there with null. Null if there is '
    'no difference. If a and b are not both objects, a itself.';

create type pgmb.serialised as (serialised jsonb, emit boolean, error text);
comment on type pgmb.serialised is 'A row in the form of its events; or the error in making that form, with the row as it is.';

-- Call serialise_record_for_event for a row and catch any error, so that the user's write never fails because of it.
create function pgmb.serialised(tbl oid, op text, one record) returns pgmb.serialised
language plpgsql stable as $$
declare
    told pg_catalog.record;
    answer pgmb.serialised;
begin
    begin
        -- Call the function in an expression and not in a query, because the plan of a query would contain a copy of the row.
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
                -- A value that jsonb cannot store, such as a json with \u0000, is kept as text at least.
                answer.error := pg_catalog.format('%s: %s', answer.error, pg_catalog.row_to_json(one));
            exception when others or assert_failure then
                answer.serialised := null;
            end;
        end;
    end if;
    return answer;
end
$$;
