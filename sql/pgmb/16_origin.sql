-- Which cluster the transaction ids of the log come from, and how the log changes in another cluster.

-- Whether this is a copy in another cluster that has not dispatched yet. Until it dispatches, which events were dispatched is not
-- known.
create function pgmb.restored() returns boolean
language sql stable security definer as $$
    select not pgmb.is_native()
$$;

-- Give all undispatched events the id of this transaction, so that the next poll dispatches them. For a restored or upgraded
-- cluster, in which the old transaction ids have no meaning.
create function pgmb.restamp_undispatched() returns void
language plpgsql as $$
declare
    at pgmb.dispatcher := pgmb.dispatcher_now();
    old text := pgmb.here();
    -- This transaction does not see the events that an open transaction publishes meanwhile. The next poll takes them.
    upto pg_snapshot := pgmb.visible_now();
    restored_at xid8 := (select pgchange.full_xid(d.xmin) from pgmb.dispatcher as d where d.version = at.version);
    waiting bigint;
begin
    -- Dispatches that were restored need not be those that the gaps were noted for.
    delete from pgmb.gap;
    -- Events that the old cluster's snapshot saw are dispatched, except those that were published here since.
    with gone as (
        delete from pgmb.published as p
        returning p.txid, p.seq, p.addressed, p.ids,
            p.txid > restored_at and p.txid <= pgchange.full_xid(p.xmin)
            or not (
                pg_visible_in_snapshot(p.txid, at.snapshot)
                or coalesce(p.txid = at.partial_txid and p.seq <= at.partial_seq, false)) as waits
    ), stamped as (
        insert into pgmb.published (addressed, ids)
        select g.addressed, g.ids from gone as g where g.waits order by g.txid, g.seq
        returning cardinality(ids) as n
    )
    select coalesce(sum(s.n), 0) into waiting from stamped as s;
    update pgmb.scheduled set txid = default;
    at.restored_at := clock_timestamp();
    at.restored := format(
        '%s: the log was restored or upgraded, and %s undispatched events were given a new transaction id',
        at.restored_at::timestamptz(0), waiting);
    at.snapshot := upto;
    at.partial_txid := null;
    at.partial_seq := null;
    at.scheduled_upto := '';
    perform pgmb.move_dispatcher(at);
    perform pgchange.note_origin('pgmb.origin');
    -- Also groups without a source, because their first batch may be claimed already.
    update pgmb.subscription_groups as g set source = pgmb.here() where coalesce(pgchange.came_along(g.source, old), true);
end
$$;
