-- The table, key columns, triggers and shard of an attachment, found again after a rename, a drop or a restore.

-- Whether a relation is the table of a tube's pods; false if that table was dropped. A dump stores a dropped relation as an
-- oid, and after a restore another relation may have this oid. So an oid alone proves nothing. The function is in PL/pgSQL,
-- which keeps its plans, because every claim calls it.
create function tube.are_pods(rel regclass, tube text) returns boolean
language plpgsql stable as $$
declare
    table_comment text := obj_description(rel, 'pg_class');
begin
    if table_comment like 'Pods of tube %' then
        return starts_with(table_comment, format('Pods of tube %s:', tube));
    end if;
    -- A dump without comments also loses this comment. Then recognise the table by its columns.
    return (
        select count(*) = 4
        from pg_attribute as a
        join (values
            ('seq', 'bigint'::regtype), ('shard', 'integer'), ('ids', 'bigint[]'), ('ids', 'text[]'), ('txid', 'xid8')
        ) as v(name, type) on a.attname = v.name and a.atttypid = v.type
        where a.attrelid = rel and a.attnum > 0);
end
$$;

-- The comment on the functions of a table's triggers.
create function tube.capture_comment(attached tube.attachment) returns text
language sql stable as $$
    select format('Capture of %s for tube %s.', tube.full_name(attached.tbl), attached.tube)
$$;

-- Whether the table of an attachment was dropped, also if another table has its oid now. Such a table has none of the
-- attachment's triggers, and the comment on the trigger functions has another name.
create function tube.is_gone(attached tube.attachment) returns boolean
language plpgsql stable as $$
begin
    if exists (
        select from pg_trigger as t join pg_proc as p on p.oid = t.tgfoid
        where t.tgrelid = attached.tbl and starts_with(p.proname, 'pgchange_touch_')
          and split_part(p.proname, '_', 4) = attached.token
    ) then
        return false;
    end if;
    -- The triggers may have been dropped by hand, so look for their functions, too.
    return not exists (
        select from unnest(array['insert', 'update', 'delete', 'truncate']) as k(op)
        join pg_proc as p on p.proname = tube.function_name(attached.token, k.op)
        where obj_description(p.oid, 'pg_proc') = tube.capture_comment(attached));
end
$$;

-- The attachment of a table: its own, or that of its nearest ancestor, of which it is a partition or a child.
create function tube.attachment_of(rel oid, tube text) returns tube.attachment
language plpgsql stable
-- Capture triggers call it, too, with any setting of the writer.
set row_security = on
as $$
begin
    return (
        with recursive line(relid, up) as (
            select rel, 0
            union
            select i.inhparent, line.up + 1 from line join pg_inherits as i on i.inhrelid = line.relid
        )
        select k.attached
        from line
        -- Only the attachments of these relations are read, and not all of the tube.
        cross join lateral (
            select a from tube.attachment as a where a.tbl = line.relid and a.tube = attachment_of.tube offset 0
        ) as k(attached)
        where not tube.is_gone(k.attached)
        order by line.up limit 1);
end
$$;

-- Whether a table is attached to a tube. The function is security definer, because an owner of the table may lose the right to
-- see the tube.
create function tube.is_attached(tube text, tbl oid) returns boolean
language sql stable security definer as $$
    select (tube.attachment_of(tbl, tube)).tube is not null
$$;

-- The current name, with its schema, of the attached table that a relation is or is a partition of.
create function tube.attached_name(rel oid, tube text) returns text
language sql stable as $$
    select tube.full_name((tube.attachment_of(rel, tube)).tbl)
$$;

-- The shard under which a table touches a tube, or did before it was detached; null if it was never attached.
create function tube.shard_of(tube text, tbl regclass) returns integer
language sql stable as $$
    select coalesce(
        (select a.shard from tube.attachment as a where a.tube = shard_of.tube and a.tbl = shard_of.tbl),
        (select d.shard from tube.detached as d where d.tube = shard_of.tube and d.tbl = shard_of.tbl))
$$;

-- The shard that a name implies: the trailing digits of the name of the table's schema, else those of its own name.
create function tube.inferred_shard(tbl regclass) returns integer
language plpgsql stable as $$
declare
    digits text := coalesce(
        substring(tube.schema_of(tbl) from '(?:^|[^0-9])0*([0-9]{1,9})$'),
        (select substring(c.relname from '(?:^|[^0-9])0*([0-9]{1,9})$') from pg_class as c where c.oid = tbl));
begin
    if digits is null then
        perform pgchange.refuse(
            format(
                '%s cannot be attached without a shard: neither the name of its schema nor its own ends in the number of a shard',
                tbl),
            'give the shard: tube.tube_table_ensure_attached(tube, tbl, shard => ...)');
    end if;
    return digits::integer;
end
$$;

-- The current column of an id of an attached table, by its place in the key. If one column has the recorded name and another the
-- recorded number, the column in a unique index has replaced the other. If both or neither is in such an index, the number
-- decides, because a rename keeps the number. In a restored table, whose numbers may differ, the name decides.
create function tube.key_attribute(attached tube.attachment, place integer) returns pg_attribute
language plpgsql stable
set plan_cache_mode = force_generic_plan
as $$
begin
    return (
        select c
        from pg_attribute as c
        cross join lateral (
            select exists (
                select from pg_index as i
                where i.indrelid = c.attrelid and i.indisunique and i.indisvalid and i.indpred is null
                  and c.attnum = any (i.indkey::smallint[]))
        ) as u(is_unique)
        where c.attrelid = attached.tbl and c.attnum > 0 and not c.attisdropped
          and (c.attname = attached.key[place] or c.attnum = attached.key_numbers[place])
        order by u.is_unique desc, (c.attnum = attached.key_numbers[place]) = (attached.number_of = attached.tbl::oid) desc
        limit 1);
end
$$;

-- The problem with the current id columns of an attached table; null if they identify every row.
create function tube.id_trouble(attached tube.attachment) returns text
language plpgsql stable
set plan_cache_mode = force_generic_plan
as $$
begin
    return (
        with key as materialized (
            select p.place, attached.key[p.place] as name, attached.key_types[p.place] as type, k.*
            from generate_subscripts(attached.key, 1) as p(place)
            cross join lateral tube.key_attribute(attached, p.place) as k
        )
        select coalesce(
            (select case
                 when k.attname is null then format('its column of ids, %I, was dropped, so its changes are lost', k.name)
                 when pgchange.key_type(k.atttypid) <> k.type
                     then format(
                         'its column of ids, %I, is %s now, but must be %s', k.attname, format_type(k.atttypid, k.atttypmod),
                                 case when k.type = 'bigint'::regtype then 'bigint, integer or smallint' else k.type::text end)
                 when t.reason is not null then format('its column of ids, %I: %s', k.attname, t.reason)
                 else format('its column of ids, %I, can be null: a row without an id touches nothing, and is in no copy', k.attname) end
             from key as k cross join lateral pgchange.key_type_trouble(k.atttypid, k.attcollation) as t(reason)
             -- The types of most ids need no further checks.
             where (k.attnotnull and k.type = 'bigint'::regtype
                    and k.atttypid in ('bigint'::regtype, 'integer'::regtype, 'smallint'::regtype)) is not true
               and (k.attname is null or pgchange.key_type(k.atttypid) <> k.type or t.reason is not null or not k.attnotnull)
             order by k.place limit 1),
            (select format('no unique index identifies its rows by %s: several rows can have one id', u.columns)
             from (
                 select string_agg(quote_ident(k.attname), ', ' order by k.place) as columns, array_agg(k.attnum) as numbers
                 from key as k
             ) as u
             -- As in pgchange.key_order(), without the names of the columns of all indexes.
             where not attached.is_grouped and u.numbers is not null and not exists (
                 select from pg_index as i
                 where i.indrelid = attached.tbl and i.indisunique and i.indisvalid and i.indpred is null
                   and i.indnkeyatts = cardinality(u.numbers)
                   and (i.indkey::smallint[])[:i.indnkeyatts - 1] @> u.numbers
                   and (i.indkey::smallint[])[:i.indnkeyatts - 1] <@ u.numbers))));
end
$$;

-- The current names of the id columns of an attached table or of a partition of it; null if such a column was dropped.
create function tube.key_names(rel oid, tube text) returns name[]
language sql stable as $$
    select case when bool_and(n.name is not null) then array_agg(n.name order by p.place) end
    from tube.attachment_of(rel, key_names.tube) as a
    cross join lateral generate_subscripts(a.key, 1) as p(place)
    cross join lateral tube.key_attribute(a::tube.attachment, p.place) as k
    cross join lateral pgchange.key_now(
        a.tbl, k.attname, k.attnum, a.key[p.place], case when a.number_of = a.tbl::oid then a.key_numbers[p.place] end) as n(name)
$$;

-- The kinds of triggers by which a table and each of its partitions touch a tube, and of the triggers that these need.
create function tube.capture_ops(tbl regclass) returns text[]
language sql stable as $$
    -- After a MERGE on a partitioned table, PostgreSQL (15 to 18) shows statement triggers the wrong row. In place of the updated
    -- rows they see the row that was inserted last. They see the right rows if the partitions have a row trigger before insert.
    -- So there is such a trigger, the guard, which never fires.
    select array['insert', 'update', 'delete', 'truncate'] || case when c.relkind = 'p' then array['guard', 'bar'] end
    from pg_class as c where c.oid = tbl
$$;

-- The capture triggers of a table, its partitions and its former partitions, found by their functions even after a rename. Guards
-- and bars call no function of ours, so they are found by name.
create function tube.captures(tbl regclass, tube text)
returns table (relid regclass, trigger name, op text, function oid, enabled boolean)
language plpgsql stable rows 4
set plan_cache_mode = force_generic_plan
-- PostgreSQL makes the plan while the catalogues are small, and keeps it while they grow.
set enable_seqscan = off
as $$
declare
    token text := (select a.token from tube.attachment as a where a.tbl = captures.tbl and a.tube = captures.tube);
    names name[] := array[
        tube.function_name(token, 'insert'), tube.function_name(token, 'update'), tube.function_name(token, 'delete'),
        tube.function_name(token, 'truncate')];
    functions oid[];
    tree oid[];
begin
    if token is null then
        return;
    end if;
    tree := array(select d.relid from pgchange.descendants(tbl) as d(relid));
    -- Leave out a function of the same name that another role uses on another table.
    functions := array(
        select distinct p.oid from pg_trigger as t join pg_proc as p on p.oid = t.tgfoid
        where t.tgrelid = any (tree) and p.proname = any (names));
    return query
        select t.tgrelid::regclass, t.tgname, split_part(p.proname, '_', 3), p.oid, t.tgenabled in ('O', 'A')
        from pgchange.triggers_of(variadic functions) as t
        join pg_proc as p on p.oid = t.tgfoid;
    -- Only partitioned tables have guards and bars.
    if (select c.relkind from pg_class as c where c.oid = tbl) <> 'p' then
        return;
    end if;
    return query
        select t.tgrelid::regclass, t.tgname, k.kind, t.tgfoid, t.tgenabled in ('O', 'A')
        from unnest(tree) as r(relid)
        cross join (values ('guard', tube.function_name(token, 'guard')), ('bar', tube.function_name(token, 'bar'))) as k(kind, name)
        cross join lateral (select t.* from pg_trigger as t where t.tgrelid = r.relid and t.tgname = k.name offset 0) as t;
end
$$;

-- Triggers on a table and its partitions by which another table, of which it was a partition, still touches a tube.
create function tube.former_captures(tbl regclass, tube text) returns table (relid regclass, trigger name)
language sql stable as $$
    select t.tgrelid, t.tgname
    from pgchange.descendants(tbl) as d(relid)
    join pg_trigger as t on t.tgrelid = d.relid
    join pg_proc as p on p.oid = t.tgfoid
    where starts_with(p.proname, 'pgchange_touch_')
      and t.tgargs = convert_to(former_captures.tube, getdatabaseencoding()) || decode('00', 'hex')
      and split_part(p.proname, '_', 4) is distinct from (
          select a.token from tube.attachment as a where a.tbl = former_captures.tbl and a.tube = former_captures.tube)
$$;
