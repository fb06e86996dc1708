-- Reading events again: by their ids, after an event of a subscription, and where a condition failed for them.

create function pgmb.read_events(event_ids pgmb.event_id[]) returns setof pgmb.events
language sql stable security definer as $$
    select e.* from unnest(event_ids) with ordinality as i(id, n)
    cross join lateral (select x.* from pgmb.events as x where x.id = i.id offset 0) as e
    order by i.n
$$;
comment on function pgmb.read_events(pgmb.event_id[]) is
    'Events by their ids, in the order of the ids, without those that were deleted.';

-- The events between two ids that match a subscription, in order, without those that it is known to have got.
create function pgmb.replay_older(sid text, from_event_id text, below text, known text[], max_events integer) returns text[]
language plpgsql as $$
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

create function pgmb.replay_events(gid varchar, sid varchar, from_event_id pgmb.event_id, max_events integer)
returns setof pgmb.events
language plpgsql volatile security definer
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
            hint = 'list the subscriptions: select id, group_id from pgmb.subscriptions';
    end if;
    if coalesce(from_event_id !~ '^pm[0-9a-f]{22}$', true) then
        raise invalid_parameter_value using message = format('%L is not an event id', from_event_id);
    end if;
    if coalesce(max_events, 0) < 1 then
        raise invalid_parameter_value using message = 'max_events must be at least 1 event';
    end if;
    ids := pgmb.replay_older(
        sid, from_event_id, began,
        -- Events that were committed late, or published under an id of the publisher's choice, may be older than the first
        -- dispatch. Include them if they were dispatched, or will be.
        case when from_event_id < began then array(
            select i.id
            from pgmb.dispatched as d cross join lateral unnest(d.event_ids) as i(id)
            where d.group_id = gid and d.subscription_id = sid and d.event_ids[1] < began
            union all
            select u.event_id from pgmb.unread_events as u where u.event_id < began) end,
        max_events);
    -- Continue after the event itself if it was dispatched, else after its time.
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
              -- Leave out retries, because each was for one handler, which got it. Leave out a copy if the event that it copies
              -- is replayed, too.
              and not exists (
                  select from pgmb.events as e
                  where e.id = i.id and (
                      e.topic = 'pgmb-retry'
                      or e.metadata ->> 'replay_of' > from_event_id collate "C"
                      and exists (select from pgmb.events as o where o.id = e.metadata ->> 'replay_of')))
            -- A dispatch can have several slices of a subscription with the same id.
            order by d.id, i.id collate "C" limit max_events - cardinality(ids));
    end if;
    return query select e.* from pgmb.read_events(ids[:max_events]::pgmb.event_id[]) as e;
end
$$;
comment on function pgmb.replay_events(varchar, varchar, pgmb.event_id, integer) is
    'Returns at most max_events events of a subscription, those after from_event_id. Events older than the first that was '
    'dispatched to it are selected by its condition; later events are returned if they were dispatched to it. Left out are '
    'retries, and each copy whose original is replayed, too. Moves no cursor.';

-- Evaluate the events of faults again: which match now, and which fail again. One query, so that all see the subscriptions of the
-- same moment.
create function pgmb.match_again(failed pgmb.fault[], out matches pgmb.match[], out faults pgmb.fault[])
language plpgsql stable as $$
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

create function pgmb.replay_faults(gid varchar default null) returns bigint
language plpgsql volatile security definer as $$
declare
    failed pgmb.fault[];
    again record;
    written record;
begin
    perform pgchange.check_isolation();
    if not pg_try_advisory_xact_lock(pgmb.dispatch_key()) then
        raise lock_not_available using message = 'no fault was replayed: events are being dispatched', hint = 'try again in a moment';
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
        again.matches, 0);
    return written.pairs;
end
$$;
comment on function pgmb.replay_faults(varchar) is
    'Evaluate failed conditions again, of a group or of all groups. Events that match are dispatched now; events that fail again '
    'are recorded again. Returns how many pairs of event and subscription were dispatched.';
