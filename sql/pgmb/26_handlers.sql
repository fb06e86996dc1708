-- What a handler failed on: it comes back to that handler alone by a retry, and after the last one it becomes a dead letter.
-- Both hold copies of the events, as the log does not keep what was read.

-- The first of some subscriptions that is there; null where all are gone.
create function pgmb.first_there(sids text[]) returns pgmb.subscription_id
language sql stable as $$
    select s.id from unnest(sids) with ordinality as x(sid, n) join pgmb.subscriptions as s on s.id = x.sid
    order by x.n limit 1
$$;

-- Give events, as [{id, topic, payload, metadata}, ...], back to a handler after a pause, by the first of their subscriptions that is
-- there; null where all are gone, as nobody would get it. attempts is how many have failed.
create function pgmb.retry_events(
    sids text[], handler text, events jsonb, error text, attempts integer, pause interval
) returns pgmb.event_id
language sql security definer as $$
    insert into pgmb.events (id, topic, payload, metadata, subscription_id)
    select pgmb.create_event_id(clock_timestamp() + pause, nextval('pgmb.event_seq')), 'pgmb-retry',
           jsonb_build_object(
               'ids', jsonb_path_query_array(events, '$[*].id'), 'retryNumber', attempts, 'handlerName', handler),
           jsonb_build_object('events', events, 'error', error, 'subscriptions', sids), sid
    from pgmb.first_there(sids) as sid
    where sid is not null
    returning id
$$;

-- Keep the events that a handler of a group gave up as a dead letter, whose number is returned; it is sent again by the first of
-- their subscriptions that is there then.
create function pgmb.give_up_events(
    gid pgmb.group_id, sids text[], handler text, events jsonb, error text, attempts integer
) returns bigint
language sql security definer as $$
    select pgchange.write_letter(
        'event', pgmb.name_of(gid) || '/' || handler,
        jsonb_build_object('group', gid, 'handler', handler, 'subscriptions', sids), jsonb_build_object('events', events),
        jsonb_array_length(events), format('handler %s gave them up', handler), error, attempts)
$$;
