-- Rows that were there before the tracking began.

-- A row's xmin as the 64-bit transaction id that it most recently stood for. A frozen row may seem younger than it is.
create function revision.full_xid(xmin xid) returns bigint
language sql stable as $$
    select case when (now.n & ~4294967295) + x.n > now.n then (now.n & ~4294967295) + x.n - 4294967296
                else (now.n & ~4294967295) + x.n end
    from (select pg_snapshot_xmax(pg_current_snapshot())::text::bigint) as now(n), (select xmin::text::bigint) as x(n)
$$;

-- The SQL condition that a row is of a transaction that was open or to come when a snapshot was taken: that revision.full_xid() of its
-- xmin is not below. The call of a function for each row would cost more than all else. It knows the transactions of now by the
-- snapshot of the statement in which it stands, for a row of a later one would look old.
create function revision.is_young(since pg_snapshot) returns text
language sql immutable as $$
    select format(
        '(xmin::text::bigint + case when xmin::text::bigint > (%1$s & 4294967295) then -4294967296 else 0 end + (%1$s & ~4294967295) >= %2$s)',
        '(select pg_snapshot_xmax(pg_current_snapshot())::text::bigint)', pg_snapshot_xmin(since)::text)
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

-- The SQL condition that a row of a tracked table lies behind a key, or before, as the operator says: in the order of the index of the
-- key, which is that of revision.key_order(). All rows lie behind null.
create function revision.beside_key(known revision.tracked, columns name[], alias name, operator text, key text) returns text
language sql stable as $$
    select case when key is null then 'true' else (
        select format('(%s) %s (%s)', string_agg(format('%I.%I', alias, o.name), ', ' order by o.place), operator,
                      string_agg(format(case when u.type = 'bigint'::regtype then '%L::bigint' else '%L' end, u.value), ', ' order by o.place))
        from unnest(coalesce(pgchange.key_order(known.tbl, columns), columns)) with ordinality as o(name, place)
        join unnest(columns, pgchange.key_parts(known.key_types, key), known.key_types) as u(name, value, type) on u.name = o.name) end
$$;

-- The columns of the key of a tracked table, as order by takes them.
create function revision.key_order(known revision.tracked, columns name[], alias name) returns text
language sql stable as $$
    select string_agg(format('%I.%I', alias, o.name), ', ' order by o.place)
    from unnest(coalesce(pgchange.key_order(known.tbl, columns), columns)) with ordinality as o(name, place)
$$;

-- Put the next chunk of the rows that were there before the tracking in the queue; returns how many rows it looked at, null when
-- there are no more.
create function revision.enqueue_chunk(tbl regclass, chunk integer) returns bigint
language plpgsql
-- Compiling the queries (jit) would take longer than running them.
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
        perform pgchange.refuse(format('%s is not tracked, or its key column is gone', tbl), 'call revision.track first');
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
    -- The text of a key is made of the last row only.
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
    -- What was committed when the capture was put in place was not captured. A row of a transaction that was open or to come
    -- then, or of a subtransaction that may belong to one, was inserted since, and captured, or only updated since: the queue
    -- tells. Above the highest key of then everything was captured; keys that are no numbers have no such ceiling. In a restored
    -- dump all rows are in doubt.
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
        -- A branch that an expression gives is shared where another table's commits go there or may.
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
            format('%s rows of %s may have come after the tracking began, and its branch may hold other tables'' commits, '
                   'so captured ones cannot be told from the rest', unclear, tbl),
            'track the table with a branch of its own');
    end if;
    if unclear > 0 and revision.trimmed_since(known.branch_id, since) then
        perform pgchange.refuse(
            format('%s rows of %s may have been captured already, and the history that would tell was trimmed', unclear, tbl),
            format('put those that consumers have not had into revision.commit_queue (%s, branch_id) yourself', held));
    end if;
    begin
        execute format($chunk$
            with existing as materialized (
                select %1$s as key, pg_catalog.int8up((%5$s)) as branch,
                       %13$s as young, %12$s as n
                from %3$s as %6$I where %4$s
                order by %11$s
            ), gap as (
                -- What lies between the chunks that are in the queue already.
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
        -- What failed when it was written is a fault already.
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

select pgchange.pin_settings('revision.enqueue_chunk(regclass, integer)');
