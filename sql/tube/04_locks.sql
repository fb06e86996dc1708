-- Locks, and the one order in which they are taken: the capture of each table, in the order of the tables; its name in its
-- shard; the tube's; of a table that moves its backfill's and its touching; tables; pods.
--
-- Each worker has a lock of its own, and all share the tube's. Whoever changes their number or a table's shard takes the tube's
-- alone: so no id is ever in two batches at once.

create function tube.lock_key(tube text, worker integer default null) returns bigint
language sql immutable
as $$
    select pg_catalog.hashtextextended(
        case when worker is null then 'pgchange tube ' || tube else 'pgchange worker ' || worker || ' ' || tube end, 0)
$$;
comment on function tube.lock_key(text, integer) is
    'The advisory lock of a worker, or of the whole tube: shared by workers at work, exclusive for whoever changes their '
    'number or a shard.';

create function tube.take_lock(tube text, worker integer) returns boolean
language sql volatile
as $$
    select pg_catalog.pg_try_advisory_xact_lock_shared(tube.lock_key(tube))
       and pg_catalog.pg_try_advisory_xact_lock(tube.lock_key(tube, worker))
$$;
comment on function tube.take_lock(text, integer) is 'Take a worker''s lock until the transaction ends, if it is free.';

create function tube.locked(tube text, worker integer) returns boolean
language sql stable
set search_path = pg_catalog, tube, pg_temp
as $$
    select pgchange.locked(tube.lock_key(tube, worker))
$$;
comment on function tube.locked(text, integer) is 'Whether a worker is at work.';

create function tube.check_level() returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception using errcode = 'PC007',
            message = format('tubes are changed and backfilled in a read committed transaction only, and this one is %s',
                             current_setting('transaction_isolation')),
            hint = 'begin isolation level read committed, or alter role ... set default_transaction_isolation';
    end if;
end
$$;
comment on function tube.check_level() is 'Refuse a transaction that would not see what ended while it waited for a lock.';

create function tube.holds_tables(besides regclass[]) returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    return exists (
        select from pg_locks as l
        where l.pid = pg_backend_pid() and l.locktype = 'relation' and l.relation >= 16384 and l.relation <> all (besides)
          and l.mode in ('ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock'));
end
$$;
comment on function tube.holds_tables(regclass[]) is 'Whether this transaction keeps writers from any other table than those.';

create function tube.unseen() returns interval
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select current_setting('deadlock_timeout')::interval / 2
$$;
comment on function tube.unseen() is
    'How long a transaction that holds tables may wait for anything: soon after, somebody who waits for what it holds may look '
    'for a deadlock, and be the one that is ended.';

create function tube.hold(key bigint, who text) returns void
language plpgsql
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    lock_timeout text := current_setting('lock_timeout');
    held boolean := tube.holds_tables('{}');
begin
    if held then
        perform set_config('lock_timeout', (extract(epoch from tube.unseen()) * 1000)::integer || 'ms', true);
    end if;
    perform pg_advisory_xact_lock(key);
    perform set_config('lock_timeout', lock_timeout, true);
exception when lock_not_available then
    raise lock_not_available using
        message = format('%s are at work, and do not end in time', who),
        hint = case when held
            then 'try again when they have ended, or do this before anything that locks a table: this transaction has locked '
                 'one, and its writers wait too; nothing was changed'
            else 'try again when they have ended, or with a longer lock_timeout; nothing was changed' end;
end
$$;
comment on function tube.hold(bigint, text) is
    'Wait for those at work under an advisory lock, as long as lock_timeout says, and keep others from it until this transaction '
    'ends; wait only shortly where this transaction already keeps writers from a table.';

create function tube.hold_still(tube text) returns void
language sql
set search_path = pg_catalog, tube, pg_temp
as $$
    select tube.hold(tube.lock_key(tube), format('workers of tube %I', tube))
$$;
comment on function tube.hold_still(text) is
    'Wait until no worker of a tube is at work, as long as lock_timeout says, and keep them from starting until this '
    'transaction ends.';

create function tube.holders(relation regclass, mode text) returns table (pid integer, is_autovacuum boolean)
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
comment on function tube.holders(regclass, text) is
    'Who keeps a table from being locked; a prepared transaction has no pid.';

create function tube.stop_autovacuum(relation regclass, mode text) returns void
language plpgsql
set search_path = pg_catalog, tube, pg_temp
set lock_timeout = '3s'
as $$
begin
    perform set_config('lock_timeout', ((extract(epoch from 2 * tube.unseen()) + 2) * 1000)::integer || 'ms', true);
    execute format('lock table only %s in %s mode', relation, mode);
    raise exception using errcode = 'PCUND', message = 'the lock is let go of';
exception when lock_not_available or deadlock_detected or sqlstate 'PCUND' then
    null;
end
$$;
comment on function tube.stop_autovacuum(regclass, text) is
    'Wait for a table until PostgreSQL cancels an autovacuum that is in the way, which it does for who has waited '
    'deadlock_timeout.';

create function tube.take_locks(relations regclass[], mode text) returns void
language plpgsql
set search_path = pg_catalog, tube, pg_temp
set lock_timeout = '100ms'
as $$
declare
    unseen interval := tube.unseen();
    is_first boolean := not tube.holds_tables(relations);
    until timestamptz := clock_timestamp() + case when is_first then interval '5 s' else unseen end;
    held_since timestamptz;
    relation regclass;
    -- One that prevents wraparound is not cancelled: no use in trying that again and again.
    stops integer := case when tube.holds_tables('{}') then 0 else 2 end;
begin
    for attempt in 1 .. 1000 loop
        held_since := null;
        perform set_config('lock_timeout', least(attempt, 4) * 100 || 'ms', true);
        begin
            foreach relation in array relations loop
                execute format(
                    'lock table only %s in %s mode %s', relation, mode,
                    case when not is_first or clock_timestamp() > held_since + unseen - interval '0.1 s' then 'nowait' end);
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
                         from tube.holders(relation, mode) as h)),
                    hint = 'try again when they have ended; nothing was changed';
            end if;
        end;
        -- Here nothing is held any more, so nobody waits for us but for this table.
        if stops > 0 and (select bool_and(h.is_autovacuum) from tube.holders(relation, mode) as h) then
            stops := stops - 1;
            perform tube.stop_autovacuum(relation, mode);
            continue;
        end if;
        perform pg_sleep(0.02 * least(attempt, 10));
    end loop;
end
$$;
comment on function tube.take_locks(regclass[], text) is
    'Lock tables, all or none, within about 5 s. It waits for one at a time, and shortly, for behind a lock that is waited for '
    'everybody waits; and never as long as PostgreSQL waits before it looks for a deadlock: it might end somebody '
    'else. Only where an autovacuum alone is in the way it waits longer, once or twice, while it holds nothing.';

create function tube.hold_capture(tbl oid) returns void
language sql
set search_path = pg_catalog, pg_temp
as $$
    select pg_advisory_xact_lock(hashtextextended('pgchange capture ' || tbl, 0))
$$;
comment on function tube.hold_capture(oid) is
    'Keep others from changing the capture of a table until this transaction ends, and wait for those who are changing it.';

create function tube.touch_key(tbl regclass) returns bigint
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select hashtextextended('pgchange touch ' || tbl::oid, 0)
$$;
comment on function tube.touch_key(regclass) is
    'The advisory lock of touching a table by hand: shared by those who touch, exclusive for whoever changes its shard.';

create function tube.hold_shard(tbl regclass) returns void
language plpgsql security definer
set search_path = pg_catalog, tube, pg_temp
as $$
begin
    perform pg_advisory_xact_lock_shared(tube.touch_key(tbl));
    if current_setting('transaction_isolation') <> 'read committed' then
        -- Who does not see what was committed before gets a serialization failure, as for any row that is not what it sees.
        perform from tube.attachment as a where a.tbl = hold_shard.tbl for share;
        perform from tube.detached as d where d.tbl = hold_shard.tbl for share;
    end if;
end
$$;
comment on function tube.hold_shard(regclass) is
    'Keep the shard that a table has from being changed until the transaction ends. Where it was changed behind the snapshot of '
    'a repeatable read transaction, the error asks to repeat that transaction.';

create function tube.backfill_key(tbl regclass, shard integer) returns bigint
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
    select hashtextextended(format('pgchange backfill %s %s', tbl::oid, shard), 0)
$$;
comment on function tube.backfill_key(regclass, integer) is 'The advisory lock of a backfill of a table and shard.';
