-- The rows of a backfill in their order: chunks by (order column, id), those without an order last; and which rows are wanted.

create function tube.base_type(tbl regclass, column_name name) returns pg_type
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
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
comment on function tube.base_type(regclass, name) is 'The type of a column, or that which its domain is over.';

-- In PL/pgSQL, which keeps its plans: every slice of a backfill asks.
create function tube.is_own_type(kind pg_type) returns boolean
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
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
comment on function tube.is_own_type(pg_type) is
    'Whether rows are sorted by operators that are not found in pg_catalog, where a comparison takes those of another type; or '
    'whether who compares and reads values runs what somebody wrote for this type: a cast, or a check of a domain within it.';

create function tube.order_type(tbl regclass, order_col name) returns text
language sql stable
set search_path = pg_catalog, tube, pg_temp
set quote_all_identifiers = off
as $$
    select concat(
        format_type(a.atttypid, a.atttypmod), ' collate ' || nullif(a.attcollation, 0)::regcollation,
        (select ' of ' || string_agg(quote_literal(e.enumlabel), ', ' order by e.enumsortorder)
         from tube.base_type(tbl, order_col) as k
         join pg_enum as e on e.enumtypid in (k.oid, k.typelem)))
    from pg_attribute as a where a.attrelid = tbl and a.attname = order_col and a.attnum > 0 and not a.attisdropped
$$;
comment on function tube.order_type(regclass, name) is
    'The type, the collation and the labels of a column, upon which its order depends; null where there is no such column.';

create function tube.check_order(tbl regclass, order_col text) returns name
language plpgsql stable
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    column_name name := (
        select a.attname from pg_attribute as a
        where a.attrelid = tbl and a.attnum > 0 and not a.attisdropped and quote_ident(a.attname) in (order_col, quote_ident(order_col))
    );
    kind pg_type := tube.base_type(tbl, column_name);
begin
    perform tube.check_kind(tbl);
    if column_name is null then
        perform tube.refuse(
            format('%s has no column %s', tbl, coalesce(quote_ident(order_col), 'null')), 'name the column to order by');
    end if;
    if kind.typtype = 'c' then
        perform tube.refuse(
            format('column %I of %s is a composite: a value that is partly null is neither null nor not null', column_name, tbl),
            'name a column of another type');
    end if;
    if tube.is_own_type(kind) then
        perform tube.refuse(
            format('column %I of %s is %s, a type with an order, casts or checks of its own', column_name, tbl,
                   format_type(kind.oid, null)),
            'name a column of one of PostgreSQL''s own types');
    end if;
    begin
        -- Of the type alone: who plans a query of the table runs what its indexes call.
        execute format('select null::%1$s > null::%1$s', format_type(kind.oid, null));
    exception when undefined_function then
        perform tube.refuse(
            format('column %I of %s has no order', column_name, tbl), 'name a column of a type that can be sorted');
    end;
    return column_name;
end
$$;
comment on function tube.check_order(regclass, text) is 'The column to order a backfill by; refused where it cannot be.';

create function tube.has_order_index(tbl regclass, order_col name, id_column name) returns boolean
language sql stable
set search_path = pg_catalog, tube, pg_temp
as $$
    select not exists (
        select from tube.descendants(tbl) as d(relid)
        join pg_class as t on t.oid = d.relid and t.relkind = 'r'
        where not exists (
            select from pg_index as i
            join pg_class as c on c.oid = i.indexrelid
            join pg_am as m on m.oid = c.relam and m.amname = 'btree'
            join pg_opclass as s on s.oid = i.indclass[0] and s.opcdefault
            join pg_attribute as o on o.attrelid = t.oid and o.attname = order_col
            join pg_attribute as k on k.attrelid = t.oid and k.attname = id_column
            where i.indrelid = t.oid and i.indisvalid and i.indpred is null
              and i.indkey[0] = o.attnum and i.indoption[0] = 0 and i.indcollation[0] = o.attcollation
              and (o.attnum = k.attnum or i.indnatts > 1 and i.indkey[1] = k.attnum and i.indoption[1] = 0)))
$$;
comment on function tube.has_order_index(regclass, name, name) is
    'Whether indexes give the order of a backfill in all of a table: of the column and, among rows that are equal in it, of the id.';

create function tube.slice_sql(
    attached tube.attachment, order_col name, at tube.keyset, chunk integer, row_name name, wanted text
) returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select format(
        'select %1$s as o, %2$s::bigint as id, %3$s as wanted from %4$s as %5$I where %6$s '
        'order by %7$s fetch first %8$s rows with ties',
        c.place, c.id, wanted, attached.tbl, row_name,
        case when at.in_nulls then
                 c.place || ' is null' || case when at.last_id is null then '' else format(' and %s > %L::bigint', c.id, at.last_id) end
             when at.last_id is null then c.place || ' is not null'
             when c.place = c.id then format('%s > %L::bigint', c.place, at.last_id)
             else format('(%s, %s) > (%L::%s, %L::bigint)', c.place, c.id, at.last_value,
                         format_type((tube.base_type(attached.tbl, order_col)).oid, -1), at.last_id) end,
        case when c.place = c.id or at.in_nulls then c.id else c.place || ', ' || c.id end,
        chunk)
    -- With the row's name: to sort, a bare one would be that of what is selected.
    from (select format('%I.%I', row_name, order_col), format('%I.%I', row_name, attached.id_column)) as c(place, id)
$$;
comment on function tube.slice_sql(tube.attachment, name, tube.keyset, integer, name, text) is
    'The query of the next rows of a backfill, each with what is wanted of it; all of those with the last one''s order and id, of '
    'which one may be wanted and another not.';

create function tube.judged(
    predicate text, tbl regclass, id_column name, asked bigint[], out ids bigint[], out failed bigint, out message text
)
language plpgsql stable
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    each_row record;
    test text := format(E'select (%s\n) from (select ($1::%s).*) as %I', predicate, tbl,
                        (select c.relname from pg_class as c where c.oid = tbl));
    is_wanted boolean;
begin
    ids := '{}';
    failed := 0;
    for each_row in execute format(
        'select pgchange_asked.id, pgchange_row as wanted '
        'from (select u.id, min(u.n) as n from unnest($1) with ordinality as u(id, n) group by u.id) as pgchange_asked '
        'join %s as pgchange_row on pgchange_row.%I = pgchange_asked.id order by pgchange_asked.n', tbl, id_column)
    using asked loop
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
comment on function tube.judged(text, regclass, name, bigint[]) is
    'Those of some ids whose row, taken by itself, the predicate holds for, or fails; for how many it failed, and why.';

create function tube.boundary_sql(tbl regclass, order_col name, rows text, has_predicate boolean) returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    -- Values of a fixed length are few bytes and gathered as they come; others are kept where they are until the last is known.
    -- As text a value is written by format, which no cast takes part in.
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
comment on function tube.boundary_sql(regclass, name, text, boolean) is
    'The query that tells of the next rows of a backfill how many there are, the last one''s order and id, and the ids wanted.';

create function tube.read_slice(
    attached tube.attachment, order_col name, in_nulls boolean, last_value text, last_id bigint, chunk integer,
    out looked_at bigint, out upto_value text, out upto_id bigint, out ids bigint[], out failed bigint, out message text
)
language plpgsql
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    relation name := (select c.relname from pg_class as c where c.oid = attached.tbl);
    has_predicate boolean := attached.predicate is not null;
    at tube.keyset := row(in_nulls, last_value, last_id, 0, 0, false);
    judged record;
begin
    perform tube.check_whole(attached.tbl);
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
        -- First which rows these are: judged first, rows that others delete meanwhile would let unjudged ones slip in.
        execute tube.boundary_sql(
            attached.tbl, order_col, tube.slice_sql(attached, order_col, at, chunk, relation, 'true'), false)
        into looked_at, upto_value, upto_id, ids;
        judged := tube.judged(attached.predicate, attached.tbl, attached.id_column, ids);
        ids := judged.ids;
        failed := judged.failed;
        message := judged.message;
    end;
end
$$;
comment on function tube.read_slice(tube.attachment, name, boolean, text, bigint, integer) is
    'What tube.judged_slice() says, with the rights of whoever calls it.';

create function tube.read_wanted(attached tube.attachment, asked bigint[]) returns bigint[]
language plpgsql stable
set search_path = pg_catalog, tube, pg_temp
set jit = off
as $$
declare
    relation name := (select c.relname from pg_class as c where c.oid = attached.tbl);
    ids bigint[];
begin
    perform tube.check_whole(attached.tbl);
    execute format(
        E'select array(select %1$I::bigint from %2$s as %3$I where %1$I in (select unnest($1)) and (%4$s\n))',
        attached.id_column, attached.tbl, relation, coalesce(attached.predicate, 'true'))
    using asked into ids;
    return ids;
exception
    when insufficient_privilege then
        raise;
    when others or assert_failure then
        if attached.predicate is null then
            raise;
        end if;
        return (tube.judged(attached.predicate, attached.tbl, attached.id_column, asked)).ids;
end
$$;
comment on function tube.read_wanted(tube.attachment, bigint[]) is
    'What tube.judged_ids() says, with the rights of whoever calls it. It writes nothing: it works on a standby.';

create function tube.wanted(tube text, tbl regclass, ids bigint[]) returns setof bigint
language plpgsql stable
set search_path = pg_catalog, tube, pg_temp
as $$
begin
    perform tube.check_whole(tbl);
    return query select unnest(tube.judged_ids(tube.require_attachment(tube, tbl, null), ids));
end
$$;
comment on function tube.wanted(text, regclass, bigint[]) is
    'Those of some ids that a copy of an attached table is to hold: there is a row, and the predicate that the table was attached '
    'with holds for it, or fails. Refuses a table of which row security hides rows.';

create function tube.backfill_slice(
    known tube.tube, attached tube.attachment, order_col name, at tube.keyset, chunk integer, pod_size integer
) returns tube.keyset
language plpgsql
set search_path = pg_catalog, tube, pg_temp
set timezone = 'UTC'
set datestyle = 'ISO'
set intervalstyle = 'postgres'
set extra_float_digits = 1
set jit = off
as $$
declare
    ids bigint[];
begin
    at.in_nulls := coalesce(at.in_nulls, false);
    select s.looked_at, s.upto_value, s.upto_id, s.ids into at.looked_at, at.last_value, at.last_id, ids
    from tube.judged_slice(attached, order_col, at.in_nulls, at.last_value, at.last_id, chunk) as s;
    perform tube.put_pods(known.pods, 'B', attached.shard, ids, chunk_size => pod_size);
    at.touched := cardinality(ids);
    at.finished := false;
    if at.looked_at < chunk then
        -- The column of an inheritance child may be null where its parent's may not.
        at.finished := at.in_nulls or not exists (
            select from tube.descendants(attached.tbl) as d(relid)
            join pg_attribute as a on a.attrelid = d.relid and a.attname = order_col and not a.attnotnull);
        at.in_nulls := true;
        at.last_value := null;
        at.last_id := null;
    end if;
    return at;
end
$$;
comment on function tube.backfill_slice(tube.tube, tube.attachment, name, tube.keyset, integer, integer) is
    'Touch the next chunk rows of a table, as pods of op B, and return where that ended.';
