-- Temporary queues. They live as long as the session that made them, which holds an advisory lock for each.

-- A unique name that nobody can guess.
create function mbus.temporary_name() returns text
language sql volatile as $$
    select replace(gen_random_uuid()::text, '-', '')
$$;

create function mbus.create_temporary_queue() returns text
language plpgsql security definer as $$
declare
    tqname text := 'temp.' || mbus.temporary_name();
begin
    perform pg_advisory_lock(mbus.temporary_key(tqname));
    insert into mbus.temporary (name, is_queue) values (tqname, true);
    return tqname;
end
$$;
comment on function mbus.create_temporary_queue() is
    'Make a queue that lives as long as this session, and return its name. Does not work behind a pooler that shares sessions.';

-- Refuse a temporary queue whose session has ended.
create function mbus.temporary_lives(tqname text) returns void
language plpgsql stable as $$
begin
    if not exists (select from mbus.temporary as t where t.name = tqname and t.is_queue) or not mbus.lives(tqname) then
        raise undefined_object using message = format('Unknown queue:%s', tqname), hint = 'its session has ended';
    end if;
end
$$;

create function mbus.post_temp(
    tqname text, data hstore, headers hstore default null, properties hstore default null,
    delayed_until timestamp default null, expires timestamp default null
) returns text
language plpgsql security definer as $$
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
comment on function mbus.post_temp(text, hstore, hstore, hstore, timestamp, timestamp) is
    'Post a message to a temporary queue. Returns its iid.';

-- Whether a message of a temporary queue waits for one of these messages.
create function mbus.is_behind("after" text[]) returns boolean
language sql stable as $$
    select case when "after" <> '{}' then
        mbus.obstacle("after") is not null or exists (
            select from mbus.tempq as t where t.iid = any ("after") and coalesce(t.expires > clock_timestamp(), true))
        else false end
$$;

create function mbus.consume_temp(tqname text) returns setof mbus.qt_model
language plpgsql security definer as $$
begin
    -- The caller needs no other right than to know the name.
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
