-- Moving a group to another place of the log, also if its cursor is in another database, and after the source lost its latest
-- transactions.

-- In the database of the events: the cursor after everything that was dispatched before a time. Without a time, the cursor after
-- everything that is published now; it dispatches that.
create function pgmb.cursor_of(at timestamptz default null) returns pgmb.event_id
language plpgsql security definer as $$
begin
    if at > clock_timestamp() then
        raise invalid_parameter_value using message = format('the time %s is in the future', at),
            hint = 'give a time in the past, or leave it out for now';
    end if;
    if at is null then
        perform pg_advisory_xact_lock(pgmb.dispatch_key());
        while (pgmb.dispatch()).more loop
        end loop;
    end if;
    -- Without a time, do not use the clock: the last dispatch can be ahead of it.
    return pgmb.cursor_by_now(pgmb.create_event_id(coalesce(at, 'infinity'), 0));
end
$$;

create function pgmb.point_of(at timestamptz default null) returns jsonb
language sql as $$
    select jsonb_build_object('cursor', pgmb.cursor_of(at), 'source', pgmb.here())
$$;
comment on function pgmb.point_of(timestamptz) is 'The result of pgmb.cursor_of(), with the database to which it belongs.';

-- The hint on valid points.
create function pgmb.cursor_hint() returns text
language sql immutable as $$
    select 'null is the beginning; in the database of the events, pgmb.point_of(<timestamp>) returns the point of a time'
$$;

-- Refuse a value to which no group can be moved.
create function pgmb.check_point(point jsonb) returns void
language plpgsql immutable as $$
begin
    perform pgchange.check_point(point, 'pgmb');
    if point is not null and coalesce(point ->> 'cursor', '') !~ '^pm[0-9a-f]{22}$' then
        raise invalid_parameter_value using message = format('%L is not a cursor', point ->> 'cursor'), hint = pgmb.cursor_hint();
    end if;
end
$$;

-- In the database of the events: refuse a move to a point of another database, of the future, or before deleted events.
create function pgmb.check_move(gid text, "position" jsonb, point jsonb) returns void
language plpgsql stable as $$
declare
    here text := pgmb.here();
begin
    perform pgmb.check_group(gid);
    if point ->> 'source' <> here or point is null and not coalesce(pgchange.came_along("position" ->> 'source', here), true) then
        raise exception using errcode = 'PC004',
            message = format('group %I cannot be moved to a point of another database', gid),
            hint = 'the database of the events records a move first: pgmb.note_move() there returns the version for '
                   'pgmb.move_consumer()';
    end if;
    perform pgmb.check_past(point ->> 'cursor', pgmb.cursor_hint());
    perform pgmb.check_kept(gid, point ->> 'cursor');
end
$$;

create function pgmb.note_move(gid text, "position" jsonb, point jsonb) returns bigint
language plpgsql security definer as $$
declare
    mark pgchange.claim;
begin
    perform pgmb.check_point(point);
    perform pgmb.check_move(gid, "position", point);
    perform pgchange.check_lease(pgmb.pending(gid, "position"));
    -- Keep also the events from an earlier move back, until the group has claimed.
    mark := pgchange.record(
        'event', pgmb.name_of(gid), pgmb.address(gid), "position", to_jsonb(least(
            coalesce("position" ->> 'cursor', '') collate "C", (
                select least(c.after, c.upto) from pgmb.claims as c
                where c.consumer = pgmb.name_of(gid) and c.batch is null and c.elsewhere) collate "C")),
        pgmb.at(point), pgmb.here(), null);
    return mark.version;
end
$$;
comment on function pgmb.note_move(text, jsonb, jsonb) is
    'In the database of the events: record that a group moves from its position to a point of pgmb.point_of(), as a claim records '
    'a batch. Returns the version for pgmb.move_consumer(). Events behind the point are kept until the group has claimed from '
    'there. Refused if they were deleted, or if the point is in the future.';
