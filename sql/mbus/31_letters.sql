-- Dead letters. The messages of a batch that a feed gave up are in the dmq, with one letter for the batch. A message that was
-- posted to the dmq in SQL has a letter of its own. A letter and its messages in the dmq are always deleted together.

alter table mbus.dmq add column letter bigint references pgchange.letter on delete cascade;
create index on mbus.dmq (letter);

-- A new letter, with its number in its content, so that its messages can be found before it is sent again.
create function mbus.named_by_itself(letter bigint) returns bigint
language sql as $$
    update pgchange.letter as l set content = l.content || jsonb_build_object('letter', l.id)
    where l.id = named_by_itself.letter
    returning l.id
$$;

-- Write a dead letter for each message that is posted to the dmq.
create function mbus.write_letters() returns trigger
language plpgsql security definer as $$
declare
    message record;
begin
    for message in
        select p.id, p.headers, p.received, (mbus.queue_of(p.iid)).qname as qname from posted as p where p.letter is null order by p.id
    loop
        update mbus.dmq as d set letter = mbus.named_by_itself(pgchange.write_letter(
            'queue', 'queue:' || coalesce(message.qname, 'dmq'), jsonb_build_object('queue', message.qname),
            jsonb_build_object('messages', 1, 'consumers', message.received), 1, 'posted to the dmq', message.headers -> 'dmq.error'))
        where d.id = message.id;
    end loop;
    return null;
end
$$;

create trigger write_letters after insert on mbus.dmq referencing new table as posted
    for each statement execute function mbus.write_letters();

-- When messages leave the dmq, wake the messages that wait for them. Delete a letter with its last message.
create function mbus.after_dead() returns trigger
language plpgsql security definer as $$
begin
    perform mbus.wake_up('{0}', array(select g.id from gone as g));
    delete from pgchange.letter as l
    where l.id in (select g.letter from gone as g) and not exists (select from mbus.dmq as d where d.letter = l.id);
    return null;
end
$$;

create trigger after_dead after delete on mbus.dmq referencing old table as gone
    for each statement execute function mbus.after_dead();

-- Copy a batch to the dmq under a dead letter, so that messages that wait for its messages go on waiting. Returns the number of
-- the letter. Messages that others have taken since the claim are left out. Refuse a batch at work, and a batch without any
-- messages left.
create function mbus.give_up(caller pgchange.caller, qname text, cname text, batch jsonb, reason text) returns bigint
language plpgsql as $$
declare
    c mbus.consumer := mbus.feed_consumer(caller, qname, cname);
    mark mbus.batch;
    lowest bigint;
    highest bigint;
    counted bigint;
    letter bigint;
begin
    -- Lock the batch before its messages, as a claim and an ack do. From here on no other transaction can ack or adopt the batch.
    perform from mbus.batch as b where b.number = (give_up.batch -> 'bounds' ->> 'number')::bigint and b.consumer = c.id for update;
    select p.* into mark
    from mbus.pending(qname, c, (mbus.position(qname, cname) ->> 'slot')::integer) as p
    where p.number = (give_up.batch -> 'bounds' ->> 'number')::bigint and p.batch ->> 'id' = give_up.batch ->> 'id';
    if mark.number is null then
        raise exception using errcode = 'PC006', message = format(
            'batch %s of queue:%s/%s is at work, or acked', batch ->> 'id', qname, cname),
            hint = 'read the status again: only a batch that was claimed and not acked can be skipped';
    end if;
    lowest := mark.batch -> 'bounds' -> 'lowest';
    highest := mark.batch -> 'bounds' -> 'highest';
    perform from mbus.apart as a
    where a.consumer = mark.consumer and a.batch = mark.number and a.id between lowest and highest
    order by a.id
    for update;
    get diagnostics counted = row_count;
    if counted = 0 then
        raise exception using errcode = 'PC009',
            message = format('batch %s has no messages left to skip: others took them', mark.batch ->> 'id'),
            hint = 'there is nothing to do: the next claim leaves this batch out';
    end if;
    update mbus.batch as b set count = b.count - (mark.batch -> 'count')::bigint + counted where b.number = mark.number;
    letter := mbus.named_by_itself(pgchange.write_letter(
        'queue', mbus.name_of(qname, cname), jsonb_build_object('queue', qname, 'consumer', cname),
        jsonb_build_object('messages', counted), counted, reason, batch ->> 'error', mark.attempt, (batch ->> 'id')::uuid));
    execute format($query$
        insert into mbus.dmq (iid, delayed_until, expires, headers, properties, data, letter)
        select coalesce(l.iid, %2$L || l.id), l.delayed_until::timestamp, l.expires::timestamp, l.headers, l.properties, l.data, $4
        from mbus.apart as a
        cross join lateral (select x.* from mbus.%1$I as x where x.id = a.id offset 0) as l
        where a.consumer = $1 and a.batch = $2 and a.id between $3 and $5
        order by a.id
        $query$, 'log$' || qname, qname || '.')
    using mark.consumer, mark.number, lowest, letter, highest;
    return letter;
end
$$;

create function mbus_sealed.letter_rights(caller pgchange.caller, address jsonb) returns text[]
language sql stable security definer as $$
    select case when mbus.is_admin(caller) or mbus.may(caller, 'consume', address ->> 'queue', address ->> 'consumer') then '{see,keep}'::text[]
                else '{}' end
$$;
comment on function mbus_sealed.letter_rights(pgchange.caller, jsonb) is
    'The rights of the caller on dead letters of a queue. A role that may consume from the queue may see, send again and drop them.';

-- The first message of a dead letter that does not match the selector of a consumer to which it would go. Such a consumer is the
-- given consumer, or any that gave the letter up.
create function mbus.unmatched(letter bigint, qname text, cname text, out iid text, out consumer text)
language plpgsql stable as $$
declare
    c mbus.consumer;
begin
    for c in
        select x.* from mbus.consumer as x
        where x.qname = unmatched.qname and x.selector is not null and coalesce(x.name = cname, true)
        order by x.id
    loop
        execute format($query$
            select d.iid from mbus.dmq as d
            where d.letter = $1 and ($2 or $3 = any (d.received))
              and not coalesce(mbus.%I((
                  d.id, clock_timestamp() at time zone 'UTC', d.iid, null, null, d.received, d.headers - array['dmq.added', 'dmq.error'], d.properties, d.data
              )::mbus.qt_model), true)
            order by d.id limit 1
            $query$, 'match$' || c.id)
        into iid using letter, cname is not null, c.id;
        if iid is not null then
            consumer := c.name;
            return;
        end if;
    end loop;
end
$$;

create function mbus_sealed.check_letter(caller pgchange.caller, address jsonb, content jsonb) returns void
language plpgsql stable security definer as $$
declare
    lost record;
begin
    if 'see' <> all (mbus_sealed.letter_rights(caller, address)) then
        perform mbus.deny(caller, 'consume', address ->> 'queue', address ->> 'consumer');
    end if;
    if not exists (select from mbus.queue as q where q.qname = address ->> 'queue') then
        raise exception using errcode = 'PC012',
            message = format('the messages belong to no queue of this database: %s', coalesce(address ->> 'queue', 'none')),
            hint = 'make the queue, or drop the letter; mbus.dmq has the messages';
    end if;
    if address ? 'consumer' and not exists (
        select from mbus.consumer as c where c.qname = address ->> 'queue' and c.name = address ->> 'consumer')
    then
        raise exception using errcode = 'PC012', message = format('unknown consumer:%s', address ->> 'consumer'),
            hint = 'make the consumer, or drop the letter; mbus.dmq has the messages';
    end if;
    -- If all these consumers were dropped, the message would go to all present consumers.
    if jsonb_typeof(content -> 'consumers') = 'array' and not exists (
        select from mbus.consumer as c where c.qname = address ->> 'queue' and content -> 'consumers' @> to_jsonb(c.id))
    then
        raise exception using errcode = 'PC012', message = 'the consumers that gave the message up were dropped',
            hint = 'drop the letter; mbus.dmq has the message, to post it anew if others are to have it';
    end if;
    -- The caller may pass any content, so use it only if the letter has this address.
    lost := mbus.unmatched(
        (select l.id from pgchange.letter as l
         where l.id = (check_letter.content ->> 'letter')::bigint and l.address = check_letter.address),
        address ->> 'queue', address ->> 'consumer');
    if lost.iid is not null then
        raise exception using errcode = 'PC012',
            message = format('message %s does not match the selector of consumer %s, which would not receive it', lost.iid, lost.consumer),
            hint = 'correct the values that the selector uses, in mbus.dmq; or drop the letter';
    end if;
end
$$;
comment on function mbus_sealed.check_letter(pgchange.caller, jsonb, jsonb) is
    'Refuse a dead letter whose queue or consumer was dropped, or that nobody would receive.';

-- A part of a message in a readable form. A long part is left out.
create function mbus.shown(held hstore) returns jsonb
language sql stable as $$
    -- Do not even read a value whose stored form is long.
    select case when pg_column_size(held) > 20000 or octet_length(held::text) > 20000
                then to_jsonb('left out: it is longer than 20 kB'::text)
                else hstore_to_jsonb(held) end
$$;

create function mbus_sealed.letter_content(caller pgchange.caller, address jsonb, content jsonb) returns jsonb
language plpgsql stable security definer as $$
declare
    message jsonb;
    holds jsonb := '[]';
    size bigint := 0;
begin
    if 'see' <> all (mbus_sealed.letter_rights(caller, address)) then
        perform mbus.deny(caller, 'consume', address ->> 'queue', address ->> 'consumer');
    end if;
    -- The caller may pass any content, so use it only if the letter has this address.
    for message in
        select jsonb_strip_nulls(jsonb_build_object(
            'iid', d.iid, 'data', mbus.shown(d.data), 'properties', mbus.shown(d.properties),
            'headers', mbus.shown(d.headers), 'delayed_until', d.delayed_until, 'expires', d.expires))
        from mbus.dmq as d
        where d.letter = (
            select l.id from pgchange.letter as l
            where l.id = (letter_content.content ->> 'letter')::bigint and l.address = letter_content.address)
        order by d.id
        limit 100
    loop
        size := size + octet_length(message::text);
        exit when size > 200000;
        holds := holds || jsonb_build_array(message);
    end loop;
    return content || jsonb_build_object('holds', holds);
end
$$;
comment on function mbus_sealed.letter_content(pgchange.caller, jsonb, jsonb) is
    'The content of a dead letter: its own content, and its messages in the dmq. At most a hundred messages, and at most 200 kB '
    'of them; a part longer than 20 kB is left out.';

create function mbus_sealed.redrive(caller pgchange.caller, letter bigint) returns void
language plpgsql security definer as $$
declare
    address jsonb;
    content jsonb;
begin
    select l.address, l.content into address, content from pgchange.letter as l where l.id = letter and l.kind = 'queue' for update;
    if not found then
        perform pgchange.letter_gone(letter);
    end if;
    if 'keep' <> all (mbus_sealed.letter_rights(caller, address)) then
        perform mbus.deny(caller, 'consume', address ->> 'queue', address ->> 'consumer');
    end if;
    perform mbus_sealed.check_letter(caller, address, content);
    execute format($query$
        with moved as (
            delete from mbus.dmq as d where d.letter = $1 returning d.*
        )
        insert into mbus.%I (data, headers, properties, iid, not_for)
        select m.data, mbus.headers_for(m.headers - array['dmq.added', 'dmq.error'], $2), m.properties, m.iid,
               -- For all consumers this is an empty array, not null, because the message was copied to other queues when it was
               -- first posted.
               array(
                   select c.id from mbus.consumer as c
                   where c.qname = $2 and not case when $3 is not null then c.name = $3 else coalesce(c.id = any (m.received), true) end)
        from moved as m order by m.id
        $query$, 'log$' || (address ->> 'queue'))
    using letter, address ->> 'queue', address ->> 'consumer';
end
$$;
comment on function mbus_sealed.redrive(pgchange.caller, bigint) is
    'Post the messages of a dead letter again under their ids, without delay and expiry. They go to the consumers that gave them '
    'up, or else to all. The letter is deleted in the same transaction.';
