-- What waits for a position, and whether it has come to a point. Nothing here writes; all of it works on a standby.

-- How many commits are unread, exact up to max_changes. Beyond that it is an estimate: the numbers of the queue count the commits of
-- all branches, so the rest of the way to the branch's latest commit is taken to be as thick with its commits as the way so far.
-- Without settings of its own, so that the plan of a look takes it in.
create function pubsub.count_unread(branch_id bigint, at jsonb, upto pg_snapshot, low_txid xid8, max_changes integer)
returns table (counted bigint, exact boolean, age double precision)
language sql stable as $$
    select case when f.counted <= count_unread.max_changes then f.counted else f.counted + greatest(0, coalesce((
               select ((q.id - f.last_id)::double precision * f.counted / (f.last_id - f.first_id + 1))::bigint
               from revision.commit_queue as q
               where q.branch_id = count_unread.branch_id order by q.branch_id desc, q.txid desc, q.id desc limit 1), 0)) end,
           f.counted <= count_unread.max_changes,
           extract(epoch from pg_catalog.clock_timestamp() - f.oldest)
    from (
        select count(*) as counted, min(u.id) as first_id, max(u.id) as last_id, min(u.created_at) as oldest
        from (
            select r.id, r.created_at
            from pubsub.cursor_of(count_unread.at) as c
            cross join lateral pubsub.unread(
                count_unread.branch_id, c.after, c.partial_txid, c.partial_id, count_unread.upto,
                low_txid => count_unread.low_txid) as r
            limit count_unread.max_changes::bigint + 1
        ) as u
    ) as f
$$;

-- How many faults may belong to each of these branches, up to a thousand: those of its tables, and those of tables whose branch an
-- expression gives. The cost grows with the number of tables that have faults, and not with the number of their faults.
create function pubsub.faults(branch_ids bigint[]) returns table (branch_id bigint, faults bigint)
language plpgsql stable security definer as $$
begin
    return query
        with faulty as materialized (
            select f.tbl, f.branch_id from revision.faulty_tables() as f
        )
        select b.id, (
            select count(*)
            from (
                select
                from faulty
                cross join lateral (select from revision.fault as f where f.tbl = faulty.tbl limit 1000) as found_fault
                where coalesce(faulty.branch_id, b.id) = b.id
                limit 1000
            ) as bounded)
        from unnest(branch_ids) as b(id);
end
$$;

-- What lag() says of a position: with the dead letter that it is to process again. Null waits where nothing can.
-- Volatile and without settings of its own, so that the plan of a look takes it in.
create function pubsub.lag_of(
    "position" jsonb, ready bigint, ready_exact boolean, ready_age double precision,
    waiting bigint, waiting_exact boolean, waiting_age double precision, faults bigint
) returns jsonb
language sql volatile as $$
    select pg_catalog.jsonb_build_object(
        'ready', ready + coalesce(("position" -> 'letter' -> 'batch' -> 'count')::bigint, 0), 'ready_exact', ready_exact,
        'ready_age', greatest(
            ready_age, extract(epoch from pg_catalog.clock_timestamp() - ("position" -> 'letter' ->> 'since')::timestamptz)),
        'waiting', coalesce(waiting, 0), 'waiting_exact', coalesce(waiting_exact, true), 'waiting_age', waiting_age,
        'faults', faults)
$$;

-- How many commits are ready for a position, with those of the dead letter that it is to process again, and how many an in-order
-- consumer has to wait for because an older transaction is open. What an open transaction has written itself nobody can see.
create function pubsub.lag(branch_id bigint, "position" jsonb, upto integer, in_order boolean) returns jsonb
language plpgsql volatile
set plan_cache_mode = force_generic_plan
set jit = off
set enable_sort = off
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
    visible pg_snapshot := pubsub.current_snapshot();
    settled pg_snapshot := visible;
    ready record;
    waiting record;
begin
    perform pubsub.check_branch(branch_id);
    perform pubsub.check_position("position" ->> 'consumer', branch_id, "position");
    if coalesce(upto < 0, true) then
        raise invalid_parameter_value using message = 'upto must not be negative';
    end if;
    select null::bigint as counted, null::boolean as exact, null::double precision as age into waiting;
    if in_order then
        settled := pgchange.snapshot_below(visible, pg_snapshot_xmin(visible));
        select c.* into waiting from pubsub.count_unread(branch_id, "position", visible, pg_snapshot_xmax(settled), upto) as c;
    end if;
    select c.* into ready from pubsub.count_unread(branch_id, "position", settled, '0', upto) as c;
    return pubsub.lag_of(
        "position", ready.counted, ready.exact, ready.age, waiting.counted, waiting.exact, waiting.age,
        (select f.faults from pubsub.faults(array[lag.branch_id]) as f));
end
$$;

-- lag() of many at once, for less than one by one: of [{branch_id, position, upto, in_order}, ...] an array in their order. Refused
-- where it would be of one of them. are_checked: positions were, by a snapshot of then, so that whoever is dropped meanwhile has its
-- lag still.
create function pubsub.lags(asked jsonb, are_checked boolean default false) returns jsonb
language plpgsql volatile
set plan_cache_mode = force_generic_plan
set jit = off
set enable_sort = off
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
    visible pg_snapshot := pubsub.current_snapshot();
    settled pg_snapshot := pgchange.snapshot_below(visible, pg_snapshot_xmin(visible));
begin
    if not are_checked then
        perform pubsub.check_branch(b.id)
        from (select distinct a.branch_id from jsonb_to_recordset(asked) as a(branch_id bigint)) as b(id);
        perform pubsub.check_positions(asked);
        if exists (select from jsonb_to_recordset(asked) as a(upto integer) where coalesce(a.upto < 0, true)) then
            raise invalid_parameter_value using message = 'upto must not be negative';
        end if;
    end if;
    return (
        with branch as materialized (
            select f.branch_id as id, f.faults
            from pubsub.faults(array(
                select distinct a.branch_id from jsonb_to_recordset(asked) as a(branch_id bigint))) as f
        )
        select jsonb_agg(
            pubsub.lag_of(
                a."position", ready.counted, ready.exact, ready.age, waiting.counted, waiting.exact, waiting.age, branch.faults)
            order by a.n)
        from rows from (jsonb_to_recordset(asked) as (branch_id bigint, "position" jsonb, upto integer, in_order boolean))
            with ordinality as a(branch_id, "position", upto, in_order, n)
        join branch on branch.id = a.branch_id
        cross join lateral pubsub.count_unread(
            a.branch_id, a."position", case when a.in_order then settled else visible end, '0', a.upto) as ready
        -- The condition of a join comes after what it joins: where nothing waits for order there is nothing to read.
        left join lateral pubsub.count_unread(
            a.branch_id, a."position", case when a.in_order then visible else '1:1:' end, pg_snapshot_xmax(settled), a.upto)
            as waiting on a.in_order);
end
$$;

-- A point in the queue to wait for or to move a consumer to: all that is committed now, or all before the first commit that was
-- written at or after a time.
create function pubsub.point(branch_id bigint, at timestamptz default null) returns jsonb
language plpgsql volatile as $$
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
        s := pgchange.snapshot_below(s, coalesce(first_txid, pg_snapshot_xmax(s)));
    end if;
    return jsonb_build_object(
        'snapshot', s, 'source', revision.here(), 'until', coalesce(at, clock_timestamp())::timestamptz(0));
end
$$;

-- Whether a position has processed every commit up to a point; and the point, for the next time.
create function pubsub.passed(branch_id bigint, "position" jsonb, goal jsonb) returns jsonb
language plpgsql volatile
set plan_cache_mode = force_generic_plan
set jit = off
set enable_sort = off
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
    at record;
begin
    perform pubsub.check_branch(branch_id);
    perform pubsub.check_position("position" ->> 'consumer', branch_id, "position");
    at := pubsub.cursor_of("position");
    if goal ->> 'source' <> revision.here() then
        raise exception using errcode = 'PC004', message = 'the point was taken in another database than this source',
            hint = 'the source was restored, upgraded or exchanged since: take a new point';
    end if;
    return jsonb_build_object('goal', goal, 'passed', not exists (
        select from pubsub.unread(
            passed.branch_id, at.after, at.partial_txid, at.partial_id, (goal ->> 'snapshot')::pg_snapshot)));
end
$$;
