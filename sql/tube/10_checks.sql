-- Which tables can be attached.

-- Refuse a table that cannot be attached to any tube, with the reason.
create function tube.check_table(tbl regclass) returns void
language plpgsql stable as $$
begin
    perform pgchange.check_capturable(tbl, 'attach', 'tube');
    if exists (select from tube.tube as t where t.pods = tbl and tube.are_pods(tbl, t.name)) then
        perform pgchange.refuse(format('%s is not a table of your own', tbl), 'attach a table of your own');
    end if;
end
$$;

-- Refuse columns that cannot be ids of a tube, with the reason. Whether they identify a row is not checked here.
create function tube.check_columns(tbl regclass, columns name[], known tube.tube) returns void
language plpgsql stable as $$
declare
    column_name name;
    found_one pg_attribute;
    reason text;
    types constant regtype[] := pgchange.key_types(tbl, columns);
begin
    if coalesce(cardinality(columns), 0) = 0 then
        perform pgchange.refuse(format('no column of %s is named', tbl), 'name the columns that hold its ids');
    end if;
    foreach column_name in array columns loop
        found_one := (
            select a from pg_attribute as a
            where a.attrelid = tbl and a.attname = column_name and a.attnum > 0 and not a.attisdropped);
        reason := pgchange.key_type_trouble(found_one.atttypid, found_one.attcollation);
        if found_one is null then
            perform pgchange.refuse(format('%s has no column %I', tbl, column_name), 'name columns that it has');
        elsif found_one.attgenerated = 'v' then
            perform pgchange.refuse(
                format(
                    'column %I of %s is virtual, so a trigger does not see its values',
                    column_name, tbl), 'make it a stored column, or name other columns');
        elsif reason is not null then
            perform pgchange.refuse(
                format('column %I of %s is %s: %s', column_name, tbl, format_type(found_one.atttypid, found_one.atttypmod), reason),
                'name columns of other types');
        end if;
    end loop;
    if types <> known.key then
        perform pgchange.refuse(
            format('the ids of %s, %s, are %s, and those of tube %I are %s', tbl,
                   (select string_agg(quote_ident(c.name), ', ' order by c.place) from unnest(columns) with ordinality as c(name, place)),
                   array_to_string(types, ', '), known.name, array_to_string(known.key, ', ')),
            format(
                'make a tube for such ids: select tube.tube_ensure_exists(%L, key => %L); or name other columns, by key, or by '
                'group_by if several rows have one id', known.name || '_2', types));
    end if;
end
$$;

-- The grants that the owner of a table needs for its capture.
create function tube.rights_hint(owner_name name, pods regclass) returns text
language sql stable as $$
    select format(
        'let their owners run: select tube.grant_consumer(%L); grant usage on schema %I to %I; grant insert (op, shard, ids, '
        'payload, ts) on %s to %I',
                  quote_ident(owner_name), tube.schema_of(pods), owner_name, tube.full_name(pods), owner_name)
$$;

-- Refuse a caller that lacks rights on the pods of a tube.
create function tube.demand(known tube.tube, deed text, rights text[]) returns void
language plpgsql stable as $$
declare
    missing text := (
        select string_agg(case r when 'insert' then 'insert (op, shard, ids, payload, ts)' else r end, ', ')
        from unnest(rights) as r
        where not case r when 'insert' then has_any_column_privilege(known.pods, r) else has_table_privilege(known.pods, r) end);
begin
    if missing is not null then
        raise insufficient_privilege using
            message = format('role %I may not %s %I', current_user, deed, known.name),
            hint = format(
                'let the owner of its pods run: grant usage on schema %1$I to %2$I; grant %3$s on %4$s to %2$I',
                tube.schema_of(known.pods), current_user, missing, tube.full_name(known.pods));
    end if;
end
$$;

-- Which changes of a table are lost because the role of its capture may not insert pods; null if none are.
create function tube.what_is_lost(capturer oid, pods regclass) returns text
language sql stable as $$
    -- Make the same checks as the capture. Name columns by their numbers, because naming a dropped column raises an error.
    select case
        when not has_sequence_privilege(capturer, 'tube.seq', 'usage')
             or not (has_table_privilege(capturer, pods, 'insert') or a.columns @> '{op,shard,ids}')
            then 'changes are lost'
        when not (has_table_privilege(capturer, pods, 'insert') or a.columns @> '{payload}')
            then 'truncations are lost'
    end
    from (
        select coalesce(array_agg(a.attname) filter (where has_column_privilege(capturer, pods, a.attnum, 'insert')), '{}')
        from pg_attribute as a where a.attrelid = pods and a.attnum > 0 and not a.attisdropped
    ) as a(columns)
$$;

-- Refuse a table whose owner may not insert pods.
create function tube.check_rights(tbl regclass, known tube.tube) returns void
language plpgsql stable as $$
declare
    owner_name name := (select pg_get_userbyid(c.relowner) from pg_class as c where c.oid = tbl);
begin
    if not (
        has_schema_privilege(owner_name, 'tube', 'usage')
        and (select bool_and(has_column_privilege(owner_name, known.pods, c, 'insert'))
             from unnest(array['op', 'shard', 'ids', 'payload', 'ts']) as c)
        and has_sequence_privilege(owner_name, 'tube.seq', 'usage')
        and has_column_privilege(owner_name, 'tube.fault', 'message', 'insert')
        and has_schema_privilege(owner_name, (select c.relnamespace from pg_class as c where c.oid = known.pods), 'usage')
    ) then
        raise insufficient_privilege using
            message = format('%I, the owner of %s, may not put pods into tube %I', owner_name, tbl, known.name),
            hint = tube.rights_hint(owner_name, known.pods);
    end if;
end
$$;

-- The parents of a table, and other parents of its children. A statement on such a parent changes rows of the table, but fires no
-- trigger of the table.
create function tube.outer_parents(tbl regclass) returns setof regclass
language plpgsql stable as $$
declare
    tree oid[] := array(select d.relid from pgchange.descendants(tbl) as d(relid));
begin
    return query
        select distinct i.inhparent::regclass from pg_inherits as i
        where i.inhrelid = any (tree) and i.inhparent <> all (tree);
end
$$;

-- Refuse a table whose rows are also changed by statements on a parent.
create function tube.check_parents(tbl regclass) returns void
language plpgsql stable as $$
declare
    parent regclass := (select min(p::oid) from tube.outer_parents(tbl) as p);
begin
    if parent is not null then
        perform pgchange.refuse(
            format('%s, or a child of it, has the parent %s, and writes through that parent would not be captured', tbl, parent),
            format('attach %s, or end the inheritance', parent));
    end if;
end
$$;

-- Refuse a table if a partition, child or parent of it is attached to the same tube, because a row has only one shard.
create function tube.check_family(tbl regclass, tube text) returns void
language plpgsql stable as $$
declare
    relative regclass := (
        with recursive family(relid) as (
            select d.relid from pgchange.descendants(tbl) as d(relid)
            union
            select i.inhparent from family join pg_inherits as i on i.inhrelid = family.relid
        )
        select (k.attached).tbl
        from family
        cross join lateral (
            select a from tube.attachment as a
            where a.tbl = family.relid and a.tube = check_family.tube and a.tbl <> check_family.tbl offset 0
        ) as k(attached)
        where not tube.is_gone(k.attached) order by (k.attached).tbl::text limit 1
    );
begin
    if relative is not null then
        perform pgchange.refuse(
            format('%s shares rows with %s, which is attached to tube %I already', tbl, relative, tube),
            format('detach that table first: tube.tube_table_ensure_detached(%L, %L)', tube, relative));
    end if;
end
$$;

-- Refuse a table if another table of the same name touches the tube under the same shard. A copy could not distinguish their
-- rows.
create function tube.check_twin(wanted tube.attachment) returns void
language plpgsql as $$
declare
    relation name := (select c.relname from pg_class as c where c.oid = wanted.tbl);
    twin regclass;
begin
    -- Serialize attachments of tables with this name, so that the second of two sees the first.
    perform pg_advisory_xact_lock(hashtextextended(format('pgchange twin %s %s %s', wanted.shard, relation, wanted.tube), 0));
    select (k.attached).tbl into twin
    from pg_class as c
    cross join lateral (
        select a from tube.attachment as a
        where a.tube = wanted.tube and a.tbl = c.oid and a.shard = wanted.shard and a.tbl <> wanted.tbl offset 0
    ) as k(attached)
    where c.relname = relation and not tube.is_gone(k.attached)
    order by (k.attached).tbl limit 1;
    if twin is not null then
        perform pgchange.refuse(
            format('%s and %s would both touch tube %I under shard %s, so a copy could not tell their rows apart',
                   wanted.tbl, twin, wanted.tube, wanted.shard),
            'attach one of them under another shard, or to another tube');
    end if;
end
$$;
