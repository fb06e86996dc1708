-- The functions and triggers of an attachment: finding, placing, repairing and dropping them.

-- The functions of an attachment. For each kind: its name with the schema in which it is or will be created, and its owner if it
-- exists. A function to which another role gave this name in another schema does not count.
create function tube.placed(attached tube.attachment) returns table (kind text, name text, owner oid)
language plpgsql stable
set plan_cache_mode = force_generic_plan
as $$
begin
    return query
        with called as materialized (
            select c.function from tube.captures(attached.tbl, attached.tube) as c
        )
        select k.kind, format('%I.%I', coalesce(f.schema, tube.schema_of(attached.tbl)), k.name), f.owner
        from (
            select x, tube.function_name(attached.token, x)
            from unnest(array['insert', 'update', 'delete', 'truncate', 'judge']) as x
        ) as k(kind, name)
        left join lateral (
            select n.nspname, p.proowner
            from pg_class as t
            join pg_proc as p on p.proname = k.name
            join pg_namespace as n on n.oid = p.pronamespace
            cross join lateral (select exists (select from called as c where c.function = p.oid)) as u(is_called)
            where t.oid = attached.tbl and (u.is_called or p.pronamespace = t.relnamespace or p.proowner = t.relowner)
            order by u.is_called desc, p.proowner = t.relowner desc
            limit 1
        ) as f(schema, owner) on true;
end
$$;

-- Whether functions of an attachment belong to a former owner of the table. The present owner may not replace them.
create function tube.is_anothers(attached tube.attachment) returns boolean
language sql stable as $$
    select exists (
        select from tube.placed(attached) as p join pg_class as t on t.oid = attached.tbl where p.owner <> t.relowner)
$$;

-- Create or replace a trigger function of a table.
create function tube.place_function(attached tube.attachment, op text, function text) returns void
language plpgsql as $$
declare
    owner_name name := (select pg_get_userbyid(c.relowner) from pg_class as c where c.oid = attached.tbl);
begin
    -- Without a predicate, the body names everything with its schema, also types and operators. Otherwise objects of the writer
    -- could run with the owner's rights. A pinned search_path would cost more than the rest of the function.
    perform pgchange.place_function(
        function || '()',
        format(
            'create or replace function %s() returns trigger language plpgsql security definer %s %s as %L', function,
            case when attached.predicate is not null or op = 'truncate' then 'set search_path = pg_catalog, tube, pg_temp' end,
            case when attached.predicate is not null then pgchange.settings() else pgchange.key_settings(attached.key_types) end,
            tube.capture_body(attached, op)),
        tube.capture_comment(attached));
    execute format('alter function %s() owner to %I', function, owner_name);
end
$$;

-- Create the function that applies the predicate of an attachment outside of its triggers, with the rights of the table's owner.
-- Raises an error if the predicate does not fit the table, or needs more rights than its owner has.
create function tube.place_judge(attached tube.attachment, function text) returns void
language plpgsql as $$
declare
    owner_name name := (select pg_get_userbyid(c.relowner) from pg_class as c where c.oid = attached.tbl);
    ids text := case when attached.key_types = '{bigint}' then 'bigint[]' else 'text[]' end;
    signature text := format('%s(%s, name, boolean, text, text, integer)', function, ids);
begin
    perform pgchange.place_function(signature, format($function$
        create or replace function %1$s(
            asked %2$s, order_col name, in_nulls boolean, last_value text, last_id text, chunk integer,
            out looked_at bigint, out upto_value text, out upto_id text, out ids %2$s, out failed bigint, out message text
        )
        language plpgsql security definer
        set search_path = pg_catalog, tube, pg_temp %3$s
        as %4$L
    $function$, function, ids, pgchange.settings(), format($body$
declare
    attached tube.attachment := (select a from tube.attachment as a where a.token = %L);
begin
    attached.key := tube.key_names(attached.tbl, attached.tube);
    if asked is not null then
        ids := tube.read_wanted(attached, asked);
    elsif chunk is null then
        perform tube.check_predicate(attached.predicate, attached.tbl);
    else
        select s.* into looked_at, upto_value, upto_id, ids, failed, message
        from tube.read_slice(attached, order_col, in_nulls, last_value, last_id, chunk, asked) as s;
    end if;
end
$body$, attached.token)), format('Reads %s for backfills into tube %s.', attached.tbl, attached.tube));
    execute format('alter function %s owner to %I', signature, owner_name);
    if attached.key_types = '{bigint}' then
        perform tube.ask_judge(signature::regprocedure, null::bigint[]);
    else
        perform tube.ask_judge(signature::regprocedure, null::text[]);
    end if;
end
$$;

-- Create or replace all functions of an attachment.
create function tube.place_functions(attached tube.attachment) returns void
language plpgsql as $$
declare
    placed record;
begin
    for placed in select p.* from tube.placed(attached) as p order by p.kind <> 'judge' loop
        if placed.kind <> 'judge' then
            perform tube.place_function(attached, placed.kind, placed.name);
        elsif attached.predicate is not null then
            perform tube.place_judge(attached, placed.name);
        end if;
    end loop;
end
$$;

-- The table and its partitions that lack a trigger of the capture.
create function tube.uncaptured(attached tube.attachment) returns regclass[]
language plpgsql stable
set plan_cache_mode = force_generic_plan
as $$
begin
    return (
        select array(
            select d.relid from pgchange.descendants(attached.tbl) as d(relid)
            left join (
                select c.relid from tube.captures(attached.tbl, attached.tube) as c
                group by 1 having count(distinct c.op) = cardinality(tube.capture_ops(attached.tbl))
            ) as whole on whole.relid = d.relid
            where whole.relid is null order by d.relid));
end
$$;

-- Place the triggers on a table and on every partition without them. Remove the triggers of another table of which it was a
-- partition.
create function tube.place_triggers(attached tube.attachment) returns void
language plpgsql as $$
declare
    uncaptured regclass[] := tube.uncaptured(attached);
    former regclass[] := array(select distinct f.relid from tube.former_captures(attached.tbl, attached.tube) as f order by 1);
    captured record;
    missing record;
    wanted name;
begin
    if uncaptured || former = '{}' then
        return;
    end if;
    perform pgchange.take_locks(
        array(select distinct r from unnest(uncaptured || former) as r order by r),
        case when former <> '{}' then 'access exclusive' else 'share row exclusive' end);
    for captured in select f.* from tube.former_captures(attached.tbl, attached.tube) as f loop
        execute format('drop trigger %I on %s', captured.trigger, captured.relid);
    end loop;
    for missing in
        with kinds as materialized (
            select k.op, p.name as function
            from unnest(tube.capture_ops(attached.tbl)) as k(op) left join tube.placed(attached) as p on p.kind = k.op
        ), captured as materialized (
            select c.relid, c.op from tube.captures(attached.tbl, attached.tube) as c
        )
        select r.relid, k.op, k.function from kinds as k cross join unnest(uncaptured) as r(relid)
        where not exists (select from captured as c where c.relid = r.relid and c.op = k.op)
          and (k.op not in ('guard', 'bar') or r.relid = attached.tbl)
    loop
        if missing.op = 'guard' then
            perform pgchange.place_guard(missing.relid, tube.function_name(attached.token, 'guard'));
            continue;
        end if;
        if missing.op = 'bar' then
            perform pgchange.place_bar(missing.relid, tube.function_name(attached.token, 'bar'));
            continue;
        end if;
        wanted := tube.capture_name(attached.tbl, attached.tube, missing.op);
        execute format(
            'create trigger %I after %s on %s %s for each statement execute function %s(%L)', wanted, missing.op, missing.relid,
            case missing.op when 'insert' then 'referencing new table as pgchange_added'
                            when 'update' then 'referencing old table as pgchange_removed new table as pgchange_added'
                            when 'delete' then 'referencing old table as pgchange_removed' else '' end,
            missing.function, attached.tube);
    end loop;
exception when duplicate_object then
    perform pgchange.refuse(format('%s already has a trigger %I', missing.relid, wanted),
        'if another system captures the same changes by it, drop it; otherwise rename it');
end
$$;

-- Drop the triggers of an attachment. The caller has locked the tables. Returns how many there were.
create function tube.drop_triggers(attached tube.attachment) returns bigint
language plpgsql as $$
declare
    captured record;
    dropped bigint := 0;
begin
    -- Dropping the guard and the bar of a partitioned table drops those of its partitions.
    for captured in
        select c.* from tube.captures(attached.tbl, attached.tube) as c where c.op not in ('guard', 'bar') or c.relid = attached.tbl
    loop
        execute format('drop trigger %I on %s', captured.trigger, captured.relid);
        dropped := dropped + 1;
    end loop;
    return dropped;
end
$$;

-- Remove the capture from a table that stays attached; false if it has none. If the table has a foreign table as a child,
-- PostgreSQL would refuse updates and deletes through the captured table.
create function tube.take_off(attached tube.attachment) returns boolean
language plpgsql as $$
begin
    perform tube.hold_capture(attached.tbl);
    perform pgchange.take_locks(array(
        select c.relid from tube.captures(attached.tbl, attached.tube) as c group by 1 order by 1), 'access exclusive');
    return tube.drop_triggers(attached) > 0;
end
$$;

-- Drop the triggers and the functions of an attachment. The caller has locked the tables.
create function tube.drop_capture(attached tube.attachment) returns void
language plpgsql as $$
declare
    function regprocedure;
begin
    perform tube.drop_triggers(attached);
    -- Functions of a former owner stay; without their triggers they do nothing.
    for function in
        select p.oid from unnest(array['insert', 'update', 'delete', 'truncate', 'judge']) as k(kind)
        join pg_proc as p on p.proname = tube.function_name(attached.token, k.kind)
        where not exists (select from pgchange.triggers_of(p.oid)) and pg_has_role(current_user, p.proowner, 'usage')
    loop
        execute format('drop function %s', function);
    end loop;
end
$$;
