-- What people ask and do: status, faults, skip, drop.

do $$
begin
    perform pgchange.register('pgmb', 'event');
end
$$;

create function pgmb.status(upto integer default 1000) returns setof pgchange.consumer_status
language plpgsql volatile security definer
set search_path = pg_catalog, pgmb, pg_temp
set jit = off
as $$
declare
    known record;
    run record;
    waits record;
begin
    if coalesce(upto < 0, true) then
        raise invalid_parameter_value using message = 'upto must not be negative';
    end if;
    waits := pgmb.waiting(upto);
    for known in
        select g.id, coalesce(c.elsewhere, false) as elsewhere, c.batch_id, c.attempt, c.error, c.claimed_at, c.version as claimed,
               case when not c.elsewhere or c is null then coalesce(g.last_read_event_id, '')
                    when c.batch is null then c.upto else c.after end as cursor,
               case when not c.elsewhere or c is null then g.version
                    when c.batch is null then c.version else c.from_version end as version,
               case when c.elsewhere then c.claimed_at else g.updated_at end as updated_at,
               c is null and not exists (select from pgmb.subscriptions as s where s.group_id = g.id) as unknown
        from pgmb.subscription_groups as g left join pgmb.claim as c on c.group_id = g.id
        order by g.id
    loop
        select a.* into run from pgmb.next_runs(known.id, known.cursor, upto::bigint + 1) as a;
        return query select
            'event', pgmb.name_of(known.id), jsonb_build_object('group', known.id), known.version,
            coalesce(run.count, 0), coalesce(run.count, 0) <= upto,
            greatest(extract(epoch from clock_timestamp() - pgmb.extract_date_from_event_id(run.lowest)), 0)::double precision,
            waits.counted, pgmb.faults(known.id), pgmb.locked(known.id),
            case when known.claimed > known.version then known.batch_id end,
            case when known.claimed > known.version then known.attempt end,
            case when known.claimed > known.version then known.error end,
            case when known.claimed > known.version then known.claimed_at end,
            known.updated_at::timestamptz, null::text,
            case when known.elsewhere then 'progress' when known.unknown then 'changes' end;
    end loop;
end
$$;
comment on function pgmb.status(integer) is
    'Every group, as pgchange.status() shows it: what is ready for it and how old, what waits to be dispatched for any group, its '
    'faults, whether it is being read, and the batch that it claimed last and has not acked. For a group whose cursor is elsewhere, '
    'only the last claim tells, so a batch that is done can be shown as in work.';

create function pgmb.dispatching()
returns table (
    dispatched_at timestamptz, events bigint, waiting bigint, oldest_seconds double precision, at_work integer, restored text,
    faults bigint, astray bigint
)
language plpgsql volatile security definer
set search_path = pg_catalog, pgmb, pg_temp
as $$
begin
    return query
        select d.dispatched_at, d.total, w.counted, w.age, (select min(l) from pgmb.who_locks(pgmb.dispatch_key()) as l),
               case when d.restored_at > now() - interval '1 day' then d.restored end,
               (select count(*) from (select from pgmb.fault limit 1000) as bounded),
               (select count(*) from (select from pgmb.fault as f where f.group_id is null limit 1000) as bounded)
        from pgmb.dispatcher_now() as d, pgmb.waiting(1000) as w;
end
$$;
comment on function pgmb.dispatching() is
    'The last poll that had something to dispatch, how many events there have ever been, how many wait and since when, which '
    'process dispatches now, what was done after a restore in the last day, how many faults there are, and how many of those, '
    'astray, are for a subscription that is gone; each counted up to a thousand.';

create function pgmb.match_again(failed pgmb.fault[], out matches pgmb.match[], out faults pgmb.fault[])
language plpgsql stable
set search_path = pg_catalog, pgmb, pg_temp
as $$
declare
    known record;
    part record;
begin
    for known in
        select s.group_id, f.subscription_id, c as condition, f.group_id is null as addressed,
               array_agg(distinct i.id collate "C" order by i.id collate "C") as ids
        from unnest(failed) as f
        join pgmb.subscriptions as s on s.id = f.subscription_id
        join pgmb.condition as c on c.id = s.condition_id
        cross join lateral unnest(f.event_ids) as i(id)
        group by 1, 2, 3, 4
    loop
        if known.addressed then
            known.ids := array(select e.id::text from pgmb.read_events(known.ids) as e);
            matches := matches || (known.group_id, known.subscription_id, known.ids)::pgmb.match;
            continue;
        end if;
        part := pgmb.evaluate(
            known.condition, pgmb.match_sql(known.condition, addressed => true), known.ids, array[known.subscription_id]);
        matches := matches || part.matches;
        faults := faults || part.faults;
    end loop;
end
$$;
comment on function pgmb.match_again(pgmb.fault[]) is
    'Which events of faults match now, and which fail again; all of them see the subscriptions as they were at one moment.';

create function pgmb.replay_faults(gid varchar default null) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pgmb, pg_temp
as $$
declare
    failed pgmb.fault[];
    again record;
    written record;
begin
    perform pgmb.check_read_committed();
    if not pg_try_advisory_xact_lock(pgmb.dispatch_key()) then
        raise lock_not_available using message = 'events are being dispatched', hint = 'try again in a moment';
    end if;
    with gone as (
        delete from pgmb.fault as f using pgmb.subscriptions as s
        where s.id = f.subscription_id and (gid is null or s.group_id = gid)
        returning f.*
    )
    select array_agg(g::pgmb.fault) into failed from gone as g;
    again := pgmb.match_again(failed);
    perform pgmb.note_faults(again.faults);
    if coalesce(cardinality(again.matches), 0) = 0 then
        return 0;
    end if;
    written := pgmb.write_matches(
        pgmb.dispatcher_now(), array(
            select distinct i.id collate "C"
            from unnest(again.matches) as m cross join lateral unnest(m.ids) as i(id) order by 1),
        again.matches);
    perform pgmb.move_dispatcher(written.at);
    return written.pairs;
end
$$;
comment on function pgmb.replay_faults(varchar) is
    'Evaluate the conditions that failed once more, of one group or of all: what matches is dispatched now, what fails again is '
    'noted again. Returns how many pairs of event and subscription were dispatched.';

create function pgmb.cursor_of(at timestamptz default null) returns pgmb.event_id
language plpgsql security definer
set search_path = pg_catalog, pgmb, pg_temp
as $$
begin
    if at > clock_timestamp() then
        raise invalid_parameter_value using message = format('the time %s lies in the future', at),
            hint = 'give a time of before, or none for now';
    end if;
    if at is null then
        perform pg_advisory_xact_lock(pgmb.dispatch_key());
        while (pgmb.dispatch()).more loop
        end loop;
    end if;
    -- Without a time the clock does not count: what was dispatched last can be ahead of it.
    return pgmb.cursor_by_now(pgmb.create_event_id(coalesce(at, 'infinity'), 0));
end
$$;
comment on function pgmb.cursor_of(timestamptz) is
    'In the database of the events: the cursor after all that was dispatched before a time; or, without a time, after all that '
    'is published now, which it dispatches.';

create function pgmb.point_of(at timestamptz default null) returns jsonb
language sql
set search_path = pg_catalog, pgmb, pg_temp
as $$
    select jsonb_build_object('cursor', pgmb.cursor_of(at), 'source', pgmb.here())
$$;
comment on function pgmb.point_of(timestamptz) is 'The same, with the place of the events.';

create function pgmb.cursor_hint() returns text
language sql immutable
as $$
    select 'null is the beginning; in the database of the events, pgmb.cursor_of(<timestamp>) is the cursor of a time'
$$;
comment on function pgmb.cursor_hint() is 'Which cursors a group can be moved to.';

create function pgmb.note_move(gid text, "position" jsonb, new_cursor pgmb.event_id) returns bigint
language plpgsql security definer
set search_path = pg_catalog, pgmb, pgchange, pg_temp
as $$
declare
    began_at bigint := "position" ->> 'version';
    version bigint := pgchange.next_version(
        pgmb.name_of(gid), greatest(began_at, (select c.version from pgmb.claim as c where c.group_id = gid)));
begin
    perform pgmb.check_group(gid);
    if new_cursor is null and not coalesce(pgchange.came_along("position" ->> 'source', pgmb.here()), true) then
        raise exception using errcode = 'PC004',
            message = format('group %I is moved to a point of another database than this one', gid),
            hint = 'the database of the events notes a move first: pgmb.note_move() there gives the version for pgmb.move_group()';
    end if;
    perform pgmb.check_past(new_cursor, pgmb.cursor_hint());
    perform pgmb.check_kept(gid, new_cursor);
    insert into pgmb.claim as c (group_id, version, from_version, attempt, after, upto, elsewhere, moved_to)
    values (
        gid, version, began_at, 0, coalesce("position" ->> 'cursor', ''), coalesce(new_cursor, ''),
        "position" ->> 'database' <> pgmb.here(), coalesce(new_cursor, ''))
    on conflict on constraint claim_pkey do update set
        version = excluded.version, from_version = excluded.from_version, batch_id = null, attempt = 0, error = null,
        batch = null, after = excluded.after, upto = excluded.upto, elsewhere = excluded.elsewhere,
        moved_to = least(c.moved_to, excluded.moved_to), claimed_at = excluded.claimed_at;
    return version;
end
$$;
comment on function pgmb.note_move(text, jsonb, pgmb.event_id) is
    'In the database of the events: note that a group is moved from its position to a cursor, as a claim notes a batch, and '
    'return the version for pgmb.move_group(). What it is moved back to is kept until it has claimed from there; refused where '
    'that is gone, or lies in the future.';

create function pgmb.move_group(
    gid text, new_cursor pgmb.event_id, version bigint default null, source text default null
) returns void
language plpgsql security definer
set search_path = pg_catalog, pgmb, pg_temp
as $$
begin
    perform pgmb.take_idle(gid);
    if new_cursor !~ '^pm[0-9a-f]{22}$' then
        raise invalid_parameter_value using message = format('%L is not a cursor', new_cursor), hint = pgmb.cursor_hint();
    end if;
    if version is null then
        if not exists (select from pgmb.subscriptions as s where s.group_id = gid) then
            raise exception using errcode = 'PC004',
                message = format('the events of group %I are in another database than this one', gid),
                hint = 'that database notes a move first: pgmb.note_move() there gives the version for pgmb.move_group()';
        end if;
        version := pgmb.note_move(gid, pgmb.position(gid), new_cursor);
        new_cursor := pgmb.cursor_by_now(new_cursor);
        source := pgmb.here();
    elsif new_cursor is not null and source is null then
        raise invalid_parameter_value using message = 'say where the cursor is from: source => pgmb.here() of the database of the events',
            hint = 'pgmb.point_of() there gives both';
    end if;
    update pgmb.subscription_groups as g set
        last_read_event_id = new_cursor, version = move_group.version, source = coalesce(move_group.source, g.source),
        updated_at = now()
    where g.id = gid;
end
$$;
comment on function pgmb.move_group(text, pgmb.event_id, bigint, text) is
    'In the database of a group''s cursor: move it to one that pgmb.cursor_of() gave, or to null, the beginning. Where the events '
    'are in another database, pgmb.note_move() there gives the version, and pgmb.here() the place that the cursor is from.';

create function pgmb.drop_group(gid text) returns void
language plpgsql security definer
set search_path = pg_catalog, pgmb, dead_letter, pg_temp
as $$
begin
    perform pgmb.take_idle(gid);
    -- What a poll under way dispatches to this group would be there for the next one of its name.
    perform pg_advisory_xact_lock(pgmb.dispatch_key());
    delete from pgmb.fault as f where f.group_id = gid;
    delete from pgmb.claim as c where c.group_id = gid;
    delete from dead_letter.letter as l where l.kind in ('event', 'handler') and l.address ->> 'group' = gid;
    delete from pgmb.subscription_groups as g where g.id = gid;
end
$$;
comment on function pgmb.drop_group(text) is
    'Delete a group, its subscriptions, its cursor and its dead letters; it no longer keeps events from being deleted. It waits '
    'for a poll that is under way, and nothing is dispatched until its transaction ends.';
