-- A consumer and how far it has come: its lock, its position, and whether that means anything here. The lock and the position are
-- where the results are; what is claimed is where the commits are.

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
    select consumer_id || '/' || branch_id::text
$$;
comment on function pubsub.name_of(text, bigint) is 'A consumer''s name, as status shows it.';

create function pubsub.address(consumer_id text, branch_id bigint) returns jsonb
language sql stable
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
language sql stable
as $$
    select pg_catalog.jsonb_build_object(
        'snapshot', coalesce("position" ->> 'snapshot', '1:1:'), 'partial', nullif("position" -> 'partial', 'null'))
$$;
comment on function pubsub.at(jsonb) is 'Where a position is, or the bounds of a batch end: {snapshot, partial: [txid, id] or null}.';
