-- What people ask and do: status, skip, move, drop.

create function pubsub.held_back_by() returns text
language sql stable security definer
set search_path = pg_catalog, pubsub, pg_temp
as $$
    with oldest(xid) as (
        select (pg_snapshot_xmin(pg_current_snapshot())::text::bigint & 4294967295)::text::xid
    )
    select coalesce(
        (select format('transaction of process %s (%s, database %s, %s since %s)',
                       a.pid, a.usename, a.datname, a.state, a.xact_start)
         from pg_stat_activity as a, oldest as o where a.backend_xid = o.xid limit 1),
        (select format('prepared transaction %L (%s, database %s, since %s)', p.gid, p.owner, p.database, p.prepared)
         from pg_prepared_xacts as p, oldest as o where p.transaction = o.xid limit 1))
    where not pg_is_in_recovery()
$$;
comment on function pubsub.held_back_by() is
    'The oldest open transaction, of any database of this cluster: in-order consumers wait for it. Null when there is none.';

do $$
begin
    perform pgchange.register('pubsub', 'commit');
end
$$;

create function pubsub.status(upto integer default 1000) returns setof pgchange.consumer_status
language plpgsql volatile security definer
set search_path = pg_catalog, pubsub, pg_temp
as $$
declare
    holder text := pubsub.held_back_by();
    w pubsub.watermark;
    is_here boolean;
    lag jsonb;
    mark pgchange.claim;
    told text;
    advice text;
begin
    for w in select * from pubsub.watermark as m order by m.consumer_id, m.branch_id loop
        lag := null;
        mark := null;
        told := null;
        is_here := exists (select from revision.branch as b where b.id = w.branch_id)
            and coalesce(pgchange.came_along(w.source, pubsub.here()), true);
        if is_here then
            mark := pubsub.pending(w.consumer_id, w.branch_id, pubsub.position(w.consumer_id, w.branch_id));
            begin
                lag := pubsub.lag(w.branch_id, pubsub.position(w.consumer_id, w.branch_id), upto, w.in_order);
            exception when sqlstate 'PC003' or sqlstate 'PC004' then
                get stacked diagnostics told = message_text, advice = pg_exception_hint;
                told := told || ': ' || advice;
            end;
        end if;
        return query select
            'commit', pubsub.name_of(w.consumer_id, w.branch_id),
            jsonb_build_object('consumer_id', w.consumer_id, 'branch_id', w.branch_id, 'in_order', w.in_order), w.version,
            (lag ->> 'ready')::bigint, (lag ->> 'ready_exact')::boolean, (lag ->> 'ready_age')::double precision,
            (lag ->> 'waiting')::bigint, (lag ->> 'faults')::bigint,
            pubsub.locked(w.consumer_id, w.branch_id), mark.batch_id, mark.attempt, mark.error, mark.claimed_at, w.updated_at,
            coalesce(told, case when (lag ->> 'waiting')::bigint > 0 then holder end),
            case when not is_here then 'changes' end;
    end loop;
end
$$;
comment on function pubsub.status(integer) is
    'Every consumer whose watermark is here, as pgchange.status() shows it: what is ready, what one that reads in order has to wait '
    'for and because of whom, and the batch in work. Where the commits are in another database the lag is null: ask there. Where it '
    'cannot be told because a person must decide first, held_back_by says what.';

create function pubsub.take_idle(consumer_id text, branch_id bigint) returns void
language sql
set search_path = pg_catalog, pubsub, pg_temp
as $$
    select pgchange.take_idle(
        pubsub.name_of(consumer_id, branch_id), pubsub.lock_key(consumer_id, branch_id),
        pubsub.position(consumer_id, branch_id) is not null, 'select consumer_id, branch_id from pubsub.watermark')
$$;
comment on function pubsub.take_idle(text, bigint) is 'Take the lock of a consumer that exists and is not at work, or say so.';

create function pubsub.skip(consumer_id text, branch_id bigint, batch jsonb, reason text) returns bigint
language plpgsql security definer
set search_path = pg_catalog, pubsub, dead_letter, pg_temp
as $$
begin
    perform pubsub.take_idle(consumer_id, branch_id);
    perform pubsub.advance(consumer_id, branch_id, batch);
    return dead_letter.give_up(
        'commit', pubsub.name_of(consumer_id, branch_id), pubsub.address(consumer_id, branch_id), batch, reason);
end
$$;
comment on function pubsub.skip(text, bigint, jsonb, text) is
    'Give up a claimed batch, as pubsub.in_work() of the source has it: it becomes a dead letter, or goes back to the one that '
    'it was sent from, whose number is returned; the consumer goes on behind it.';

create function pubsub.skip_batch(consumer_id text, branch_id bigint, reason text) returns uuid
language plpgsql security definer
set search_path = pg_catalog, pubsub, pg_temp
as $$
declare
    mark pgchange.claim;
begin
    perform pubsub.take_idle(consumer_id, branch_id);
    mark := pubsub.pending(consumer_id, branch_id, pubsub.position(consumer_id, branch_id));
    if mark.version is null then
        raise exception using errcode = 'PC009', message = format('consumer %s/%s has no batch in work', consumer_id, branch_id),
            hint = 'only a batch that was claimed and not acked can be skipped';
    end if;
    perform pubsub.skip(
        consumer_id, branch_id, pubsub.in_work(consumer_id, branch_id, pubsub.position(consumer_id, branch_id)), reason);
    return mark.batch_id;
end
$$;
comment on function pubsub.skip_batch(text, bigint, text) is
    'Give up the batch that a consumer claimed and cannot finish, where commits and watermark share a database.';

create function pubsub.check_point(point jsonb) returns void
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
begin
    if point is null or point ? 'snapshot' is not true then
        raise invalid_parameter_value using message = 'a point is what pubsub.point() returns, or {"snapshot": null} for the beginning';
    end if;
    if point ->> 'snapshot' is not null and point ->> 'source' is null then
        raise invalid_parameter_value using message = 'the point does not say where it was taken',
            hint = 'give what pubsub.point() returned, whole';
    end if;
end
$$;
comment on function pubsub.check_point(jsonb) is 'Refuse what is no point to move a consumer to.';

create function pubsub.note_move(consumer_id text, branch_id bigint, "position" jsonb, point jsonb) returns bigint
language plpgsql security definer
set search_path = pg_catalog, pubsub, pgchange, pg_temp
as $$
declare
    here text := pubsub.check_origin();
    mark pgchange.claim;
begin
    perform pubsub.check_point(point);
    if point ->> 'source' <> here or point ->> 'snapshot' is null and not coalesce(pgchange.came_along("position" ->> 'source', here), true)
    then
        raise exception using errcode = 'PC004',
            message = format('consumer %s/%s is moved to a point of another database than this one', consumer_id, branch_id),
            hint = 'the database of the commits notes a move first: pubsub.note_move() there gives the version for pubsub.move_consumer()';
    end if;
    if pg_snapshot_xmax((point ->> 'snapshot')::pg_snapshot) > pg_snapshot_xmax(pg_current_snapshot()) then
        raise invalid_parameter_value using
            message = format('the point %s lies in the future: it is beyond the transactions of this cluster', point ->> 'snapshot'),
            hint = 'pubsub.point() gives the point of now, pubsub.point(<branch>, <timestamp>) that of a time';
    end if;
    mark := pgchange.record(
        'commit', pubsub.name_of(consumer_id, branch_id), pubsub.address(consumer_id, branch_id),
        "position", pubsub.at("position"), pubsub.at(point - 'partial'), here, null);
    return mark.version;
end
$$;
comment on function pubsub.note_move(text, bigint, jsonb, jsonb) is
    'In the database of the commits: note that a consumer is moved from its position to a point, as a claim notes a batch, and '
    'return the version for pubsub.move_consumer(). A batch in work is given up as such: its commits come in a new one.';

create function pubsub.move_consumer(consumer_id text, branch_id bigint, point jsonb, version bigint default null) returns void
language plpgsql security definer
set search_path = pg_catalog, pubsub, pg_temp
as $$
begin
    perform pubsub.take_idle(consumer_id, branch_id);
    perform pubsub.check_point(point);
    if version is null then
        version := pubsub.note_move(consumer_id, branch_id, pubsub.position(consumer_id, branch_id), point);
    end if;
    update pubsub.watermark as w set
        version = move_consumer.version,
        snapshot = coalesce(point ->> 'snapshot', '1:1:')::pg_snapshot,
        partial_txid = null, partial_id = null,
        source = coalesce(point ->> 'source', w.source),
        updated_at = now()
    where w.consumer_id = move_consumer.consumer_id and w.branch_id = move_consumer.branch_id;
    perform pubsub.void_letters(consumer_id, branch_id, 'its consumer was moved back before it, so its changes come by themselves');
end
$$;
comment on function pubsub.move_consumer(text, bigint, jsonb, bigint) is
    'Move a consumer to a point that pubsub.point() of the source gave: what lies before it counts as processed, what lies '
    'behind comes, again if need be. Where the commits are in another database, pubsub.note_move() there gives the version. Dead '
    'letters that lie behind it are void: what they stand for comes by itself.';

create function pubsub.drop_consumer(consumer_id text, branch_id bigint) returns void
language plpgsql security definer
set search_path = pg_catalog, pubsub, pg_temp
as $$
declare
    claims boolean;
begin
    if not pg_try_advisory_xact_lock(pubsub.lock_key(consumer_id, branch_id)) then
        perform pubsub.take_idle(consumer_id, branch_id);
    end if;
    claims := pgchange.forget_claim('commit', pubsub.name_of(consumer_id, branch_id));
    perform dead_letter.drop_of('commit', pubsub.address(consumer_id, branch_id));
    delete from pubsub.watermark as w
    where w.consumer_id = drop_consumer.consumer_id and w.branch_id = drop_consumer.branch_id;
    if not found and claims is null then
        perform pubsub.take_idle(consumer_id, branch_id);
    end if;
end
$$;
comment on function pubsub.drop_consumer(text, bigint) is
    'Forget a consumer: its watermark with its dead letters, and its claim, of which a database has both or one. It no longer holds back trimming, '
    'and under the same name it would begin anew.';
