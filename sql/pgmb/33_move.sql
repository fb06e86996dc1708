-- Moving a group to another place of the log, also where its cursor is in another database, and after the source lost its tail.

-- In the database of the events: the cursor after all that was dispatched before a time; or, without a time, after all that is
-- published now, which it dispatches.
create function pgmb.cursor_of(at timestamptz default null) returns pgmb.event_id
language plpgsql security definer as $$
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

create function pgmb.point_of(at timestamptz default null) returns jsonb
language sql as $$
    select jsonb_build_object('cursor', pgmb.cursor_of(at), 'source', pgmb.here())
$$;
comment on function pgmb.point_of(timestamptz) is 'The same, with the place of the events.';

-- Which points a group can be moved to.
create function pgmb.cursor_hint() returns text
language sql immutable as $$
    select 'null is the beginning; in the database of the events, pgmb.point_of(<timestamp>) is the point of a time'
$$;

-- Refuse a value that is no point to move a group to.
create function pgmb.check_point(point jsonb) returns void
language plpgsql immutable as $$
begin
    perform pgchange.check_point(point, 'pgmb');
    if point is not null and coalesce(point ->> 'cursor', '') !~ '^pm[0-9a-f]{22}$' then
        raise invalid_parameter_value using message = format('%L is not a cursor', point ->> 'cursor'), hint = pgmb.cursor_hint();
    end if;
end
$$;

-- In the database of the events: refuse a move to a point of another one, of the future, or before events that are gone.
create function pgmb.check_move(gid text, "position" jsonb, point jsonb) returns void
language plpgsql stable as $$
declare
    here text := pgmb.here();
begin
    perform pgmb.check_group(gid);
    if point ->> 'source' <> here or point is null and not coalesce(pgchange.came_along("position" ->> 'source', here), true) then
        raise exception using errcode = 'PC004',
            message = format('group %I is moved to a point of another database than this one', gid),
            hint = 'the database of the events notes a move first: pgmb.note_move() there gives the version for pgmb.move_consumer()';
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
    -- What it was moved back to before is kept too, until it has claimed.
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
    'In the database of the events: note that a group is moved from its position to a point that pgmb.point_of() gave, as a claim notes a '
    'batch, and return the version for pgmb.move_consumer(). What it is moved back to is kept until it has claimed from there; refused '
    'where that is gone, or lies in the future.';
