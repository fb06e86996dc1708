-- Capture: what a tracked table's trigger does with the rows that are inserted, each of which is a commit.
--
-- The trigger function belongs to the owner of the table and runs with that owner's rights, so that a plain writer needs
-- none of ours and an expression can do no more than its owner. It evaluates inside an exception block and writes outside
-- it: a write inside would cost every statement a second transaction id.

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

-- Note a row that could not be placed in the queue, with its key if that is known.
create function revision.note_fault(rel oid, commit_id bigint, message text, key text default null) returns void
language sql
-- Asked by captures, whatever a writer has set.
set row_security = on
as $$
    insert into revision.fault (tbl, commit_id, message, key)
    values (rel, note_fault.commit_id, note_fault.message, note_fault.key)
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

-- The query that gives the keys of all rows that a statement has added to a tracked table or a partition of it, as texts: by the names
-- that the columns have now. The key of a row without a value in one of them is null.
create function revision.keys_of(rel oid, key_types regtype[]) returns text
language plpgsql stable as $$
declare
    key constant name[] := revision.key_columns(rel);
begin
    if key is null then
        raise 'the key column is gone';
    end if;
    return (
        select format('select array(select case when %s then %s end from added as pgchange_added)',
                      string_agg(format('pgchange_added.%I is not null', u.name), ' and '),
                      pgchange.key_text(key_types, key, 'pgchange_added'))
        from unnest(key) as u(name));
end
$$;

-- The body of the trigger function of one table, written for its columns so that PostgreSQL keeps its plans. A row without a key, or
-- whatever else fails, is looked at by itself and becomes a fault. A partition that has left the table makes no commits.
create function revision.capture_body(tbl regclass, key name[], key_types regtype[], branch_id bigint, expression text) returns text
language sql stable as $$
    select format(
        case when key_types <> '{bigint}' then $keyed$
#variable_conflict use_column
declare
    pgchange_keys pg_catalog.text[];
    pgchange_reason pg_catalog.text := 'its key is null';
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
        -- The text of the key is named so that a column whose type does not fit any more fails in this block. It is not evaluated.
        if exists (select from added as pgchange_added where %1$s or %11$s is null and %9$s is null)
            or not (%7$s)
               and coalesce(revision.key_columns(tg_relid) operator(pg_catalog.<>) %8$L::pg_catalog.name[], true)
        then
            raise 'each row is to be looked at';
        end if;
    exception when others or assert_failure then
        begin
            execute revision.keys_of(tg_relid, %10$L::pg_catalog.regtype[]) into pgchange_keys;
        exception when others or assert_failure then
            pgchange_reason := sqlerrm;
            pgchange_keys := array(select null::pg_catalog.text from added);
        end;
        perform revision.note_fault(tg_relid, null, pgchange_reason) from pg_catalog.unnest(pgchange_keys) as k(key) where k.key is null;
        insert into revision.commit_queue (key, branch_id)
        select k.key, %2$s from pg_catalog.unnest(pgchange_keys) as k(key) where k.key is not null;
        return null;
    end;
    insert into revision.commit_queue (key, branch_id) select %9$s, %2$s from added as pgchange_added;
    return null;
end
$keyed$ when expression is null then $constant$
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
        if exists (select from added where pg_catalog.int8up(%1$s) is null)
            or not %7$s
               and coalesce((revision.key_columns(tg_relid))[1] operator(pg_catalog.<>) %8$L::pg_catalog.name, true)
        then
            raise 'each row is to be looked at';
        end if;
    exception when others or assert_failure then
        pgchange_key := (revision.key_columns(tg_relid))[1];
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
    insert into revision.commit_queue (commit_id, branch_id) select %1$s, %2$s from added;
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
        from (select %1$s, pg_catalog.int8up((%3$s)) from added as %4$I) as e(commit_id, branch_id)
        where e.branch_id is not null;
        if pg_catalog.array_position(pgchange_commits, null) is not null
            or not pgchange_is_named and coalesce((revision.key_columns(tg_relid))[1] <> %8$L::pg_catalog.name, true)
        then
            raise 'each row is to be looked at';
        end if;
    exception when others or assert_failure then
        pgchange_key := (revision.key_columns(tg_relid))[1];
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
        case when key_types = '{bigint}' then quote_ident(key[1]) else k.is_null end, branch_id, expression, c.relname, tbl, tbl::oid,
        k.named, case when key_types = '{bigint}' then key[1]::text else key::text end,
        pgchange.key_text(key_types, key, 'pgchange_added'), key_types, format('pgchange_added.%I', key[1])
    )
    from pg_class as c
    cross join lateral (
        select string_agg(format('pgchange_added.%I is null', u.name), ' or ' order by u.place),
               string_agg(pgchange.key_check(tbl, u.name, a.attnum), ' and ' order by u.place)
        from unnest(key) with ordinality as u(name, place)
        join pg_attribute as a on a.attrelid = tbl and a.attname = u.name
    ) as k(is_null, named)
    where c.oid = tbl
$$;
