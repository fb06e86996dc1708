-- Rows that were there before the tracking began, and rows that capture could not place.

-- A row's xmin as the 64-bit transaction id that it most recently stood for. A frozen row may seem younger than it is.
create function revision.full_xid(xmin xid) returns bigint
language sql stable as $$
    select case when (now.n & ~4294967295) + x.n > now.n then (now.n & ~4294967295) + x.n - 4294967296
                else (now.n & ~4294967295) + x.n end
    from (select pg_snapshot_xmax(pg_current_snapshot())::text::bigint) as now(n), (select xmin::text::bigint) as x(n)
$$;

-- The transaction that made the ids of the queue this cluster's own: that of the installation, or of a rebase; null where they are
-- not.
create function revision.native_from() returns bigint
language sql stable security definer as $$
    select revision.full_xid(o.xmin) from revision.origin as o where revision.is_native()
$$;

-- Whether history of a branch, or of any, is gone that was written since.
create function revision.trimmed_since(branch_id bigint, since pg_snapshot) returns boolean
language sql stable security definer as $$
    select exists (
        select from revision.trimmed as t
        where t.branch_id = coalesce(trimmed_since.branch_id, t.branch_id) and t.commits > 0 and t.upto > pg_snapshot_xmin(since))
$$;

-- Refuse to run what the owner of a table wrote for anybody else: it could do whatever its caller may.
create function revision.check_reads_no_code(known revision.tracked) returns void
language plpgsql as $$
declare
    owner_name name := (select pg_get_userbyid(c.relowner) from pg_class as c where c.oid = known.tbl);
begin
    if owner_name = current_user then
        return;
    end if;
    execute format('lock table %s in access share mode', known.tbl);
    -- A key of another type may have casts, a view of PostgreSQL 15 may be in the place of the table, a policy may call anything.
    if known.expression is not null or row_security_active(known.tbl) or not exists (
        select from pg_class as c
        join pg_attribute as a on a.attrelid = c.oid and a.attname = revision.key_column(c.oid)
        where c.oid = known.tbl and c.relkind in ('r', 'p') and pgchange.is_integer(a.atttypid)
    ) then
        raise insufficient_privilege using
            message = format('what reads %s runs with the rights of its owner, %I, and no others', known.tbl, owner_name),
            hint = format('connect as %I, whose code it may be: an expression, a policy, casts of the key', owner_name);
    end if;
    perform pgchange.check_code(known.tbl);
end
$$;

-- Put one row of a tracked table in the queue; false, and a fault, where its branch cannot be told. A row that is gone goes nowhere.
create function revision.enqueue_row(tbl regclass, commit_id bigint) returns boolean
language plpgsql as $$
declare
    known revision.tracked := (select t from revision.tracked as t where t.tbl = enqueue_row.tbl);
    branch bigint := known.branch_id;
    found_row boolean;
begin
    perform revision.check_reads_no_code(known);
    begin
        execute format(
            'select true, pg_catalog.int8up((%s)) from %s as %I where %I = $1',
            coalesce(known.expression, known.branch_id::text), tbl,
            (select c.relname from pg_class as c where c.oid = tbl), revision.key_column(tbl))
        using commit_id into found_row, branch;
    exception when others or assert_failure then
        insert into revision.fault (tbl, commit_id, message) values (enqueue_row.tbl, enqueue_row.commit_id, sqlerrm);
        return false;
    end;
    if branch is not null then
        insert into revision.commit_queue (commit_id, branch_id) values (enqueue_row.commit_id, branch);
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
    if revision.key_column(tbl) is null then
        perform pgchange.refuse(format('%s is not tracked, or its key column is gone', tbl), 'call revision.track first');
    end if;
    perform revision.check_owner(tbl, 'have its faults tried again');
    for fault in
        with taken as (
            delete from revision.fault as f
            where f.tbl in (select d.relid from pgchange.descendants(replay_faults.tbl) as d(relid))
              and f.commit_id is not null
            returning f.*
        )
        select * from taken order by id
    loop
        replayed := replayed + revision.enqueue_row(tbl, fault.commit_id)::integer;
    end loop;
    return replayed;
end
$$;
comment on function revision.replay_faults(regclass) is
    'Try the faults of a table again, when what caused them is mended; returns how many went through. The rest stay faults. '
    'Only the owner of the table may where what reads it could be code of his: an expression, a policy, a key of another type.';

-- Put the next chunk of the rows that were there before the tracking in the queue; returns how many rows it looked at, null when
-- there are no more.
create function revision.enqueue_chunk(tbl regclass, chunk integer) returns bigint
language plpgsql as $$
declare
    known revision.tracked;
    key name := revision.key_column(tbl);
    table_name name := (select c.relname from pg_class as c where c.oid = tbl);
    since pg_snapshot;
    upto bigint;
    looked bigint;
    unclear bigint;
    in_queue boolean := false;
begin
    select t.* into known from revision.tracked as t where t.tbl = enqueue_chunk.tbl for update;
    if known is null or key is null then
        perform pgchange.refuse(format('%s is not tracked, or its key column is gone', tbl), 'call revision.track first');
    end if;
    if known.existing_done then
        return null;
    end if;
    perform revision.check_owner(tbl, 'put its rows in the queue');
    perform revision.check_reads_no_code(known);
    -- What was committed when the capture was put in place was not captured. A row of a transaction that was open or to come
    -- then, or of a subtransaction that may belong to one, was inserted since, and captured, or only updated since: the queue
    -- tells. Above the highest key of then everything was captured. In a restored dump all rows are in doubt.
    since := case when revision.is_native() then known.since else '1:1:' end;
    execute format($chunk$
        select count(*), max(c.key), count(*) filter (where c.young and c.key <= %4$L)
        from (
            select %1$I as key, revision.full_xid(xmin) >= %3$L::bigint as young
            from %2$s as %7$I where %1$I > %5$L::bigint order by %7$I.%1$I limit %6$s
        ) as c
    $chunk$, key, tbl, pg_snapshot_xmin(since)::text, known.key_ceiling, coalesce(known.existing_upto, -9223372036854775808), chunk,
        table_name)
    into looked, upto, unclear;
    if unclear > 0 and not exists (select from revision.branch as b where b.tbl = enqueue_chunk.tbl and b.id = known.branch_id) then
        -- A branch that an expression gives is shared where another table's commits go there or may.
        execute format($doubt$
            select exists (
                select from (
                    select %1$I as key, pg_catalog.int8up((%2$s)) as branch
                    from %3$s as %4$I
                    where %1$I > %5$L::bigint and %1$I <= %6$L::bigint and revision.full_xid(xmin) >= %7$L::bigint
                ) as e
                join revision.commit_queue as q on (q.branch_id, q.commit_id) = (e.branch, e.key)
                where q.txid >= %7$L::xid8 and not pg_catalog.pg_visible_in_snapshot(q.txid, %8$L)
                  and (%9$L or exists (
                      select from revision.tracked as t
                      where t.tbl <> %10$L::pg_catalog.regclass and (t.expression is not null or t.branch_id = e.branch))))
        $doubt$, key, coalesce(known.expression, known.branch_id::text), tbl, table_name,
            coalesce(known.existing_upto, -9223372036854775808), least(upto, known.key_ceiling), pg_snapshot_xmin(since)::text, since,
            known.branch_id is not null, tbl)
        into in_queue;
    end if;
    if in_queue then
        perform pgchange.refuse(
            format('%s rows of %s may have come after the tracking began, and its branch may hold other tables'' commits, '
                   'so captured ones cannot be told from the rest', unclear, tbl),
            'track the table with a branch of its own');
    end if;
    if unclear > 0 and revision.trimmed_since(known.branch_id, since) then
        perform pgchange.refuse(
            format('%s rows of %s may have been captured already, and the history that would tell was trimmed', unclear, tbl),
            'put those that consumers have not had into revision.commit_queue (commit_id, branch_id) yourself');
    end if;
    begin
        execute format($chunk$
            with existing as materialized (
                select %1$I as key, pg_catalog.int8up((%6$s)) as branch,
                       revision.full_xid(xmin) >= %2$L::bigint as young
                from %3$s as %7$I where %1$I > %4$L::bigint and %1$I <= %5$L::bigint
                order by %7$I.%1$I
            ), captured as materialized (
                select q.branch_id, q.commit_id from revision.commit_queue as q
                where (select bool_or(e.young) from existing as e) and q.branch_id in (select e.branch from existing as e)
                  and q.txid >= %2$L::xid8 and not pg_catalog.pg_visible_in_snapshot(q.txid, %8$L)
            )
            insert into revision.commit_queue (commit_id, branch_id)
            select e.key, e.branch from existing as e
            where e.branch is not null and (not e.young or e.key <= %9$L::bigint
              and not exists (select from captured as c where (c.branch_id, c.commit_id) = (e.branch, e.key))
              and not exists (
                  select from revision.fault as f
                  where f.commit_id = e.key and f.tbl in (select d.relid from pgchange.descendants(%10$L) as d(relid))))
            order by e.key
        $chunk$, key, pg_snapshot_xmin(since)::text, tbl, coalesce(known.existing_upto, -9223372036854775808), upto,
            coalesce(known.expression, known.branch_id::text), table_name, since, known.key_ceiling, tbl);
    exception when others or assert_failure then
        if looked > 1 then
            return revision.enqueue_chunk(tbl, greatest(chunk / 10, 1));
        end if;
        -- What failed when it was written is a fault already.
        if not exists (
            select from revision.fault as f
            where f.commit_id = upto and f.tbl in (select d.relid from pgchange.descendants(enqueue_chunk.tbl) as d(relid)))
        then
            perform revision.enqueue_row(tbl, upto);
        end if;
    end;
    update revision.tracked as t
    set existing_upto = coalesce(upto, t.existing_upto), existing_done = looked < chunk
    where t.tbl = enqueue_chunk.tbl;
    return looked;
end
$$;

create procedure revision.enqueue_existing(tbl regclass, chunk integer default 10000)
language plpgsql as $$
declare
    looked bigint;
    total bigint := 0;
begin
    if chunk < 1 then
        raise invalid_parameter_value using message = 'chunk must be at least 1 row';
    end if;
    loop
        looked := revision.enqueue_chunk(tbl, chunk);
        exit when looked is null;
        commit;
        total := total + looked;
        raise notice '% rows of % looked at', total, tbl;
    end loop;
end
$$;
comment on procedure revision.enqueue_existing(regclass, integer) is
    'Put the rows that were there before the tracking in the queue, chunk by chunk with a commit each. Stopped at any point '
    'it goes on from there; none is doubled with what the trigger captured. Run it as the owner of the table, outside a '
    'transaction.';

select pgchange.pin_settings('revision.enqueue_row(regclass, bigint)', 'revision.enqueue_chunk(regclass, integer)');
