-- Lock, claim, ack. The lock, the position and the ack are where the results are; the claim is where the commits are.

create function pubsub.lock_key(consumer_id text, branch_id bigint) returns bigint
language sql immutable
as $$
    select pg_catalog.hashtextextended('pgchange commit ' || branch_id || ' ' || consumer_id, 0)
$$;
comment on function pubsub.lock_key(text, bigint) is
    'The advisory lock of a consumer. Two consumers with the same key would only find each other busy.';

create function pubsub.locked(consumer_id text, branch_id bigint) returns boolean
language sql stable
set search_path = pg_catalog, pubsub, pg_temp
as $$
    select pgchange.locked(pubsub.lock_key(consumer_id, branch_id))
$$;
comment on function pubsub.locked(text, bigint) is 'Whether a consumer is at work.';

create function pubsub.here() returns text
language plpgsql stable security definer
set search_path = pg_catalog, pubsub, pgchange, pg_temp
as $$
begin
    -- Of what came along first, if anything did.
    return (
        select pgchange.place(o.id, o.cluster) from revision.origin as o
        order by o.written_as = o.tableoid, o.written_in = o.xmin limit 1);
end
$$;
comment on function pubsub.here() is 'The place where the transaction ids of this database mean something.';

create function pubsub.check_origin() returns text
language plpgsql stable security definer
set search_path = pg_catalog, pubsub, pg_temp
as $$
begin
    if not revision.is_native() then
        raise exception using errcode = 'PC004',
            message = 'this database was restored from a dump or upgraded: its transaction ids mean something else here',
            hint = 'select pubsub.rebase_after_restore(), or after pg_upgrade pubsub.rebase_after_restore(txids_kept => true)';
    end if;
    return pubsub.here();
end
$$;
comment on function pubsub.check_origin() is
    'Refuse a database whose transaction ids are not those of its cluster; else the place where they are.';

create function pubsub.name_of(consumer_id text, branch_id bigint) returns text
language sql immutable
as $$
    select consumer_id || '/' || branch_id
$$;
comment on function pubsub.name_of(text, bigint) is 'A consumer''s name, as status shows it.';

create function pubsub.address(consumer_id text, branch_id bigint) returns jsonb
language sql immutable
as $$
    select pg_catalog.jsonb_build_object('consumer_id', consumer_id, 'branch_id', branch_id)
$$;
comment on function pubsub.address(text, bigint) is 'What a consumer''s claim and its dead letters are known by.';

create function pubsub.restored_in_part(consumer text) returns text
language sql immutable
as $$
    select 'restore the whole dump, then select pubsub.rebase_after_restore(); or choose a point: airflow pgchange move ' || consumer
$$;
comment on function pubsub.restored_in_part(text) is 'What to do where the progress of a consumer came without its commits.';

create function pubsub.check_mark(mark pgchange.claim, here text) returns bigint
language plpgsql stable
set search_path = pg_catalog, pubsub, pgchange, pg_temp
as $$
begin
    if not pgchange.came_along(mark.source, here)
       or not pg_is_in_recovery()
          and pg_snapshot_xmax((mark.upto ->> 'snapshot')::pg_snapshot) > pg_snapshot_xmax(pg_current_snapshot())
    then
        raise exception using errcode = 'PC004',
            message = format('what this database knows of %s was restored from another one, without its place', mark.consumer),
            hint = pubsub.restored_in_part(mark.consumer);
    end if;
    return mark.version;
end
$$;
comment on function pubsub.check_mark(pgchange.claim, text) is
    'Refuse a claim of another place, or of transactions that this cluster has not reached; else its version.';

create function pubsub.check_position(consumer_id text, branch_id bigint, "position" jsonb) returns text
language plpgsql stable security definer
set search_path = pg_catalog, pubsub, pgchange, pg_temp
as $$
declare
    here text := pubsub.check_origin();
    at bigint := "position" ->> 'version';
    known bigint := (
        select pubsub.check_mark(c, here) from pgchange.claim as c
        where c.kind = 'commit' and c.consumer = pubsub.name_of(check_position.consumer_id, check_position.branch_id));
begin
    if not pgchange.fits("position", here) then
        raise exception using errcode = 'PC004',
            message = format('the watermark of %s/%s belongs to another database than this source', consumer_id, branch_id),
            hint = 'if the source was restored or upgraded: airflow pgchange repair; else check the source''s connection';
    end if;
    -- A standby may only be late.
    if at > 0 and not pg_is_in_recovery() then
        if at > coalesce(known, 0) then
            raise exception using errcode = 'PC003',
                message = format('the watermark of %s/%s is at batch %s, but this source knows only %s: it lost its latest '
                                 'transactions', consumer_id, branch_id, at, coalesce(known, 0)),
                hint = 'airflow pgchange repair starts again from what survived; changes then come at least once';
        end if;
        if pg_snapshot_xmax(("position" ->> 'snapshot')::pg_snapshot) > pg_snapshot_xmax(pg_current_snapshot()) then
            raise exception using errcode = 'PC004',
                message = format('the watermark of %s/%s is beyond the transactions of this cluster: it was restored from '
                                 'another one', consumer_id, branch_id),
                hint = pubsub.restored_in_part(pubsub.name_of(consumer_id, branch_id));
        end if;
    end if;
    return here;
end
$$;
comment on function pubsub.check_position(text, bigint, jsonb) is
    'Refuse a position whose transaction ids mean something else at this source, or that is ahead of what the source knows. '
    'Everything that would otherwise take new commits for processed ones asks it; returns the place.';

create function pubsub.register(consumer_id text, branch_id bigint, in_order boolean default false) returns boolean
language sql security definer
set search_path = pg_catalog, pubsub, pg_temp
as $$
    insert into pubsub.watermark (consumer_id, branch_id, in_order)
    select register.consumer_id, register.branch_id, register.in_order
    where pg_try_advisory_xact_lock(pubsub.lock_key(register.consumer_id, register.branch_id))
    on conflict do nothing
    returning true
$$;
comment on function pubsub.register(text, bigint, boolean) is
    'Make a consumer''s watermark, at zero, if it is not there yet and nobody else is at work on it.';

create function pubsub.position(consumer_id text, branch_id bigint) returns jsonb
language sql stable security definer
set search_path = pg_catalog, pubsub, pg_temp
as $$
    select jsonb_build_object(
        'schema', (select max(i.version) from pubsub.installed as i),
        'consumer', w.consumer_id,
        'version', w.version,
        'snapshot', w.snapshot,
        'partial', case when w.partial_txid is not null
                        then jsonb_build_array(w.partial_txid::text::bigint, w.partial_id) end,
        'source', w.source,
        'database', pubsub.here(),
        'letter', dead_letter.first_on_its_way('commit', pubsub.name_of(w.consumer_id, w.branch_id)))
    from pubsub.watermark as w
    where w.consumer_id = "position".consumer_id and w.branch_id = "position".branch_id
$$;
comment on function pubsub.position(text, bigint) is
    'A watermark as a position, with the dead letter that was sent again first and is not done; null for a consumer that has '
    'not begun.';

create function pubsub.at("position" jsonb) returns jsonb
language sql immutable
as $$
    select pg_catalog.jsonb_build_object(
        'snapshot', coalesce("position" ->> 'snapshot', '1:1:'), 'partial', nullif("position" -> 'partial', 'null'))
$$;
comment on function pubsub.at(jsonb) is 'Where a position is, or the bounds of a batch end: {snapshot, partial: [txid, id] or null}.';

create function pubsub.pending(consumer_id text, branch_id bigint, "position" jsonb) returns pgchange.claim
language sql stable security definer
set search_path = pg_catalog, pubsub, pg_temp
as $$
    select pgchange.pending(
        'commit', pubsub.name_of(consumer_id, branch_id), ("position" ->> 'version')::bigint, pubsub.at("position"),
        "position" -> 'letter' -> 'id')
$$;
comment on function pubsub.pending(text, bigint, jsonb) is
    'The claim that a position has not acked yet, if there is one; that of a dead letter while the letter is to be sent.';

create function pubsub.check_history(branch_id bigint) returns void
language plpgsql stable security definer
set search_path = pg_catalog, pubsub, pg_temp
as $$
declare
    gone record;
begin
    select sum(t.commits) as commits, max(t.upto::text::bigint) as upto into gone
    from pubsub.trimmed as t where t.branch_id = check_history.branch_id;
    if gone.commits > 0 then
        raise exception using errcode = 'PC005',
            message = format('%s commits of branch %s below transaction %s were trimmed: a new consumer will not get them',
                             gone.commits, branch_id, gone.upto),
            hint = 'say that it does without them: accept_trimmed => true';
    end if;
end
$$;
comment on function pubsub.check_history(bigint) is 'Refuse a branch of which history was trimmed.';

create function pubsub.check_history(consumer_id text, branch_id bigint, "position" jsonb) returns void
language plpgsql stable security definer
set search_path = pg_catalog, pubsub, pg_temp
as $$
declare
    began_at bigint := coalesce(("position" ->> 'version')::bigint, 0);
    at pg_snapshot := ("position" ->> 'snapshot')::pg_snapshot;
    gone record;
begin
    if began_at = 0 then
        perform pubsub.check_history(branch_id);
        return;
    end if;
    -- Trimming waits for where a consumer is, not for where it was before. The beginning that one was moved to is what is left.
    if not exists (
        select from pgchange.claim as c
        where c.kind = 'commit' and c.consumer = pubsub.name_of(check_history.consumer_id, check_history.branch_id)
          and (began_at < c.from_version or began_at = c.version and c.batch is null and at::text <> '1:1:'))
    then
        return;
    end if;
    select sum(t.commits) as commits, max(t.upto::text::bigint) as upto into gone
    from pubsub.trimmed as t where t.branch_id = check_history.branch_id and t.upto > pg_snapshot_xmin(at);
    if gone.commits > 0 then
        raise exception using errcode = 'PC005',
            message = format('%s commits of branch %s below transaction %s were trimmed, and %s/%s is at an earlier time',
                             gone.commits, branch_id, gone.upto, consumer_id, branch_id),
            hint = format('airflow pgchange move %s/%s --to beginning goes on with what is left', consumer_id, branch_id);
    end if;
end
$$;
comment on function pubsub.check_history(text, bigint, jsonb) is
    'Refuse a position behind which history was trimmed: of a new consumer, of results from an earlier time, of a move to one.';

create function pubsub.claim(
    consumer_id text, branch_id bigint, "position" jsonb, max_changes integer, in_order boolean default false,
    accept_trimmed boolean default false, choice jsonb default null, max_attempts integer default null
) returns jsonb
language plpgsql volatile security definer
set search_path = pg_catalog, pubsub, revision, pg_temp
as $$
declare
    here text := pubsub.check_position(consumer_id, branch_id, "position");
    began_at bigint := coalesce(("position" ->> 'version')::bigint, 0);
    mark pgchange.claim;
    bounds jsonb;
    batch jsonb;
begin
    perform pubsub.check_branch(branch_id);
    perform pgchange.check_claim(max_changes);
    mark := pubsub.pending(consumer_id, branch_id, "position");
    if mark.version is not null then
        if mark.batch -> 'bounds' ? 'letter' then
            perform pubsub.check_readable(branch_id, mark.batch);
        end if;
        return pgchange.claim_again(mark, max_attempts);
    end if;
    if not accept_trimmed then
        perform pubsub.check_history(consumer_id, branch_id, "position");
    end if;
    if "position" -> 'letter' ->> 'id' is not null then
        batch := pubsub.letter_batch(branch_id, "position");
        bounds := pubsub.unmoved("position");
    else
        choice := coalesce(choice, pubsub.choose(branch_id, "position", max_changes, in_order));
        if choice is null then
            return null;
        end if;
        bounds := choice -> 'bounds' || jsonb_build_object('source', here, 'from_version', began_at);
        batch := (choice - 'bounds') || jsonb_build_object(
            'id', md5(concat_ws('|', consumer_id, branch_id, bounds - 'upto', choice -> 'count', choice -> 'slices' -> 0,
                                choice -> 'slices' -> -1))::uuid,
            'bounds', bounds || jsonb_build_object('in_order', in_order));
    end if;
    mark := pgchange.record(
        'commit', pubsub.name_of(consumer_id, branch_id), pubsub.address(consumer_id, branch_id), began_at,
        pubsub.at("position"), pubsub.at(bounds), here, batch);
    return mark.batch;
end
$$;
comment on function pubsub.claim(text, bigint, jsonb, integer, boolean, boolean, jsonb, integer) is
    'Record and return the next batch of a consumer, or the one that it claimed and never acked, with the attempt counted, or '
    'that of a dead letter that is to be sent again, as it was recorded; null when nothing is ready. Call it on the primary of '
    'the source, in a transaction of its own, holding the lock.';

create function pubsub.advance(consumer_id text, branch_id bigint, batch jsonb) returns bigint
language plpgsql
set search_path = pg_catalog, pubsub, pg_temp
as $$
declare
    bounds jsonb := batch -> 'bounds';
begin
    if bounds ? 'letter' then
        bounds := bounds || pubsub.unmoved(bounds -> 'at');
    end if;
    perform pgchange.check_claimed('commit', pubsub.name_of(consumer_id, branch_id), batch);
    update pubsub.watermark as w set
        version = (batch ->> 'version')::bigint,
        snapshot = (bounds ->> 'snapshot')::pg_snapshot,
        partial_txid = (bounds -> 'partial' ->> 0)::xid8,
        partial_id = (bounds -> 'partial' ->> 1)::bigint,
        commit_id = coalesce((bounds ->> 'commit_id')::bigint, w.commit_id),
        source = bounds ->> 'source',
        in_order = coalesce((bounds ->> 'in_order')::boolean, w.in_order),
        updated_at = now()
    where w.consumer_id = advance.consumer_id and w.branch_id = advance.branch_id
      and w.version = (bounds ->> 'from_version')::bigint
      and w.snapshot::text = bounds ->> 'after';
    if not found then
        raise exception using errcode = 'PC006',
            message = format('the watermark of %s/%s is not where batch %s began', consumer_id, branch_id, batch ->> 'id'),
            hint = 'somebody moved the consumer; roll back and claim again';
    end if;
    return (batch ->> 'version')::bigint;
end
$$;
comment on function pubsub.advance(text, bigint, jsonb) is
    'Move a watermark behind a batch; behind one that is sent again by its version alone.';

create function pubsub.ack(consumer_id text, branch_id bigint, batch jsonb) returns bigint
language plpgsql security definer
set search_path = pg_catalog, pubsub, pg_temp
as $$
declare
    version bigint := pubsub.advance(consumer_id, branch_id, batch);
begin
    perform dead_letter.done('commit', pubsub.address(consumer_id, branch_id), batch);
    return version;
end
$$;
comment on function pubsub.ack(text, bigint, jsonb) is
    'Advance a watermark behind a batch, in the transaction that holds the consumer''s lock and writes the results. A dead '
    'letter that was sent again is done with it.';
