-- Temporary queues and consumers: they live as long as the session that made them, which holds an advisory lock for each.

create function mbus.temporary_name() returns text
language sql volatile
set search_path from current
as $$
    select replace(gen_random_uuid()::text, '-', '')
$$;
comment on function mbus.temporary_name() is 'A name that nobody has had, and nobody can guess.';

create function mbus.create_temporary_queue() returns text
language plpgsql security definer
set search_path from current
as $$
declare
    tqname text := 'temp.' || mbus.temporary_name();
begin
    perform pg_advisory_lock(mbus.temporary_key(tqname));
    insert into mbus.temporary (name, is_queue) values (tqname, true);
    return tqname;
end
$$;
comment on function mbus.create_temporary_queue() is
    'Make a queue that lives as long as this session, not behind a pooler that shares sessions; returns its name.';

create function mbus.temporary_lives(tqname text) returns void
language plpgsql stable
set search_path from current
as $$
begin
    if not exists (select from mbus.temporary as t where t.name = tqname and t.is_queue) or not mbus.lives(tqname) then
        raise undefined_object using message = format('Unknown queue:%s', tqname), hint = 'its session has ended';
    end if;
end
$$;
comment on function mbus.temporary_lives(text) is 'Refuse a temporary queue whose session ended.';

create function mbus.post_temp(
    tqname text, data hstore, headers hstore default null, properties hstore default null,
    delayed_until timestamp default null, expires timestamp default null
) returns text
language plpgsql security definer
set search_path from current
as $$
declare
    number bigint := nextval(pg_get_serial_sequence('mbus.tempq', 'id'));
begin
    perform mbus.temporary_lives(tqname);
    insert into mbus.tempq (id, iid, tqname, delayed_until, expires, headers, properties, data)
    overriding system value
    values (number, tqname || '.' || number, post_temp.tqname, post_temp.delayed_until::timestamptz, post_temp.expires::timestamptz,
            mbus.headers_for(coalesce(post_temp.headers, ''), post_temp.tqname), post_temp.properties, post_temp.data);
    return tqname || '.' || number;
end
$$;
comment on function mbus.post_temp(text, hstore, hstore, hstore, timestamp, timestamp) is 'Post a message to a temporary queue; returns its iid.';

create function mbus.is_behind("after" text[]) returns boolean
language sql stable
set search_path from current
as $$
    select case when "after" <> '{}' then
        mbus.obstacle("after") is not null or exists (
            select from mbus.tempq as t where t.iid = any ("after") and coalesce(t.expires > clock_timestamp(), true))
        else false end
$$;
comment on function mbus.is_behind(text[]) is 'Whether a message of a temporary queue waits for one of these.';

create function mbus.consume_temp(tqname text) returns setof mbus.qt_model
language plpgsql security definer
set search_path from current
as $$
begin
    -- Its name is the right to it.
    perform mbus.temporary_lives(tqname);
    return query
    delete from mbus.tempq as t
    where t.id = (
        select x.id from mbus.tempq as x
        where x.tqname = consume_temp.tqname
          and coalesce(x.expires > clock_timestamp(), true) and coalesce(x.delayed_until <= clock_timestamp(), true)
          and not mbus.is_behind((x.headers -> 'consume_after')::text[])
        order by x.added, x.delayed_until, x.id
        limit 1
        for update skip locked)
    returning t.id, t.added::timestamp, t.iid, t.delayed_until::timestamp, t.expires::timestamp, t.received,
              t.headers || hstore('destination', t.tqname), t.properties, t.data;
end
$$;
comment on function mbus.consume_temp(text) is 'Receive a message of a temporary queue.';

create function mbus.bound_to(known mbus.queue) returns text
language sql stable
set search_path from current
as $$
    select case when bool_and(c.selector is not null) and not mbus.is_admin() and not mbus.has_role('admin', known.qname)
                then string_agg(distinct format(E'(%s\n)', c.selector), ' or ') end
    from mbus.consumer as c where c.qname = known.qname and not c.temporary and mbus.may('consume', known.qname, c.name)
$$;
comment on function mbus.bound_to(mbus.queue) is
    'The selectors of the consumers by whom the session may consume from a queue, as one; null where one of them receives everything, as '
    'for an admin.';

create function mbus.create_temporary_consumer(qname text, p_selector text default null) returns text
language plpgsql security definer
set search_path from current
as $$
declare
    known mbus.queue := mbus.queue_named(qname);
    -- Of a length that any queue's functions can have with it.
    cname text := 'temp_' || left(mbus.temporary_name(), 12);
begin
    perform mbus.demand('consume', qname);
    if p_selector is not null and not mbus.is_owner() then
        perform mbus.deny();
    end if;
    known := mbus.queue_to_change(qname);
    perform mbus.add_consumer(known, cname, coalesce(p_selector, mbus.bound_to(known)), true);
    if not known.is_roles_security_model then
        perform mbus.let_call((mbus.consumer_functions(known, mbus.consumer_named(qname, cname)))[1:3], quote_ident(session_user));
    end if;
    perform pg_advisory_lock(mbus.temporary_key(qname || ' ' || cname));
    insert into mbus.temporary (name, is_queue, through) values (qname || ' ' || cname, false, array(
        select c.id from mbus.consumer as c
        where c.qname = known.qname and not c.temporary and mbus.may('consume', c.qname, c.name)));
    return cname;
end
$$;
comment on function mbus.create_temporary_consumer(text, text) is
    'Make a consumer that lives as long as this session, whose user may consume by it; returns its name. It receives what its maker '
    'may, as long as it may: who consumes by selectors only is bound to them here too. A selector may be set by the owner of the queues only.';

create function mbus.clear_tempq() returns void
language plpgsql security definer
set search_path from current
set lock_timeout = '200ms'
as $$
declare
    left_over mbus.temporary;
begin
    for left_over in select t.* from mbus.temporary as t where not mbus.lives(t.name) for update skip locked loop
        begin
            if left_over.is_queue then
                delete from mbus.tempq as t where t.tqname = left_over.name;
            else
                perform pg_advisory_xact_lock(hashtextextended('mbus queues', 0));
                perform mbus.remove_consumer(q, c)
                from mbus.consumer as c join mbus.queue as q using (qname)
                where c.temporary and c.qname || ' ' || c.name = left_over.name;
            end if;
            delete from mbus.temporary as t where t.name = left_over.name;
        exception when lock_not_available then
            -- Whoever takes would wait behind this for a transaction that has taken and is open: another time.
            null;
        when dependent_objects_still_exist then
            raise warning '%', sqlerrm;
        end;
    end loop;
    delete from mbus.tempq as t
    where t.id in (select x.id from mbus.tempq as x where x.expires < clock_timestamp() for update skip locked);
end
$$;
comment on function mbus.clear_tempq() is
    'Remove temporary queues and consumers whose sessions ended, with their messages; what somebody is at stays until the next time.';
