-- Dead letters of the event log: batches of a group's feed, and events that a handler gave up. The address of a letter names its
-- handler. Letters contain copies of the events, because the log does not keep events that were read.

-- The events of a batch, as [{id, topic, payload, metadata, subscriptions}, ...]. A part has at most a thousand events and about
-- 8 MiB, because the size of a jsonb is limited.
create function pgmb.copies(gid text, batch jsonb) returns table (part bigint, events jsonb)
language sql stable as $$
    select min(e.n), jsonb_agg(jsonb_build_object(
        'id', e.id, 'topic', e.topic, 'payload', e.payload, 'metadata', e.metadata, 'subscriptions', e.subscription_ids)
        order by e.n)
    from (
        select x.id, x.topic, x.payload, x.metadata, x.subscription_ids, row_number() over run - 1 as n,
               sum(length(x.payload::text) + coalesce(length(x.metadata::text), 0)) over run as size
        from pgmb.events_shared(
            gid, batch -> 'bounds' ->> 'after', batch -> 'bounds' ->> 'upto', batch -> 'bounds' ->> 'lowest',
            batch -> 'bounds' ->> 'highest') as x
        window run as (order by x.dispatch, x.rank)
    ) as e
    group by e.n / 1000, div(e.size, 8388608)
    order by 1
$$;

-- Store the events of a batch as dead letters, a letter for each part of pgmb.copies(). If the events are in another database,
-- store the batch alone. Returns the number of the last letter.
create function pgmb.give_up(gid text, batch jsonb, reason text) returns bigint
language plpgsql as $$
declare
    here boolean := not (batch -> 'elsewhere')::boolean;
    copied record;
    letter bigint;
begin
    for copied in
        select c.part, jsonb_build_object('events', c.events) as content, jsonb_array_length(c.events) as n
        from pgmb.copies(gid, batch) as c where here
        union all
        select 0, jsonb_build_object('batch', batch - array['attempt', 'error', 'elsewhere']), (batch ->> 'count')::integer
        where not here
        order by part
    loop
        letter := pgchange.write_letter(
            'event', pgmb.name_of(gid), pgmb.address(gid), copied.content, copied.n, reason, batch ->> 'error',
            (batch ->> 'attempt')::integer, (batch ->> 'id')::uuid);
    end loop;
    return letter;
end
$$;

-- The subscription by which an event is sent to a group again. It is a subscription that selected the event, or else any; null if
-- there is none.
create function pgmb.resend_subscription(gid text, wanted jsonb) returns text
language sql stable as $$
    select s.id from pgmb.subscriptions as s where s.group_id = gid order by wanted ? s.id desc, s.id limit 1
$$;

-- The subscriptions by which the events of a handler's letter can come to it.
create function pgmb.subscriptions_of(address jsonb) returns text[]
language sql immutable as $$
    select array(select jsonb_array_elements_text(address -> 'subscriptions'))
$$;

-- Refuse a letter of a group that has no subscription for it any more.
create function pgmb.refuse_letter(address jsonb) returns void
language plpgsql stable as $$
begin
    raise exception using errcode = 'PC012',
        message = format('no event can be sent to group %I: its subscriptions are gone', address ->> 'group'),
        hint = 'publish the events in the content of the letter again, or drop the letter';
end
$$;

-- Refuse a dead letter whose events cannot reach its consumer any more.
create function pgmb.check_letter(address jsonb, content jsonb) returns void
language plpgsql stable security definer as $$
begin
    if not content ? 'events' then
        raise exception using errcode = 'PC012',
            message = format(
                'the letter cannot be sent: its events, of group %I, are in another database than the cursor', address ->> 'group'),
            hint = 'there, publish the events that pgmb.replay_events() still returns; here the letter can only be dropped';
    end if;
    if address ? 'subscriptions' and pgmb.first_there(pgmb.subscriptions_of(address)) is null
       or pgmb.resend_subscription(address ->> 'group', '[]') is null
    then
        perform pgmb.refuse_letter(address);
    end if;
end
$$;

-- Publish the events of a dead letter again. For a handler's letter, they go to that handler alone, with all its attempts.
-- Otherwise they go to the group alone, as new events with replay_of in their metadata. The letter is deleted in the same
-- transaction.
create function pgmb.redrive(letter bigint) returns void
language plpgsql security definer as $$
declare
    wanted record;
    sent boolean;
begin
    delete from pgchange.letter as l where l.id = letter and l.kind = 'event'
    returning l.address, l.content -> 'events' as events, l.error into wanted;
    if not found then
        perform pgchange.letter_gone(letter);
    end if;
    if wanted.address ? 'handler' then
        sent := pgmb.retry_events(
            pgmb.subscriptions_of(wanted.address), wanted.address ->> 'handler', wanted.events, wanted.error, 0, interval '0')
            is not null;
    else
        -- Publish with a subscription. Without it, all groups would get the events.
        insert into pgmb.events (topic, payload, metadata, subscription_id)
        select x.event ->> 'topic', x.event -> 'payload',
               coalesce(nullif(x.event -> 'metadata', 'null'), '{}') || jsonb_build_object('replay_of', x.event -> 'id'), sid
        from jsonb_array_elements(wanted.events) with ordinality as x(event, n)
        cross join lateral pgmb.resend_subscription(wanted.address ->> 'group', x.event -> 'subscriptions') as sid
        where sid is not null
        order by x.n;
        sent := found;
    end if;
    if not sent then
        -- The subscriptions existed at the check, and were deleted since.
        perform pgmb.refuse_letter(wanted.address);
    end if;
end
$$;
