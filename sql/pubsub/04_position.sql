-- A consumer and its progress: its lock, its position, and whether the position is valid here. The lock and the position are in
-- the database of the results; claims are in the database of the commits.

-- Functions that pubsub writes itself.
-- - check_point() and check_move(): points of commits are snapshots.
-- - check_position(), mark() and check_readable(): transaction ids are not valid in a restored copy until they are rebased.
-- - earlier(): of two snapshots, neither need cover the other.
-- - status(): the lags of all consumers are counted by one query.
select pgchange.offer(
    'commit', 'pubsub', 'consumer_id text, branch_id bigint', 'commits:%s/%s', traits => '{position,recorded letters}',
    own => '{check_move,check_point,check_position,check_readable,earlier,mark,status}', origin => 'revision',
    options => 'in_order boolean default false, accept_trimmed boolean default false, choice jsonb default null');

-- The place of the transaction ids in this database. Raises an error if they are not those of its cluster.
create function pubsub.check_origin() returns text
language plpgsql stable security definer as $$
begin
    if not revision.is_native() then
        raise exception using errcode = 'PC004',
            message = 'this database was restored from a dump or upgraded: its transaction ids are not valid here',
            hint = 'run select pubsub.rebase_after_restore(), or after pg_upgrade pubsub.rebase_after_restore(txids_kept => true)';
    end if;
    return revision.here();
end
$$;

-- The hint if the progress of a consumer was restored without its commits.
create function pubsub.restored_in_part(consumer text) returns text
language sql immutable as $$
    select 'restore the whole dump, then select pubsub.rebase_after_restore(); or choose a point: airflow-pgchange move '
        || pgchange.shell_quoted(consumer)
$$;

-- The version of a claim. Raises an error if the claim was recorded in another database, or names transactions that this cluster
-- has not reached.
create function pubsub.check_mark(mark pgchange.claim, here text) returns bigint
language plpgsql stable as $$
begin
    if not pgchange.came_along(mark.source, here)
       or not pg_is_in_recovery()
          and pg_snapshot_xmax((mark.upto ->> 'snapshot')::pg_snapshot) > pg_snapshot_xmax(pg_current_snapshot())
    then
        raise exception using errcode = 'PC004',
            message = format(
                'the record of %s came from another database, whose transaction ids mean nothing here', mark.consumer),
            hint = pubsub.restored_in_part(mark.consumer);
    end if;
    return mark.version;
end
$$;

-- The place, if a position is valid here and not ahead of the claim that this source knows; else raises an error.
create function pubsub.check_known("position" jsonb, consumer text, here text, mark pgchange.claim) returns text
language plpgsql stable as $$
begin
    perform pgchange.check_position(
        consumer, "position", here, case when mark.version is not null then pubsub.check_mark(mark, here) end);
    -- A standby may only be late.
    if ("position" ->> 'version')::bigint > 0 and not pg_catalog.pg_is_in_recovery()
       and pg_catalog.pg_snapshot_xmax(("position" ->> 'snapshot')::pg_catalog.pg_snapshot)
           > pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())
    then
        raise exception using errcode = 'PC004',
            message = pg_catalog.format(
                'the watermark of %s is beyond the transactions of this cluster: it was restored from another cluster', consumer),
            hint = pubsub.restored_in_part(consumer);
    end if;
    return here;
end
$$;

-- The place of a position. Raises an error if its transaction ids are not valid at this source, or if the position is ahead of
-- the source's record. Every function calls it that could otherwise take new commits for processed commits.
create function pubsub.check_position(consumer_id text, branch_id bigint, "position" jsonb) returns text
language plpgsql stable security definer as $$
declare
    name text := pubsub.name_of(consumer_id, branch_id);
begin
    return pubsub.check_known(
        "position", name, pubsub.check_origin(), (select c from pgchange.claim as c where c.kind = 'commit' and c.consumer = name));
end
$$;

-- check_position() for many positions: [{branch_id, position}, ...].
create function pubsub.check_positions(asked jsonb) returns void
language plpgsql stable security definer as $$
declare
    here text := pubsub.check_origin();
begin
    perform pubsub.check_known(a."position", name, here, c)
    from jsonb_to_recordset(asked) as a(branch_id bigint, "position" jsonb)
    cross join lateral pubsub.name_of(a."position" ->> 'consumer', a.branch_id) as name
    left join pgchange.claim as c on c.kind = 'commit' and c.consumer = name;
end
$$;

-- Create the watermark of a consumer at the beginning, if it does not exist and no other session is at work on it.
create function pubsub.register(consumer_id text, branch_id bigint, in_order boolean default false) returns boolean
language sql security definer as $$
    insert into pubsub.watermark (consumer_id, branch_id, in_order)
    select register.consumer_id, register.branch_id, register.in_order
    where pubsub.take_lock(register.consumer_id, register.branch_id)
    on conflict do nothing
    returning true
$$;

-- A watermark of this database as a position. schema: the latest version of the schema; here: the place; consumer: the
-- consumer's name. The function has no settings of its own, so that it adds no cost to its callers.
create function pubsub.position_of(w pubsub.watermark, schema integer, here text, consumer text) returns jsonb
language sql stable as $$
    select pg_catalog.jsonb_build_object(
        'schema', schema,
        'consumer', w.consumer_id,
        'version', w.version,
        'snapshot', w.snapshot,
        'partial', case when w.partial_txid is not null
                        then pg_catalog.jsonb_build_array(w.partial_txid::text::bigint, w.partial_id) end,
        'source', w.source,
        'database', here,
        'letter', pgchange.next_letter('commit', consumer))
$$;

-- A watermark as a position, or null if the consumer has not begun. It has the first dead letter that was sent again and is not
-- processed yet.
create function pubsub.position(consumer_id text, branch_id bigint) returns jsonb
language plpgsql stable security definer as $$
begin
    return (
        select pubsub.position_of(
            w, (select max(i.version) from pubsub.installed as i), revision.here(), pubsub.name_of(w.consumer_id, w.branch_id))
        from pubsub.watermark as w
        where w.consumer_id = "position".consumer_id and w.branch_id = "position".branch_id);
end
$$;

-- The place of a position, or of the end of a batch's bounds: {snapshot, partial: [txid, id] or null}.
create function pubsub.at("position" jsonb) returns jsonb
language sql stable as $$
    select pg_catalog.jsonb_build_object(
        'snapshot', coalesce("position" ->> 'snapshot', '1:1:'), 'partial', nullif("position" -> 'partial', 'null'))
$$;

-- Whether a consumer at the place at has processed everything before upto.
create function pubsub.covers(at jsonb, upto jsonb) returns boolean
language sql immutable as $$
    select pgchange.snapshot_union(s.seen, s.wanted)::text = pgchange.snapshot_union(s.seen, s.seen)::text
       and coalesce(
           pg_visible_in_snapshot((upto -> 'partial' ->> 0)::xid8, s.seen)
           or coalesce(at -> 'partial' -> 0 = upto -> 'partial' -> 0
                       and (at -> 'partial' ->> 1)::bigint >= (upto -> 'partial' ->> 1)::bigint, false),
           true)
    from (select (at ->> 'snapshot')::pg_snapshot, (upto ->> 'snapshot')::pg_snapshot) as s(seen, wanted)
$$;

-- A place before both of two places.
create function pubsub.earlier(one jsonb, other jsonb) returns jsonb
language sql immutable as $$
    select jsonb_build_object(
        'snapshot', pgchange.snapshot_intersection((one ->> 'snapshot')::pg_snapshot, (other ->> 'snapshot')::pg_snapshot),
        'partial', null)
$$;

-- Put a watermark at a place, if it is at version was and at place before; null means any. The place behind a batch also has the id
-- of its last commit, and whether it was read in order. The function has no search_path of its own, which would slow down every
-- ack.
create function pubsub.put(
    consumer_id text, branch_id bigint, at jsonb, version bigint, source text, was bigint, before jsonb
) returns boolean
language plpgsql as $$
begin
    update pubsub.watermark as w set
        version = put.version,
        snapshot = (at ->> 'snapshot')::pg_snapshot,
        partial_txid = (at -> 'partial' ->> 0)::xid8,
        partial_id = (at -> 'partial' ->> 1)::bigint,
        commit_id = coalesce((at ->> 'commit_id')::bigint, w.commit_id),
        source = put.source,
        in_order = coalesce((at ->> 'in_order')::boolean, w.in_order),
        updated_at = now()
    where w.consumer_id = put.consumer_id and w.branch_id = put.branch_id
      and (was is null or w.version = was)
      and (before is null or w.snapshot::text = before ->> 'snapshot');
    return found;
end
$$;

-- Delete a watermark. Returns whether it was here.
create function pubsub.forget(consumer_id text, branch_id bigint) returns boolean
language plpgsql as $$
begin
    delete from pubsub.watermark as w where w.consumer_id = forget.consumer_id and w.branch_id = forget.branch_id;
    return found;
end
$$;
