-- What a table, its partitions and the triggers on them are called today, and whether a predicate fits them.

create function tube.attachment_of(rel oid, tube text) returns tube.attachment
language sql stable security definer
set search_path = pg_catalog, tube, pg_temp
as $$
    with recursive line(relid, up) as (
        select rel, 0
        union
        select i.inhparent, line.up + 1 from line join pg_inherits as i on i.inhrelid = line.relid
    )
    select a.* from line join tube.attachment as a on a.tbl = line.relid and a.tube = attachment_of.tube order by line.up limit 1
$$;
comment on function tube.attachment_of(oid, text) is
    'The attachment that a table belongs to: its own, or that of the nearest table whose partition or child it is.';

create function tube.id_attribute(attached tube.attachment) returns pg_attribute
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select c from pg_attribute as c
    where c.attrelid = attached.tbl and c.attnum > 0 and not c.attisdropped
      and (c.attname = attached.id_column or c.attnum = attached.id_number)
    order by c.attname = attached.id_column desc
    limit 1
$$;
comment on function tube.id_attribute(tube.attachment) is
    'The column of ids as it is today: the one of that name, whatever its number is after a restore or once another column took '
    'its place; where there is none, the one that was renamed.';

create function tube.id_column(rel oid, tube text) returns name
language sql stable
set search_path = pg_catalog, tube, pg_temp
as $$
    select (tube.id_attribute(tube.attachment_of(rel, tube))).attname
$$;
comment on function tube.id_column(oid, text) is 'Today''s name of the column of ids of an attached table or of a partition of it.';

create function tube.descendants(tbl regclass) returns setof regclass
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    with recursive tree(relid) as (
        select tbl::oid
        union
        select i.inhrelid from tree join pg_inherits as i on i.inhparent = tree.relid
    )
    select relid::regclass from tree
$$;
comment on function tube.descendants(regclass) is
    'A table with its partitions and inheritance children: a statement trigger fires only on the one that a statement names.';

create function tube.parse_predicate(predicate text) returns void
language plpgsql stable
set search_path = pg_catalog, tube, pg_temp
as $$
begin
    execute format(E'select where (%s\n) limit 0', predicate);
exception
    when syntax_error or invalid_text_representation or datatype_mismatch then
        perform tube.refuse(
            format('the predicate %L does not parse: %s', predicate, sqlerrm),
            'write an SQL condition over the columns of one row');
    when others then
        null; -- Its columns are those of tables that come later.
end
$$;
comment on function tube.parse_predicate(text) is 'Refuse a predicate that is no SQL.';

create function tube.check_predicate(predicate text, tbl regclass) returns void
language plpgsql stable
set search_path = pg_catalog, tube, pg_temp
as $$
begin
    execute format(E'select from %s as %I where (%s\n) limit 0', tbl,
                   (select c.relname from pg_class as c where c.oid = tbl), predicate);
exception when others then
    perform tube.refuse(
        format('the predicate %L does not fit %s: %s', predicate, tbl, sqlerrm),
        'write an SQL condition over the columns of one row; name functions and other tables with their schema');
end
$$;
comment on function tube.check_predicate(text, regclass) is 'Refuse a predicate that a table cannot answer.';

create function tube.table_named(name text) returns regclass
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    return to_regclass(name);
exception when others then
    return null;
end
$$;
comment on function tube.table_named(text) is 'A table by the name in a control pod; null for what is none.';

create function tube.attached_name(rel oid, tube text) returns text
language sql stable
set search_path = pg_catalog, tube, pg_temp
as $$
    select (tube.attachment_of(rel, tube)).tbl::text
$$;
comment on function tube.attached_name(oid, text) is
    'Today''s name, with its schema, of the attached table that a relation is or is a partition of.';

create function tube.captures(tbl regclass, tube text)
returns table (relid regclass, trigger name, op text, function oid, enabled boolean)
language sql stable
set search_path = pg_catalog, tube, pg_temp
as $$
    with own as (
        select distinct t.tgfoid
        from pg_trigger as t join pg_proc as p on p.oid = t.tgfoid
        where t.tgrelid in (select d.relid from tube.descendants(tbl) as d(relid)) and p.proname like 'pgchange\_touch\_%'
          and t.tgargs = convert_to(captures.tube, getdatabaseencoding()) || '\x00'::bytea
    )
    select t.tgrelid, t.tgname,
           case when t.tgtype & 4 > 0 then 'insert' when t.tgtype & 8 > 0 then 'delete'
                when t.tgtype & 16 > 0 then 'update' else 'truncate' end,
           t.tgfoid, t.tgenabled in ('O', 'A')
    from pg_trigger as t join own on own.tgfoid = t.tgfoid
$$;
comment on function tube.captures(regclass, text) is
    'The triggers by which a table touches a tube, its partitions'' and those of former partitions too: found by what they '
    'call, whatever was renamed.';

create function tube.capture_name(tbl regclass, tube text, op text) returns name
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select case
        when octet_length(c.relname || tube) <= 38 then format('%s_%s_after_%s_trigger', c.relname, tube, op)
        else format('%s_%s_after_%s_trigger', left(c.relname || '_' || tube, 14), left(md5(c.relname || '/' || tube), 8), op)
    end::name
    from pg_class as c where c.oid = tbl
$$;
comment on function tube.capture_name(regclass, text, text) is
    'The name of a trigger: <table>_<tube>_after_<op>_trigger, shortened where it would not fit.';
