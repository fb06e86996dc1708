-- How maintenance and other changes besides writers wait for locks of a table, so that no session is ended for a deadlock.
--
-- A session that waits for a lock looks for a deadlock once, after deadlock_timeout. If there is a deadlock, PostgreSQL ends that
-- session, even if another session caused the deadlock. So maintenance waits only if no session waits for it, because such a
-- session may be about to look. It does not wait either while any session is about to look, because that session may come to wait
-- for maintenance. And it gives up before a session that begins to wait meanwhile looks.

-- The longest wait of maintenance: half of deadlock_timeout. A session that begins to wait for maintenance meanwhile then looks
-- for a deadlock only after maintenance has given up, so it is not ended.
create function pgchange.unseen() returns interval
language sql stable as $$
    select current_setting('deadlock_timeout')::interval / 2
$$;

-- Whether maintenance may wait for a lock for this long. It may if no session waits for this session, and if no session's
-- deadlock_timeout ends in that time.
create function pgchange.may_wait(most interval) returns boolean
language sql volatile as $$
    select not exists (
        select from pg_locks as l
        where not l.granted
          and (pg_backend_pid() = any (pg_blocking_pids(l.pid))
               or clock_timestamp() - l.waitstart between 1.5 * pgchange.unseen() - most and 2.5 * pgchange.unseen()))
$$;

-- The lock_timeout for the next lock of maintenance, at most this long; 1 ms if it may not wait.
create function pgchange.patience(most interval) returns text
language sql volatile as $$
    select case when pgchange.may_wait(m) then greatest(1, extract(epoch from m) * 1000)::integer else 1 end || 'ms'
    from least(most, pgchange.unseen()) as m
$$;

-- Lock a table, or rows, by a statement that accepts nowait, and wait at most this long. If maintenance may not wait and the lock
-- is not free, it fails at once. Maintenance takes every lock that others may hold by this function before it changes anything.
create function pgchange.lock_briefly(lock text, most interval) returns void
language plpgsql
set lock_timeout = '1ms'
as $$
declare
    patience constant text := pgchange.patience(most);
begin
    perform set_config('lock_timeout', patience, true);
    execute lock || case when patience = '1ms' then ' nowait' else '' end;
end
$$;

-- Take an advisory lock until the transaction ends, and wait for it at most this long, like pgchange.lock_briefly() for tables.
create function pgchange.lock_briefly(key bigint, most interval) returns void
language plpgsql
set lock_timeout = '1ms'
as $$
declare
    patience constant text := pgchange.patience(most);
begin
    perform set_config('lock_timeout', patience, true);
    if patience <> '1ms' then
        perform pg_catalog.pg_advisory_xact_lock(key);
    elsif not pg_catalog.pg_try_advisory_xact_lock(key) then
        raise lock_not_available using message = format('advisory lock %s is held by another transaction', key);
    end if;
end
$$;

-- Whether this transaction blocks the writers of any table besides these.
create function pgchange.holds_tables(besides regclass[]) returns boolean
language plpgsql volatile as $$
begin
    return exists (
        select from pg_locks as l
        where l.pid = pg_backend_pid() and l.locktype = 'relation' and l.relation >= 16384 and l.relation <> all (besides)
          and l.mode in ('ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock'));
end
$$;

-- The processes that hold a lock of a table against this mode. A prepared transaction has no pid.
create function pgchange.holders(relation regclass, mode text) returns table (pid integer, is_autovacuum boolean)
language sql volatile
set search_path = pg_catalog, pg_temp
as $$
    select l.pid,
           -- Without the right to see other roles' sessions, backend_type is null. Then a session without a user counts as an
           -- autovacuum worker.
           bool_and(l.mode = 'ShareUpdateExclusiveLock') and coalesce(bool_and(
               coalesce(a.backend_type = 'autovacuum worker', a.usesysid is null)), false)
    from pg_locks as l left join pg_stat_activity as a on a.pid = l.pid
    where l.locktype = 'relation' and l.relation = holders.relation and l.granted and l.pid is distinct from pg_backend_pid()
      and l.database = (select d.oid from pg_database as d where d.datname = current_database())
      and (holders.mode = 'access exclusive' or l.mode not in ('AccessShareLock', 'RowShareLock'))
    group by l.pid, l.virtualtransaction
    order by l.pid
$$;

-- Wait for a table until PostgreSQL cancels the autovacuum that holds it. PostgreSQL does so once a session has waited for
-- deadlock_timeout.
create function pgchange.stop_autovacuum(relation regclass, mode text) returns void
language plpgsql
set lock_timeout = '3s'
as $$
begin
    perform set_config('lock_timeout', ((extract(epoch from 2 * pgchange.unseen()) + 2) * 1000)::integer || 'ms', true);
    execute format('lock table only %s in %s mode', relation, mode);
    raise exception using errcode = 'PCUND', message = 'release the lock again';
exception when lock_not_available or deadlock_detected or sqlstate 'PCUND' then
    null;
end
$$;

-- Lock tables, all or none, within about 5 s. It waits for one table at a time, and shortly, because all other sessions queue
-- behind a waiting lock. It never waits until PostgreSQL looks for a deadlock, which might end another session. Only if nothing
-- but an autovacuum holds a table does it wait longer, once or twice, while it holds no lock.
create function pgchange.take_locks(relations regclass[], mode text) returns void
language plpgsql
set lock_timeout = '100ms'
as $$
declare
    unseen interval := pgchange.unseen();
    is_first boolean;
    until timestamptz;
    waits boolean;
    held_since timestamptz;
    relation regclass;
    stops integer;
begin
    -- In most cases no other session uses the tables. If another session does, the locks of all sessions are read. That is
    -- costly, because a transaction that changes thousands of tables holds thousands of locks.
    begin
        foreach relation in array relations loop
            execute format('lock table only %s in %s mode nowait', relation, mode);
        end loop;
        return;
    exception when lock_not_available then
        is_first := not pgchange.holds_tables(relations);
        until := clock_timestamp() + least(interval '5 s', case when not is_first then unseen end);
        -- PostgreSQL does not cancel an autovacuum that prevents wraparound, so more than two tries are no use.
        stops := case when pgchange.holds_tables('{}') then 0 else 2 end;
    end;
    for attempt in 1 .. 1000 loop
        held_since := null;
        waits := is_first and pgchange.may_wait(unseen);
        perform set_config('lock_timeout', least(attempt, 4) * 100 || 'ms', true);
        begin
            foreach relation in array relations loop
                execute format(
                    'lock table only %s in %s mode %s', relation, mode,
                    case when not waits or clock_timestamp() > held_since + unseen - interval '0.1 s' then 'nowait' end);
                held_since := coalesce(held_since, clock_timestamp());
                perform set_config('lock_timeout', '100ms', true);
            end loop;
            return;
        exception when lock_not_available or deadlock_detected then
            if clock_timestamp() > until then
                raise lock_not_available using
                    message = format(
                        '%s is being %s by transactions that do not end%s', relation,
                        case mode when 'access exclusive' then 'used' else 'written' end,
                        (select ': ' || string_agg(
                            case when h.pid is null then 'a prepared transaction'
                                 when h.is_autovacuum then 'autovacuum, process ' || h.pid else 'process ' || h.pid end, ', ')
                         from pgchange.holders(relation, mode) as h)),
                    hint = 'try again when they have ended; nothing was changed';
            end if;
        end;
        -- No lock is held at this point, so other sessions wait for this session at most because of this table.
        if stops > 0 and (select bool_and(h.is_autovacuum) from pgchange.holders(relation, mode) as h) then
            stops := stops - 1;
            perform pgchange.stop_autovacuum(relation, mode);
            continue;
        end if;
        perform pg_sleep(0.02 * least(attempt, 10));
    end loop;
end
$$;

-- Lock a table with its partitions and inheritance children, all or none. PostgreSQL cannot lock foreign tables, so they are left
-- out.
create function pgchange.lock_family(tbl regclass, mode text) returns void
language sql volatile as $$
    select pgchange.take_locks(array(
        select d.relid from pgchange.descendants(tbl) as d(relid) join pg_class as c on c.oid = d.relid
        where c.relkind <> 'f' order by d.relid), mode)
$$;

-- The other transaction that holds an advisory lock; it may be prepared. Its description, the call that ends it, and when it
-- began. Columns that the caller may not see are null.
create function pgchange.lock_holder(key bigint)
returns table (pid integer, told text, call text, since timestamptz)
language sql volatile as $$
    select l.pid,
           case when l.pid is not null
                then format('the transaction of process %s (%s)', l.pid, concat_ws(', ',
                    nullif(a.application_name, ''), a.usename, a.state, 'since ' || a.xact_start::timestamptz(0)))
                else format('the prepared transaction %L (%s)', p.gid,
                            concat_ws(', ', p.owner, 'since ' || p.prepared::timestamptz(0))) end,
           case when l.pid is not null then format('select pg_terminate_backend(%s)', l.pid)
                else format('commit prepared %1$L, or rollback prepared %1$L', p.gid) end,
           coalesce(a.xact_start, p.prepared)
    from pg_locks as l
    left join pg_stat_activity as a on a.pid = l.pid
    left join pg_locks as x on l.pid is null and x.pid is null and x.virtualtransaction = l.virtualtransaction
        and x.locktype = 'transactionid'
    left join pg_prepared_xacts as p on p.transaction = x.transactionid
    where l.locktype = 'advisory' and l.objsubid = 1 and l.granted and l.pid is distinct from pg_backend_pid()
      and l.database = (select d.oid from pg_database as d where d.datname = current_database())
      and (l.classid::bigint << 32 | l.objid::bigint) = key
    limit 1
$$;

-- The lock_timeout of a change that waits for another transaction, if the session sets none. It equals the time after which a
-- relay gives up on the server.
create function pgchange.longest_wait() returns text
language sql immutable as $$
    select '10s'
$$;

-- Take an advisory lock until the transaction ends. If others hold it, wait as long as lock_timeout, or longest_wait() if
-- lock_timeout sets no limit. Then fail with the consequence, the transaction that holds the lock, and the call that ends it.
create function pgchange.lock_or_tell(key bigint, consequence text) returns void
language plpgsql as $$
declare
    own_limit constant text := current_setting('lock_timeout');
    holder record;
begin
    if pg_try_advisory_xact_lock(key) then
        return;
    end if;
    begin
        if own_limit = '0' then
            perform set_config('lock_timeout', pgchange.longest_wait(), true);
        end if;
        perform pg_advisory_xact_lock(key);
        perform set_config('lock_timeout', own_limit, true);
    exception when lock_not_available then
        select * into holder from pgchange.lock_holder(key);
        raise lock_not_available using
            message = format('%s: %s does not end', consequence, coalesce(holder.told, 'another transaction')),
            hint = concat_ws('; ', 'try again when it has ended', 'to end it: ' || holder.call);
    end;
end
$$;
