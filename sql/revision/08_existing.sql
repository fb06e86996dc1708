-- Putting rows in the queue that were in a table before it was tracked.

-- The xmin of a row as the latest 64-bit transaction id that it can stand for. A frozen row may seem younger than it is.
create function revision.full_xid(xmin xid) returns bigint
language sql stable as $$
    select case when (now.n & ~4294967295) + x.n > now.n then (now.n & ~4294967295) + x.n - 4294967296
                else (now.n & ~4294967295) + x.n end
    from (select pg_snapshot_xmax(pg_current_snapshot())::text::bigint) as now(n), (select xmin::text::bigint) as x(n)
$$;

-- The SQL condition that the transaction of a row had not ended when a snapshot was taken. It holds if revision.full_xid() of the
-- row's xmin is not below the snapshot's xmin. It is written out, because calling the function for each row would cost more than
-- the rest of the query. The condition reads the current snapshot itself, when its statement runs. With a snapshot from before, a
-- row of a transaction that began since would seem old by 2^32 transactions.
create function revision.is_young(since pg_snapshot) returns text
language sql immutable as $$
    select format(
        '(xmin::text::bigint + case when xmin::text::bigint > (%1$s & 4294967295) then -4294967296 else 0 end + (%1$s & ~4294967295) >= %2$s)',
        '(select pg_snapshot_xmax(pg_current_snapshot())::text::bigint)', pg_snapshot_xmin(since)::text)
$$;

-- The transaction from which on the transaction ids of the queue are valid in this cluster: that of the installation or of a
-- rebase. Null if they are not valid.
create function revision.native_from() returns bigint
language sql stable security definer as $$
    select revision.full_xid(o.xmin) from revision.origin as o where revision.is_native()
$$;

-- Whether commits that were written since a snapshot have been trimmed, in the given branch or in any branch.
create function revision.trimmed_since(branch_id bigint, since pg_snapshot) returns boolean
language sql stable security definer as $$
    select exists (
        select from revision.trimmed as t
        where t.branch_id = coalesce(trimmed_since.branch_id, t.branch_id) and t.commits > 0 and t.upto > pg_snapshot_xmin(since))
$$;

-- The SQL condition that a row of a tracked table comes after a key, or before it, depending on the operator. The order is that
-- of the index of the key, as in revision.key_order(). All rows come after null.
create function revision.beside_key(known revision.tracked, columns name[], alias name, operator text, key text) returns text
language sql stable as $$
    select case when key is null then 'true' else (
        select format('(%s) %s (%s)', string_agg(format('%I.%I', alias, o.name), ', ' order by o.place), operator,
                      string_agg(format(case when u.type = 'bigint'::regtype then '%L::bigint' else '%L' end, u.value), ', ' order by o.place))
        from unnest(coalesce(pgchange.key_order(known.tbl, columns), columns)) with ordinality as o(name, place)
        join unnest(columns, pgchange.key_parts(known.key_types, key), known.key_types) as u(name, value, type) on u.name = o.name) end
$$;

-- The columns of the key of a tracked table, for order by.
create function revision.key_order(known revision.tracked, columns name[], alias name) returns text
language sql stable as $$
    select string_agg(format('%I.%I', alias, o.name), ', ' order by o.place)
    from unnest(coalesce(pgchange.key_order(known.tbl, columns), columns)) with ordinality as o(name, place)
$$;

-- Put the next chunk of the existing rows in the queue. Returns how many rows it read; null if there are no more.
create function revision.enqueue_chunk(tbl regclass, chunk integer) returns bigint
language plpgsql
-- Compiling the queries (JIT) would take longer than running them.
set jit = off
as $$
declare
    known revision.tracked;
    columns name[] := revision.key_columns(tbl);
    row_alias name := (select c.relname from pg_class as c where c.oid = tbl);
    held text;
    key text;
    number text;
    kept text;
    last text;
    doubted text := 'true';
    branch text;
    ordered text;
    beyond text;
    within text;
    since pg_snapshot;
    upto text;
    looked bigint;
    unclear bigint;
    in_queue boolean := false;
begin
    select t.* into known from revision.tracked as t where t.tbl = enqueue_chunk.tbl for update;
    if known is null or columns is null then
        perform pgchange.refuse(format('%s is not tracked, or its key column was dropped', tbl), 'call revision.track first');
    end if;
    if known.existing_done then
        return null;
    end if;
    perform revision.check_owner(tbl, 'put its rows in the queue');
    perform revision.check_reads_no_code(known);
    held := revision.queue_column(known.key_types);
    key := pgchange.key_text(known.key_types, columns, row_alias);
    branch := coalesce(known.expression, known.branch_id::text);
    ordered := revision.key_order(known, columns, row_alias);
    number := format('row_number() over (order by %s)', ordered);
    -- Make the text of the key of the last row only.
    select string_agg(format('%I.%I as key_%s', row_alias, u.name, u.place), ', '),
           format('max(%s) filter (where c.is_last)',
                  pgchange.key_text(known.key_types, array_agg(('key_' || u.place)::name order by u.place), 'c'))
    into kept, last
    from unnest(columns) with ordinality as u(name, place);
    if known.key_types = '{bigint}' then
        number := 'null::bigint';
        kept := key || ' as key';
        last := 'max(c.key)';
        doubted := format('c.key <= %L', known.key_ceiling);
    end if;
    beyond := revision.beside_key(known, columns, row_alias, '>', known.existing_upto);
    -- Rows of transactions that had ended when the capture began were not captured. Rows of later transactions are in doubt: they
    -- were inserted since and captured, or only updated since. For these, look up the key in the queue. A key of one integer
    -- column above the highest key of that time was certainly captured. In a restored dump, all rows are in doubt.
    since := case when revision.is_native() then known.since else '1:1:' end;
    execute format($chunk$
        select count(*), %9$s, count(*) filter (where c.is_young and %4$s)
        from (
            select r.*, lead(true) over () is null as is_last
            from (select %1$s, %3$s as is_young from %2$s as %8$I where %6$s order by %5$s limit %7$s) as r
        ) as c
    $chunk$, kept, tbl, revision.is_young(since), doubted, ordered, beyond, chunk, row_alias, last)
    into looked, upto, unclear;
    within := case when upto is null then 'false' else beyond || ' and ' || revision.beside_key(known, columns, row_alias, '<=', upto) end;
    if unclear > 0 and not exists (select from revision.branch as b where b.tbl = enqueue_chunk.tbl and b.id = known.branch_id) then
        -- Rows in doubt can be looked up only if no other table puts commits in the branch. A branch from an expression counts
        -- as shared if another table puts commits there, or may do so.
        execute format($doubt$
            select exists (
                select from (
                    select %1$s as key, pg_catalog.int8up((%2$s)) as branch
                    from %3$s as %4$I
                    where %5$s and %12$s
                ) as c
                join revision.commit_queue as q on (q.branch_id, q.%10$I) = (c.branch, c.key)
                where %11$s and q.txid >= %6$L::xid8 and not pg_catalog.pg_visible_in_snapshot(q.txid, %7$L)
                  and (%8$L or exists (
                      select from revision.tracked as t
                      where t.tbl <> %9$L::pg_catalog.regclass and (t.expression is not null or t.branch_id = c.branch))))
        $doubt$, key, branch, tbl, row_alias, within, pg_snapshot_xmin(since)::text, since, known.branch_id is not null, tbl, held,
            doubted, revision.is_young(since))
        into in_queue;
    end if;
    if in_queue then
        perform pgchange.refuse(
            format(
                '%s rows of %s may be newer than the tracking, but captured rows cannot be distinguished: its branch may also '
                'have commits of other tables', unclear, tbl),
            'track the table with a branch of its own');
    end if;
    if unclear > 0 and revision.trimmed_since(known.branch_id, since) then
        perform pgchange.refuse(
            format('%s rows of %s may have been captured already, but the history that would show this was trimmed', unclear, tbl),
            format('insert the rows that consumers have not had into revision.commit_queue (%s, branch_id) yourself', held));
    end if;
    begin
        execute format($chunk$
            with existing as materialized (
                select %1$s as key, pg_catalog.int8up((%5$s)) as branch,
                       %13$s as young, %12$s as n
                from %3$s as %6$I where %4$s
                order by %11$s
            ), gap as (
                -- The ranges between the chunks that are already in the queue.
                select e.txid, e.last_id, lead(e.txid, 1, '18446744073709551615') over w as next_txid,
                       lead(e.first_id, 1, 9223372036854775807) over w as next_id
                from (
                    select %2$L::xid8 as txid, -9223372036854775808 as first_id, -9223372036854775808 as last_id
                    union all
                    select e.txid, e.first_id, e.last_id from revision.enqueued as e where e.tbl = %9$L::pg_catalog.regclass
                ) as e
                window w as (order by e.txid, e.first_id)
            ), captured as materialized (
                select q.branch_id, q.key
                from (
                    select distinct c.branch from existing as c
                    where c.branch is not null and (select bool_or(c.young) from existing as c)
                ) as b
                cross join gap as g
                cross join lateral (
                    select q.branch_id, q.%10$I as key from revision.commit_queue as q
                    where q.branch_id = b.branch and q.txid between g.txid and g.next_txid
                      and (q.txid, q.id) > (g.txid, g.last_id) and (q.txid, q.id) < (g.next_txid, g.next_id)
                      and not pg_catalog.pg_visible_in_snapshot(q.txid, %7$L)
                    offset 0
                ) as q
            ), inserted as (
                insert into revision.commit_queue (%10$I, branch_id)
                select c.key, c.branch from existing as c
                where c.branch is not null and (not c.young or %8$s
                  and not exists (select from captured as q where (q.branch_id, q.key) = (c.branch, c.key))
                  and not exists (
                      select from revision.fault as f
                      where f.%10$I = c.key and f.tbl in (select d.relid from pgchange.descendants(%9$L) as d(relid))))
                order by c.n, c.key
                returning id
            )
            insert into revision.enqueued (tbl, txid, first_id, last_id)
            select %9$L::pg_catalog.regclass, pg_catalog.pg_current_xact_id(), min(i.id), max(i.id) from inserted as i
            having count(*) > 0
        $chunk$, key, pg_snapshot_xmin(since)::text, tbl, within, branch, row_alias, since, doubted, tbl, held, ordered, number,
            revision.is_young(since));
    exception when others or assert_failure then
        if looked > 1 then
            return revision.enqueue_chunk(tbl, greatest(chunk / 10, 1));
        end if;
        -- A row that failed when it was written has a fault already.
        if not exists (
            select from revision.fault as f
            where coalesce(f.key, f.commit_id::text) = upto
              and f.tbl in (select d.relid from pgchange.descendants(enqueue_chunk.tbl) as d(relid)))
        then
            perform revision.enqueue_row(tbl, upto);
        end if;
    end;
    update revision.tracked as t
    set existing_upto = coalesce(upto, t.existing_upto), existing_done = looked < chunk
    where t.tbl = enqueue_chunk.tbl;
    delete from revision.enqueued as e where e.tbl = enqueue_chunk.tbl and looked < chunk;
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
        raise invalid_parameter_value using message = 'existing rows cannot be put in the queue in chunks of fewer than 1 row';
    end if;
    loop
        looked := revision.enqueue_chunk(tbl, chunk);
        exit when looked is null;
        commit;
        total := total + looked;
        raise notice '% rows of % were read', total, tbl;
    end loop;
end
$$;
comment on procedure revision.enqueue_existing(regclass, integer) is
    'Put the rows that were in a table before it was tracked in the queue, in chunks with a commit each. If it is stopped, it '
    'continues from there the next time. Rows that the trigger captured are not put in the queue again. Run it as the owner of '
    'the table, outside a transaction.';

select pgchange.pin_settings('revision.enqueue_chunk(regclass, integer)');
