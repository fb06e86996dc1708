-- Posting to a queue: one message per call, many through arrays, or COPY into the log. A message that was received can be put
-- back.

-- The ids in a header consume_after, which is a text array with or without braces.
create function mbus.predecessors(consume_after text) returns text[]
language plpgsql immutable as $$
begin
    return array(
        select distinct i from unnest(
            case when trim(consume_after) like '{%' then consume_after else '{' || consume_after || '}' end::text[]) as i
        where i <> '' order by i);
exception when data_exception then
    raise invalid_parameter_value using message = format('Wrong consume_after:%s', consume_after),
        hint = 'an array of message ids: {q.1,q.2}';
end
$$;

-- The headers of a message as they are stored: those that its poster gave, with its origin and time.
create function mbus.headers_for(headers hstore, qname text) returns hstore
language sql stable as $$
    select headers || hstore(array[
        'seenby', case when (s.seenby)[cardinality(s.seenby)] = current_database() then s.seenby
                       else s.seenby || current_database()::text end::text,
        'source_db', coalesce(headers -> 'source_db', current_database()),
        'destination_queue', qname,
        'enqueue_time', coalesce(headers -> 'enqueue_time', clock_timestamp()::timestamp::text)])
        || case when headers -> 'consume_after' is null then ''
                else hstore('consume_after', mbus.predecessors(headers -> 'consume_after')::text) end
    from (select coalesce((headers -> 'seenby')::text[], '{}')) as s(seenby)
$$;

-- Refuse an id of another queue, under which the message could not be found. Refuse also an id that the sequence has not
-- returned yet.
create function mbus.check_iid(known mbus.queue, iid text) returns void
language plpgsql as $$
begin
    -- The sequence would later return such a number for another message, too.
    if iid !~ '[.][0-9]{1,18}$' or substring(iid from '^(.*)[.]') not in (known.qname, 'dmq')
       or iid !~ '^dmq' and substring(iid from '[0-9]+$')::bigint > coalesce(pg_sequence_last_value(known.seq), 0)
    then
        raise invalid_parameter_value using message = format('Wrong iid=%s for queue %s', iid, known.qname),
            hint = format('mbus.get_iid(%L) returns an id', known.qname);
    end if;
end
$$;

-- The consumers for which this transaction can put a message back, because it has received the message for them. Null if the
-- message is not in the queue: it would then go to all consumers.
create function mbus.got_now(known mbus.queue, iid text) returns integer[]
language plpgsql stable as $$
declare
    mine xid8 := pg_current_xact_id_if_assigned();
    message record;
    received integer[];
    receivers integer[] := '{}';
    pending_consumers integer[] := '{}';
    remains boolean := false;
begin
    for message in select * from mbus.entries(known, iid) loop
        received := array(
            select c from mbus.receipt as r, unnest(case when r.consumer is null then r.pending else array[r.consumer] end) as c
            where r.queue = known.id and r.id = message.id and r.txid = mine
        ) || array(
            select p.consumer from unnest(message.wanted) as c
            cross join mbus.stands_at(c, mod(message.id, known.consumers_cnt)::integer) as p
            where p.txid = mine and c = any (message.received)
              and not mbus.passed(message.id, message.txid, p.began, p.began_xids, p.began_ids)
        ) || array(
            select a.consumer from mbus.apart as a
            join mbus.batch as b on b.number = a.batch
            join mbus.consumer as c on c.id = a.consumer
            where a.consumer = any (message.wanted) and a.id = message.id
              and exists (select from mbus.held_slots(known.qname, c.name) as h where h.slot = b.slot and h.mine));
        receivers := receivers || received;
        if not message.gone then
            remains := true;
            pending_consumers := pending_consumers || array(
                select w from unnest(message.wanted) as w where w <> all (message.received) and w <> all (received));
        end if;
    end loop;
    -- Leave out consumers that have the message again: they must not get it twice.
    receivers := array(select distinct c from unnest(receivers) as c where c <> all (pending_consumers) order by c);
    if receivers = '{}' and remains then
        raise unique_violation using message = format('message %s is still in queue %s', iid, known.qname),
            hint = 'only the transaction that received or took it can put it back under its id, and only once';
    end if;
    return nullif(receivers, '{}');
end
$$;

-- The consumers that do not get a message when it is put back. They received it before this transaction, or are still to
-- receive it. Null if this transaction received the message for no consumer.
create function mbus.had_before(known mbus.queue, iid text, got_now integer[]) returns integer[]
language plpgsql stable as $$
begin
    return case when got_now is not null then array(
        select distinct c from mbus.entries(known, iid) as e, unnest(e.wanted || coalesce(e.not_for, '{}')) as c
        where c <> all (got_now)
        order by c) end;
end
$$;

-- Refuse to put a message back if its copy in the log matches no consumer, because the consumers that received it would lose it.
create function mbus.check_comes_back(known mbus.queue, number bigint, iid text) returns void
language plpgsql stable as $$
begin
    if not exists (select from mbus.entries(known, iid) as e where e.id = number and e.wanted <> '{}') then
        raise invalid_parameter_value using
            message = format('message %s cannot be put back: it matches no selector now, so nobody would receive it', iid),
            hint = 'keep its properties and whatever else the selectors use; or post it without its iid, as a new message';
    end if;
end
$$;

-- Create the functions post_<queue> and postn_<queue>.
create function mbus.make_post_functions(known mbus.queue) returns void
language plpgsql as $$
declare
    guard text := case when known.is_roles_security_model then mbus.guard('post', known.qname) else '' end;
    texts regtype := pg_typeof((null::mbus.qt_model).data);
begin
    perform mbus.place_asking(known.is_roles_security_model, 'post_' || known.qname,
        format('data %1$s, headers %1$s default null, properties %1$s default null, delayed_until timestamp default null, '
            'expires timestamp default null, iid text default null', texts),
        'text', 'language plpgsql security definer',
        format($body$
#variable_conflict use_variable
declare
    number bigint;
    had integer[];
begin
    %1$s
    if iid is null and headers is null then
        insert into mbus.%3$I (data, properties, delayed_until, expires)
        values (data, properties, delayed_until::timestamptz, expires::timestamptz)
        returning id into number;
        return %4$L || number;
    end if;
    if iid is not null then
        perform mbus.check_iid(mbus.queue_named(%2$L), iid);
        had := mbus.had_before(mbus.queue_named(%2$L), iid, mbus.got_now(mbus.queue_named(%2$L), iid));
    end if;
    if headers is null then
        insert into mbus.%3$I (data, properties, delayed_until, expires, iid, not_for)
        values (data, properties, delayed_until::timestamptz, expires::timestamptz, iid, had)
        returning id into number;
    else
        insert into mbus.%3$I (data, headers, properties, delayed_until, expires, iid, not_for)
        values (data, mbus.headers_for(headers, %2$L), properties, delayed_until::timestamptz, expires::timestamptz, iid, had)
        returning id into number;
    end if;
    if had is not null then
        perform mbus.check_comes_back(mbus.queue_named(%2$L), number, iid);
    end if;
    return coalesce(iid, %4$L || number);
end
$body$, guard, known.qname, 'log$' || known.qname, known.qname || '.'),
        format('Post a message to queue %s. Returns its iid.', known.qname));

    perform mbus.place_asking(known.is_roles_security_model, 'postn_' || known.qname,
        format('data %1$s[], headers %1$s[] default null, properties %1$s[] default null, delayed_until timestamp[] default null, '
            'expires timestamp[] default null, iid text[] default null', texts),
        'text[]', 'language plpgsql security definer',
        format($body$
#variable_conflict use_variable
declare
    made text[];
    plain hstore := hstore(array[
        'seenby', '{' || current_database() || '}', 'source_db', current_database()::text,
        'destination_queue', %2$L, 'enqueue_time', clock_timestamp()::timestamp::text]);
begin
    %1$s
    if greatest(cardinality(headers), cardinality(properties), cardinality(delayed_until), cardinality(expires), cardinality(iid))
        > coalesce(cardinality(data), 0)
    then
        raise array_subscript_error using
            message = 'the messages were not posted: an argument has more elements than data',
            hint = 'each element of data is a message: give the other arrays at most as many elements';
    end if;
    if iid is not null then
        return array(
            select %5$s(%6$su.data, u.headers, u.properties, u.delayed_until, u.expires, u.iid)
            from unnest(data, headers, properties, delayed_until, expires, iid)
                as u(data, headers, properties, delayed_until, expires, iid));
    end if;
    with posted as (
        insert into mbus.%3$I (data, headers, properties, delayed_until, expires)
        select u.data, case when u.headers is null then plain else mbus.headers_for(u.headers, %2$L) end,
               u.properties, u.delayed_until::timestamptz, u.expires::timestamptz
        from unnest(data, headers, properties, delayed_until, expires) as u(data, headers, properties, delayed_until, expires)
        returning id)
    select coalesce(array_agg(%4$L || posted.id), '{}') into made from posted;
    return made;
end
$body$, guard, known.qname, 'log$' || known.qname, known.qname || '.',
            format('%s.%I', case when known.is_roles_security_model then 'mbus_sealed' else 'mbus' end, 'post_' || known.qname),
            case when known.is_roles_security_model then 'caller, ' else '' end),
        format('Post messages to queue %s, one for each element of data. Returns their iids in this order.', known.qname));
end
$$;
