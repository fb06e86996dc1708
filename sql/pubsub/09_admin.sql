-- Administration: status, skip, move, drop.

-- The oldest open transaction in any database of this cluster, for which in-order consumers wait; null if there is none.
create function pubsub.held_back_by() returns text
language plpgsql stable security definer as $$
begin
    return (
        with oldest(xid) as (
            select (pg_snapshot_xmin(pg_current_snapshot())::text::bigint & 4294967295)::text::xid
        )
        select coalesce(
            (select format('transaction of process %s (%s, database %s, %s since %s); to end it: select pg_terminate_backend(%s)',
                           a.pid, concat_ws(', ', nullif(a.application_name, ''), a.usename), a.datname, a.state,
                           a.xact_start::timestamptz(0), a.pid)
             from pg_stat_activity as a, oldest as o where a.backend_xid = o.xid limit 1),
            (select format('prepared transaction %L (%s, database %s, since %s); to end it there: rollback prepared %1$L',
                           p.gid, p.owner, p.database, p.prepared::timestamptz(0))
             from pg_prepared_xacts as p, oldest as o where p.transaction = o.xid limit 1))
        where not pg_is_in_recovery());
end
$$;

-- Why a person must decide before a consumer can go on from a position in this database; null if none need decide. here: what
-- revision.here() returned, or null if the transaction ids of this database are not valid.
create function pubsub.undecided("position" jsonb, consumer text, here text, mark pgchange.claim) returns text
language plpgsql stable as $$
declare
    told text;
    advice text;
begin
    perform pubsub.check_origin() where here is null;
    perform pubsub.check_known("position", consumer, here, mark);
    return null;
exception when sqlstate 'PC003' or sqlstate 'PC004' then
    get stacked diagnostics told = message_text, advice = pg_exception_hint;
    return told || ': ' || advice;
end
$$;

-- The status of every consumer whose watermark is here, as in pgchange.status(). It has the ready changes and the batch in work.
-- For an in-order consumer, it also has the number of changes that wait, and the transaction that holds them back. If the commits
-- are in another database, the lag is null; that database knows it. If a person must decide first, held_back_by has the reason.
create function pubsub.status(upto integer default 1000) returns setof pgchange.consumer_status
language plpgsql volatile security definer
set jit = off
as $$
declare
    here text := revision.here();
    native text := case when revision.is_native() then here end;
    schema integer := (select max(i.version) from pubsub.installed as i);
    held bigint[] := pgchange.locks_held();
    holder text := pubsub.held_back_by();
begin
    if coalesce(upto < 0, true) then
        raise invalid_parameter_value using message =
            'the status cannot be shown: upto must not be negative or null; give the number up to which ready changes are counted';
    end if;
    return query
        -- Read the watermarks once, so that everything below refers to the same moment.
        with known as materialized (
            select w as mark, n.name, p.at, h.is_here, case when h.is_here then pubsub.undecided(p.at, n.name, native, c) end as told
            from pubsub.watermark as w
            cross join lateral pubsub.name_of(w.consumer_id, w.branch_id) as n(name)
            cross join lateral (select pubsub.position_of(w, schema, here, n.name) offset 0) as p(at)
            cross join lateral (
                select exists (select from revision.branch as b where b.id = w.branch_id offset 0)
                       and coalesce(pgchange.came_along(w.source, here), true)
            ) as h(is_here)
            left join lateral (
                select x.* from pgchange.claim as x where x.kind = 'commit' and x.consumer = n.name offset 0
            ) as c on true
        ), numbered as (
            select k.*, x.is_clear, row_number() over (partition by x.is_clear order by k.name) as n
            from known as k cross join lateral (select k.is_here and k.told is null) as x(is_clear)
        ), lags as materialized (
            select l.lag, l.n
            from (
                select jsonb_agg(jsonb_build_object(
                    'branch_id', (k.mark).branch_id, 'position', k.at, 'upto', upto, 'in_order', (k.mark).in_order) order by k.n)
                from numbered as k where k.is_clear
            ) as a(asked)
            cross join lateral jsonb_array_elements(case when a.asked is not null then pubsub.lags(a.asked, are_checked => true) end)
                with ordinality as l(lag, n)
        )
        select s.*
        from numbered as k
        left join lags as l on l.n = k.n and k.is_clear
        cross join lateral (
            select case when k.is_here then to_jsonb(pubsub.pending((k.mark).consumer_id, (k.mark).branch_id, k.at)) end offset 0
        ) as p(work)
        cross join lateral pgchange.standing(
            'commit', k.name,
            jsonb_build_object(
                'consumer_id', (k.mark).consumer_id, 'branch_id', (k.mark).branch_id, 'in_order', (k.mark).in_order),
            to_jsonb(k.mark), l.lag,
            p.work,
            pubsub.lock_key((k.mark).consumer_id, (k.mark).branch_id) = any (held)
                or p.work ->> 'batch_id' is not null and pubsub.locked((k.mark).consumer_id, (k.mark).branch_id),
            coalesce(k.told, case when (l.lag ->> 'waiting')::bigint > 0 then holder end),
            case when not k.is_here then 'changes' end) as s
        order by (k.mark).consumer_id, (k.mark).branch_id;
end
$$;

-- The address of each consumer whose watermark is here.
create function pubsub.consumers() returns setof jsonb
language sql stable as $$
    select pubsub.address(w.consumer_id, w.branch_id) from pubsub.watermark as w
$$;

-- Refuse a value to which no consumer can be moved.
create function pubsub.check_point(point jsonb) returns void
language plpgsql immutable as $$
begin
    if point is null or point ? 'snapshot' is not true then
        raise invalid_parameter_value using message =
            'the consumer cannot be moved: a point is the result of pubsub.point(), or {"snapshot": null} for the beginning';
    end if;
    if point ->> 'snapshot' is not null and point ->> 'source' is null then
        raise invalid_parameter_value using message = 'the consumer cannot be moved: the point does not say where it was taken',
            hint = 'give the whole result of pubsub.point()';
    end if;
end
$$;

-- In the database of the commits: refuse a move to a point of another database, or of the future.
create function pubsub.check_move(consumer_id text, branch_id bigint, "position" jsonb, point jsonb) returns void
language plpgsql stable as $$
declare
    here text := pubsub.check_origin();
begin
    if point ->> 'source' <> here or point ->> 'snapshot' is null and not coalesce(pgchange.came_along("position" ->> 'source', here), true)
    then
        raise exception using errcode = 'PC004',
            message = format('consumer %s cannot be moved to a point of another database', pubsub.name_of(consumer_id, branch_id)),
            hint = 'the database of the commits records a move first: pubsub.note_move() there returns the version for '
                   'pubsub.move_consumer()';
    end if;
    if pg_snapshot_xmax((point ->> 'snapshot')::pg_snapshot) > pg_snapshot_xmax(pg_current_snapshot()) then
        raise invalid_parameter_value using
            message = format(
                'the consumer cannot be moved to point %s: it is in the future, beyond the transactions of this cluster',
                point ->> 'snapshot'),
            hint = 'pubsub.point() returns the present point, pubsub.point(<branch>, <timestamp>) that of a time';
    end if;
end
$$;
