-- Rows that the capture could not put in the queue: the tables that have such rows, and trying them again.

-- The tables that have faults, with the branch of their commits. The branch is null if an expression returns it, or if the table
-- is not tracked any more. The first part goes from table to table by the index, so the cost does not depend on the number of
-- faults.
create function revision.faulty_tables() returns table (tbl regclass, branch_id bigint)
language sql stable as $$
    with recursive faulty(tbl) as (
        (select f.tbl from revision.fault as f order by f.tbl limit 1)
        union all
        select (select f.tbl from revision.fault as f where f.tbl > faulty.tbl order by f.tbl limit 1)
        from faulty where faulty.tbl is not null
    ), line(tbl, relid) as (
        select f.tbl, f.tbl::oid from faulty as f where f.tbl is not null
        union
        select line.tbl, i.inhparent from line join pg_inherits as i on i.inhrelid = line.relid
    )
    select line.tbl, max(t.branch_id)
    from line
    left join revision.tracked as t on t.tbl = line.relid
    group by line.tbl
$$;

-- How many rows of a table and its partitions could not be put in the queue, up to 1000, either with a key or without.
create function revision.count_faults(parts regclass[], without_key boolean) returns bigint
language plpgsql stable
set plan_cache_mode = force_generic_plan
as $$
begin
    return (
        select count(*)
        from (
            select
            from unnest(parts) as d(relid)
            cross join lateral (
                select from revision.fault as f
                where f.tbl = d.relid and f.kind = 'capture' and (f.commit_id is null and f.key is null) = count_faults.without_key
                limit 1000
            ) as found_fault
            limit 1000
        ) as bounded);
end
$$;

-- Refuse to run code of the owner of a table as another role, because it would run with the rights of the caller.
create function revision.check_reads_no_code(known revision.tracked) returns void
language plpgsql as $$
declare
    owner_name name := (select pg_get_userbyid(c.relowner) from pg_class as c where c.oid = known.tbl);
begin
    if owner_name = current_user then
        return;
    end if;
    execute format('lock table %s in access share mode', known.tbl);
    -- Reading the table may run code of its owner if there is an expression or a policy, which may call any function. It may
    -- also do so if the type of the key has changed, because of casts. In PostgreSQL 15, a view may also have replaced the
    -- table.
    if known.expression is not null or row_security_active(known.tbl) or not exists (
        select from pg_class as c
        where c.oid = known.tbl and c.relkind in ('r', 'p') and pgchange.key_types(c.oid, revision.key_columns(c.oid)) = known.key_types
    ) then
        raise insufficient_privilege using
            message = format('%s is read with the rights of its owner, %I, and no others', known.tbl, owner_name),
            hint = format(
                'connect as %I, because reading it may run that owner''s code: an expression, a policy, casts of the key',
                owner_name);
    end if;
    perform pgchange.check_code(known.tbl);
end
$$;

-- The column of the queue, and of the faults, for keys of these types.
create function revision.queue_column(key_types regtype[]) returns text
language sql immutable as $$
    select case when key_types = '{bigint}' then 'commit_id' else 'key' end
$$;

-- Put a row of a tracked table in the queue. If its branch cannot be determined, record a fault and return false. A row that does
-- not exist any more becomes no commit.
create function revision.enqueue_row(tbl regclass, key text) returns boolean
language plpgsql as $$
declare
    known revision.tracked := (select t from revision.tracked as t where t.tbl = enqueue_row.tbl);
    branch bigint := known.branch_id;
    found_row boolean;
    is_number boolean := known.key_types = '{bigint}';
begin
    perform revision.check_reads_no_code(known);
    begin
        execute format(
            'select true, pg_catalog.int8up((%s)) from %s as %I where %s',
            coalesce(known.expression, known.branch_id::text), tbl, (select c.relname from pg_class as c where c.oid = tbl),
            pgchange.key_condition(
                known.key_types, revision.key_columns(tbl), (select c.relname from pg_class as c where c.oid = tbl), key))
        into found_row, branch;
    exception when others or assert_failure then
        perform revision.note_fault(
            tbl, case when is_number then key::bigint end, sqlerrm, case when not is_number then key end);
        return false;
    end;
    if branch is not null then
        insert into revision.commit_queue (commit_id, key, branch_id)
        values (case when is_number then enqueue_row.key::bigint end, case when not is_number then enqueue_row.key end, branch);
    end if;
    return true;
end
$$;

create function revision.replay_faults(tbl regclass) returns bigint
language plpgsql as $$
declare
    fault revision.fault;
    replayed bigint := 0;
begin
    if revision.key_columns(tbl) is null then
        perform pgchange.refuse(format('%s is not tracked, or its key column was dropped', tbl), 'call revision.track first');
    end if;
    perform revision.check_owner(tbl, 'have its faults tried again');
    for fault in
        with taken as (
            delete from revision.fault as f
            where f.tbl in (select d.relid from pgchange.descendants(replay_faults.tbl) as d(relid))
              and (f.commit_id is not null or f.key is not null)
            returning f.*
        )
        select * from taken order by id
    loop
        replayed := replayed + revision.enqueue_row(tbl, coalesce(fault.key, fault.commit_id::text))::integer;
    end loop;
    return replayed;
end
$$;
comment on function revision.replay_faults(regclass) is
    'Try the faults of a table again, once their cause is fixed. Returns how many rows were put in the queue; the others stay '
    'faults. If reading the table could run code of its owner (an expression, a policy, a key of another type), only that owner '
    'may call this.';

select pgchange.pin_settings('revision.enqueue_row(regclass, text)');
