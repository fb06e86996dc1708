-- Events on which a handler failed. A retry returns them to that handler alone; after the last retry they become a dead letter.
-- Both contain copies of the events, because the log does not keep events that were read.

-- The first of these subscriptions that exists; null if none does.
create function pgmb.first_there(sids text[]) returns pgmb.subscription_id
language sql stable as $$
    select s.id from unnest(sids) with ordinality as x(sid, n) join pgmb.subscriptions as s on s.id = x.sid
    order by x.n limit 1
$$;

-- Return events, as [{id, topic, payload, metadata}, ...], to a handler after a pause, by the first of their subscriptions that
-- exists. attempts: how many attempts have failed. Null if no subscription exists, so that nobody would get them.
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

-- Store the events that a handler of a group gave up as a dead letter, and return its number. The letter is sent again by the
-- first of their subscriptions that exists then.
create function pgmb.give_up_events(
    gid pgmb.group_id, sids text[], handler text, events jsonb, error text, attempts integer
) returns bigint
language sql security definer as $$
    select pgchange.write_letter(
        'event', pgmb.name_of(gid) || '/' || handler,
        jsonb_build_object('group', gid, 'handler', handler, 'subscriptions', sids), jsonb_build_object('events', events),
        jsonb_array_length(events), format('handler %s gave them up', handler), error, attempts)
$$;
