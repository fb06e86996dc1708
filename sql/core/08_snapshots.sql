-- Arithmetic on transaction ids and snapshots. A consumer has processed the union of the snapshots of its batches.

-- The full transaction id, with its epoch, of an xid that was assigned recently.
create function pgchange.full_xid(xid xid) returns xid8
language sql stable as $$
    select (near.n + ((xid::text::bigint - near.n) & 4294967295 | case
        when (xid::text::bigint - near.n) & 2147483648 > 0 then -4294967296 else 0 end))::text::xid8
    from (select pg_snapshot_xmax(pg_current_snapshot())::text::bigint) as near(n)
$$;

-- The snapshot that sees everything below xmax but the given transactions.
create function pgchange.snapshot_of(open_xids bigint[], xmax bigint) returns pg_snapshot
language plpgsql immutable as $$
begin
    return (
        select (coalesce(min(x), xmax) || ':' || xmax || ':' || coalesce(string_agg(x::text, ',' order by x), ''))::pg_snapshot
        from (select distinct unnest(open_xids)) as o(x)
        where x < xmax
    );
end
$$;

-- The snapshot that sees what either of two sees.
create function pgchange.snapshot_union(a pg_snapshot, b pg_snapshot) returns pg_snapshot
language plpgsql immutable as $$
begin
    if pg_snapshot_xmin(a) = pg_snapshot_xmax(a) and pg_snapshot_xmin(b) = pg_snapshot_xmax(b) then
        -- Neither has open transactions.
        return case when pg_snapshot_xmax(a) > pg_snapshot_xmax(b) then a else b end;
    end if;
    return (
        select pgchange.snapshot_of(
            array(
                select x::text::bigint
                from (select pg_snapshot_xip(a) union select pg_snapshot_xip(b)) as o(x)
                where not pg_visible_in_snapshot(x, a) and not pg_visible_in_snapshot(x, b)
            ),
            greatest(pg_snapshot_xmax(a)::text::bigint, pg_snapshot_xmax(b)::text::bigint))
    );
end
$$;

-- The snapshot that sees what both of two see.
create function pgchange.snapshot_intersection(a pg_snapshot, b pg_snapshot) returns pg_snapshot
language plpgsql immutable as $$
begin
    return (
        select pgchange.snapshot_of(
            array(select x::text::bigint from (select pg_snapshot_xip(a) union select pg_snapshot_xip(b)) as o(x)),
            least(pg_snapshot_xmax(a)::text::bigint, pg_snapshot_xmax(b)::text::bigint))
    );
end
$$;

-- The part of a snapshot that is below a transaction id.
create function pgchange.snapshot_below(s pg_snapshot, xid xid8) returns pg_snapshot
language plpgsql immutable as $$
begin
    return (
        select pgchange.snapshot_of(
            array(select x::text::bigint from pg_snapshot_xip(s) as o(x)),
            least(pg_snapshot_xmax(s)::text::bigint, xid::text::bigint))
    );
end
$$;

-- A snapshot that also sees one more transaction.
create function pgchange.snapshot_with(s pg_snapshot, xid xid8) returns pg_snapshot
language plpgsql immutable as $$
begin
    return (
        select pgchange.snapshot_of(
            array(
                select x::text::bigint from pg_snapshot_xip(s) as o(x) where x <> xid
                union all
                select g from generate_series(pg_snapshot_xmax(s)::text::bigint, xid::text::bigint - 1) as g
            ),
            greatest(pg_snapshot_xmax(s)::text::bigint, xid::text::bigint + 1))
    );
end
$$;
