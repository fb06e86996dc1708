-- Reading by cursor, for handlers and for manual SQL. The session holds the lock of a group.

-- A cursor. A cursor beyond the last dispatch is replaced by the present cursor, so that all later dispatches are read.
create function pgmb.cursor_by_now(cursor text) returns text
language plpgsql stable as $$
declare
    last text := left((pgmb.dispatcher_now()).last_id, 15);
begin
    return case when left(cursor, 15) collate "C" > last then last || 'fffffffff' else cursor end;
end
$$;

-- In the database of the events: refuse a cursor in the future. rewind: the hint.
create function pgmb.check_past(cursor text, rewind text) returns void
language plpgsql stable as $$
declare
    last text := (pgmb.dispatcher_now()).last_id;
begin
    if cursor collate "C" > greatest(last || 'g', pgmb.create_event_id(clock_timestamp(), 0)::text) collate "C"
       and left(cursor, 15) <> left(last, 15)
    then
        raise invalid_parameter_value using message = format('the cursor %L is in the future', cursor), hint = rewind;
    end if;
end
$$;

-- Refuse a cursor that is malformed, in the future, or of another group.
create function pgmb.check_cursor(gid text, cursor text) returns void
language plpgsql stable security definer
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
    at text := (select g.last_read_event_id from pgmb.subscription_groups as g where g.id = gid);
    rewind text := 'give a time, pgmb.create_event_id(<timestamp>, 0), or a cursor that pgmb.read_next_events() returned for this '
                   'group';
begin
    if cursor !~ '^pm[0-9a-f]{22}$' then
        raise invalid_parameter_value using message = format('%L is not a cursor', cursor), hint = rewind;
    end if;
    perform pgmb.check_past(cursor, rewind);
    if pgmb.rank_of(cursor) > 0 and cursor is distinct from at and not exists (
        select from pgmb.dispatched as d
        where d.group_id = gid and d.id >= cursor and d.id < left(cursor, 15) || 'g')
    then
        raise invalid_parameter_value using
            message = format('the cursor %L is not one of group %L, which has no dispatch there', cursor, gid), hint = rewind;
    end if;
end
$$;

-- Raise an error because an event that was dispatched to a group was deleted. The hint says how to pass it.
create function pgmb.refuse_gap(gid text, after text, upto text, expected bigint, found_events bigint) returns void
language plpgsql stable as $$
declare
    gap record;
begin
    with ranked as (
        select d.id as slice, i.id, min(d.low + d.before) as low, min(d.high + d.before) as high,
               min(d.before) + row_number() over (partition by d.id order by i.id collate "C") as rank
        from pgmb.slices(gid, after, upto) as d cross join lateral unnest(d.event_ids) as i(id)
        group by d.id, i.id
    ), dispatched_events as (
        select r.slice, r.id, r.rank, row_number() over (order by r.slice collate "C", r.rank) as n
        from ranked as r where r.rank > r.low and r.rank <= r.high
    )
    select w.id, w.n - 1 as before_it, pgmb.cursor_at(pgmb.micros(w.slice), w.rank) as after_it into gap
    from dispatched_events as w where not exists (select from pgmb.events as e where e.id = w.id) order by w.n limit 1;
    raise object_not_in_prerequisite_state using
        message = format('of %s events of group %I only %s could be read: %s was deleted', expected, gid, found_events, gap.id),
        hint = format(
            '%scontinue after it: select pgmb.set_group_cursor(%L, %L)',
            case when gap.before_it > 0 then format(
                'read the %s events before it (chunk_size => %s) and set the cursor that they come with, then ',
                gap.before_it, gap.before_it) else '' end,
            gid, gap.after_it);
end
$$;

create function pgmb.read_next_events(
    gid varchar, cursor pgmb.event_id default null,
    chunk_size integer default pgmb.get_config_value('poll_chunk_size')::integer, peek boolean default false
)
returns table (
    id pgmb.event_id, topic varchar, payload jsonb, metadata jsonb, subscription_ids pgmb.subscription_id[],
    next_cursor pgmb.event_id
)
language plpgsql volatile security definer
set plan_cache_mode = force_generic_plan
set jit = off
as $$
#variable_conflict use_column
declare
    after text;
    run record;
    upto pgmb.event_id;
    found_events bigint;
begin
    perform pgmb.check_group(gid);
    peek := coalesce(peek, false);
    if coalesce(chunk_size, 0) < 1 then
        raise invalid_parameter_value using message = 'chunk_size must be at least 1 event';
    end if;
    if cursor is not null then
        perform pgmb.check_cursor(gid, cursor);
    end if;
    -- A session can take an advisory lock several times, and PostgreSQL counts that. A client that reads ahead takes the lock
    -- at each read, and releases it once for each batch that it has handled. So another client can read only after the last
    -- batch.
    if not peek and not pg_try_advisory_lock(pgmb.lock_key(gid)) then
        return;
    end if;
    -- Check this under the lock, because a lease is made under the lock.
    if not peek and pgmb.is_leased(gid) then
        perform pg_advisory_unlock(pgmb.lock_key(gid));
        return;
    end if;
    begin
        -- Read the cursor under the lock, because the former holder may have moved it.
        after := coalesce(cursor, (select g.last_read_event_id from pgmb.subscription_groups as g where g.id = gid), '');
        run := pgmb.next_events(gid, after, chunk_size);
        upto := run.upto;
        return query
            select e.id::pgmb.event_id, e.topic, e.payload, e.metadata, e.subscription_ids::pgmb.subscription_id[], upto
            from pgmb.some_events(gid, after, run.upto, run.lowest, run.highest, run.alone) as e;
        get diagnostics found_events = row_count;
        if found_events < run.count then
            perform pgmb.refuse_gap(gid, after, run.upto, run.count, found_events);
        end if;
    -- A rollback does not release a lock of the session, and a caller whose read failed would not release it.
    exception when others or query_canceled then
        if not peek then
            perform pg_advisory_unlock(pgmb.lock_key(gid));
        end if;
        raise;
    end;
end
$$;
comment on function pgmb.read_next_events(varchar, pgmb.event_id, integer, boolean) is
    'The next events of a group in the order of dispatch, after its own cursor or a given cursor. next_cursor is the same in '
    'every row: continue from it, or pass it to pgmb.set_group_cursor. Each call takes the group''s lock for the session once '
    'more, also if it finds no events. So a session releases the lock as often as it read. If another session holds the lock, or '
    'the group''s batch is leased, the call takes nothing and returns nothing. A peek and a call that fails take no lock. Do not '
    'call it behind a pooler in transaction mode.';

create function pgmb.release_group_lock(gid varchar) returns boolean
language plpgsql volatile as $$
begin
    return pgmb.held_here(gid) and pg_advisory_unlock(pgmb.lock_key(gid));
end
$$;
comment on function pgmb.release_group_lock(varchar) is
    'Release the lock of a group once: a session that has read the group n times releases it n times. Returns false if this '
    'session does not hold the lock.';

-- In the database of the events: refuse to move a group back before dispatches with deleted events, because it could not read on.
-- Retention deletes such events if they were published long before their dispatch.
create function pgmb.check_kept(gid text, new_cursor pgmb.event_id) returns void
language plpgsql stable security definer
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
declare
    -- If the cursor of the group is in another database, the last claim shows how far it has read.
    at text := greatest(
        (select g.last_read_event_id from pgmb.subscription_groups as g where g.id = gid),
        (select c.upto from pgmb.claims as c where c.consumer = pgmb.name_of(gid) and c.elsewhere));
    low text := coalesce(new_cursor, '');
    gone text;
begin
    -- Moving forward needs no check.
    if low collate "C" >= at collate "C" or at is null then
        return;
    end if;
    gone := (
        select d.id from pgmb.dispatched as d
        where d.group_id = gid and d.id > low and d.id <= at and (
            select count(*) from pgmb.events as e where e.id in (d.event_ids[1], d.event_ids[cardinality(d.event_ids)])
        ) < least(cardinality(d.event_ids), 2)
        order by d.group_id desc, d.id desc limit 1);
    if gone is not null then
        raise object_not_in_prerequisite_state using
            message = format(
                'group %I cannot read events again that were dispatched to it up to %s: they were deleted', gid,
                pgmb.extract_date_from_event_id(gone)),
            hint = 'retention deletes events that every group has read; all later events exist: ' || case
                when exists (select from pgmb.claims as c where c.consumer = pgmb.name_of(gid) and c.elsewhere) then format(
                    'airflow-pgchange move %s --to %L', pgchange.shell_quoted(pgmb.name_of(gid)),
                    pgmb.extract_date_from_event_id(gone) + interval '1 microsecond')
                else format('select pgmb.set_group_cursor(%L, %L)', gid, gone) end;
    end if;
end
$$;

create function pgmb.set_group_cursor(gid varchar, new_cursor pgmb.event_id, release_lock boolean default false) returns void
language plpgsql volatile security definer
set plan_cache_mode = force_generic_plan
as $$
begin
    perform pgmb.check_group(gid);
    if new_cursor is not null then
        perform pgmb.check_cursor(gid, new_cursor);
    end if;
    if not pg_try_advisory_xact_lock(pgmb.lock_key(gid)) then
        raise lock_not_available using message = format('group %I is being read by another session', gid),
            hint = 'stop it, or wait until it releases the group';
    end if;
    perform pgchange.check_lease(pgmb.pending(gid, pgmb.position(gid)));
    perform pgmb.check_kept(gid, new_cursor);
    update pgmb.subscription_groups as g set last_read_event_id = pgmb.cursor_by_now(new_cursor), updated_at = now()
    where g.id = gid;
    if release_lock then
        perform pgmb.release_group_lock(gid);
    end if;
end
$$;
comment on function pgmb.set_group_cursor(varchar, pgmb.event_id, boolean) is
    'Move a group''s cursor: past the events that were read, to a time (pgmb.create_event_id(<timestamp>, 0)), or to null, the '
    'beginning. release_lock releases the group''s lock once, as pgmb.release_group_lock() does.';

create function pgmb.set_group_cursor(gid text, cursor text, release_lock boolean default false) returns void
language sql volatile as $$
    select pgmb.set_group_cursor(gid::pg_catalog.varchar, set_group_cursor.cursor::pgmb.event_id, release_lock)
$$;
comment on function pgmb.set_group_cursor(text, text, boolean) is
    'The same, with the new cursor named as in read_next_events: cursor => ''...''.';
