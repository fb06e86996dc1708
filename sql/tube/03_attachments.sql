-- Which table an attachment is of, by which columns and triggers it touches its tube, and under which shard: found again whatever
-- was renamed, dropped or restored since.

-- Whether a relation is the table that was made for a tube's pods; false where that was dropped.
-- In a dump a relation that was dropped is a mere number, which another relation may have where the dump is restored: so a
-- number alone proves nothing. In PL/pgSQL, which keeps its plans: every claim asks.
create function tube.are_pods(rel regclass, tube text) returns boolean
language plpgsql stable as $$
declare
    told text := obj_description(rel, 'pg_class');
begin
    if told like 'Pods of tube %' then
        return starts_with(told, format('Pods of tube %s:', tube));
    end if;
    -- A dump may have left the comment out.
    return (
        select count(*) = 4
        from pg_attribute as a
        join (values
            ('seq', 'bigint'::regtype), ('shard', 'integer'), ('ids', 'bigint[]'), ('ids', 'text[]'), ('txid', 'xid8')
        ) as v(name, type) on a.attname = v.name and a.atttypid = v.type
        where a.attrelid = rel and a.attnum > 0);
end
$$;

-- What is noted with the functions of a table's triggers.
create function tube.capture_comment(attached tube.attachment) returns text
language sql stable as $$
    select format('Capture of %s for tube %s.', tube.full_name(attached.tbl), attached.tube)
$$;

-- Whether the table of an attachment was dropped, whatever has its number now: that has none of its triggers, nor the name that is
-- noted with their functions.
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
    -- Somebody may have dropped all of them.
    return not exists (
        select from unnest(array['insert', 'update', 'delete', 'truncate']) as k(op)
        join pg_proc as p on p.proname = tube.function_name(attached.token, k.op)
        where obj_description(p.oid, 'pg_proc') = tube.capture_comment(attached));
end
$$;

-- The attachment that a table belongs to: its own, or that of the nearest table whose partition or child it is.
create function tube.attachment_of(rel oid, tube text) returns tube.attachment
language plpgsql stable
-- Asked by captures too, whatever a writer has set.
set row_security = on
as $$
begin
    return (
        with recursive line(relid, up) as (
            select rel, 0
            union
            select i.inhparent, line.up + 1 from line join pg_inherits as i on i.inhrelid = line.relid
        )
        select a from line join tube.attachment as a on a.tbl = line.relid and a.tube = attachment_of.tube
        where not tube.is_gone(a)
        order by line.up limit 1);
end
$$;

-- Whether a table is attached to a tube, also for an owner of it who may no longer see the tube.
create function tube.is_attached(tube text, tbl oid) returns boolean
language sql stable security definer as $$
    select (tube.attachment_of(tbl, tube)).tube is not null
$$;

-- Today's name, with its schema, of the attached table that a relation is or is a partition of.
create function tube.attached_name(rel oid, tube text) returns text
language sql stable as $$
    select tube.full_name((tube.attachment_of(rel, tube)).tbl)
$$;

-- The shard under which a table touches a tube, or did when it was detached; null for one that never did.
create function tube.shard_of(tube text, tbl regclass) returns integer
language sql stable as $$
    select coalesce(
        (select a.shard from tube.attachment as a where a.tube = shard_of.tube and a.tbl = shard_of.tbl),
        (select d.shard from tube.detached as d where d.tube = shard_of.tube and d.tbl = shard_of.tbl))
$$;

-- The shard that the trailing digits of the name of a table's schema are, or else those of its own name.
create function tube.inferred_shard(tbl regclass) returns integer
language plpgsql stable as $$
declare
    digits text := coalesce(
        substring(tube.schema_of(tbl) from '(?:^|[^0-9])0*([0-9]{1,9})$'),
        (select substring(c.relname from '(?:^|[^0-9])0*([0-9]{1,9})$') from pg_class as c where c.oid = tbl));
begin
    if digits is null then
        perform pgchange.refuse(
            format('neither the name of the schema of %s nor its own ends in a shard''s number', tbl),
            'give the shard: tube.tube_table_ensure_attached(tube, tbl, shard => ...)');
    end if;
    return digits::integer;
end
$$;

-- A column of the ids of an attached table as it is today, by its place in the key. If one column has its name and another its number,
-- it is the one in a unique index: that took the place of the other. If both are or neither is, it is the one with the number, whatever
-- it is called now; in a restored table, where numbers are others, the one with the name.
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

-- What is wrong today with the columns from which the ids of an attached table are taken; null if every row has an id in them.
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
                 when k.attname is null then format('its column of ids, %I, was dropped, and its changes are lost', k.name)
                 when pgchange.key_type(k.atttypid) <> k.type
                     then format('its column of ids, %I, is %s now, and has to be %s', k.attname, format_type(k.atttypid, k.atttypmod),
                                 case when k.type = 'bigint'::regtype then 'bigint, integer or smallint' else k.type::text end)
                 when t.reason is not null then format('its column of ids, %I: %s', k.attname, t.reason)
                 else format('its column of ids, %I, can be null: a row without an id touches nothing, and is in no copy', k.attname) end
             from key as k cross join lateral pgchange.key_type_trouble(k.atttypid, k.attcollation) as t(reason)
             where k.attname is null or pgchange.key_type(k.atttypid) <> k.type or t.reason is not null or not k.attnotnull
             order by k.place limit 1),
            (select format('no unique index names its rows by %s: several rows can have one id', string_agg(quote_ident(k.attname), ', ' order by k.place))
             from key as k
             where not attached.is_grouped
             having pgchange.key_order(attached.tbl, array_agg(k.attname order by k.place)) is null and count(*) > 0)));
end
$$;

-- Today's names of the columns of ids of an attached table or of a partition of it; null if one of them is gone.
create function tube.key_names(rel oid, tube text) returns name[]
language sql stable as $$
    select case when bool_and(n.name is not null) then array_agg(n.name order by p.place) end
    from (select (tube.attachment_of(rel, tube)).*) as a
    cross join lateral generate_subscripts(a.key, 1) as p(place)
    cross join lateral tube.key_attribute(a::tube.attachment, p.place) as k
    cross join lateral pgchange.key_now(
        a.tbl, k.attname, k.attnum, a.key[p.place], case when a.number_of = a.tbl::oid then a.key_numbers[p.place] end) as n(name)
$$;

-- What the triggers are for by which a table and each of its partitions touch a tube, and those that make such triggers right.
create function tube.capture_ops(tbl regclass) returns text[]
language sql stable as $$
    -- To triggers of a partitioned table PostgreSQL (15 to 18) shows what a MERGE updates as the row that it inserted last;
    -- but not where partitions have a trigger that comes before each row is inserted: so there is one, that never fires.
    select array['insert', 'update', 'delete', 'truncate'] || case when c.relkind = 'p' then array['guard', 'bar'] end
    from pg_class as c where c.oid = tbl
$$;

-- The triggers by which a table touches a tube, its partitions' and those of former partitions too: found by what they call, whatever
-- was renamed; guards and bars, which call nothing of ours, by their names.
create function tube.captures(tbl regclass, tube text)
returns table (relid regclass, trigger name, op text, function oid, enabled boolean)
language plpgsql stable rows 4
set plan_cache_mode = force_generic_plan
as $$
declare
    token text := (select a.token from tube.attachment as a where a.tbl = captures.tbl and a.tube = captures.tube);
    names name[] := array(select tube.function_name(token, k) from unnest(array['insert', 'update', 'delete', 'truncate']) as k);
    functions oid[] := array(select p.oid from pg_proc as p where p.proname = any (names));
    tree oid[];
begin
    if token is null then
        return;
    end if;
    tree := array(select d.relid from pgchange.descendants(tbl) as d(relid));
    -- Not a function of that name that somebody else put on another table.
    functions := array(select distinct t.tgfoid from pg_trigger as t where t.tgrelid = any (tree) and t.tgfoid = any (functions));
    return query
        select t.tgrelid::regclass, t.tgname, split_part(p.proname, '_', 3), p.oid, t.tgenabled in ('O', 'A')
        from unnest(functions) as f(oid)
        join pg_proc as p on p.oid = f.oid
        cross join lateral pgchange.triggers_of(p.oid) as t
        union all
        select t.tgrelid::regclass, t.tgname, k.kind, t.tgfoid, t.tgenabled in ('O', 'A')
        from unnest(array['guard', 'bar']) as k(kind)
        join pg_trigger as t on t.tgname = tube.function_name(token, k.kind)
        where t.tgrelid = any (tree);
end
$$;

-- The triggers on a table and its partitions by which another table, whose partition one was, still touches a tube.
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
