-- Tubes by name, and which of them are trusted. Reading, deleting or inserting pods can run code that the owner of their table
-- added to it.

-- Code of another role that would run if the caller reads, deletes or inserts pods. It is an expression, a policy, a trigger and
-- the like; null if there is none. Code of superusers does not count.
create function tube.code_on(pods regclass) returns text
language plpgsql stable
set quote_all_identifiers = off
set search_path = pg_catalog, pg_temp
as $$
declare
    class record;
begin
    -- A role with the TRIGGER privilege can add a trigger.
    if exists (
        select from pg_trigger as t
        where t.tgrelid = pods and not (
            select r.rolname = current_user or r.rolsuper
            from pg_proc as p join pg_roles as r on r.oid = p.proowner where p.oid = t.tgfoid)
    ) then
        return 'a trigger';
    end if;
    select c.relkind, c.relrowsecurity, r.rolname = current_user or r.rolsuper as is_trusted into class
    from pg_class as c join pg_roles as r on r.oid = c.relowner where c.oid = pods;
    -- The caller's own code and that of superusers are trusted: superusers have all rights anyway. Return at once, because PostgreSQL
    -- prepares all queries of the expression below, even if it runs none of them.
    if coalesce(class.is_trusted, true) then
        return null;
    end if;
    return case
        when class.relkind <> 'r' then 'become another kind of relation than an ordinary table'
        when class.relrowsecurity then 'row security'
        when exists (select from pg_rewrite as r where r.ev_class = pods) then 'a rule'
        -- A foreign key adds a trigger to the table that it refers to, too.
        when exists (select from pg_trigger as t where t.tgrelid = pods) then 'a trigger'
        when exists (select from pg_inherits as i where i.inhparent = pods) then 'a child'
        when exists (select from pg_inherits as i where i.inhrelid = pods) then 'a parent'
        when exists (select from pg_constraint as c where c.conrelid = pods and c.contype in ('c', 'x')) then 'a constraint'
        -- Code of other roles in indexes and statistics, because even planning a query of the pods can run it. PostgreSQL's own
        -- functions, types and operators have no rows in pg_depend.
        when exists (
            select from (
                select 'pg_class'::regclass, i.indexrelid from pg_index as i where i.indrelid = pods
                union all
                select 'pg_statistic_ext'::regclass, s.oid from pg_statistic_ext as s where s.stxrelid = pods
            ) as o(class, id)
            join pg_depend as d on d.classid = o.class and d.objid = o.id
            where d.refclassid in ('pg_proc'::regclass, 'pg_type'::regclass, 'pg_operator'::regclass)
        ) then 'an index or statistics with a function in them'
        -- A value for a column of another type would be cast, by a cast that its owner may have made.
        when (
            select count(*) <> 7 or count(v.name) <> 7
            from pg_attribute as a
            left join pg_attrdef as d on d.adrelid = a.attrelid and d.adnum = a.attnum
            left join (values
                ('seq', 'bigint'::regtype,
                 'CASEWHEN(pg_current_xact_id()ISNOTNULL)THENnextval(''tube.seq''::regclass)ELSENULL::bigintEND'),
                ('op', 'character', '''T''::bpchar'), ('shard', 'integer', ''), ('ids', 'bigint[]', ''), ('ids', 'text[]', ''), ('payload', 'jsonb', ''),
                ('ts', 'timestamptz', 'statement_timestamp()'), ('txid', 'xid8', 'pg_current_xact_id()')
            ) as v(name, type, value) on a.attname = v.name and a.atttypid = v.type and coalesce(
                translate(pg_get_expr(d.adbin, d.adrelid), E' \n', '') = v.value, true)
            where a.attrelid = pods and a.attnum > 0 and not a.attisdropped
        ) then 'a column or a default of another kind'
    end;
end
$$;

-- The fix for pods whose table has code of another role.
create function tube.code_hint(known tube.tube) returns text
language sql stable as $$
    select format('let %I, the owner of %s, remove it', r.rolname, known.pods)
        -- Only the owner's own code is trusted when the owner uses the tube. If the owner is the caller or a superuser, the code
        -- belongs to a third role, so this advice would not help.
        || case when r.rolname = current_user or r.rolsuper then '' else ', or use the tube as that role' end
    from pg_class as c join pg_roles as r on r.oid = c.relowner where c.oid = known.pods
$$;

-- A tube by its name. Raises an error if there is no such tube, or if reading its pods would run code of another role.
create function tube.named(tube text) returns tube.tube
language plpgsql stable as $$
declare
    known tube.tube := (select t from tube.tube as t where t.name = named.tube);
    code text;
begin
    if known.name is null then
        raise exception using errcode = 'PC002', message = format('there is no tube %I', coalesce(tube, '')),
            hint = 'tube.tube_list() lists the tubes that you may use; tube.tube_ensure_exists() makes a new tube';
    end if;
    if not tube.are_pods(known.pods, tube) then
        perform pgchange.refuse(
            format('the table of the pods of tube %I is gone', tube),
            format('tube.tube_ensure_exists(%L) makes it anew; then attach its tables again and backfill', tube));
    end if;
    code := tube.code_on(known.pods);
    if code is not null then
        raise insufficient_privilege using
            message = format('the pods of tube %I, %s, have %s: its code would run with your rights', tube, known.pods, code),
            hint = tube.code_hint(known);
    end if;
    return known;
end
$$;

-- Several tubes by their names, separated by commas, or as the text of an array.
create function tube.named_all(tube_or_tubes text) returns setof tube.tube
language plpgsql stable as $$
declare
    name text;
begin
    if btrim(tube_or_tubes, ' {}') = '' then
        perform pgchange.refuse('no tube is named', 'name a tube, or several separated by commas');
    end if;
    foreach name in array coalesce(
        case when exists (select from tube.tube as t where t.name = tube_or_tubes) then array[tube_or_tubes] end,
        case when tube_or_tubes ~ '^[{].*[}]$' then tube_or_tubes::text[] else string_to_array(tube_or_tubes, ',') end, array[null])
    loop
        return next tube.named(trim(name));
    end loop;
end
$$;

-- The tubes that the caller may read, in the order of their names. Tubes whose pods have code of another role are left out with a
-- notice.
create function tube.readable_tubes() returns setof tube.tube
language plpgsql volatile as $$
declare
    known tube.tube;
    code text;
begin
    for known in
        select t.* from tube.tube as t
        where tube.are_pods(t.pods, t.name) and has_table_privilege(t.pods, 'select')
          and has_schema_privilege(tube.schema_of(t.pods), 'usage')
        order by t.name
    loop
        begin
            execute format('lock table only %s in access share mode nowait', tube.full_name(known.pods));
            code := tube.code_on(known.pods);
        exception when lock_not_available then
            raise notice 'the pods of tube %, %, are locked by another transaction, so they were left out', known.name, known.pods;
            continue;
        end;
        if code is null then
            return next known;
        else
            raise notice using
                message = format('the pods of tube %I, %s, have %s, so they were left out', known.name, known.pods, code),
                hint = tube.code_hint(known);
        end if;
    end loop;
end
$$;
