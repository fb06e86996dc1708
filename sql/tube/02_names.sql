-- Names of tables, functions and triggers.

-- The name of the schema of a relation; null if the relation does not exist.
create function tube.schema_of(rel regclass) returns name
language sql stable as $$
    select n.nspname from pg_class as c join pg_namespace as n on n.oid = c.relnamespace where c.oid = rel
$$;

-- The current name of a relation with its schema, for use under any search_path; null if the relation does not exist.
create function tube.full_name(rel oid) returns text
language plpgsql stable
set plan_cache_mode = force_generic_plan
as $$
begin
    return (
        select format('%I.%I', n.nspname, c.relname) from pg_class as c join pg_namespace as n on n.oid = c.relnamespace where c.oid = rel);
end
$$;

-- The table that a control pod names; null if there is no such table.
create function tube.table_named(name text) returns regclass
language plpgsql stable as $$
begin
    return to_regclass(name);
exception when others then
    return null;
end
$$;

-- A name with this suffix. If it is longer than 63 bytes, the base is cut, and a hash of the base is inserted before the suffix.
create function tube.short_name(base text, suffix text) returns name
language sql immutable as $$
    select case
        when octet_length(base || suffix) <= 63 then base || suffix
        else (
            select left(base, n) from generate_series(0, length(base)) as n
            where octet_length(left(base, n)) <= 54 - octet_length(suffix) order by n desc limit 1
        ) || '_' || left(md5(base), 8) || suffix
    end::name
$$;

-- The name of a function of an attachment: of a trigger, or of the function judge, which applies the predicate.
create function tube.function_name(token text, kind text) returns name
language plpgsql immutable as $$
begin
    return case when kind = 'judge' then 'pgchange_judge_' || token else format('pgchange_touch_%s_%s', kind, token) end;
end
$$;

-- The name of a trigger: <table>_<tube>_after_<op>_trigger, shortened if it is too long.
create function tube.capture_name(tbl regclass, tube text, op text) returns name
language sql stable as $$
    select tube.short_name(c.relname || '_' || tube, format('_after_%s_trigger', op)) from pg_class as c where c.oid = tbl
$$;

-- Functions that tube writes itself: lock_key() and take_lock(), because all workers share the lock of the tube. note_attempt()
-- and outcome(), because workers may neither write nor read pgchange.batch.
select pgchange.offer(
    'tube', 'tube', 'tube text, worker integer', 'tube:%s/%s', traits => '{work set,copied letters}',
    own => '{lock_key,note_attempt,outcome,take_lock}', letters_elsewhere => false, options => 'workers integer', as_owner => false);
