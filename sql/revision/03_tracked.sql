-- The current key, owner and branch of a tracked table.

-- The current columns of the key of a tracked table, by their places in the key; the attribute is null if the column was dropped.
-- If one column has the recorded name and another the recorded number, the column in a unique index has replaced the other. If
-- both or neither is in such an index, the number decides, because a rename keeps the number. In a restored table, whose numbers
-- may differ, the name decides.
create function revision.key_attributes(known revision.tracked)
returns table (place bigint, name name, number smallint, type regtype, today pg_attribute)
language plpgsql stable
set plan_cache_mode = force_generic_plan
as $$
begin
    return query
        select u.place, u.name, u.number, u.type, coalesce(
            (select a from pg_attribute as a
             where a.attrelid = known.tbl and a.attname = u.name and a.attnum = u.number and not a.attisdropped),
            (select a
             from pg_attribute as a
             where a.attrelid = known.tbl and a.attnum > 0 and not a.attisdropped and (a.attname = u.name or a.attnum = u.number)
             order by
                 exists (
                     select from pgchange.unique_indexes(known.tbl) as i
                     where cardinality(i.columns) = cardinality(known.key) and a.attname = any (i.columns)) desc,
                 (a.attnum = u.number) = (known.key_of = known.tbl::oid) desc
             limit 1))
        from unnest(known.key, known.key_numbers, known.key_types) with ordinality as u(name, number, type, place);
end
$$;

-- The current names of the key columns of a tracked table or of a partition of it; null if such a column was dropped.
create function revision.key_columns(rel oid) returns name[]
language sql stable security definer as $$
    with recursive line(relid, depth) as (
        select rel, 0
        union
        select i.inhparent, line.depth + 1 from line join pg_inherits as i on i.inhrelid = line.relid
    ), known as (
        select t from line join revision.tracked as t on t.tbl = line.relid order by line.depth limit 1
    )
    select case when bool_and(n.name is not null) then array_agg(n.name order by k.place) end
    from known
    cross join lateral revision.key_attributes(known.t) as k
    cross join lateral pgchange.key_now(
        (known.t).tbl, (k.today).attname, (k.today).attnum, k.name,
        case when (known.t).key_of = (known.t).tbl::oid then k.number end) as n(name)
$$;

-- The problem with the current key of a tracked table, for which revision.track() would refuse it; null if there is none.
create function revision.key_trouble(known revision.tracked) returns text
language plpgsql stable
set plan_cache_mode = force_generic_plan
as $$
begin
    return (
        with key as materialized (
            select a.* from revision.key_attributes(known) as a
        )
        select coalesce(
            (select case
                 when (k.today).attname is null then format(
                     'its key column %I was dropped, so its rows go to revision.fault', k.name)
                 when pgchange.key_type((k.today).atttypid) <> k.type then format(
                     'its key column %I is %s now, and %s', (k.today).attname, format_type((k.today).atttypid, (k.today).atttypmod),
                     case when k.type = 'bigint'::regtype then 'must be bigint, integer or smallint'
                          else format('was %s: a consumer cannot tell its new keys from those of before', k.type) end)
                 when t.reason is not null then format(
                     'its key column %I is %s now: %s', (k.today).attname, format_type((k.today).atttypid, (k.today).atttypmod), t.reason)
                 else format(
                     'its key column %I can be null now, and a row without a key goes to revision.fault instead of the queue',
                             (k.today).attname) end
             from key as k
             cross join lateral pgchange.key_type_trouble((k.today).atttypid, (k.today).attcollation) as t(reason)
             where (k.today).attname is null or pgchange.key_type((k.today).atttypid) <> k.type or t.reason is not null
                or not (k.today).attnotnull
             order by k.place
             limit 1),
            (select format(
                 case when cardinality(c.columns) = 1
                      then 'its key column %s is not unique any more, and two rows with one key are the same commit'
                      else 'its key columns %s have no unique index together any more, and two rows with one key are the same commit' end,
                 (select string_agg(quote_ident(n), ', ' order by place) from unnest(c.columns) with ordinality as u(n, place)))
             from (select array_agg((k.today).attname order by k.place) from key as k) as c(columns)
             where pgchange.key_order(known.tbl, c.columns) is null)));
end
$$;

-- Whether the caller has the role of the owner of a table, or of a table of which it is a partition.
create function revision.owns(rel oid) returns boolean
language sql stable as $$
    with recursive line(relid) as (
        select rel
        union
        select i.inhparent from line join pg_inherits as i on i.inhrelid = line.relid
    )
    select exists (
        select from line join pg_class as c on c.oid = line.relid where pg_has_role(c.relowner, 'usage'))
$$;

-- Refuse an action on a table to a role that is not a member of its owner.
create function revision.check_owner(tbl regclass, deed text) returns void
language plpgsql stable as $$
begin
    if not revision.owns(tbl) then
        perform pgchange.check_owner(tbl, deed);
    end if;
end
$$;

-- The branch of a tracked table, for keys of these types. The first call creates it.
create function revision.own_branch(tbl regclass, key_types regtype[]) returns bigint
language plpgsql as $$
declare
    branch bigint := (select b.id from revision.branch as b where b.tbl = own_branch.tbl);
begin
    while branch is null loop
        insert into revision.branch (type, tbl, key) values ('stable', own_branch.tbl, nullif(key_types, '{bigint}'))
        on conflict (id) do nothing
        returning id into branch;
    end loop;
    return branch;
end
$$;

-- Refuse a branch that does not exist, or whose keys have other types.
create function revision.check_branch(branch bigint, tbl regclass, key_types regtype[]) returns void
language plpgsql stable as $$
declare
    known revision.branch := (select b from revision.branch as b where b.id = branch);
    kept constant regtype[] := coalesce(known.key, '{bigint}');
begin
    if known is null then
        raise exception using errcode = 'PC001', message = format('there is no branch %s', branch),
            hint = 'insert it into revision.branch, or leave branch_id out for a branch of the table''s own';
    end if;
    if kept <> key_types then
        perform pgchange.refuse(
            format('the keys of branch %s are %s, and those of %s are %s', branch, array_to_string(kept, ', '), tbl,
                   array_to_string(key_types, ', ')),
            case when known.tbl is distinct from check_branch.tbl then 'leave branch_id out for a branch of the table''s own'
            else format('make another branch and give its id as branch_id: insert into revision.branch (type, key) values '
                        '(''stable'', %L) returning id', nullif(key_types, '{bigint}')) end);
    end if;
end
$$;
