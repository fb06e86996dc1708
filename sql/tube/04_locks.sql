-- Locks, and the single order in which they are taken. First the capture of each table, in the order of the tables; then its name
-- in its shard; then the lock of the tube. If a table moves to another shard, the locks of its backfill and of manual touches
-- follow. Last come tables, then pods.
--
-- Each worker has a lock of its own, and all workers share the lock of the tube. A change of their number or of a table's shard
-- takes the lock of the tube exclusively. So no id is ever in two batches at once.

-- The key of the advisory lock of a worker, or of the whole tube. Workers share the lock of the tube; a change of their number or
-- of a shard takes it exclusively.
create function tube.lock_key(tube text, worker integer default null) returns bigint
language sql immutable as $$
    select pg_catalog.hashtextextended(
        case when worker is null then 'pgchange tube ' || tube else 'pgchange worker ' || worker || ' ' || tube end, 0)
$$;

-- Take the lock of a worker until the transaction ends; false if another session has it.
create function tube.take_lock(tube text, worker integer) returns boolean
language sql volatile as $$
    select pg_catalog.pg_try_advisory_xact_lock_shared(tube.lock_key(tube))
       and pg_catalog.pg_try_advisory_xact_lock(tube.lock_key(tube, worker))
$$;

-- Take an advisory lock until this transaction ends. Wait for its holders as long as lock_timeout allows. If this transaction
-- already blocks the writers of a table, wait only shortly, or not at all if a session waits for it. The argument who names the
-- holders in the error.
create function tube.hold(key bigint, who text) returns void
language plpgsql as $$
declare
    held boolean;
begin
    -- A transaction that changes thousands of tables holds thousands of locks. They are read only if this lock is not free.
    if pg_try_advisory_xact_lock(key) then
        return;
    end if;
    held := pgchange.holds_tables('{}');
    if held then
        perform pgchange.lock_briefly(key, pgchange.unseen());
    else
        perform pg_advisory_xact_lock(key);
    end if;
exception when lock_not_available then
    raise lock_not_available using
        message = format('%s are at work and do not end in time', who),
        hint = case when held
            then 'try again when they have ended, or before anything that locks a table, because the writers of the locked table '
                 'wait, too; nothing was changed'
            else 'try again when they have ended, or with a longer lock_timeout; nothing was changed' end;
end
$$;

-- Wait until no worker of a tube is at work, as long as lock_timeout allows, and keep workers from starting until this
-- transaction ends.
create function tube.hold_still(tube text) returns void
language sql as $$
    select tube.hold(tube.lock_key(tube), format('workers of tube %I', tube))
$$;

-- Raise an error if a batch of a tube is leased.
create function tube.check_leases(tube text) returns void
language plpgsql stable as $$
begin
    perform pgchange.check_lease(tube.name_of(w.tube, w.worker), w.batch ->> 'id', w.leased_by, w.leased_until)
    from tube.worker as w where w.tube = check_leases.tube;
end
$$;

-- Lock the capture of a table against other changes until this transaction ends, after waiting for changes in progress.
create function tube.hold_capture(tbl oid) returns void
language sql as $$
    select pg_advisory_xact_lock(hashtextextended('pgchange capture ' || tbl, 0))
$$;

-- The key of the advisory lock for touches of a table by hand: touches share it, a change of the table's shard takes it
-- exclusively.
create function tube.touch_key(tbl regclass) returns bigint
language sql stable as $$
    select hashtextextended('pgchange touch ' || tbl::oid, 0)
$$;

-- Keep the shard of a table from changing until the transaction ends. If it has changed since the snapshot of a repeatable read
-- transaction, raise a serialization failure.
create function tube.hold_shard(tbl regclass) returns void
language plpgsql security definer as $$
begin
    perform pg_advisory_xact_lock_shared(tube.touch_key(tbl));
    if current_setting('transaction_isolation') <> 'read committed' then
        -- Lock the rows that have the shard of the table. PostgreSQL raises a serialization failure here if such a row was changed
        -- after the snapshot.
        perform from tube.attachment as a where a.tbl = hold_shard.tbl for share;
        perform from tube.detached as d where d.tbl = hold_shard.tbl for share;
    end if;
end
$$;

-- The key of the advisory lock of the backfill of a table and shard.
create function tube.backfill_key(tbl regclass, shard integer) returns bigint
language sql immutable as $$
    select hashtextextended(format('pgchange backfill %s %s', tbl::oid, shard), 0)
$$;
