-- Capture: what a tracked table's trigger does with the rows that are inserted, each of which is a commit.
--
-- The trigger function belongs to the owner of the table and runs with that owner's rights, so that a plain writer needs
-- none of ours and an expression can do no more than its owner. It evaluates inside an exception block and writes outside
-- it: a write inside would cost every statement a second transaction id.

-- The key column of a tracked table as it is today. If one column has its name and another its number, it is the one that is unique:
-- that took the place of the other. If both are or neither is, it is the one with the number, whatever it is called now; in a
-- restored table, where numbers are others, the one with the name.
create function revision.key_attribute(known revision.tracked) returns pg_attribute
language sql stable as $$
    select a
    from pg_attribute as a
    where a.attrelid = known.tbl and a.attnum > 0 and not a.attisdropped
      and (a.attname = known.commit_id or a.attnum = known.key_number)
    order by pgchange.is_unique(known.tbl, a.attnum) desc, (a.attnum = known.key_number) = (known.key_of = known.tbl::oid) desc
    limit 1
$$;

-- Today's name of the key column of a tracked table or of a partition of it.
create function revision.key_column(rel oid) returns name
language sql stable security definer as $$
    with recursive line(relid) as (
        select rel
        union
        select i.inhparent from line join pg_inherits as i on i.inhrelid = line.relid
    )
    select pgchange.key_now(t.tbl, k.attname, k.attnum, t.commit_id, case when t.key_of = t.tbl::oid then t.key_number end)
    from line
    join revision.tracked as t on t.tbl = line.relid
    cross join lateral (select (revision.key_attribute(t)).*) as k
    limit 1
$$;

-- What revision.track() would refuse about the key of a tracked table today; null where it is as it has to be.
create function revision.key_trouble(known revision.tracked) returns text
language sql stable as $$
    select case
        when k.attname is null then format('its key column %I was dropped, and its rows go to revision.fault', known.commit_id)
        when not pgchange.is_integer(k.atttypid)
            then format('its key column %I is %s now, and has to be bigint, integer or smallint', k.attname, format_type(k.atttypid, k.atttypmod))
        when not k.attnotnull
            then format('its key column %I may be null now, and a row without a key goes to revision.fault instead of the queue', k.attname)
        when not pgchange.is_unique(known.tbl, k.attnum)
            then format('its key column %I is not unique any more, and two rows with one key are the same commit', k.attname)
    end
    from (select (revision.key_attribute(known)).*) as k
$$;

-- Whether a table is, or is a partition of, the table for which the capture was written whose number was root.
create function revision.is_captured(rel oid, root oid) returns boolean
language sql stable security definer as $$
    with recursive line(relid) as (
        select rel
        union
        select i.inhparent from line join pg_inherits as i on i.inhrelid = line.relid
    )
    select exists (select from line where line.relid = root)
        -- In a restored database no table has the number that it had.
        or not exists (select from revision.tracked as t where t.tbl = root)
           and exists (select from line join revision.tracked as t on t.tbl = line.relid)
$$;

-- Note a row that could not be placed in the queue.
create function revision.note_fault(rel oid, commit_id bigint, message text) returns void
language sql
-- Asked by captures, whatever a writer has set.
set row_security = on
as $$
    insert into revision.fault (tbl, commit_id, message) values (rel, note_fault.commit_id, note_fault.message)
$$;

-- Note that a partition was written after it had left its table: if it comes back, its rows are in no commit.
create function revision.note_departed(rel oid) returns void
language sql
set row_security = on
as $$
    insert into revision.fault (tbl, kind, message)
    select rel, 'missed', 'it was written while it was no partition of the tracked table'
    where not exists (select from revision.fault as f where f.tbl = rel and f.kind = 'missed')
$$;

-- Whether the caller is a member of the owner of a table, or of one that it is a partition of.
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

-- Refuse to do something with a table of whose owner the caller is no member.
create function revision.check_owner(tbl regclass, deed text) returns void
language plpgsql stable as $$
begin
    if not revision.owns(tbl) then
        perform pgchange.check_owner(tbl, deed);
    end if;
end
$$;

-- The branch of a tracked table's own, made at the first call.
create function revision.own_branch(tbl regclass) returns bigint
language plpgsql as $$
declare
    branch bigint := (select b.id from revision.branch as b where b.tbl = own_branch.tbl);
begin
    while branch is null loop
        insert into revision.branch (type, tbl) values ('stable', own_branch.tbl)
        on conflict (id) do nothing
        returning id into branch;
    end loop;
    return branch;
end
$$;

-- Refuse, with the reason, a table that cannot be tracked.
create function revision.check_trackable(tbl regclass, commit_id name) returns void
language plpgsql stable as $$
declare
    class pg_class := (select c from pg_class as c where c.oid = tbl);
    owner_name name := pg_get_userbyid(class.relowner);
    key pg_attribute := (
        select a from pg_attribute as a
        where a.attrelid = tbl and a.attname = commit_id and a.attnum > 0 and not a.attisdropped
    );
    other constant text := pgchange.key_hint(tbl, 'as in revision.track(tbl, commit_id => ...)');
begin
    perform pgchange.check_capturable(tbl, 'track', 'revision', 'pubsub');
    perform pgchange.check_captured_once(tbl, 'revision', 'commit_queue');
    if key is null then
        perform pgchange.refuse(format('%s has no column %I', tbl, commit_id), other);
    end if;
    if not pgchange.is_integer(key.atttypid) then
        perform pgchange.refuse(
            format('column %I of %s is %s, and the key is bigint, integer or smallint', commit_id, tbl,
                   format_type(key.atttypid, key.atttypmod)), other);
    end if;
    if not key.attnotnull then
        perform pgchange.refuse(format('column %I of %s may be null', commit_id, tbl), other);
    end if;
    if not pgchange.is_unique(tbl, key.attnum) then
        perform pgchange.refuse(format('column %I of %s is not unique', commit_id, tbl), other);
    end if;
    perform pgchange.check_code(tbl);
    if not (
        has_schema_privilege(owner_name, 'revision', 'usage')
        and has_column_privilege(owner_name, 'revision.commit_queue', 'commit_id', 'insert')
    ) then
        raise insufficient_privilege using
            message = format('%I, the owner of %s, may not put commits in the queue', owner_name, tbl),
            hint = format('let the owner of schema revision run: select revision.grant_owner(%L)', owner_name);
    end if;
end
$$;

-- The body of the trigger function of one table, written for its columns so that PostgreSQL keeps its plans. A row without a key, or
-- whatever else fails, is looked at by itself and becomes a fault. A partition that has left the table makes no commits.
create function revision.capture_body(tbl regclass, commit_id name, branch_id bigint, expression text) returns text
language sql stable as $$
    select format(
        case when expression is null then $constant$
#variable_conflict use_column
declare
    pgchange_row_added pg_catalog.record;
    pgchange_key pg_catalog.text;
    pgchange_commit bigint;
begin
    -- Dropped with all that it held: nobody waits for commits.
    if pg_catalog.to_regnamespace('revision') is null then
        return null;
    end if;
    if tg_relid operator(pg_catalog.<>) %6$s::pg_catalog.oid and not revision.is_captured(tg_relid, %6$s::pg_catalog.oid) then
        perform revision.note_departed(tg_relid);
        return null;
    end if;
    begin
        if exists (select from added where pg_catalog.int8up(%1$I) is null)
            or not %7$s
               and coalesce(revision.key_column(tg_relid) operator(pg_catalog.<>) %8$L::pg_catalog.name, true)
        then
            raise 'each row is to be looked at';
        end if;
    exception when others or assert_failure then
        pgchange_key := revision.key_column(tg_relid);
        for pgchange_row_added in select * from added loop
            begin
                pgchange_commit := null;
                pgchange_commit := pg_catalog.to_jsonb(pgchange_row_added) operator(pg_catalog.->>) pgchange_key;
                if pgchange_commit is null then
                    raise '%%', case when pgchange_key is null then 'the key column is gone' else 'its key is null' end;
                end if;
            exception when others or assert_failure then
                perform revision.note_fault(tg_relid, pgchange_commit, sqlerrm);
                continue;
            end;
            insert into revision.commit_queue (commit_id, branch_id) values (pgchange_commit, %2$s);
        end loop;
        return null;
    end;
    insert into revision.commit_queue (commit_id, branch_id) select %1$I, %2$s from added;
    return null;
end
$constant$ else $expression$
#variable_conflict use_column
declare
    pgchange_row_added pg_catalog.record;
    pgchange_key pg_catalog.text;
    pgchange_commit bigint;
    pgchange_branch bigint;
    pgchange_commits bigint[];
    pgchange_branches bigint[];
    pgchange_is_named boolean;
begin
    -- Dropped with all that it held: nobody waits for commits.
    if pg_catalog.to_regnamespace('revision') is null then
        return null;
    end if;
    if tg_relid <> %6$s::pg_catalog.oid and not revision.is_captured(tg_relid, %6$s::pg_catalog.oid) then
        perform revision.note_departed(tg_relid);
        return null;
    end if;
    begin
        select pg_catalog.array_agg(e.commit_id), pg_catalog.array_agg(e.branch_id), %7$s
        into pgchange_commits, pgchange_branches, pgchange_is_named
        from (select %1$I, pg_catalog.int8up((%3$s)) from added as %4$I) as e(commit_id, branch_id)
        where e.branch_id is not null;
        if pg_catalog.array_position(pgchange_commits, null) is not null
            or not pgchange_is_named and coalesce(revision.key_column(tg_relid) <> %8$L::pg_catalog.name, true)
        then
            raise 'each row is to be looked at';
        end if;
    exception when others or assert_failure then
        pgchange_key := revision.key_column(tg_relid);
        for pgchange_row_added in select * from added loop
            begin
                pgchange_commit := null;
                pgchange_commit := pg_catalog.to_jsonb(pgchange_row_added) operator(pg_catalog.->>) pgchange_key;
                if pgchange_key is null then
                    raise 'the key column is gone';
                end if;
                select pg_catalog.int8up((%3$s)) into strict pgchange_branch
                from pg_catalog.jsonb_populate_record(null::%5$s, pg_catalog.to_jsonb(pgchange_row_added)) as %4$I;
                if pgchange_branch is not null and pgchange_commit is null then
                    raise 'its key is null';
                end if;
            exception when others or assert_failure then
                perform revision.note_fault(tg_relid, pgchange_commit, sqlerrm);
                continue;
            end;
            if pgchange_branch is not null then
                insert into revision.commit_queue (commit_id, branch_id) values (pgchange_commit, pgchange_branch);
            end if;
        end loop;
        return null;
    end;
    insert into revision.commit_queue (commit_id, branch_id)
    select * from unnest(pgchange_commits, pgchange_branches);
    return null;
end
$expression$ end,
        commit_id, branch_id, expression, c.relname, tbl, tbl::oid, pgchange.key_check(tbl, commit_id, a.attnum), commit_id
    )
    from pg_class as c join pg_attribute as a on a.attrelid = c.oid and a.attname = capture_body.commit_id
    where c.oid = tbl
$$;
