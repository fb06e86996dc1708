-- The column that orders the rows of a table in a backfill: which types it may have, and which indexes give its order.

-- Refuse a view. Before PostgreSQL 16, an owner can turn a table into a view, and its functions would run with the rights of the
-- reader.
create function tube.check_kind(tbl regclass) returns void
language plpgsql stable as $$
begin
    if (select c.relkind not in ('r', 'p') from pg_class as c where c.oid = tbl) then
        perform pgchange.refuse(format('%s is no longer a table', tbl), 'detach it: tube.tube_table_ensure_detached');
    end if;
end
$$;

-- The type of a column, or the base type of its domain.
create function tube.base_type(tbl regclass, column_name name) returns pg_type
language plpgsql stable as $$
declare
    kind pg_type;
begin
    select t.* into kind
    from pg_attribute as a join pg_type as t on t.oid = a.atttypid
    where a.attrelid = tbl and a.attname = column_name;
    while kind.typtype = 'd' loop
        select t.* into kind from pg_type as t where t.oid = kind.typbasetype;
    end loop;
    return kind;
end
$$;

-- Whether a type brings code of its own: operators for sorting that are not in pg_catalog, casts, or the check of a domain in
-- it. The function is in PL/pgSQL, which keeps its plans, because every slice of a backfill calls it.
create function tube.is_own_type(kind pg_type) returns boolean
language plpgsql stable as $$
declare
    parts oid[];
begin
    with recursive part(oid) as (
        select kind.oid
        union
        select p.oid
        from part join pg_type as t on t.oid = part.oid
        cross join lateral (
            select t.typelem where t.typcategory = 'A'
            union all
            select r.rngsubtype from pg_range as r where t.oid in (r.rngtypid, r.rngmultitypid)
        ) as p(oid)
    )
    select array_agg(oid) into parts from part;
    return exists (
        select from pg_type as t
        where t.oid = any (parts)
          and (t.typtype in ('c', 'd')
               or t.typnamespace <> 'pg_catalog'::regnamespace and exists (
                   select from pg_cast as c where c.castfunc <> 0 and t.oid in (c.castsource, c.casttarget))))
        or exists (
            select from pg_opclass as o join pg_am as m on m.oid = o.opcmethod and m.amname = 'btree'
            where o.opcintype = any (parts) and o.opcdefault and o.opcnamespace <> 'pg_catalog'::regnamespace);
end
$$;

-- The type, the collation and the enum labels of a column, on which its order depends; null if there is no such column.
create function tube.order_type(tbl regclass, order_col name) returns text
language sql stable
set quote_all_identifiers = off
as $$
    select concat(
        format_type(a.atttypid, a.atttypmod), ' collate ' || nullif(a.attcollation, 0)::regcollation,
        (select ' of ' || string_agg(quote_literal(e.enumlabel), ', ' order by e.enumsortorder)
         from tube.base_type(tbl, order_col) as k
         join pg_enum as e on e.enumtypid in (k.oid, k.typelem)))
    from pg_attribute as a where a.attrelid = tbl and a.attname = order_col and a.attnum > 0 and not a.attisdropped
$$;

-- The column to order a backfill by. Raises an error if it cannot be that column.
create function tube.check_order(tbl regclass, order_col text) returns name
language plpgsql stable as $$
declare
    column_name name := (
        select a.attname from pg_attribute as a
        where a.attrelid = tbl and a.attnum > 0 and not a.attisdropped and quote_ident(a.attname) in (order_col, quote_ident(order_col))
    );
    kind pg_type := tube.base_type(tbl, column_name);
begin
    perform tube.check_kind(tbl);
    if column_name is null then
        perform pgchange.refuse(
            format('%s has no column %s', tbl, coalesce(quote_ident(order_col), 'null')), 'name the column to order by');
    end if;
    if kind.typtype = 'c' then
        perform pgchange.refuse(
            format('column %I of %s is a composite: a value that is partly null is neither null nor not null', column_name, tbl),
            'name a column of another type');
    end if;
    if tube.is_own_type(kind) then
        perform pgchange.refuse(
            format('column %I of %s is %s, a type with an order, casts or checks of its own', column_name, tbl,
                   format_type(kind.oid, null)),
            'name a column of a type that PostgreSQL provides');
    end if;
    begin
        -- Check the type by a query without the table, because planning a query of the table runs functions in its indexes.
        execute format('select null::%1$s > null::%1$s', format_type(kind.oid, null));
    exception when undefined_function then
        perform pgchange.refuse(
            format('column %I of %s has no order', column_name, tbl), 'name a column of a type that can be sorted');
    end;
    return column_name;
end
$$;

-- The columns that order a backfill: the order column, then those of the ids, in the order of their unique index.
create function tube.order_columns(attached tube.attachment, order_col name) returns name[]
language sql stable as $$
    select order_col || array_remove(coalesce(pgchange.key_order(attached.tbl, attached.key), attached.key), order_col)
$$;

-- The order column of a backfill if the caller names none: the first id column of the unique index.
create function tube.default_order(attached tube.attachment) returns name
language sql stable as $$
    select (coalesce(pgchange.key_order(attached.tbl, attached.key), attached.key))[1]
$$;

-- Whether indexes give the order of a backfill in the table and all its children. They must have the order column first, then the
-- ids.
create function tube.has_order_index(attached tube.attachment, order_col name) returns boolean
language sql stable as $$
    select not exists (
        select from pgchange.descendants(attached.tbl) as d(relid)
        join pg_class as t on t.oid = d.relid and t.relkind = 'r'
        where not exists (
            select from pg_index as i
            join pg_class as c on c.oid = i.indexrelid
            join pg_am as m on m.oid = c.relam and m.amname = 'btree'
            where i.indrelid = t.oid and i.indisvalid and i.indpred is null
              and not exists (
                  select from unnest(tube.order_columns(attached, order_col)) with ordinality as w(name, place)
                  left join pg_attribute as a on a.attrelid = t.oid and a.attname = w.name
                  left join pg_opclass as s on s.oid = i.indclass[w.place - 1] and s.opcdefault
                  where s.oid is null or w.place > i.indnkeyatts or i.indkey[w.place - 1] is distinct from a.attnum
                     or i.indoption[w.place - 1] <> 0 or i.indcollation[w.place - 1] <> a.attcollation)))
$$;
