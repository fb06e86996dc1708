-- After a restore, an upgrade, or a source that lost its tail.

create function pgmb.full_xid(xid xid) returns bigint
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select near.n + ((xid::text::bigint - near.n) & 4294967295 | case
        when (xid::text::bigint - near.n) & 2147483648 > 0 then -4294967296 else 0 end)
    from (select pg_snapshot_xmax(pg_current_snapshot())::text::bigint) as near(n)
$$;
comment on function pgmb.full_xid(xid) is 'A transaction id near today''s, with its epoch.';

create function pgmb.restamp_undispatched() returns void
language plpgsql
set search_path = pg_catalog, pgmb, pg_temp
as $$
declare
    at pgmb.dispatcher := pgmb.dispatcher_now();
    old text := pgmb.here();
    -- What an open transaction publishes meanwhile it does not see: that comes with the next poll.
    upto pg_snapshot := pgmb.visible_now();
    restored_at bigint := (select pgmb.full_xid(d.xmin) from pgmb.dispatcher as d where d.version = at.version);
    waiting bigint;
begin
    -- What the old cluster's snapshot saw is dispatched, unless it was published here since.
    with gone as (
        delete from pgmb.published as p
        returning p.txid, p.seq, p.addressed, p.ids,
            p.txid::text::bigint > restored_at and p.txid::text::bigint <= pgmb.full_xid(p.xmin)
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
    update pgmb.subscription_groups as g set source = pgmb.here() where pgchange.came_along(g.source, old);
end
$$;
comment on function pgmb.restamp_undispatched() is
    'In a restored or upgraded cluster, whose transaction ids mean something else: give all that waits the id of this '
    'transaction, so that the next poll dispatches it.';

create function pgmb.mark(gid text) returns jsonb
language sql stable security definer
set search_path = pg_catalog, pgmb, pg_temp
as $$
    select jsonb_build_object(
        'source', pgmb.here(), 'version', c.version, 'cursor', c.upto,
        'from_version', c.from_version, 'after', c.after)
    from pgmb.claim as c where c.group_id = gid
$$;
comment on function pgmb.mark(text) is
    'What this source knows of a group whose cursor is elsewhere: the cursors before and after the batch that it claimed last.';

create function pgmb.adopt_mark(gid text, mark jsonb) returns text
language plpgsql security definer
set search_path = pg_catalog, pgmb, pg_temp
as $$
declare
    at bigint;
    before boolean;
begin
    perform pgmb.take_idle(gid);
    at := (select g.version from pgmb.subscription_groups as g where g.id = gid);
    if mark is null then
        mark := jsonb_build_object('version', 0, 'from_version', 0, 'after', null, 'cursor', null);
    end if;
    before := at = (mark ->> 'from_version')::bigint;
    if not before and at < (mark ->> 'version')::bigint then
        raise exception using errcode = 'PC009',
            message = format('group %I is at batch %s, before the last claim that the source knows', gid, at),
            hint = 'choose a cursor: pgmb.set_group_cursor(...)';
    end if;
    -- Where the source lost what it knew, the group may have been moved back or begun anew since.
    if at > (mark ->> 'version')::bigint then
        mark := mark || jsonb_build_object('cursor', (
            select least(mark ->> 'cursor' collate "C", coalesce(g.last_read_event_id, '') collate "C")
            from pgmb.subscription_groups as g where g.id = gid));
    end if;
    update pgmb.subscription_groups as g set
        version = (mark ->> case when before then 'from_version' else 'version' end)::bigint,
        last_read_event_id = nullif(mark ->> case when before then 'after' else 'cursor' end, ''),
        source = mark ->> 'source', updated_at = now()
    where g.id = gid;
    return case when before or at = (mark ->> 'version')::bigint then 'exactly once' else 'at least once' end;
end
$$;
comment on function pgmb.adopt_mark(text, jsonb) is
    'Go on from what pgmb.mark() of the source says; returns the guarantee: exactly once where the source knows the last batch, '
    'at least once from the mark on where it lost batches that were processed.';
