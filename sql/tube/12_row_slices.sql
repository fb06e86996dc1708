-- Slices of the rows of a table in the order of a backfill: by (order column, id), with rows without an order at the end. Also
-- which of the rows a predicate holds for.

-- Refuse a table if row security hides rows of it from the caller: a comparison with a copy would delete these rows there.
create function tube.check_whole(tbl regclass) returns void
language plpgsql stable as $$
begin
    perform tube.check_kind(tbl);
    if row_security_active(tbl) then
        raise insufficient_privilege using
            message = format(
                'row security hides rows of %s from %I, so it cannot be compared with a copy: they would count as deleted',
                tbl, current_user),
            hint = 'read it as a role with bypassrls, or as its owner without force row level security';
    end if;
end
$$;

-- The query of the next rows of a backfill. For each row it returns the order, the id, and whether the predicate holds. It
-- includes all rows with the order and id of the last row, because the predicate may hold for only some of them.
create function tube.slice_sql(
    attached tube.attachment, order_col name, at tube.keyset, chunk integer, row_name name, wanted text
) returns text
language sql stable as $$
    with columns as (
        select format('%I.%I', row_name, o.name) as place, o.number, o.name = order_col as is_order,
               format('%L::%s',
                      case when o.name = any (attached.key)
                           then (pgchange.key_parts(attached.key_types, at.last_id))[array_position(attached.key, o.name)]
                           else at.last_value end,
                      case when attached.key_types = '{bigint}' and o.name = attached.key[1] then 'bigint'
                           else format_type((tube.base_type(attached.tbl, o.name)).oid, -1) end) as value
        from unnest(tube.order_columns(attached, order_col)) with ordinality as o(name, number)
    ), joined as (
        select max(c.place) filter (where c.is_order) as order_place,
               string_agg(c.place, ', ' order by c.number) as places, string_agg(c.value, ', ' order by c.number) as values,
               string_agg(c.place, ', ' order by c.number) filter (where not c.is_order) as id_places,
               string_agg(c.value, ', ' order by c.number) filter (where not c.is_order) as id_values
        from columns as c
    )
    select format(
        'select %1$s as o, %2$s as id, %3$s as wanted from %4$s as %5$I where %6$s and %7$s '
        'order by %8$s fetch first %9$s rows with ties',
        j.order_place, pgchange.key_text(attached.key_types, attached.key, row_name::text), wanted, attached.tbl, row_name,
        case when at.in_nulls then
                 j.order_place || ' is null' || case when at.last_id is null then '' else format(' and (%s) > (%s)', j.id_places, j.id_values) end
             when at.last_id is null then j.order_place || ' is not null'
             else format('(%s) > (%s)', j.places, j.values) end,
        (select string_agg(format('%I.%I is not null', row_name, k.name), ' and ' order by k.place)
         from unnest(attached.key) with ordinality as k(name, place)),
        -- Write the column with the alias of the row, because order by would take a bare name for a column of the select list.
        case when at.in_nulls then coalesce(j.id_places, j.places) else j.places end,
        chunk)
    from joined as j
$$;

-- The FROM clause that finds the rows of text ids through the table's index. pgchange_n is the number of the id of each row. The
-- values are literals, which their types read without a cast of a user.
create function tube.found_sql(attached tube.attachment, row_name name, asked text[]) returns text
language sql stable as $$
    select format(
        'unnest(%s) with ordinality as pgchange_asked(%s, pgchange_n) join %s as %I on %s',
        string_agg(
            format('%L::%s[]',
                   array(select (pgchange.key_parts(attached.key_types, u.id))[k.place] from unnest(asked) with ordinality as u(id, n) order by u.n),
                   format_type((tube.base_type(attached.tbl, k.name)).oid, -1)), ', ' order by k.place),
        string_agg('pgchange_k' || k.place, ', ' order by k.place), attached.tbl, row_name,
        string_agg(format('%I.%I = pgchange_asked.pgchange_k%s', row_name, k.name, k.place), ' and ' order by k.place))
    from unnest(attached.key) with ordinality as k(name, place)
$$;

-- The ids whose row satisfies the predicate, checked row by row. If the predicate fails for a row, its id counts as wanted.
-- failed and message: for how many rows it failed, and the last error.
create function tube.judged(
    attached tube.attachment, asked anyarray, out ids anyarray, out failed bigint, out message text
)
language plpgsql stable as $$
declare
    each_row record;
    is_wanted boolean;
    test text := format(E'select (%s\n) from (select ($1::%s).*) as %I', attached.predicate, attached.tbl,
                        (select c.relname from pg_class as c where c.oid = attached.tbl));
    rows constant text := case when attached.key_types = '{bigint}' then format(
            'select pgchange_asked.id, pgchange_row as wanted '
            'from (select u.id, min(u.n) as n from unnest($1) with ordinality as u(id, n) group by u.id) as pgchange_asked '
            'join %s as pgchange_row on pgchange_row.%I = pgchange_asked.id order by pgchange_asked.n', attached.tbl, attached.key[1])
        else format('select ($1)[pgchange_n] as id, pgchange_row as wanted from %s order by pgchange_n',
                    tube.found_sql(attached, 'pgchange_row', asked::text[])) end;
begin
    ids := '{}';
    failed := 0;
    for each_row in execute rows using asked loop
        begin
            execute test using each_row.wanted into is_wanted;
        exception when others or assert_failure then
            is_wanted := true;
            failed := failed + 1;
            message := sqlerrm;
        end;
        if is_wanted then
            ids := array_append(ids, each_row.id);
        end if;
    end loop;
end
$$;

-- The query that summarises the next rows of a backfill. Its columns are their number, the order and id of the last row, and the
-- ids that are wanted.
create function tube.boundary_sql(tbl regclass, order_col name, rows text, has_predicate boolean) returns text
language sql stable as $$
    -- Values of a fixed length are small, so they are aggregated at once. Other values stay where they are until the last row is
    -- known. format() writes a value as text without a cast.
    select case when t.typlen > 0 then format('
        select coalesce(cardinality(g.seen), 0), case when l.o is not null then format(''%%s'', l.o) end, g.seen[cardinality(g.seen)],
               coalesce(g.%s, ''{}'')
        from (
            select array_agg(c.o) as places, array_agg(c.id) as seen%s from (%s) as c
        ) as g cross join lateral (select g.places[cardinality(g.seen)]) as l(o)',
        case when has_predicate then 'wanted' else 'seen' end,
        case when has_predicate then ', array_agg(c.id) filter (where c.wanted) as wanted' else '' end, rows)
    else format('
        with c as materialized (%s), n as (select count(*) as looked_at from c)
        select n.looked_at, case when l.o is not null then format(''%%s'', l.o) end, l.id, array(select c.id from c where %s)
        from n left join lateral (select c.o, c.id from c offset greatest(n.looked_at - 1, 0) limit 1) as l on true',
        rows, case when has_predicate then 'c.wanted' else 'true' end) end
    from pg_attribute as a join pg_type as t on t.oid = a.atttypid
    where a.attrelid = tbl and a.attname = order_col
$$;

-- The rows of tube.judged_slice(), read with the rights of the caller.
create function tube.read_slice(
    attached tube.attachment, order_col name, in_nulls boolean, last_value text, last_id text, chunk integer, like_ids anyarray,
    out looked_at bigint, out upto_value text, out upto_id text, out ids anyarray, out failed bigint, out message text
)
language plpgsql as $$
declare
    relation name := (select c.relname from pg_class as c where c.oid = attached.tbl);
    has_predicate boolean := attached.predicate is not null;
    at tube.keyset := row(in_nulls, last_value, last_id, 0, 0, false);
begin
    perform tube.check_whole(attached.tbl);
    perform pgchange.check_code(attached.tbl, or_else => 'attach it with a predicate, such as true');
    perform tube.check_order(attached.tbl, quote_ident(order_col));
    begin
        execute tube.boundary_sql(
            attached.tbl, order_col,
            tube.slice_sql(attached, order_col, at, chunk, relation, E'(' || coalesce(attached.predicate, 'true') || E'\n)'),
            has_predicate)
        into looked_at, upto_value, upto_id, ids;
    exception when others or assert_failure then
        if not has_predicate then
            raise;
        end if;
        -- Determine the rows first, and evaluate the predicate then. In the other order, rows that are deleted meanwhile would
        -- let rows into the slice for which the predicate was not evaluated.
        execute tube.boundary_sql(
            attached.tbl, order_col, tube.slice_sql(attached, order_col, at, chunk, relation, 'true'), false)
        into looked_at, upto_value, upto_id, ids;
        select j.ids, j.failed, j.message into ids, failed, message from tube.judged(attached, ids) as j;
    end;
end
$$;

-- The ids of tube.judged_ids(), read with the rights of the caller. Writes nothing, so it works on a standby.
create function tube.read_wanted(attached tube.attachment, asked anyarray) returns anyarray
language plpgsql stable
set jit = off
as $$
declare
    relation name := (select c.relname from pg_class as c where c.oid = attached.tbl);
    test text := E'(' || coalesce(attached.predicate, 'true') || E'\n)';
    ids asked%type;
begin
    perform tube.check_whole(attached.tbl);
    perform pgchange.check_code(attached.tbl, or_else => 'attach it with a predicate, such as true');
    execute case when attached.key_types = '{bigint}' then format(
            'select array(select %1$I::bigint from %2$s as %3$I where %1$I in (select unnest($1)) and %4$s)',
            attached.key[1], attached.tbl, relation, test)
        else format('select array(select ($1)[pgchange_n] from %s where %s)', tube.found_sql(attached, relation, asked::text[]), test) end
    using asked into ids;
    return ids;
exception
    when insufficient_privilege then
        raise;
    when others or assert_failure then
        if attached.predicate is null then
            raise;
        end if;
        return (tube.judged(attached, asked)).ids;
end
$$;
