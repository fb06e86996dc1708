-- How long maintenance, and whoever changes a table beside its writers, waits for locks: never so that anybody is ended for a
-- deadlock.
--
-- Who waits for a lock looks for a deadlock once, after deadlock_timeout, and is ended where it finds one, whoever came into it
-- last. So maintenance waits for nobody while somebody waits for it, who may be about to look; nor while anybody is about to look,
-- who may wait for somebody that comes to wait for it. And it gives up before whoever begins to wait meanwhile looks.

-- How long one may wait of whom others can come to wait: later somebody who does may look for a deadlock, and be the one that is
-- ended.
create function pgchange.unseen() returns interval
language sql stable as $$
    select current_setting('deadlock_timeout')::interval / 2
$$;

-- Whether maintenance may wait so long: nobody waits for this session, and nobody is to look for a deadlock meanwhile.
create function pgchange.may_wait(most interval) returns boolean
language sql volatile as $$
    select not exists (
        select from pg_locks as l
        where not l.granted
          and (pg_backend_pid() = any (pg_blocking_pids(l.pid))
               or clock_timestamp() - l.waitstart between 1.5 * pgchange.unseen() - most and 2.5 * pgchange.unseen()))
$$;

-- The lock_timeout of maintenance for what comes next, so long at most: the shortest one where it may not wait.
create function pgchange.patience(most interval) returns text
language sql volatile as $$
    select case when pgchange.may_wait(m) then greatest(1, extract(epoch from m) * 1000)::integer else 1 end || 'ms'
    from least(most, pgchange.unseen()) as m
$$;

-- Lock a table, or rows, by a statement to which nowait can be added, and wait so long at most; where one may not wait, and the lock
-- is not free, it fails at once. So maintenance locks whatever others may have locked, before it changes that.
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

-- The same for an advisory lock, until the transaction ends.
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
        raise lock_not_available using message = format('advisory lock %s is held by others', key);
    end if;
end
$$;

-- Whether this transaction keeps writers from any other table than those.
create function pgchange.holds_tables(besides regclass[]) returns boolean
language plpgsql volatile as $$
begin
    return exists (
        select from pg_locks as l
        where l.pid = pg_backend_pid() and l.locktype = 'relation' and l.relation >= 16384 and l.relation <> all (besides)
          and l.mode in ('ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock'));
end
$$;

-- Who keeps a table from being locked; a prepared transaction has no pid.
create function pgchange.holders(relation regclass, mode text) returns table (pid integer, is_autovacuum boolean)
language sql volatile
set search_path = pg_catalog, pg_temp
as $$
    select l.pid,
           -- Of whom a role may not see the kind it sees at least that no role is connected there.
           bool_and(l.mode = 'ShareUpdateExclusiveLock') and coalesce(bool_and(
               coalesce(a.backend_type = 'autovacuum worker', a.usesysid is null)), false)
    from pg_locks as l left join pg_stat_activity as a on a.pid = l.pid
    where l.locktype = 'relation' and l.relation = holders.relation and l.granted and l.pid is distinct from pg_backend_pid()
      and l.database = (select d.oid from pg_database as d where d.datname = current_database())
      and (holders.mode = 'access exclusive' or l.mode not in ('AccessShareLock', 'RowShareLock'))
    group by l.pid, l.virtualtransaction
    order by l.pid
$$;

-- Wait for a table until PostgreSQL cancels an autovacuum that is in the way, which it does for who has waited deadlock_timeout.
create function pgchange.stop_autovacuum(relation regclass, mode text) returns void
language plpgsql
set lock_timeout = '3s'
as $$
begin
    perform set_config('lock_timeout', ((extract(epoch from 2 * pgchange.unseen()) + 2) * 1000)::integer || 'ms', true);
    execute format('lock table only %s in %s mode', relation, mode);
    raise exception using errcode = 'PCUND', message = 'the lock is let go of';
exception when lock_not_available or deadlock_detected or sqlstate 'PCUND' then
    null;
end
$$;

-- Lock tables, all or none, within about 5 s. It waits for one at a time, and shortly, for behind a lock that is waited for everybody
-- waits; and never as long as PostgreSQL waits before it looks for a deadlock: it might end somebody else. Only where an autovacuum
-- alone is in the way it waits longer, once or twice, while it holds nothing.
create function pgchange.take_locks(relations regclass[], mode text) returns void
language plpgsql
set lock_timeout = '100ms'
as $$
declare
    unseen interval := pgchange.unseen();
    is_first boolean := not pgchange.holds_tables(relations);
    until timestamptz := clock_timestamp() + least(interval '5 s', case when not is_first then unseen end);
    waits boolean;
    held_since timestamptz;
    relation regclass;
    -- One that prevents wraparound is not cancelled: no use in trying that again and again.
    stops integer := case when pgchange.holds_tables('{}') then 0 else 2 end;
begin
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
        -- Here nothing is held any more, so nobody waits for us but for this table.
        if stops > 0 and (select bool_and(h.is_autovacuum) from pgchange.holders(relation, mode) as h) then
            stops := stops - 1;
            perform pgchange.stop_autovacuum(relation, mode);
            continue;
        end if;
        perform pg_sleep(0.02 * least(attempt, 10));
    end loop;
end
$$;

-- Lock a table with its partitions and inheritance children, all or none. PostgreSQL locks no foreign tables: those are left out.
create function pgchange.lock_family(tbl regclass, mode text) returns void
language sql volatile as $$
    select pgchange.take_locks(array(
        select d.relid from pgchange.descendants(tbl) as d(relid) join pg_class as c on c.oid = d.relid
        where c.relkind <> 'f' order by d.relid), mode)
$$;

-- The transaction of another session, or the prepared one, that holds an advisory lock, the call that ends it, and when it began, as
-- far as the caller may see that.
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

-- The lock_timeout of a change that waits for another transaction, in a session that sets none: as long as a relay waits for an
-- answer before the server counts as lost.
create function pgchange.longest_wait() returns text
language sql immutable as $$
    select '10s'
$$;

-- Take an advisory lock until the transaction ends. Where others hold it, wait as long as lock_timeout says, or longest_wait() where
-- it sets no limit. Then fail with the consequence, the transaction that holds the lock, and the call that ends it.
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
