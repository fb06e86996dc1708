-- Dead letters of handlers: events that one gave up. A letter holds copies of them, as the log lets go of what was read. To send
-- it again is to publish a retry, which goes to that handler alone.

insert into dead_letter.kind (kind, schema) values ('handler', 'pgmb');

create function pgmb.give_up_events(
    gid pgmb.group_id, handler text, sid pgmb.subscription_id, events jsonb, error text, attempts integer
) returns bigint
language sql security definer
set search_path = pg_catalog, pgmb, dead_letter, pg_temp
as $$
    select dead_letter.write(
        'handler', format('events:%s/%s', gid, handler),
        jsonb_build_object('group', gid, 'handler', handler, 'subscription', sid), jsonb_build_object('events', events),
        jsonb_array_length(events), format('handler %s gave them up', handler), error, attempts)
$$;
comment on function pgmb.give_up_events(pgmb.group_id, text, pgmb.subscription_id, jsonb, text, integer) is
    'Keep the events that a handler of a group gave up, as [{id, topic, payload, metadata}, ...], as a dead letter, whose number '
    'is returned.';

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
            message = format('subscription %s of group %L is gone, and with it the way to its handlers',
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
    returning l.address, l.content -> 'events' as events into wanted;
    if not found then
        perform dead_letter.gone(letter);
    end if;
    insert into pgmb.events (topic, payload, metadata, subscription_id)
    values (
        'pgmb-retry',
        jsonb_build_object(
            'ids', jsonb_path_query_array(wanted.events, '$[*].id'), 'retryNumber', 0,
            'handlerName', wanted.address -> 'handler'),
        jsonb_build_object('events', wanted.events, 'letter', letter),
        wanted.address ->> 'subscription');
end
$$;
comment on function pgmb.send_again(bigint) is
    'Publish a retry of the events of a dead letter for their handler; the letter goes in the same transaction.';
