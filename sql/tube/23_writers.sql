-- Waiting for the writers of tables.

-- The transactions that are writing tables or the pods of their tubes, as virtual transaction ids and transaction ids. A prepared
-- transaction has only the latter. pg_stat_activity does not show prepared transactions, and shows an ordinary role no
-- transaction start of others.
create function tube.writers(tables regclass[]) returns table (transaction text)
language sql volatile as $$
    with relations as (
        select d.relid::oid as relid from unnest(tables) as t(tbl) cross join lateral pgchange.descendants(t.tbl) as d(relid)
        union
        select t.pods::oid from tube.tube as t
        where t.name in (select a.tube from tube.attachment as a where a.tbl = any (tables))
    ), holders as (
        select distinct l.virtualtransaction
        from pg_locks as l join relations as r on r.relid = l.relation
        where l.locktype = 'relation' and l.mode = 'RowExclusiveLock' and l.granted
          and l.database = (select d.oid from pg_database as d where d.datname = current_database())
          and l.pid is distinct from pg_backend_pid()
          -- Leave out transactions that only insert the pods of another backfill.
          and not exists (
              select from pg_locks as b
              where b.locktype = 'advisory' and b.virtualtransaction = l.virtualtransaction and b.objsubid = 1
                and (b.classid::bigint << 32 | b.objid::bigint) in (
                    select tube.backfill_key(a.tbl, a.shard) from tube.attachment as a))
    )
    select h.virtualtransaction from holders as h where h.virtualtransaction not like '-1/%'
    union
    select 'xid ' || l.transactionid
    from pg_locks as l join holders as h using (virtualtransaction)
    where l.locktype = 'transactionid' and l.mode = 'ExclusiveLock'
$$;

-- Transactions of a list that have not ended. Returns their names, and the id and the age of the oldest, as far as the caller may
-- see them; null if all have ended.
create function tube.awaited(transactions text[], out names text, out xid xid, out duration interval)
language sql volatile as $$
    select string_agg(distinct h.name, ', '), (array_agg(h.xid order by h.duration desc nulls last, age(h.xid) desc))[1],
           -- Write the time as hours, however many there are, because an interval with days has a space in its text.
           make_interval(secs => max(extract(epoch from h.duration))::double precision)
    from (
        select coalesce(
                   'process ' || l.pid, 'prepared transaction ' || quote_literal(p.gid), 'a prepared transaction') as name,
               x.transactionid as xid, clock_timestamp() - coalesce(a.xact_start, p.prepared) as duration
        from pg_locks as l
        left join pg_locks as x on x.virtualtransaction = l.virtualtransaction and x.pid is not distinct from l.pid
            and x.locktype = 'transactionid' and x.mode = 'ExclusiveLock'
            and (l.locktype = 'virtualxid' or x.transactionid = l.transactionid)
        left join pg_stat_activity as a on a.pid = l.pid
        left join pg_prepared_xacts as p on p.transaction = l.transactionid and l.pid is null
        where (l.locktype = 'virtualxid' and l.mode = 'ExclusiveLock' and l.virtualxid = any (transactions))
           or (l.locktype = 'transactionid' and l.mode = 'ExclusiveLock' and 'xid ' || l.transactionid = any (transactions))
    ) as h
$$;

-- Wait for the present writers of tables, and raise a notice every 2 s with their names. Raises an error that names them if they
-- do not end in time.
create function tube.wait_for_writers(tables regclass[], timeout interval) returns void
language plpgsql
set intervalstyle = 'postgres'
as $$
declare
    waited text[] := array(select w.transaction from tube.writers(tables) as w);
    began timestamptz := clock_timestamp();
    told_at timestamptz;
    oldest record;
    holders text;
begin
    if timeout is null then
        perform pgchange.refuse('step 2 needs a timeout, but none was given', 'give the longest time to wait, as in ''60 seconds''');
    end if;
    loop
        begin
            oldest := tube.awaited(waited);
            holders := oldest.names;
            exit when holders is null;
            if (clock_timestamp() < told_at + interval '2 s') is not true then
                told_at := clock_timestamp();
                raise notice 'tube_backfill: await_ms=% active_tx_xid=% active_tx_duration=% waiting for %',
                    round(extract(epoch from told_at - began) * 1000), oldest.xid, oldest.duration, holders;
            end if;
            if clock_timestamp() >= began + timeout then
                raise lock_not_available using
                    message = format(
                        'the backfill has not begun: its tables are still being written after %s, by %s', timeout, holders),
                    hint = 'try again when they have ended, or with a longer timeout; nothing was changed';
            end if;
            perform pg_sleep(0.02);
        exception when query_canceled then
            -- A cancel during a later round names the writers of the round before.
            if holders is null then
                raise;
            end if;
            raise query_canceled using
                message = format('%s, while tables of the backfill are still being written by %s', sqlerrm, holders),
                hint = 'try again when they have ended, or with a longer statement_timeout; nothing was changed';
        end;
    end loop;
end
$$;
