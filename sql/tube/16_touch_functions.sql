-- The functions <tube>_touch and <table>_touch, in the schemas of a tube's pods and of a table.

-- Touch ids of a table in every tube to which it is attached with ids of this type: bigint or text.
create function tube.touch_table(tbl text, ids anyarray, op text, payload jsonb, chunk_size integer) returns void
language plpgsql as $$
declare
    relation regclass := to_regclass(tbl);
    attached tube.attachment;
    is_attached boolean := false;
begin
    perform tube.hold_shard(relation);
    for attached in
        select a.* from tube.attachment as a
        where a.tbl = relation and (a.key_types = '{bigint}') = (pg_typeof(ids) = 'bigint[]'::regtype)
        order by a.tube
    loop
        is_attached := true;
        if pg_typeof(ids) = 'bigint[]'::regtype then
            perform tube.touch(attached.tube, attached.shard, ids::bigint[], op, payload, chunk_size);
        else
            perform tube.touch_keys(attached.tube, attached.shard, ids::text[], op, payload, chunk_size);
        end if;
    end loop;
    if not is_attached then
        perform pgchange.refuse(
            format('%s is attached to no tube that you may use', tbl),
            'attach it (again if it was renamed), or have INSERT granted on the tube''s pods');
    end if;
end
$$;

-- Create the function <tube>_touch of a tube in the schema of its pods.
create function tube.make_touch(schema_name name, tube text, key regtype[]) returns void
language plpgsql as $$
declare
    ids text := case when key = '{bigint}' then 'bigint[]' else 'text[]' end;
    signature text := format('%I.%I(integer, %s, character, jsonb, integer)', schema_name, tube || '_touch', ids);
begin
    if to_regprocedure(signature) is not null then
        perform pgchange.refuse(format('there is a function %s already', signature), 'drop or rename it');
    end if;
    perform pgchange.place_function(signature, format($function$
        create function %I.%I(
            shard integer, ids %s, op character, payload jsonb default null, chunk_size integer default 250
        ) returns void
        language sql
        as %L
    $function$, schema_name, tube || '_touch', ids, format(
        'select tube.%I(%L, shard, ids, op, payload, chunk_size)', case when key = '{bigint}' then 'touch' else 'touch_keys' end, tube)),
        'Touch ids of a shard in tube ' || tube || '.');
end
$$;

-- Create the function <table>_touch of a table for ids of a type, bigint[] or text[]. Drop it if the table touches no tube with
-- such ids.
create function tube.place_touch(tbl regclass, ids text) returns void
language plpgsql as $$
declare
    relation name := (select c.relname from pg_class as c where c.oid = tbl);
    owner_name name := (select pg_get_userbyid(c.relowner) from pg_class as c where c.oid = tbl);
    is_attached boolean := exists (
        select from tube.attachment as a
        where a.tbl = place_touch.tbl and (a.key_types = '{bigint}') = (place_touch.ids = 'bigint[]'));
    function text;
    signature text;
    known regprocedure;
    whose text;
    another regclass;
begin
    if relation is null then
        return;
    end if;
    function := format('%I.%I', tube.schema_of(tbl), tube.short_name(relation, '_touch'));
    signature := format('%s(%s, character, jsonb, integer)', function, ids);
    known := to_regprocedure(signature);
    whose := substring(obj_description(known, 'pg_proc') from '^Touch ids of (.*) in every tube that it is attached to[.]$');
    another := (select a.tbl from tube.attachment as a where a.tbl = tube.table_named(whose) and a.tbl <> place_touch.tbl limit 1);
    if known is not null and whose is null or another is not null then
        if is_attached then
            perform pgchange.refuse(
                format('there is a function %s already%s', signature, ', for table ' || another), 'drop or rename it');
        end if;
        return;
    end if;
    if not pg_has_role(current_user, (select p.proowner from pg_proc as p where p.oid = known), 'usage') then
        raise notice '% belongs to another owner and was not changed', signature using
            hint = format('let its owner drop it; attaching %s again then creates it', tbl);
        return;
    end if;
    if not is_attached then
        if known is not null then
            execute format('drop function %s', known);
        end if;
        return;
    end if;
    perform pgchange.place_function(signature, format($function$
        create or replace function %s(
            ids %s, op character default 'T', payload jsonb default null, chunk_size integer default 250
        ) returns void
        language sql
        as %L
    $function$, function, ids, format('select tube.touch_table(%L, ids, op, payload, chunk_size)', tube.full_name(tbl))),
        format('Touch ids of %s in every tube that it is attached to.', tube.full_name(tbl)));
    execute format('alter function %s owner to %I', signature, owner_name);
end
$$;

-- Create the functions <table>_touch of a table, in its schema and with its owner, for each type of ids of its tubes: bigint[]
-- and text[]. Drop them if the table is not attached to such a tube.
create function tube.place_touch(tbl regclass) returns void
language sql as $$
    select tube.place_touch(tbl, k.ids) from unnest(array['bigint[]', 'text[]']) as k(ids)
$$;

-- Drop the functions <table>_touch of tables that were renamed, moved to another schema or dropped, because these functions fail.
create function tube.drop_lost_touches() returns void
language plpgsql as $$
declare
    function regprocedure;
begin
    for function in
        select p.oid
        from pg_description as d
        join pg_proc as p on p.oid = d.objoid
        cross join lateral substring(d.description from '^Touch ids of (.*) in every tube that it is attached to[.]$') as told(whose)
        where d.classoid = 'pg_proc'::regclass and d.description like 'Touch ids of % in every tube that it is attached to.'
          and p.proname like '%\_touch' and pg_has_role(current_user, p.proowner, 'usage') and tube.table_named(told.whose) is null
    loop
        execute format('drop function %s', function);
    end loop;
end
$$;
