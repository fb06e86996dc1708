-- Looking at messages without receiving them.

create function mbus_sealed.is_msg_exists(caller pgchange.caller, msgiid text) returns boolean
language plpgsql stable security definer as $$
declare
    known mbus.queue := mbus.queue_of(msgiid);
begin
    if known.id is not null then
        perform mbus.demand(caller, 'consume', known.qname);
        if exists (select from mbus.entries(known, msgiid) as e where not e.gone) then
            return true;
        end if;
    end if;
    return exists (select from mbus.dmq as d where d.iid = msgiid and mbus.is_admin(caller))
        or exists (select from mbus.tempq as t where t.iid = msgiid);
end
$$;
comment on function mbus_sealed.is_msg_exists(pgchange.caller, text) is 'Whether a message is in its queue, or in the dmq.';

create function mbus_sealed.peek(caller pgchange.caller, msgiid text) returns mbus.qt_model
language plpgsql stable security definer as $$
declare
    known mbus.queue := mbus.queue_of(msgiid);
    message mbus.qt_model;
begin
    if known.id is not null then
        perform mbus.demand(caller, 'consume', known.qname);
        select m.* into message
        from mbus.entries(known, msgiid) as e cross join mbus.message_of(known, e.id, e.received) as m
        where not e.gone order by e.id limit 1;
        if message.id is not null then
            return message;
        end if;
    end if;
    select d.id, d.added, d.iid, d.delayed_until, d.expires, d.received, d.headers, d.properties, d.data into message
    from mbus.dmq as d where d.iid = msgiid and mbus.is_admin(caller) order by d.id limit 1;
    if message.id is null then
        select t.id, t.added, t.iid, t.delayed_until, t.expires, t.received, t.headers, t.properties, t.data into message
        from mbus.tempq as t where t.iid = msgiid;
    end if;
    return message;
end
$$;
comment on function mbus_sealed.peek(pgchange.caller, text) is
    'A message by its id, without receiving it; null if there is none. Its delay and expiry do not matter.';

-- Create the function peek_<queue>.
create function mbus.make_peek_function(known mbus.queue) returns void
language plpgsql as $$
begin
    perform mbus.place_asking(known.is_roles_security_model, 'peek_' || known.qname, 'msgid text default null', 'boolean',
        mbus.as_receiver('language plpgsql stable security definer'),
        format($body$
begin
    %1$s
    if msgid is null then
        return mbus.%2$I();
    end if;
    return exists (select from mbus.entries(mbus.queue_named(%3$L), msgid) as e where not e.gone);
end
$body$, case when known.is_roles_security_model then format('perform mbus.demand(caller, ''consume'', %L);', known.qname) else '' end,
            'any$' || known.id, known.qname),
        format('Whether queue %s has this message, or without an id any message.', known.qname));
end
$$;

create function mbus_sealed.estimated_messages(caller pgchange.caller, qname text) returns bigint
language plpgsql stable security definer as $$
declare
    known mbus.queue := (select q from mbus.queue as q where q.qname = estimated_messages.qname);
    counted bigint;
begin
    if known.id is null then
        raise notice 'Queue % does not exists', qname;
        return null;
    end if;
    perform mbus.demand(caller, 'consume', known.qname);
    execute format('select count(*) from (select from mbus.%I limit 10000) as m', 'qt$' || known.qname) into counted;
    if counted = 10000 then
        counted := greatest(counted, (
            select pg_sequence_last_value(known.seq) - min(d) from mbus.consumer as c, unnest(mbus.dones(c.id)) as d
            where c.qname = known.qname));
    end if;
    return counted;
end
$$;
comment on function mbus_sealed.estimated_messages(pgchange.caller, text) is
    'The number of messages in a queue, exact up to ten thousand and estimated above. Null, with a notice, if there is no such '
    'queue.';
