-- Tracking a table: its capture is put in place under a lock that waits for the table's writers.

-- Refuse an expression that gives the rows of a table no branch.
create function revision.check_expression(tbl regclass, key name[], expression text) returns void
language plpgsql as $$
begin
    execute format(
        'select %I, pg_catalog.int8up((%s)) from %s as %I limit 0', key[1], expression, tbl,
        (select c.relname from pg_class as c where c.oid = tbl));
exception when others then
    perform pgchange.refuse(
        format('the expression %L gives no branch: %s', expression, sqlerrm),
        'write an SQL expression over the columns of one row that gives a bigint; name functions with their schema');
end
$$;

-- Refuse, with the reason, a table that cannot be tracked by a key; else return the key, which is the primary key unless it is given.
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
            hint = format('let the owner of schema revision run: select revision.grant_owner(%L)', owner_name);
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
                format('an expression cannot give the branch of the rows of %s: their keys are %s, and all commits of a branch have keys '
                       'of the same types', tbl, array_to_string(key_types, ', ')),
                'leave branch_id out for a branch of the table''s own, or give the number of a branch');
        end if;
        perform revision.check_expression(tbl, key, expression);
    end if;
    if known.tbl is not null and (
        known.expression is distinct from expression
        or branch is not null and branch <> known.branch_id
    ) then
        perform pgchange.refuse(
            format('%s is already tracked with another branch', tbl), 'revision.untrack(tbl) first');
    end if;
    if expression is null then
        branch := coalesce(branch, known.branch_id, revision.own_branch(tbl, key_types));
        perform revision.check_branch(branch, tbl, key_types);
    end if;

    perform pgchange.lock_family(tbl, 'share row exclusive');
    function := revision.function_for(tbl);
    perform revision.place_function(tbl, key, branch, expression, function);
    perform revision.place_triggers(tbl, function);
    -- Keys that are no numbers need not grow: they have no ceiling, and the queue tells of each young row whether it was captured.
    if key_types = '{bigint}' then
        execute format('select coalesce(max(%I)::bigint, -9223372036854775808) from %s', key[1], tbl) into ceiling;
    end if;
    -- A transaction with a snapshot from before the lock does not see all that was written before it.
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
    'Make each row inserted into tbl a commit, named by its key. The key is the primary key, unless it is given: the columns of a unique '
    'index that are not null, such as {tenant,no}. The branch is one of the table''s own, which is returned; or the one whose number '
    'branch_id is; or, if keys are numbers, the one that branch_id, an SQL expression over the row, gives (then null is returned, and '
    'a row for which it is null goes nowhere). The expression runs with the rights of the table''s owner. '
    'Calling it again mends the capture: new partitions, a renamed key.';

-- The expression is checked as it will be evaluated.
select pgchange.pin_settings('revision.track(regclass, name[], text)', 'revision.check_expression(regclass, name[], text)');

-- Take a capture off every table that it is on. The function of a former owner stays, and does nothing.
create function revision.drop_capture(function text) returns void
language plpgsql as $$
declare
    placed record;
begin
    -- Also on what was a partition once.
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
        perform pgchange.refuse(format('%s is not tracked', tbl), 'select tbl from revision.tracked');
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
    'Stop capturing a table. Its branch and what is in the queue stay; tracked again it has the same branch.';
