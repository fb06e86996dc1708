-- Reading the queue: commits that a position has not processed and a snapshot sees. Nothing here writes, so all of it works on a
-- standby. A position is the JSON of a watermark: {version, snapshot, partial: [txid, id], source}.

create function pubsub.unread(
    branch_id bigint,
    after pg_snapshot, partial_txid xid8, partial_id bigint,
    upto pg_snapshot,
    low_txid xid8 default '0', low_id bigint default 0,
    high_txid xid8 default '18446744073709551615', high_id bigint default 9223372036854775807,
    lowest xid8 default '0', late xid8[] default null
)
returns table (txid xid8, id bigint, commit_id bigint, created_at timestamptz, key text)
language sql stable as $$
    (
        select q.txid, q.id, q.commit_id, q.created_at, q.key
        from pg_catalog.pg_snapshot_xip(unread.after) as open(txid)
        cross join lateral (
            select c.txid, c.id, c.commit_id, c.created_at, c.key
            from revision.commit_queue as c
            where c.branch_id = unread.branch_id
              and c.txid = open.txid
              and (unread.late is null or c.txid = any (unread.late))
              and (c.txid <> unread.partial_txid or c.id > unread.partial_id or unread.partial_txid is null)
              and (c.txid, c.id) > (unread.low_txid, unread.low_id)
              and (c.txid, c.id) <= (unread.high_txid, unread.high_id)
            order by c.txid, c.id
        ) as q
        where pg_catalog.pg_visible_in_snapshot(open.txid, unread.upto)
          and open.txid >= unread.low_txid
          and open.txid <= unread.high_txid
        order by open.txid, q.id
    )
    union all
    (
        select c.txid, c.id, c.commit_id, c.created_at, c.key
        from revision.commit_queue as c
        where c.branch_id = unread.branch_id
          and c.txid >= unread.lowest
          and c.txid >= greatest(pg_catalog.pg_snapshot_xmax(unread.after), unread.partial_txid, unread.low_txid)
          and c.txid < pg_catalog.pg_snapshot_xmax(unread.upto)
          and c.txid <= unread.high_txid
          -- The condition has only one lower bound. With two, the index scan may start at the lower bound.
          and (c.txid, c.id) > (
              greatest(pg_catalog.pg_snapshot_xmax(unread.after), unread.partial_txid, unread.low_txid),
              greatest(
                  case when unread.partial_txid >= greatest(pg_catalog.pg_snapshot_xmax(unread.after), unread.low_txid)
                       then unread.partial_id end,
                  case when unread.low_txid >= greatest(pg_catalog.pg_snapshot_xmax(unread.after), unread.partial_txid)
                       then unread.low_id end,
                  -1))
          and (c.txid, c.id) <= (unread.high_txid, unread.high_id)
          and pg_catalog.pg_visible_in_snapshot(c.txid, unread.upto)
        order by c.txid, c.id
    )
$$;
comment on function pubsub.unread is
    'The commits of a branch that a position has not processed and upto sees, in order of (txid, id). First come those of '
    'transactions that were open at the position, then the range behind it. Its cost depends on neither backlog nor history. For '
    'a caller that reads for many positions: no range begins before lowest, and late has the transactions that were open at any '
    'of them. If these are constants of the plan, it has only the partitions that can have unread commits. late needs an element, '
    'such as 0: for an empty array PostgreSQL plans all partitions.';

-- The snapshot and the partly processed transaction of a position.
create function pubsub.cursor_of("position" jsonb, out after pg_snapshot, out partial_txid xid8, out partial_id bigint)
language sql immutable as $$
    select coalesce("position" ->> 'snapshot', '1:1:')::pg_catalog.pg_snapshot,
           ("position" -> 'partial' ->> 0)::pg_catalog.xid8,
           ("position" -> 'partial' ->> 1)::bigint
$$;

-- The snapshot of a position, moved to the end of a gap if it ends inside the gap. A gap is a range of transactions without
-- commits of the branch (see revision.gap), so the same commits are unread. is_behind: whether the snapshot still ends before
-- the last gap of the branch. This function has no settings of its own, so that it is inlined.
create function pubsub.over_gap(branch_id bigint, "position" pg_snapshot) returns table (after pg_snapshot, is_behind boolean)
language sql stable as $$
    select moved.after, coalesce((
               select g.high > pg_catalog.pg_snapshot_xmax(moved.after)
               from revision.gap as g where g.branch_id = over_gap.branch_id order by g.low desc limit 1), false)
    from (
        select coalesce((
            select case when g.high > pg_catalog.pg_snapshot_xmax(over_gap."position") then (
                select (coalesce(pg_catalog.min(x.txid), g.high) || ':' || g.high || ':'
                        || coalesce(pg_catalog.string_agg(x.txid::text, ',' order by x.txid), ''))::pg_catalog.pg_snapshot
                from pg_catalog.pg_snapshot_xip(over_gap."position") as x(txid) where x.txid < g.low) end
            from revision.gap as g
            where g.branch_id = over_gap.branch_id and g.low <= pg_catalog.pg_snapshot_xmax(over_gap."position")
            order by g.low desc limit 1), over_gap."position") as after
        offset 0
    ) as moved
$$;

-- Whether a query of the commits behind a position is planned for few partitions of many. Then it is planned each time, because
-- a kept plan locks all partitions, which takes longer. is_behind: see pubsub.over_gap().
create function pubsub.has_narrow_plan(is_behind boolean) returns boolean
language plpgsql stable as $$
begin
    return not is_behind and exists (
        select from pg_inherits as i where i.inhparent = 'revision.commit_queue'::regclass offset 50);
end
$$;

-- The changes of one slice of a batch, in order.
create function pubsub.changes(branch_id bigint, bounds jsonb, after_txid bigint, after_id bigint, upto_txid bigint, upto_id bigint)
returns table (id bigint, queue_id bigint, txid bigint, created_at timestamptz)
language sql stable as $$
    select u.commit_id, u.id, u.txid::text::bigint, u.created_at
    from pubsub.unread(
        changes.branch_id,
        (changes.bounds -> 'after' ->> 'snapshot')::pg_catalog.pg_snapshot,
        (changes.bounds -> 'after' -> 'partial' ->> 0)::pg_catalog.xid8,
        (changes.bounds -> 'after' -> 'partial' ->> 1)::bigint,
        (changes.bounds ->> 'visible')::pg_catalog.pg_snapshot,
        changes.after_txid::text::pg_catalog.xid8, changes.after_id,
        changes.upto_txid::text::pg_catalog.xid8, changes.upto_id) as u
$$;

-- Like changes(), for a branch whose keys are texts.
create function pubsub.keyed_changes(branch_id bigint, bounds jsonb, after_txid bigint, after_id bigint, upto_txid bigint, upto_id bigint)
returns table (id text, queue_id bigint, txid bigint, created_at timestamptz)
language sql stable as $$
    select coalesce(u.key, u.commit_id::text), u.id, u.txid::text::bigint, u.created_at
    from pubsub.unread(
        keyed_changes.branch_id,
        (keyed_changes.bounds -> 'after' ->> 'snapshot')::pg_catalog.pg_snapshot,
        (keyed_changes.bounds -> 'after' -> 'partial' ->> 0)::pg_catalog.xid8,
        (keyed_changes.bounds -> 'after' -> 'partial' ->> 1)::bigint,
        (keyed_changes.bounds ->> 'visible')::pg_catalog.pg_snapshot,
        keyed_changes.after_txid::text::pg_catalog.xid8, keyed_changes.after_id,
        keyed_changes.upto_txid::text::pg_catalog.xid8, keyed_changes.upto_id) as u
$$;

-- Refuse a branch that does not exist.
create function pubsub.check_branch(branch_id bigint) returns void
language plpgsql stable as $$
begin
    if not exists (select from revision.branch as b where b.id = check_branch.branch_id) then
        raise exception using errcode = 'PC001', message = format('there is no branch %s in this database', branch_id),
            hint = 'list the branches: select id, type, tbl from revision.branch';
    end if;
end
$$;

-- The next batch for a position, as far as this server has it, or null. It has slices of about equal counts, and the place behind
-- it. Its bounds find the same changes again; they have the types of the keys if these are texts. If the position has within, the
-- bounds of a batch, only changes that this batch saw are chosen. The settings make PostgreSQL read in the order of the index,
-- whatever the statistics say.
create function pubsub.choose(branch_id bigint, "position" jsonb, max_changes integer, in_order boolean) returns jsonb
language plpgsql volatile
set plan_cache_mode = force_generic_plan
set jit = off
set enable_sort = off
set enable_seqscan = off
set enable_bitmapscan = off
set max_parallel_workers_per_gather = 0
as $$
declare
    upto pg_snapshot := coalesce(("position" -> 'within' ->> 'visible')::pg_snapshot, pubsub.current_snapshot());
    at record := pubsub.cursor_of("position");
    seen pg_snapshot;
    is_narrow boolean;
    late xid8[];
    only_txid xid8;
    step integer := greatest(10000, ceil(max_changes / 256.0));
    slices jsonb := '[]';
    low jsonb;
    boundary record;
    last record;
    oldest timestamptz;
    taken bigint := 0;
    state pg_snapshot;
    partial jsonb;
begin
    select o.after, pubsub.has_narrow_plan(o.is_behind) into seen, is_narrow from pubsub.over_gap(choose.branch_id, at.after) as o;
    late := '{0}' || array(select pg_snapshot_xip(seen));
    if in_order then
        upto := pgchange.snapshot_below(upto, pg_snapshot_xmin(upto));
    end if;
    if at.partial_txid is not null then
        -- Finish the transaction that was processed in part first. If this server cannot read it yet, nothing is ready.
        if not pg_visible_in_snapshot(at.partial_txid, upto) then
            return null;
        end if;
        if exists (
            select from pubsub.unread(choose.branch_id, seen, at.partial_txid, at.partial_id, upto,
                                      high_txid => at.partial_txid, high_id => at.partial_id)
        ) then
            only_txid := at.partial_txid;
        end if;
    end if;
    low := case when at.partial_txid is null or only_txid is null then jsonb_build_array(0, 0)
                else jsonb_build_array(at.partial_txid::text::bigint, at.partial_id) end;

    if is_narrow then
        perform set_config('plan_cache_mode', 'force_custom_plan', true);
    end if;
    for boundary in
        select * from (
            select row_number() over w as n, lead(u.id) over w is null as ends, u.txid, u.id, u.commit_id, u.created_at
            from pubsub.unread(
                choose.branch_id, seen, at.partial_txid, at.partial_id, upto,
                low_txid => coalesce(only_txid, '0'), low_id => case when only_txid is null then 0 else at.partial_id end,
                high_txid => coalesce(only_txid, '18446744073709551615'),
                lowest => case when only_txid is null then pg_snapshot_xmax(seen) else '0' end, late => late) as u
            window w as ()
            limit max_changes::bigint + 1
        ) as numbered
        where n = 1 or ends or n % step = 0 or n >= max_changes
    loop
        if boundary.n = 1 then
            if is_narrow then
                -- The expressions below keep their plans.
                perform set_config('plan_cache_mode', 'force_generic_plan', true);
            end if;
            oldest := boundary.created_at;
        end if;
        if boundary.n > max_changes then
            if boundary.txid = last.txid then
                state := pgchange.snapshot_below(upto, last.txid);
                partial := jsonb_build_array(last.txid::text::bigint, last.id);
            else
                state := pgchange.snapshot_below(upto, (last.txid::text::bigint + 1)::text::xid8);
            end if;
        elsif boundary.n > taken and (boundary.ends or boundary.n % step = 0 or boundary.n = max_changes) then
            slices := slices || jsonb_build_object(
                'count', boundary.n - taken, 'after', low,
                'upto', jsonb_build_array(boundary.txid::text::bigint, boundary.id));
            low := slices -> -1 -> 'upto';
            taken := boundary.n;
            last := boundary;
        end if;
    end loop;
    if taken = 0 then
        return null;
    end if;
    if only_txid is not null then
        state := case when partial is null then pgchange.snapshot_with(at.after, only_txid) else at.after end;
    else
        state := pgchange.snapshot_union(at.after, coalesce(state, upto));
    end if;
    return jsonb_build_object(
        'count', taken,
        'slices', slices,
        'oldest', oldest,
        'lsn', case when pg_is_in_recovery() then pg_last_wal_replay_lsn() else pg_current_wal_insert_lsn() end,
        'bounds', jsonb_build_object(
            'after', jsonb_build_object('snapshot', at.after, 'partial', nullif("position" -> 'partial', 'null')), 'visible', upto,
            'upto', jsonb_build_object(
                'snapshot', state, 'partial', partial, 'commit_id', last.commit_id, 'in_order', in_order))
            || coalesce((select jsonb_build_object('key', b.key::text[]) from revision.branch as b
                         where b.id = choose.branch_id and b.key is not null), '{}'));
end
$$;
