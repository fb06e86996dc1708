-- What a handler failed on: it comes back to that handler alone by a retry, and after the last one it becomes a dead letter. Both
-- hold copies of the events, as the log lets go of what was read.

insert into dead_letter.kind (kind, schema) values ('handler', 'pgmb');

create function pgmb.retry_events(
    sid pgmb.subscription_id, handler text, events jsonb, error text, attempts integer, pause interval
) returns pgmb.event_id
language sql security definer
set search_path = pg_catalog, pgmb, pg_temp
as $$
    insert into pgmb.events (id, topic, payload, metadata, subscription_id)
    values (
        pgmb.create_event_id(clock_timestamp() + pause, nextval('pgmb.event_seq')), 'pgmb-retry',
        jsonb_build_object(
            'ids', jsonb_path_query_array(events, '$[*].id'), 'retryNumber', attempts, 'handlerName', handler),
        jsonb_build_object('events', events, 'error', error), sid)
    returning id
$$;
comment on function pgmb.retry_events(pgmb.subscription_id, text, jsonb, text, integer, interval) is
    'Give events, as [{id, topic, payload, metadata}, ...], back to a handler after a pause; attempts is how many it has failed.';

create function pgmb.give_up_events(
    gid pgmb.group_id, sid pgmb.subscription_id, handler text, events jsonb, error text, attempts integer
) returns bigint
language sql security definer
set search_path = pg_catalog, pgmb, dead_letter, pg_temp
as $$
    select dead_letter.write(
        'handler', format('events:%s/%s', gid, handler),
        jsonb_build_object('group', gid, 'handler', handler, 'subscription', sid), jsonb_build_object('events', events),
        jsonb_array_length(events), format('handler %s gave them up', handler), error, attempts)
$$;
comment on function pgmb.give_up_events(pgmb.group_id, pgmb.subscription_id, text, jsonb, text, integer) is
    'Keep the events that a handler of a group gave up as a dead letter, whose number is returned.';

create function pgmb.letter_rights(address jsonb) returns text[]
language sql immutable
as $$
    select '{see,keep}'::pg_catalog.text[]
$$;
comment on function pgmb.letter_rights(jsonb) is 'What who may execute this may do with dead letters of the event log.';

create function pgmb.check_letter(address jsonb, content jsonb) returns void
language plpgsql stable security definer
set search_path = pg_catalog, pgmb, pg_temp
as $$
begin
    if not exists (select from pgmb.subscriptions as s where s.id = address ->> 'subscription') then
        raise exception using errcode = 'PC012',
            message = format('subscription %s of group %I is gone, and with it the way to its handlers',
                             address ->> 'subscription', address ->> 'group'),
            hint = 'the letter''s content still has the events: publish them anew, or drop it';
    end if;
end
$$;
comment on function pgmb.check_letter(jsonb, jsonb) is 'Refuse a dead letter whose events can reach its handler no more.';

create function pgmb.send_again(letter bigint) returns void
language plpgsql security definer
set search_path = pg_catalog, pgmb, dead_letter, pg_temp
as $$
declare
    wanted record;
begin
    delete from dead_letter.letter as l where l.id = letter and l.kind = 'handler'
    returning l.address, l.content -> 'events' as events, l.error into wanted;
    if not found then
        perform dead_letter.gone(letter);
    end if;
    perform pgmb.retry_events(
        wanted.address ->> 'subscription', wanted.address ->> 'handler', wanted.events, wanted.error, 0, interval '0');
end
$$;
comment on function pgmb.send_again(bigint) is
    'Give the events of a dead letter back to their handler, with all its attempts before it; the letter goes in the same '
    'transaction.';
