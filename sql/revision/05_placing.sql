-- The record of a tracked table, and placing its trigger function and its triggers.

-- The snapshot of everything that other transactions have committed. In it, this transaction is open. The snapshot of PostgreSQL
-- does not list this transaction.
create function revision.committed_now() returns pg_snapshot
language sql volatile as $$
    select pgchange.snapshot_of(
        array(
            select o::text::bigint from pg_snapshot_xip(now.seen) as o
            union all select now.own
            union all select generate_series(pg_snapshot_xmax(now.seen)::text::bigint, now.own)
        ),
        greatest(pg_snapshot_xmax(now.seen)::text::bigint, now.own + 1))
    from (select pg_current_snapshot(), pg_current_xact_id()::text::bigint) as now(seen, own)
$$;

-- Derive the record of a tracked table from its trigger and its columns, because the caller may not be trusted.
create function revision.derive_capture() returns trigger
language plpgsql security definer as $$
begin
    -- Maintenance calls the function by this name, so the caller must not choose it.
    new.function := (
        select format('%I.%I', n.nspname, p.proname)
        from pg_trigger as t
        join pg_proc as p on p.oid = t.tgfoid
        join pg_namespace as n on n.oid = p.pronamespace
        join pg_class as c on c.oid = t.tgrelid
        where t.tgrelid = new.tbl and t.tgname = 'pgchange_capture' and p.proowner = c.relowner);
    if new.function is null then
        perform pgchange.refuse(format('%s is not captured by its owner', new.tbl), 'track it: revision.track');
    end if;
    new.key_numbers := array(
        select a.attnum from unnest(new.key) with ordinality as u(name, place)
        join pg_attribute as a on a.attrelid = new.tbl and a.attname = u.name and a.attnum > 0
        order by u.place);
    if new.key = '{}' or cardinality(new.key_numbers) <> cardinality(new.key) then
        perform pgchange.refuse(
            format(
                '%s does not have all of the columns %s',
                new.tbl, array_to_string(new.key, ', ')),
                'call revision.track with its key');
    end if;
    new.key_types := pgchange.key_types(new.tbl, new.key);
    new.key_of := new.tbl;
    if tg_op = 'INSERT' then
        -- If the table was tracked before, some of its rows may have been captured at that time. The empty snapshot 1:1: makes
        -- revision.enqueue_existing() look up every row in the queue.
        new.since := case
            when exists (select from revision.untracked as u where u.tbl = new.tbl) then '1:1:' else revision.committed_now() end;
    end if;
    return new;
end
$$;

create trigger derive_capture before insert or update of tbl, key on revision.tracked
    for each row execute function revision.derive_capture();

-- Record that the queue has rows of a table that is not tracked any more.
create function revision.note_untracked() returns trigger
language plpgsql security definer as $$
begin
    insert into revision.untracked (tbl) values (old.tbl) on conflict do nothing;
    return null;
end
$$;

create trigger note_untracked after delete on revision.tracked
    for each row execute function revision.note_untracked();

-- Record a table whose capture is in place.
create function revision.register(
    tbl regclass, key name[], branch_id bigint, expression text, key_ceiling bigint
) returns void
language sql as $$
    insert into revision.tracked (tbl, key, branch_id, expression, key_ceiling)
    values (tbl, key, branch_id, expression, key_ceiling)
    on conflict on constraint tracked_pkey do update set key = excluded.key
$$;

-- Delete the record of a table whose capture was removed.
create function revision.unregister(tbl regclass) returns void
language plpgsql as $$
begin
    if exists (
        select from pg_trigger as t where t.tgrelid = unregister.tbl and t.tgname = 'pgchange_capture'
    ) then
        perform pgchange.refuse(format('%s cannot be forgotten: it is still captured', tbl), 'call revision.untrack');
    end if;
    delete from revision.fault as f
    where f.kind = 'missed' and f.tbl in (select d.relid from pgchange.descendants(unregister.tbl) as d(relid));
    delete from revision.tracked as t where t.tbl = unregister.tbl;
end
$$;

-- Record partitions that were attached with rows that may be in no commit, and raise a notice for each.
create function revision.note_missed(tbl regclass, came regclass[]) returns void
language sql as $$
    insert into revision.fault (tbl, kind, message)
    select m, 'missed', 'its rows were there before it was captured'
    from pgchange.tell_missed(tbl, came, 'commit', 'revision', 'enqueue_attached') as m
$$;

-- The trigger that keeps foreign tables from being attached to a tracked partitioned table; null if the table has none.
create function revision.bar(tbl regclass) returns name
language sql stable as $$
    select t.tgname from pg_trigger as t
    where t.tgrelid = tbl and t.tgparentid = 0 and t.tgconstraint <> 0 and t.tgname ~ '^pgchange_capture_bar_[0-9a-f]{12}$'
    limit 1
$$;

-- Drop the trigger that revision.bar() finds, from a table that is not tracked any more.
create function revision.drop_bar(tbl regclass) returns void
language plpgsql as $$
begin
    if revision.bar(tbl) is not null then
        execute format('drop trigger %I on %s', revision.bar(tbl), tbl);
    end if;
end
$$;

-- Place the trigger on a table and on every partition without it. Returns on how many.
create function revision.place_triggers(tbl regclass, function text) returns integer
language plpgsql as $$
declare
    known revision.tracked := (select t from revision.tracked as t where t.tbl = place_triggers.tbl);
    -- Tables whose trigger still calls the function of a former owner. They have been captured so far, so none of their rows is
    -- missing.
    captured constant regclass[] := array(
        select t.tgrelid from pgchange.triggers_of(to_regprocedure(known.function || '()')) as t where t.tgname = 'pgchange_capture');
    part regclass;
    placed regclass[] := '{}';
begin
    for part in
        select d.relid from pgchange.descendants(tbl) as d(relid)
        where not exists (
            select from pg_trigger as t
            where t.tgrelid = d.relid and t.tgname = 'pgchange_capture' and t.tgfoid = to_regprocedure(function || '()')
        )
    loop
        -- A partition that was detached from another tracked table may still have the trigger of that table.
        execute format(
            'create or replace trigger pgchange_capture after insert on %s referencing new table as added '
            'for each statement execute function %s()', part, function);
        placed := placed || part;
    end loop;
    -- The name is unique to the table, because a partition that is tracked itself has a bar of its own.
    if revision.bar(tbl) is null then
        perform pgchange.place_bar(tbl, 'pgchange_capture_bar_' || left(md5(concat(tbl::oid, clock_timestamp(), random())), 12));
    end if;
    if known.tbl is not null then
        perform revision.note_missed(tbl, array(select r from unnest(placed) as r where r <> all (captured || tbl)));
    end if;
    return cardinality(placed);
end
$$;

-- The name of the trigger function of a table for its present owner: that of the existing function, or a new name.
create function revision.function_for(tbl regclass) returns text
language plpgsql as $$
declare
    class pg_class := (select c from pg_class as c where c.oid = tbl);
    schema_name name := (select n.nspname from pg_namespace as n where n.oid = class.relnamespace);
    known text := (select t.function from revision.tracked as t where t.tbl = function_for.tbl);
    function text := format('%I.%I', schema_name, 'pgchange_capture_' || case
        when length(class.relname) <= 46 then class.relname::text
        else left(class.relname, 37) || '_' || left(md5(class.relname), 8) end);
begin
    if known is null and to_regprocedure(function || '()') is null then
        return function;
    end if;
    -- Do not replace another function of this name, such as that of a dropped table, or the function of a former owner.
    if known is null or (select p.proowner from pg_proc as p where p.oid = to_regprocedure(known || '()')) <> class.relowner then
        return format('%I.%I', schema_name, 'pgchange_capture_' || left(class.relname, 33) || '_' || left(md5(random()::text), 12));
    end if;
    return known;
end
$$;

-- Create or replace the trigger function of a tracked table.
create function revision.place_function(tbl regclass, key name[], branch_id bigint, expression text, function text) returns void
language plpgsql as $$
declare
    key_types constant regtype[] := pgchange.key_types(tbl, key);
begin
    -- Without an expression, the function has no settings, and its body names everything with its schema, also types and
    -- operators. Otherwise objects of the writer could run with the owner's rights. A pinned search_path would cost more than
    -- the rest of the function. If there is an expression, the function has the search_path under which the expression was
    -- checked. If keys are texts, it has the settings on which these texts depend.
    perform pgchange.place_function(
        function || '()',
        format(
            'create or replace function %s() returns trigger language plpgsql security definer %s as %L',
            function,
            case when expression is not null then 'set search_path = pg_catalog, revision, pg_temp ' || pgchange.settings()
                 else pgchange.key_settings(key_types) end,
            revision.capture_body(tbl, key, key_types, branch_id, expression)),
        'Capture of ' || tbl::text || ' by revision.track.');
    execute format(
        'alter function %s() owner to %I', function, (select pg_get_userbyid(c.relowner) from pg_class as c where c.oid = tbl));
end
$$;
