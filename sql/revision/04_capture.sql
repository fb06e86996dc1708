-- Capture: the trigger of a tracked table puts each inserted row in the queue as a commit.
--
-- The trigger function belongs to the owner of the table and runs with that owner's rights. So a writer needs no rights on the
-- queue, and an expression can do no more than the owner. It evaluates inside an exception block and writes outside it, because a
-- write inside would cost every statement a second transaction id.

-- Whether a table is the table with the oid root, for which the capture was written, or a partition of it.
create function revision.is_captured(rel oid, root oid) returns boolean
language sql stable security definer as $$
    with recursive line(relid) as (
        select rel
        union
        select i.inhparent from line join pg_inherits as i on i.inhrelid = line.relid
    )
    select exists (select from line where line.relid = root)
        -- In a restored database, the oid in the capture is stale. Then any tracked table above will do.
        or not exists (select from revision.tracked as t where t.tbl = root)
           and exists (select from line join revision.tracked as t on t.tbl = line.relid)
$$;

-- Record a row that could not be put in the queue, with its key if it is known.
create function revision.note_fault(rel oid, commit_id bigint, message text, key text default null) returns void
language sql
-- Capture triggers call it, with any setting of the writer.
set row_security = on
as $$
    insert into revision.fault (tbl, commit_id, message, key)
    values (rel, note_fault.commit_id, note_fault.message, note_fault.key)
$$;

-- Record that a partition was written after it was detached. If it is attached again, these rows are in no commit.
create function revision.note_departed(rel oid) returns void
language sql
set row_security = on
as $$
    insert into revision.fault (tbl, kind, message)
    select rel, 'missed', 'it was written while it was no partition of the tracked table'
    where not exists (select from revision.fault as f where f.tbl = rel and f.kind = 'missed')
$$;

-- Whether a trigger function fits the table that it is called for. That is the table with the oid root or a partition of it, and
-- its key has the names for which the function was written. Inlined, so that the last call is the only call for most statements.
create function revision.still_fits(rel oid, root oid, numbers smallint[], key name[]) returns boolean
language sql stable as $$
    select (rel operator(pg_catalog.=) root or revision.is_captured(rel, root))
        and (pgchange.are_named(root, numbers, key) or coalesce(revision.key_columns(rel) operator(pg_catalog.=) key, false))
$$;

-- Put a row that was added to a tracked table or a partition of it in the queue. If it cannot be placed, record a fault and
-- return false. key_query returns the text of a key that is not a number; branch_query returns the branch if it comes from an
-- expression.
create function revision.capture_row(added record, rel oid, key name[], key_query text, branch_query text, branch_id bigint) returns boolean
language plpgsql
-- Captures call it, with any setting of the writer.
set row_security = on
as $$
declare
    number bigint;
    text_key text;
    branch bigint := branch_id;
begin
    begin
        if key is null then
            raise 'the key column was dropped';
        elsif key_query is null then
            number := to_jsonb(added) ->> key[1];
        else
            execute key_query into strict text_key using to_jsonb(added);
        end if;
        if branch_query is not null then
            execute branch_query into strict branch using to_jsonb(added);
        end if;
        if branch is not null and number is null and text_key is null then
            raise 'its key is null';
        end if;
    exception when others or assert_failure then
        perform revision.note_fault(rel, number, sqlerrm, text_key);
        return false;
    end;
    if branch is not null then
        insert into revision.commit_queue (commit_id, key, branch_id) values (number, text_key, branch);
    end if;
    return true;
end
$$;

-- The query that puts the rows of a statement in the queue one by one. If a partition was detached from the table, its rows make
-- no commits, and this is recorded. branch_id is null if the branch comes from an expression, in which the row has the name
-- alias.
create function revision.capture_query(
    rel oid, root oid, is_number boolean, branch_id bigint, expression text default null, alias name default null
) returns text
language plpgsql as $$
declare
    key constant name[] := revision.key_columns(rel);
begin
    if rel <> root and not revision.is_captured(rel, root) then
        perform revision.note_departed(rel);
        return 'select';
    end if;
    return format(
        'select pg_catalog.count(revision.capture_row(pgchange_added, %s, %L, %L, %L, %s)) from added as pgchange_added', rel, key,
        case when key is not null and not is_number then format(
            'select case when %s then %s end from jsonb_populate_record(null::%s, $1) as pgchange_added',
            (select string_agg(format('pgchange_added.%I is not null', u.name), ' and ') from unnest(key) as u(name)),
            pgchange.key_text(rel::regclass, key, 'pgchange_added'), rel::regclass) end,
        case when expression is not null then format(
            'select int8up((%s)) from jsonb_populate_record(null::%s, $1) as %I', expression, rel::regclass, alias) end,
        coalesce(branch_id::text, 'null'));
end
$$;

-- The body of the trigger function of a table. It is written for the table's columns, so that PostgreSQL keeps its plans. Each
-- session keeps the function and its plans for every table that it writes to, so both are short. A single query makes all
-- checks; if it fails, the rows are handled one by one. The function ends with "return old", which is null here and needs no
-- plan; "return null" would need a plan.
create function revision.capture_body(tbl regclass, key name[], key_types regtype[], branch_id bigint, expression text) returns text
language sql stable as $$
    select format($body$
#variable_conflict use_column
%1$s
    begin
        %2$s
    exception when others or assert_failure then
        -- If the schema was dropped, there are no consumers.
        if pg_catalog.to_regnamespace('revision') is not null then
            execute revision.capture_query(tg_relid, %3$s);
        end if;
        return old;
    end;
    insert into revision.commit_queue (%4$s;
    return old;
end
$body$,
        case when expression is null then 'begin' else $declared$declare
    pgchange_commits bigint[];
    pgchange_branches bigint[];
    pgchange_fits boolean;
begin$declared$ end,
        case when expression is not null then format($checked$select pg_catalog.array_agg(e.commit_id), pg_catalog.array_agg(e.branch_id), %s
        into pgchange_commits, pgchange_branches, pgchange_fits
        from (select %I, pg_catalog.int8up((%s)) from added as %I) as e(commit_id, branch_id)
        where e.branch_id is not null;
        if not pgchange_fits or pg_catalog.array_position(pgchange_commits, null) is not null then
            raise 'check each row';
        end if;$checked$,
                 k.fits, key[1], expression, c.relname)
             when key_types = '{bigint}' then format($checked$select 1 into strict new
        where not exists (select from added where pg_catalog.int8up(%I) is null) and %s;$checked$, key[1], k.fits)
             -- The query contains the text of the key, but does not evaluate it. So if the type of a column was changed and does
             -- not fit, the query fails here, and the rows are handled one by one.
             else format($checked$select 1 into strict new
        where not exists (select from added as pgchange_added where %s or pgchange_added.%I is null and %s is null)
            and %s;$checked$, k.is_null, key[1], k.text, k.fits) end,
        concat_ws(', ', tbl::oid, (key_types = '{bigint}')::text, coalesce(branch_id::text, 'null'),
                  case when expression is not null then format('%L, %L', expression, c.relname) end),
        case when expression is not null then 'commit_id, branch_id) select * from unnest(pgchange_commits, pgchange_branches)'
             when key_types = '{bigint}' then format('commit_id, branch_id) select %I, %s from added', key[1], branch_id)
             else format('key, branch_id) select %s, %s from added as pgchange_added', k.text, branch_id) end)
    from pg_class as c
    cross join lateral (
        select string_agg(format('pgchange_added.%I is null', u.name), ' or ' order by u.place),
               pgchange.key_text(key_types, key, 'pgchange_added'),
               format('revision.still_fits(tg_relid, %s)', pgchange.key_check(tbl, key, array_agg(a.attnum order by u.place)))
        from unnest(key) with ordinality as u(name, place)
        join pg_attribute as a on a.attrelid = tbl and a.attname = u.name
    ) as k(is_null, text, fits)
    where c.oid = tbl
$$;
