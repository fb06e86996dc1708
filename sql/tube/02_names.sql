-- What tables, functions and triggers are called.

-- The schema that a relation is in; null where the relation is gone.
create function tube.schema_of(rel regclass) returns name
language sql stable as $$
    select n.nspname from pg_class as c join pg_namespace as n on n.oid = c.relnamespace where c.oid = rel
$$;

-- Today's name of a relation with its schema, whatever search_path it will be read under; null where it is gone.
create function tube.full_name(rel oid) returns text
language plpgsql stable
set plan_cache_mode = force_generic_plan
as $$
begin
    return (
        select format('%I.%I', n.nspname, c.relname) from pg_class as c join pg_namespace as n on n.oid = c.relnamespace where c.oid = rel);
end
$$;

-- A table by the name in a control pod; null for what is none.
create function tube.table_named(name text) returns regclass
language plpgsql stable as $$
begin
    return to_regclass(name);
exception when others then
    return null;
end
$$;

-- A name that ends as it should, and in the middle says by a hash what was left out where it would be longer than 63 bytes.
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

-- What the functions of an attachment are called: those of its triggers, and the one that applies its predicate.
create function tube.function_name(token text, kind text) returns name
language plpgsql immutable as $$
begin
    return (
        select case when kind = 'judge' then 'pgchange_judge_' || token else format('pgchange_touch_%s_%s', kind, token) end::name);
end
$$;

-- The name of a trigger: <table>_<tube>_after_<op>_trigger, shortened where it would not fit.
create function tube.capture_name(tbl regclass, tube text, op text) returns name
language sql stable as $$
    select tube.short_name(c.relname || '_' || tube, format('_after_%s_trigger', op)) from pg_class as c where c.oid = tbl
$$;

-- What is its own has a reason. lock_key() and take_lock(): all workers share the tube's lock. note_attempt() and outcome(): workers may neither
-- write nor read pgchange.batch.
select pgchange.offer(
    'tube', 'tube', 'tube text, worker integer', 'tube:%s/%s', traits => '{work set,copied letters}',
    own => '{lock_key,note_attempt,outcome,take_lock}', letters_elsewhere => false, options => 'workers integer', as_owner => false);
