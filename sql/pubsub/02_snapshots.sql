-- The snapshot for reading, on a primary or a standby.

-- The present snapshot, on a primary or a standby. The snapshot of a standby does not list open transactions, so this checks the
-- status of each. If there are more than cap transactions, it leaves everything from the oldest open transaction for later. Read
-- in a later statement than this call.
create function pubsub.current_snapshot(cap integer default 200000) returns pg_snapshot
language plpgsql volatile as $$
declare
    s pg_snapshot := pg_current_snapshot();
    lower bigint := pg_snapshot_xmin(s)::text::bigint;
    upper bigint := pg_snapshot_xmax(s)::text::bigint;
begin
    if not pg_is_in_recovery() then
        return s;
    end if;
    if upper - lower > cap then
        return pgchange.snapshot_of('{}', lower);
    end if;
    return pgchange.snapshot_of(
        array(
            select x from generate_series(lower, upper - 1) as x
            where pg_xact_status(x::text::xid8) = 'in progress'
        ),
        upper);
end
$$;
