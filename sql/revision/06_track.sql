-- Tracking a table. Its capture is placed under a lock that waits for the writers of the table.

-- Refuse an expression that does not return a branch for the rows of a table.
create function revision.check_expression(tbl regclass, key name[], expression text) returns void
language plpgsql as $$
begin
    execute format(
        'select %I, pg_catalog.int8up((%s)) from %s as %I limit 0', key[1], expression, tbl,
        (select c.relname from pg_class as c where c.oid = tbl));
exception when others then
    perform pgchange.refuse(
        format('the expression %L does not return a branch: %s', expression, sqlerrm),
        'write an SQL expression over the columns of a row that returns a bigint; name functions with their schema');
end
$$;

-- Return the key by which a table can be tracked: the given key, or the primary key. Raises an error with the reason if it cannot
-- be tracked.
create function revision.check_trackable(tbl regclass, key name[]) returns name[]
language plpgsql stable as $$
declare
    owner_name name := (select pg_get_userbyid(c.relowner) from pg_class as c where c.oid = tbl);
begin
    perform pgchange.check_capturable(tbl, 'track', 'revision', 'pubsub');
    perform pgchange.check_captured_once(tbl, 'revision', 'commit_queue');
    key := pgchange.check_key(tbl, key, format('revision.track(%L, key => %%s)', tbl));
    perform pgchange.check_code(tbl);
    if not (
        has_schema_privilege(owner_name, 'revision', 'usage')
        and has_column_privilege(owner_name, 'revision.commit_queue', 'commit_id', 'insert')
    ) then
        raise insufficient_privilege using
            message = format('%I, the owner of %s, may not put commits in the queue', owner_name, tbl),
            hint = format('let the owner of schema revision run: select revision.grant_owner(%L)', quote_ident(owner_name));
    end if;
    return key;
end
$$;

create function revision.track(tbl regclass, key name[] default null, branch_id text default null) returns bigint
language plpgsql as $$
declare
    key_types regtype[];
    known revision.tracked;
    expression text := nullif(trim(branch_id), '');
    branch bigint;
    function text;
    ceiling bigint;
    is_empty boolean;
begin
    key := revision.check_trackable(tbl, coalesce(key, revision.key_columns(tbl)));
    key_types := pgchange.key_types(tbl, key);
    -- If two sessions track the same table at once, the second finds it tracked.
    perform pg_advisory_xact_lock(hashtextextended('pgchange track ' || tbl::oid, 0));
    select t.* into known from revision.tracked as t where t.tbl = track.tbl;
    if expression ~ '^[0-9]+$' then
        branch := expression;
        expression := null;
    elsif expression is not null then
        if key_types <> '{bigint}' then
            perform pgchange.refuse(
                format(
                    'the branch of the rows of %s cannot come from an expression: their keys are %s, but a branch has keys of one '
                    'type', tbl, array_to_string(key_types, ', ')),
                'leave branch_id out for a branch of the table''s own, or give the number of a branch');
        end if;
        perform revision.check_expression(tbl, key, expression);
    end if;
    if known.tbl is not null and (
        known.expression is distinct from expression
        or branch is not null and branch <> known.branch_id
    ) then
        perform pgchange.refuse(
            format('%s is already tracked with another branch', tbl), 'first run revision.untrack(tbl)');
    end if;
    if expression is null then
        branch := coalesce(branch, known.branch_id, revision.own_branch(tbl, key_types));
        perform revision.check_branch(branch, tbl, key_types);
    end if;

    perform pgchange.lock_family(tbl, 'share row exclusive');
    function := revision.function_for(tbl);
    perform revision.place_function(tbl, key, branch, expression, function);
    perform revision.place_triggers(tbl, function);
    -- Keys that are not integers need not grow, so they have no ceiling. The queue shows for each young row whether it was
    -- captured.
    if key_types = '{bigint}' then
        execute format('select coalesce(max(%I)::bigint, -9223372036854775808) from %s', key[1], tbl) into ceiling;
    end if;
    -- A transaction whose snapshot is older than the lock does not see everything that was written before the lock.
    if current_setting('transaction_isolation') in ('repeatable read', 'serializable') then
        ceiling := case when key_types = '{bigint}' then 9223372036854775807 end;
    elsif key_types <> '{bigint}' and known is null and not row_security_active(tbl) then
        execute format('select not exists (select from %s)', tbl) into is_empty;
    end if;
    perform revision.register(tbl, key, branch, expression, ceiling);
    if is_empty then
        update revision.tracked as t set existing_done = true where t.tbl = track.tbl;
    end if;
    return branch;
end
$$;
comment on function revision.track(regclass, name[], text) is
    'Make each row that is inserted into tbl a commit, named by its key. The key is the primary key, or the given columns of a '
    'unique index that are not null, such as {tenant,no}. By default the table gets a branch of its own, which is returned. '
    'branch_id can be the number of a branch. If keys are integers, it can also be an SQL expression over the row that returns '
    'the branch. Then null is returned, and a row for which the expression is null becomes no commit. The expression runs with '
    'the rights of the table''s owner. Calling it again repairs the capture, for example after new partitions or a renamed key.';

-- Check the expression with the settings with which it will be evaluated.
select pgchange.pin_settings('revision.track(regclass, name[], text)', 'revision.check_expression(regclass, name[], text)');

-- Drop a capture from every table that has it. The function of a former owner stays, and does nothing.
create function revision.drop_capture(function text) returns void
language plpgsql as $$
declare
    placed record;
begin
    -- Every table with the trigger, because partitions that were detached still have it.
    for placed in
        select t.tgname as name, t.tgrelid::regclass as relid
        from pgchange.triggers_of(to_regprocedure(function || '()')) as t
        where not t.tgisinternal and t.tgparentid = 0
    loop
        perform pgchange.lock_family(placed.relid, 'share row exclusive');
        execute format('drop trigger %I on %s', placed.name, placed.relid);
    end loop;
    if pg_has_role(current_user, (select p.proowner from pg_proc as p where p.oid = to_regprocedure(function || '()')), 'usage') then
        execute format('drop function %s()', function);
    end if;
end
$$;

create function revision.untrack(tbl regclass) returns void
language plpgsql as $$
declare
    known revision.tracked := (select t from revision.tracked as t where t.tbl = untrack.tbl);
    part regclass;
begin
    if known is null then
        perform pgchange.refuse(format('%s is not tracked', tbl), 'list the tracked tables: select tbl from revision.tracked');
    end if;
    perform pgchange.lock_family(tbl, 'share row exclusive');
    for part in select d.relid from pgchange.descendants(tbl) as d(relid) loop
        execute format('drop trigger if exists pgchange_capture on %s', part);
    end loop;
    perform revision.drop_bar(tbl);
    perform revision.drop_capture(known.function);
    perform revision.unregister(tbl);
end
$$;
comment on function revision.untrack(regclass) is
    'Stop capturing a table. Its branch and its rows in the queue stay; if it is tracked again, it has the same branch.';
