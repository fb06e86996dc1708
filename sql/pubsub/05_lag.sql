-- What waits for a position, and whether it has come to a point. Nothing here writes; all of it works on a standby.

create function pubsub.count_unread(
    branch_id bigint, at jsonb, upto pg_snapshot, low_txid xid8, max_changes integer,
    out counted bigint, out exact boolean, out age double precision
)
language plpgsql volatile
set search_path = pg_catalog, pubsub, revision, pg_temp
set plan_cache_mode = force_generic_plan
set jit = off
set enable_sort = off
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
    c record := pubsub.cursor_of(at);
    first_id bigint;
    oldest timestamptz;
begin
    select count(*), min(u.id), min(u.created_at) into counted, first_id, oldest
    from (
        select r.id, r.created_at
        from pubsub.unread(
            count_unread.branch_id, c.after, c.partial_txid, c.partial_id, upto, low_txid => count_unread.low_txid) as r
        limit max_changes::bigint + 1
    ) as u;
    exact := counted <= max_changes;
    age := extract(epoch from clock_timestamp() - oldest);
    if not exact then
        counted := greatest(counted, 1 - first_id + coalesce((
            select q.id from revision.commit_queue as q
            where q.branch_id = count_unread.branch_id order by q.branch_id desc, q.txid desc, q.id desc limit 1), 0));
    end if;
end
$$;
comment on function pubsub.count_unread(bigint, jsonb, pg_snapshot, xid8, integer) is
    'How many commits are unread, exact up to max_changes; beyond, the distance of the queue''s numbers, which counts other '
    'branches'' commits too.';

create function pubsub.lag(branch_id bigint, "position" jsonb, upto integer, in_order boolean) returns jsonb
language plpgsql volatile
set search_path = pg_catalog, pubsub, revision, pg_temp
as $$
declare
    visible pg_snapshot := pubsub.current_snapshot();
    settled pg_snapshot := pubsub.snapshot_below(visible, pg_snapshot_xmin(visible));
    ready record;
    waiting record;
    letter jsonb := nullif("position" -> 'letter', 'null');
begin
    perform pubsub.check_branch(branch_id);
    perform pubsub.check_position("position" ->> 'consumer', branch_id, "position");
    if coalesce(upto < 0, true) then
        raise invalid_parameter_value using message = 'upto must not be negative';
    end if;
    ready := pubsub.count_unread(branch_id, "position", case when in_order then settled else visible end, '0', upto);
    waiting := pubsub.count_unread(
        branch_id, "position", case when in_order then visible else '1:1:' end, pg_snapshot_xmax(settled), upto);
    return jsonb_build_object(
        'ready', ready.counted + coalesce((letter -> 'batch' -> 'count')::bigint, 0), 'ready_exact', ready.exact,
        'ready_age', greatest(ready.age, extract(epoch from clock_timestamp() - (letter ->> 'since')::timestamptz)),
        'waiting', waiting.counted, 'waiting_exact', waiting.exact, 'waiting_age', waiting.age,
        'faults', pubsub.faults(branch_id));
end
$$;
comment on function pubsub.lag(bigint, jsonb, integer, boolean) is
    'How many commits are ready for a position, with those of the dead letter that it is to process again, and how many an in-order consumer has to wait for because an older '
    'transaction is open. What an open transaction has written itself nobody can see.';

create function pubsub.faults(branch_id bigint) returns bigint
language sql stable security definer
set search_path = pg_catalog, revision, pg_temp
as $$
    select count(*)
    from (
        select
        from revision.fault as f
        where coalesce((
              select t.branch_id from revision.tracked as t
              where t.tbl = f.tbl or f.tbl in (select d.relid from pgchange.descendants(t.tbl) as d(relid))
              limit 1), faults.branch_id) = faults.branch_id
        limit 1000
    ) as found_faults
$$;
comment on function pubsub.faults(bigint) is
    'Faults that may belong to a branch, up to a thousand: those of its tables, and those of tables whose branch an expression '
    'gives.';

create function pubsub.point(branch_id bigint, at timestamptz default null) returns jsonb
language plpgsql volatile
set search_path = pg_catalog, pubsub, revision, pg_temp
as $$
declare
    s pg_snapshot := pubsub.current_snapshot();
    first_txid xid8;
begin
    perform pubsub.check_branch(branch_id);
    if at > clock_timestamp() then
        raise invalid_parameter_value using message = format('the time %s lies in the future', at),
            hint = 'give a time of before, or none for now';
    end if;
    if at is not null then
        select q.txid into first_txid
        from revision.commit_queue as q
        where q.branch_id = point.branch_id and q.created_at >= point.at
        order by q.txid, q.id
        limit 1;
        s := pubsub.snapshot_below(s, coalesce(first_txid, pg_snapshot_xmax(s)));
    end if;
    return jsonb_build_object(
        'snapshot', s, 'source', pubsub.here(), 'until', coalesce(at, clock_timestamp())::timestamptz(0));
end
$$;
comment on function pubsub.point(bigint, timestamptz) is
    'A point in the queue to wait for or to move a consumer to: all that is committed now, or all before the first commit '
    'that was written at or after a time.';

create function pubsub.passed_point(branch_id bigint, "position" jsonb, point jsonb) returns jsonb
language plpgsql volatile
set search_path = pg_catalog, pubsub, revision, pg_temp
set plan_cache_mode = force_generic_plan
set jit = off
set enable_sort = off
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
    at record := pubsub.cursor_of("position");
begin
    if point ->> 'source' <> pubsub.here() then
        raise exception using errcode = 'PC004', message = 'the point was taken in another database than this source',
            hint = 'the source was restored, upgraded or exchanged since: take a new point';
    end if;
    return jsonb_build_object('goal', point, 'passed', not exists (
        select from pubsub.unread(
            passed_point.branch_id, at.after, at.partial_txid, at.partial_id, (point ->> 'snapshot')::pg_snapshot)));
end
$$;
comment on function pubsub.passed_point(bigint, jsonb, jsonb) is 'Whether a position has processed every commit up to a point.';

create function pubsub.passed_commit(branch_id bigint, "position" jsonb, commit_id bigint, since xid8) returns jsonb
language plpgsql volatile
set search_path = pg_catalog, pubsub, revision, pg_temp
as $$
declare
    at record := pubsub.cursor_of("position");
    from_here xid8 := pg_snapshot_xmin(pubsub.current_snapshot());
    event record;
begin
    select q.txid, q.id into event
    from revision.commit_queue as q
    where q.branch_id = passed_commit.branch_id and q.commit_id = passed_commit.commit_id and q.txid >= since
    order by q.txid desc, q.id desc
    limit 1;
    return jsonb_build_object(
        'goal', jsonb_build_object('commit_id', commit_id, 'since', coalesce(event.txid, from_here)),
        'passed', event.txid is not null and (
            pg_visible_in_snapshot(event.txid, at.after)
            or coalesce(event.txid = at.partial_txid and event.id <= at.partial_id, false)));
end
$$;
comment on function pubsub.passed_commit(bigint, jsonb, bigint, xid8) is
    'Whether a position has processed the latest event of a commit. It looks from the newest event back to since, below which '
    'an earlier look has shown that there is none.';

create function pubsub.passed(branch_id bigint, "position" jsonb, goal jsonb) returns jsonb
language plpgsql volatile
set search_path = pg_catalog, pubsub, revision, pg_temp
as $$
begin
    perform pubsub.check_branch(branch_id);
    perform pubsub.check_position("position" ->> 'consumer', branch_id, "position");
    return case when goal ? 'commit_id'
        then pubsub.passed_commit(
            branch_id, "position", (goal ->> 'commit_id')::bigint, coalesce(goal ->> 'since', '0')::xid8)
        else pubsub.passed_point(branch_id, "position", goal) end;
end
$$;
comment on function pubsub.passed(bigint, jsonb, jsonb) is
    'Whether a position has come to a goal: a point, or {commit_id}; and the goal to ask with the next time: what a look has '
    'learnt makes the next one cheap.';
