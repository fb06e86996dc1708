-- Posting by the name of a queue, to a temporary queue, or to the dmq.

create function mbus_sealed.post_dmq(
    caller pgchange.caller, data hstore, headers hstore default null, properties hstore default null,
    delayed_until timestamp default null, expires timestamp default null, iid text default null
) returns text
language plpgsql security definer as $$
declare
    number bigint := nextval(pg_get_serial_sequence('mbus.dmq', 'id'));
    whose text := (mbus.queue_of(iid)).qname;
    recipients integer[];
begin
    -- A message with the iid of a queue blocks messages in that queue, and can be sent to that queue again. So the caller needs
    -- a right on it.
    if not mbus.is_admin(caller) and not exists (
        select from mbus.queue as q
        where coalesce(q.qname = whose, true) and (mbus.may(caller, 'post', q.qname) or mbus.may(caller, 'consume', q.qname)))
    then
        perform mbus.deny(caller);
    end if;
    begin
        recipients := case when whose is not null then mbus.got_now(mbus.queue_named(whose), iid) end;
    exception when unique_violation then
        -- got_now() has refused: some consumers received the message before, and it is still in the queue for others.
        null;
    end;
    insert into mbus.dmq (id, iid, delayed_until, expires, received, headers, properties, data)
    overriding system value
    values (number, coalesce(post_dmq.iid, 'dmq.' || number), post_dmq.delayed_until, post_dmq.expires, recipients,
            mbus.headers_for(coalesce(post_dmq.headers, ''), 'dmq'), post_dmq.properties, post_dmq.data);
    return coalesce(iid, 'dmq.' || number);
end
$$;
comment on function mbus_sealed.post_dmq(pgchange.caller, hstore, hstore, hstore, timestamp, timestamp, text) is
    'Put a message that nobody can process in the dmq, under its own iid. Messages that wait for it go on waiting. For a role '
    'that may post to the queue of that iid, or consume from it.';

create function mbus.post(
    qname text, data hstore, headers hstore default null, properties hstore default null,
    delayed_until timestamp default null, expires timestamp default null, iid text default null
) returns text
language plpgsql as $$
declare
    posted text;
begin
    if qname like 'temp.%' then
        return mbus.post_temp(qname, data, headers, properties, delayed_until, expires);
    elsif qname = 'dmq' then
        return mbus.post_dmq(data, headers, properties, delayed_until, expires, iid);
    elsif qname is null or to_regprocedure(
        format('mbus.%1$I(%2$s, %2$s, %2$s, timestamp, timestamp, text)', 'post_' || qname, pg_typeof(data))) is null
    then
        raise undefined_object using message = format('Unknown queue:%s', qname), hint = 'mbus.create_queue() makes a queue';
    end if;
    execute format('select mbus.%I($1, $2, $3, $4, $5, $6)', 'post_' || qname)
    into posted using data, headers, properties, delayed_until, expires, iid;
    return posted;
end
$$;
comment on function mbus.post(text, hstore, hstore, hstore, timestamp, timestamp, text) is
    'Post a message to a queue, also to a temporary queue. Returns its iid.';

create function mbus_sealed.get_iid(caller pgchange.caller, qname text) returns text
language plpgsql security definer as $$
declare
    known mbus.queue := mbus.queue_named(qname, 'No such queue: %s');
begin
    perform mbus.demand(caller, 'post', qname);
    return known.qname || '.' || nextval(known.seq);
end
$$;
comment on function mbus_sealed.get_iid(pgchange.caller, text) is 'A new id for a message that will be posted to a queue.';

create function mbus_sealed.can_post(caller pgchange.caller, qname text) returns boolean
language sql stable security definer as $$
    select coalesce(mbus.may(caller, 'post', qname) and exists (select from mbus.queue as q where q.qname = can_post.qname), false)
$$;
comment on function mbus_sealed.can_post(pgchange.caller, text) is 'Whether the caller may post to a queue.';

create function mbus_sealed.can_consume(caller pgchange.caller, qname text, cname text default 'default') returns boolean
language sql stable security definer as $$
    select coalesce(
        mbus.may(caller, 'consume', qname, cname)
        and exists (select from mbus.consumer as c where c.qname = can_consume.qname and c.name = cname), false)
$$;
comment on function mbus_sealed.can_consume(pgchange.caller, text, text) is 'Whether the caller may consume from a queue by a consumer.';
