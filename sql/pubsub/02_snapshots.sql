-- What can be read now, on a primary or a standby.

-- What is visible now, on a primary or a standby. A standby's own snapshot does not list open transactions: there their status is
-- asked for, and above cap transactions everything from the oldest open one on is left for later. Read with a statement of its own
-- afterwards.
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
