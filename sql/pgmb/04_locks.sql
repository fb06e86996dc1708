-- Advisory locks: of a group, which one session reads at a time; of dispatching; and of creating, emptying and dropping
-- partitions.

-- Whether this session, or its transaction, holds the lock of a group.
create function pgmb.held_here(gid text) returns boolean
language plpgsql stable as $$
begin
    return pg_backend_pid() in (select w from pgchange.who_locks(pgmb.lock_key(gid)) as w);
end
$$;

-- Take the lock of a group. Raises an error if the group does not exist or is being read.
create function pgmb.take_idle(gid text) returns void
language plpgsql as $$
begin
    perform pgmb.check_group(gid);
    if not pg_try_advisory_xact_lock(pgmb.lock_key(gid)) then
        raise lock_not_available using message = format('group %I is being read', gid),
            hint = 'stop it, or wait until its batch has ended';
    end if;
end
$$;

-- The key of the advisory lock of a poll, held until its transaction ends, so that dispatches are committed in order.
create function pgmb.dispatch_key() returns bigint
language sql immutable as $$
    select pg_catalog.hashtextextended('pgchange dispatch pgmb', 0)
$$;

-- The key of the advisory lock of maintenance that creates, empties or drops partitions. If another run holds it, a run does
-- nothing.
create function pgmb.upkeep_key() returns bigint
language sql immutable as $$
    select pg_catalog.hashtextextended('pgchange upkeep pgmb', 0)
$$;
