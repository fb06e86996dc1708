-- Arithmetic on snapshots: a watermark is the union of the snapshots already processed.

create function pubsub.snapshot_of(open_xids bigint[], xmax bigint) returns pg_snapshot
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
    select (coalesce(min(x), xmax) || ':' || xmax || ':' || coalesce(string_agg(x::text, ',' order by x), ''))::pg_snapshot
    from (select distinct unnest(open_xids)) as o(x)
    where x < xmax
$$;
comment on function pubsub.snapshot_of(bigint[], bigint) is
    'The snapshot that sees everything below xmax but the given transactions.';

create function pubsub.snapshot_union(a pg_snapshot, b pg_snapshot) returns pg_snapshot
language sql immutable
set search_path = pg_catalog, pubsub, pg_temp
as $$
    select pubsub.snapshot_of(
        array(
            select x::text::bigint
            from (select pg_snapshot_xip(a) union select pg_snapshot_xip(b)) as o(x)
            where not pg_visible_in_snapshot(x, a) and not pg_visible_in_snapshot(x, b)
        ),
        greatest(pg_snapshot_xmax(a)::text::bigint, pg_snapshot_xmax(b)::text::bigint))
$$;
comment on function pubsub.snapshot_union(pg_snapshot, pg_snapshot) is
    'The snapshot that sees what either of two sees.';

create function pubsub.snapshot_intersection(a pg_snapshot, b pg_snapshot) returns pg_snapshot
language sql immutable
set search_path = pg_catalog, pubsub, pg_temp
as $$
    select pubsub.snapshot_of(
        array(select x::text::bigint from (select pg_snapshot_xip(a) union select pg_snapshot_xip(b)) as o(x)),
        least(pg_snapshot_xmax(a)::text::bigint, pg_snapshot_xmax(b)::text::bigint))
$$;
comment on function pubsub.snapshot_intersection(pg_snapshot, pg_snapshot) is
    'The snapshot that sees what both of two see.';

create function pubsub.snapshot_below(s pg_snapshot, xid xid8) returns pg_snapshot
language sql immutable
set search_path = pg_catalog, pubsub, pg_temp
as $$
    select pubsub.snapshot_of(
        array(select x::text::bigint from pg_snapshot_xip(s) as o(x)),
        least(pg_snapshot_xmax(s)::text::bigint, xid::text::bigint))
$$;
comment on function pubsub.snapshot_below(pg_snapshot, xid8) is 'What a snapshot sees below a transaction id.';

create function pubsub.snapshot_with(s pg_snapshot, xid xid8) returns pg_snapshot
language sql immutable
set search_path = pg_catalog, pubsub, pg_temp
as $$
    select pubsub.snapshot_of(
        array(
            select x::text::bigint from pg_snapshot_xip(s) as o(x) where x <> xid
            union all
            select g from generate_series(pg_snapshot_xmax(s)::text::bigint, xid::text::bigint - 1) as g
        ),
        greatest(pg_snapshot_xmax(s)::text::bigint, xid::text::bigint + 1))
$$;
comment on function pubsub.snapshot_with(pg_snapshot, xid8) is 'A snapshot that sees one transaction more.';

create function pubsub.current_snapshot(cap integer default 200000) returns pg_snapshot
language plpgsql volatile
set search_path = pg_catalog, pubsub, pg_temp
as $$
declare
    s pg_snapshot := pg_current_snapshot();
    lower bigint := pg_snapshot_xmin(s)::text::bigint;
    upper bigint := pg_snapshot_xmax(s)::text::bigint;
begin
    if not pg_is_in_recovery() then
        return s;
    end if;
    if upper - lower > cap then
        return pubsub.snapshot_of('{}', lower);
    end if;
    return pubsub.snapshot_of(
        array(
            select x from generate_series(lower, upper - 1) as x
            where pg_xact_status(x::text::xid8) = 'in progress'
        ),
        upper);
end
$$;
comment on function pubsub.current_snapshot(integer) is
    'What is visible now, on a primary or a standby. A standby''s own snapshot does not list open transactions: there their '
    'status is asked for, and above cap transactions everything from the oldest open one on is left for later. Read with a '
    'statement of its own afterwards.';
