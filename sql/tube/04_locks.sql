-- Locks, and the one order in which they are taken: the capture of each table, in the order of the tables; its name in its
-- shard; the tube's; of a table that moves its backfill's and its touching; tables; pods.
--
-- Each worker has a lock of its own, and all share the tube's. Whoever changes their number or a table's shard takes the tube's
-- alone: so no id is ever in two batches at once.

-- The advisory lock of a worker, or of the whole tube: shared by workers at work, exclusive for whoever changes their number or a
-- shard.
create function tube.lock_key(tube text, worker integer default null) returns bigint
language sql immutable as $$
    select pg_catalog.hashtextextended(
        case when worker is null then 'pgchange tube ' || tube else 'pgchange worker ' || worker || ' ' || tube end, 0)
$$;

-- Take a worker's lock until the transaction ends, if it is free.
create function tube.take_lock(tube text, worker integer) returns boolean
language sql volatile as $$
    select pg_catalog.pg_try_advisory_xact_lock_shared(tube.lock_key(tube))
       and pg_catalog.pg_try_advisory_xact_lock(tube.lock_key(tube, worker))
$$;

-- Wait for those at work under an advisory lock, as long as lock_timeout says, and keep others from it until this transaction ends;
-- wait only shortly where this transaction already keeps writers from a table, and not at all once somebody waits for it.
create function tube.hold(key bigint, who text) returns void
language plpgsql as $$
declare
    held boolean := pgchange.holds_tables('{}');
begin
    if held then
        perform pgchange.lock_briefly(key, pgchange.unseen());
    else
        perform pg_advisory_xact_lock(key);
    end if;
exception when lock_not_available then
    raise lock_not_available using
        message = format('%s are at work, and do not end in time', who),
        hint = case when held
            then 'try again when they have ended, or do this before anything that locks a table: this transaction has locked '
                 'one, and its writers wait too; nothing was changed'
            else 'try again when they have ended, or with a longer lock_timeout; nothing was changed' end;
end
$$;

-- Wait until no worker of a tube is at work, as long as lock_timeout says, and keep them from starting until this transaction ends.
create function tube.hold_still(tube text) returns void
language sql as $$
    select tube.hold(tube.lock_key(tube), format('workers of tube %I', tube))
$$;

-- Refuse to go on while batches of a tube are leased.
create function tube.check_leases(tube text) returns void
language plpgsql stable as $$
begin
    perform pgchange.check_lease(tube.name_of(w.tube, w.worker), w.batch ->> 'id', w.leased_by, w.leased_until)
    from tube.worker as w where w.tube = check_leases.tube;
end
$$;

-- Keep others from changing the capture of a table until this transaction ends, and wait for those who are changing it.
create function tube.hold_capture(tbl oid) returns void
language sql as $$
    select pg_advisory_xact_lock(hashtextextended('pgchange capture ' || tbl, 0))
$$;

-- The advisory lock of touching a table by hand: shared by those who touch, exclusive for whoever changes its shard.
create function tube.touch_key(tbl regclass) returns bigint
language sql stable as $$
    select hashtextextended('pgchange touch ' || tbl::oid, 0)
$$;

-- Keep the shard that a table has from being changed until the transaction ends. Where it was changed behind the snapshot of a
-- repeatable read transaction, the error asks to repeat that transaction.
create function tube.hold_shard(tbl regclass) returns void
language plpgsql security definer as $$
begin
    perform pg_advisory_xact_lock_shared(tube.touch_key(tbl));
    if current_setting('transaction_isolation') <> 'read committed' then
        -- Who does not see what was committed before gets a serialization failure, as for any row that is not what it sees.
        perform from tube.attachment as a where a.tbl = hold_shard.tbl for share;
        perform from tube.detached as d where d.tbl = hold_shard.tbl for share;
    end if;
end
$$;

-- The advisory lock of a backfill of a table and shard.
create function tube.backfill_key(tbl regclass, shard integer) returns bigint
language sql immutable as $$
    select hashtextextended(format('pgchange backfill %s %s', tbl::oid, shard), 0)
$$;
