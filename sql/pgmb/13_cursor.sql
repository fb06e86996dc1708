-- Reading by cursor: for handlers, and for SQL by hand. The lock of a group is the session's.

create function pgmb.refuse_gap(gid text, after text, upto text, expected bigint, found_events bigint) returns void
language plpgsql stable
set search_path = pg_catalog, pgmb, pg_temp
as $$
declare
    gap record;
begin
    with ranked as (
        select d.id as slice, i.id, min(d.low + d.before) as low, min(d.high + d.before) as high,
               min(d.before) + row_number() over (partition by d.id order by i.id collate "C") as rank
        from pgmb.slices(gid, after, upto) as d cross join lateral unnest(d.event_ids) as i(id)
        group by d.id, i.id
    ), wanted as (
        select r.slice, r.id, r.rank, row_number() over (order by r.slice collate "C", r.rank) as n
        from ranked as r where r.rank > r.low and r.rank <= r.high
    )
    select w.id, w.n - 1 as before_it, pgmb.cursor_at(pgmb.micros(w.slice), w.rank) as after_it into gap
    from wanted as w where not exists (select from pgmb.events as e where e.id = w.id) order by w.n limit 1;
    raise object_not_in_prerequisite_state using
        message = format('of %s events of group %I only %s could be read: %s was deleted', expected, gid, found_events, gap.id),
        hint = format(
            '%sgo on after it: select pgmb.set_group_cursor(%L, %L)',
            case when gap.before_it > 0 then format(
                'read the %s before it (chunk_size => %s) and set the cursor that they come with, then ',
                gap.before_it, gap.before_it) else '' end,
            gid, gap.after_it);
end
$$;
comment on function pgmb.refuse_gap(text, text, text, bigint, bigint) is
    'Refuse to go on where an event that was dispatched to a group was deleted, and say how to come past it.';

create function pgmb.read_next_events(
    gid varchar, cursor pgmb.event_id default null,
    chunk_size integer default pgmb.get_config_value('poll_chunk_size')::integer, peek boolean default false
)
returns table (
    id pgmb.event_id, topic varchar, payload jsonb, metadata jsonb, subscription_ids pgmb.subscription_id[],
    next_cursor pgmb.event_id
)
language plpgsql volatile security definer
set search_path = pg_catalog, pgmb, pg_temp
set plan_cache_mode = force_generic_plan
set jit = off
as $$
#variable_conflict use_column
declare
    after text;
    run record;
    upto pgmb.event_id;
    found_events bigint;
    held boolean;
    taken boolean := false;
begin
    perform pgmb.check_group(gid);
    if coalesce(chunk_size, 0) < 1 then
        raise invalid_parameter_value using message = 'chunk_size must be at least 1 event';
    end if;
    if cursor is not null then
        perform pgmb.check_cursor(gid, cursor);
    end if;
    if not peek then
        select l.held, l.taken into held, taken from pgmb.lock_for_session(gid) as l;
        if not held then
            return;
        end if;
    end if;
    begin
        -- Under the lock: whoever held it before may have moved the group's cursor.
        after := coalesce(cursor, (select g.last_read_event_id from pgmb.subscription_groups as g where g.id = gid), '');
        select * into run from pgmb.next_runs(gid, after, chunk_size);
        upto := run.upto;
        return query
            select e.id::pgmb.event_id, e.topic, e.payload, e.metadata, e.subscription_ids::pgmb.subscription_id[], upto
            from pgmb.some_events(gid, after, run.upto, run.lowest, run.highest, run.alone) as e;
        get diagnostics found_events = row_count;
        if found_events < run.count then
            perform pgmb.refuse_gap(gid, after, run.upto, run.count, found_events);
        end if;
    -- The lock is the session's: no rollback releases it, and a caller that got no events would not think of releasing it.
    exception when others or query_canceled then
        if taken then
            perform pg_advisory_unlock(pgmb.lock_key(gid));
        end if;
        raise;
    end;
end
$$;
comment on function pgmb.read_next_events(varchar, pgmb.event_id, integer, boolean) is
    'The next events of a group in the order of dispatch, after its own cursor or a given one, with next_cursor, the same in '
    'every row, to go on from or to give to pgmb.set_group_cursor. It takes the group''s lock for the session, and returns '
    'nothing where another holds it; a peek, or a call that fails, leaves no lock. Not behind a pooler in transaction mode.';

create function pgmb.release_group_lock(gid varchar) returns boolean
language plpgsql volatile
set search_path = pg_catalog, pgmb, pg_temp
as $$
begin
    return pgmb.held_here(gid) and pg_advisory_unlock(pgmb.lock_key(gid));
end
$$;
comment on function pgmb.release_group_lock(varchar) is 'Release the lock of a group; false where this session does not hold it.';

create function pgmb.check_kept(gid text, new_cursor pgmb.event_id) returns void
language plpgsql stable security definer
set search_path = pg_catalog, pgmb, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
declare
    -- Of a group whose cursor is in another database the last claim tells how far it has read.
    at text := greatest(
        (select g.last_read_event_id from pgmb.subscription_groups as g where g.id = gid),
        (select c.upto from pgmb.claim as c where c.group_id = gid and c.elsewhere));
    low text := coalesce(new_cursor, '');
    gone text;
begin
    -- To move forward costs no look.
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
                'events that were dispatched to group %I up to %s are gone, so it cannot read them again', gid,
                pgmb.extract_date_from_event_id(gone)),
            hint = 'retention deletes events that every group has read; all later ones are there: ' || case
                when exists (select from pgmb.claim as c where c.group_id = gid and c.elsewhere) then format(
                    'airflow pgchange move events:%s --to %L', gid,
                    pgmb.extract_date_from_event_id(gone) + interval '1 microsecond')
                else format('select pgmb.set_group_cursor(%L, %L)', gid, gone) end;
    end if;
end
$$;
comment on function pgmb.check_kept(text, pgmb.event_id) is
    'In the database of the events: refuse to move a group back to where it could not read on, before dispatches some of whose '
    'events retention has deleted, because they were published long before.';

create function pgmb.set_group_cursor(gid varchar, new_cursor pgmb.event_id, release_lock boolean default false) returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pgmb, pg_temp
set plan_cache_mode = force_generic_plan
as $$
begin
    perform pgmb.check_group(gid);
    if new_cursor is not null then
        perform pgmb.check_cursor(gid, new_cursor);
    end if;
    if not pg_try_advisory_xact_lock(pgmb.lock_key(gid)) then
        raise lock_not_available using message = format('group %I is being read by another session', gid),
            hint = 'stop it, or wait until it lets go of the group';
    end if;
    perform pgmb.check_kept(gid, new_cursor);
    update pgmb.subscription_groups as g set last_read_event_id = pgmb.cursor_by_now(new_cursor), updated_at = now()
    where g.id = gid;
    if release_lock then
        perform pgmb.release_group_lock(gid);
    end if;
end
$$;
comment on function pgmb.set_group_cursor(varchar, pgmb.event_id, boolean) is
    'Move a group''s cursor: past what was read, to a time (pgmb.create_event_id(<timestamp>, 0)), or to null, the beginning.';

create function pgmb.set_group_cursor(gid text, cursor text, release_lock boolean default false) returns void
language sql volatile
as $$
    select pgmb.set_group_cursor(gid::pg_catalog.varchar, set_group_cursor.cursor::pgmb.event_id, release_lock)
$$;
comment on function pgmb.set_group_cursor(text, text, boolean) is
    'The same, where the new cursor is named as in read_next_events: cursor => ''...''.';

create function pgmb.read_events(event_ids pgmb.event_id[]) returns setof pgmb.events
language sql stable security definer
set search_path = pg_catalog, pgmb, pg_temp
as $$
    select e.* from unnest(event_ids) with ordinality as i(id, n)
    cross join lateral (select x.* from pgmb.events as x where x.id = i.id offset 0) as e
    order by i.n
$$;
comment on function pgmb.read_events(pgmb.event_id[]) is
    'Events by their ids, in the order of the ids; those that are gone are left out.';

create function pgmb.replay_older(sid text, from_event_id text, below text, known text[], max_events integer) returns text[]
language plpgsql
set search_path = pg_catalog, pgmb, pg_temp
as $$
declare
    condition pgmb.condition := (
        select c from pgmb.condition as c join pgmb.subscriptions as s on s.condition_id = c.id where s.id = sid);
    low text := from_event_id;
    ids text[];
    wanted text[] := '{}';
    part record;
begin
    loop
        ids := array(
            select e.id::text from pgmb.events as e
            where e.id > low and e.id < below and e.id not in (select k.id from unnest(known) as k(id))
            order by e.id limit greatest(1000, max_events));
        exit when cardinality(ids) = 0;
        part := pgmb.evaluate(condition, pgmb.match_sql(condition, addressed => true), ids, array[sid]);
        perform pgmb.note_faults(part.faults);
        wanted := wanted || array(
            select i.id from unnest(part.matches) as m cross join lateral unnest(m.ids) as i(id) order by i.id collate "C");
        exit when cardinality(wanted) >= max_events;
        low := ids[cardinality(ids)];
    end loop;
    return wanted;
end
$$;
comment on function pgmb.replay_older(text, text, text, text[], integer) is
    'The events between two ids that a subscription would have got, in order, without those that it is known to have got.';

create function pgmb.replay_events(gid varchar, sid varchar, from_event_id pgmb.event_id, max_events integer)
returns setof pgmb.events
language plpgsql volatile security definer
set search_path = pg_catalog, pgmb, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
    began text := coalesce(
        (select d.id from pgmb.dispatched as d
         where d.group_id = gid and d.subscription_id = sid order by d.group_id, d.id limit 1),
        pgmb.create_event_id(clock_timestamp(), 0));
    seen text;
    ids text[];
begin
    perform pgmb.check_group(gid);
    if not exists (select from pgmb.subscriptions as s where s.id = sid and s.group_id = gid) then
        raise exception using errcode = 'PC002', message = format('group %L has no subscription %L', gid, sid),
            hint = 'select id, group_id from pgmb.subscriptions lists them';
    end if;
    if coalesce(from_event_id !~ '^pm[0-9a-f]{22}$', true) then
        raise invalid_parameter_value using message = format('%L is not an event id', from_event_id);
    end if;
    if coalesce(max_events, 0) < 1 then
        raise invalid_parameter_value using message = 'max_events must be at least 1 event';
    end if;
    ids := pgmb.replay_older(
        sid, from_event_id, began,
        -- What was committed late, or under an id of its own, came by a dispatch although its id is older than the first; and
        -- what waits to be dispatched will.
        case when from_event_id < began then array(
            select i.id
            from pgmb.dispatched as d cross join lateral unnest(d.event_ids) as i(id)
            where d.group_id = gid and d.subscription_id = sid and d.event_ids[1] < began
            union all
            select u.event_id from pgmb.unread_events as u where u.event_id < began) end,
        max_events);
    -- After the event itself where it was dispatched, else after its time.
    seen := (
        select d.id from pgmb.dispatched as d
        where d.group_id = gid and d.subscription_id = sid and d.id > from_event_id and from_event_id = any (d.event_ids)
        limit 1);
    if cardinality(ids) < max_events then
        ids := ids || array(
            select i.id
            from pgmb.dispatched as d cross join lateral unnest(d.event_ids) as i(id)
            where d.group_id = gid and d.subscription_id = sid
              and (d.id > coalesce(seen, from_event_id) or d.id = seen and i.id > from_event_id collate "C")
              and i.id <> all (ids)
              -- A retry is for one handler, which has had it; what was sent again comes as the event that it copies.
              and not exists (
                  select from pgmb.events as e
                  where e.id = i.id and (
                      e.topic = 'pgmb-retry'
                      or e.metadata ->> 'replay_of' > from_event_id collate "C"
                      and exists (select from pgmb.events as o where o.id = e.metadata ->> 'replay_of')))
            -- A dispatch can have several slices of one subscription under its id.
            order by d.id, i.id collate "C" limit max_events - cardinality(ids));
    end if;
    return query select e.* from pgmb.read_events(ids[:max_events]::pgmb.event_id[]) as e;
end
$$;
comment on function pgmb.replay_events(varchar, varchar, pgmb.event_id, integer) is
    'The events of a subscription after one that it had, at most so many: those older than the subscription by its condition, '
    'the others as they were dispatched, without retries, and without copies of what is replayed itself. It moves no cursor.';
