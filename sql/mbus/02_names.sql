-- Names of queues, functions, roles and locks.

-- Refuse an invalid name of a queue.
create function mbus.check_queue_name(qname text) returns void
language plpgsql immutable as $$
begin
    if qname is null or qname !~ '^[a-z_0-9]{1,32}$' or qname in ('dmq', 'tempq', 'temp') then
        raise invalid_parameter_value using message = format('Wrong queue name:%s', qname),
            hint = 'a name has at most 32 of a-z, _ and 0-9, and is not dmq, tempq or temp';
    end if;
end
$$;

-- Refuse an invalid name of a consumer.
create function mbus.check_consumer_name(cname text) returns void
language plpgsql immutable as $$
begin
    if cname is null or cname !~ '^[a-z_0-9]{1,32}$' then
        raise invalid_parameter_value using message = format('Wrong consumer name:%s', cname),
            hint = 'a name has at most 32 of a-z, _ and 0-9';
    end if;
end
$$;

-- Return the name if PostgreSQL can store it in full; refuse a longer name.
create function mbus.check_length(name text) returns text
language plpgsql immutable as $$
begin
    if octet_length(name) > 63 then
        raise name_too_long using message = format('the name %s is too long', name),
            hint = 'names of functions and roles have at most 63 bytes, and none is cut: choose shorter names';
    end if;
    return name;
end
$$;

-- The queue with this name. Raises an error in the words of the manual if there is no such queue.
create function mbus.queue_named(qname text, refusal text default 'Queue %s does not exists') returns mbus.queue
language plpgsql stable as $$
declare
    known mbus.queue;
begin
    select q.* into known from mbus.queue as q where q.qname = queue_named.qname;
    if known.id is null then
        raise undefined_object using message = format(refusal, qname), hint = 'mbus.create_queue() makes a queue';
    end if;
    return known;
end
$$;

-- The key of the advisory lock for making and dropping queues and consumers.
create function mbus.queues_key() returns bigint
language sql immutable as $$
    select pg_catalog.hashtextextended('mbus queues', 0)
$$;

-- Keep others from making or dropping queues and consumers until this transaction ends. If another transaction does so now,
-- wait for it: at most 10 s, or as long as lock_timeout if that is set.
create function mbus.hold_queues() returns void
language plpgsql as $$
begin
    perform pgchange.lock_or_tell(mbus.queues_key(), 'the message queues were not changed');
end
$$;

-- A queue, locked against changes and read again. Another session could have dropped and made a queue of this name before the
-- lock was taken.
create function mbus.queue_to_change(qname text) returns mbus.queue
language plpgsql as $$
begin
    perform mbus.hold_queues();
    return mbus.queue_named(qname);
end
$$;

-- A consumer of a queue. Raises an error if there is none.
create function mbus.consumer_named(qname text, cname text) returns mbus.consumer
language plpgsql stable as $$
declare
    known mbus.consumer := (
        select c from mbus.consumer as c where c.qname = consumer_named.qname and c.name = consumer_named.cname);
begin
    if known.id is null then
        if not exists (select from mbus.queue as q where q.qname = consumer_named.qname) then
            raise undefined_object using message = format('Unknown queue:%s', qname), hint = 'mbus.create_queue() makes a queue';
        end if;
        raise undefined_object using message = format('unknown consumer:%s', cname),
            hint = 'mbus.create_consumer() makes a consumer';
    end if;
    return known;
end
$$;

-- The name of the queue in a message id; null if it is not a message id.
create function mbus.qname_of(iid text) returns text
language sql immutable as $$ select substring(iid from '^(.*)[.][0-9]{1,18}$') $$;

-- The queue of a message id; null if it is unknown.
create function mbus.queue_of(iid text) returns mbus.queue
language plpgsql stable as $$
begin
    return (select q from mbus.queue as q where q.qname = mbus.qname_of(iid));
end
$$;

-- Functions that mbus writes itself. name_of(), because a dead letter may name no consumer. outcome(), because it checks the
-- rights of its caller. The other functions, because each worker of a consumer has a lock of its own.
select pgchange.offer(
    'queue', 'mbus', 'caller pgchange.caller, qname text, cname text', 'queue:%s/%s', traits => '{work set,copied letters}',
    own => '{lock_key,locked,name_of,outcome,take_idle,take_lock}', letters_elsewhere => false, tells_of_batches => true);

-- The name of a consumer in pgchange.status().
create function mbus.name_of(qname text, cname text) returns text
language sql immutable as $$
    select 'queue:' || concat_ws('/', qname, cname)
$$;

-- The name of a function that is made for a queue.
create function mbus.function_name(kind text, qname text, cname text default null) returns text
language sql immutable as $$
    select concat_ws('_', kind, qname, 'by_' || cname)
$$;

-- The names of the functions that are made for a queue, without those of its consumers.
create function mbus.queue_functions(known mbus.queue) returns text[]
language sql immutable as $$
    select array(
        select mbus.function_name(kind, known.qname)
        from unnest(array['post', 'postn', 'peek', 'clear_queue', 'run_on']) as kind)
        || array['copy$' || known.id, 'entries$' || known.id, 'awaited$' || known.id, 'any$' || known.id, 'key$' || known.id]
$$;

-- The names of the functions that are made for a consumer.
create function mbus.consumer_functions(known mbus.queue, c mbus.consumer) returns text[]
language sql immutable as $$
    select array(
        select mbus.function_name(kind, known.qname, c.name) from unnest(array['consume', 'consumen', 'take_from']) as kind)
        || array['look$' || c.id, 'safe$' || c.id, 'match$' || c.id, 'receive$' || c.id, 'find$' || c.id, 'single$' || c.id]
$$;

-- The name of a role: mbus_<db>_post_<queue>, mbus_<db>_consume_<queue>_by_<consumer> and so on.
create function mbus.role_name(kind text, qname text default null, cname text default null) returns text
language sql stable as $$
    select pg_catalog.concat_ws('_', 'mbus', pg_catalog.current_database(), kind, qname, 'by_' operator(pg_catalog.||) cname)
$$;

-- The comment that identifies a role as ours. Roles belong to the cluster, and databases x and x_post would have some roles of
-- the same name.
create function mbus.role_mark(kind text, qname text default null, cname text default null) returns text
language sql stable as $$
    select pg_catalog.concat_ws(
        ' ', 'mbus', kind, 'queue ' operator(pg_catalog.||) qname, 'consumer ' operator(pg_catalog.||) cname, 'in database',
        pg_catalog.current_database())
$$;

-- The key of the lock of a part for a consumer. A batch takes it exclusively; sessions that hold single messages of the part
-- share it.
create function mbus.part_key(consumer integer, part integer) returns bigint
language sql immutable as $$ select pg_catalog.hashtextextended('mbus part ' || part::text, consumer) $$;

-- The key of the lock by which sessions that consume single messages of a part exclude each other.
create function mbus.turn_key(consumer integer, part integer) returns bigint
language sql immutable as $$ select pg_catalog.hashtextextended('mbus turn ' || part::text, consumer) $$;

-- The key of the lock of a single message that was consumed or is being taken.
create function mbus.message_key(queue integer, id bigint) returns bigint
language sql immutable as $$ select pg_catalog.hashtextextended('mbus message ' || id::text, queue) $$;

-- The key of the lock of a worker of a consumer's feed.
create function mbus.lock_key(qname text, cname text, slot integer) returns bigint
language sql immutable as $$ select pg_catalog.hashtextextended(pg_catalog.concat_ws('/', 'mbus slot', qname, cname), slot) $$;

-- The slots whose locks are held, and whether this session holds them.
create function mbus.held_slots(qname text, cname text) returns table (slot integer, mine boolean)
language plpgsql stable rows 2 as $$
begin
    return query
        select s.slot, bool_or(l.pid = pg_backend_pid())
        from generate_series(0, 63) as s(slot)
        cross join lateral (select mbus.lock_key(qname, cname, s.slot) as key) as k
        join pg_locks as l
            on l.locktype = 'advisory' and l.objsubid = 1 and l.granted
           and l.database = (select d.oid from pg_database as d where d.datname = current_database())
           and (l.classid::bigint << 32 | l.objid::bigint) = k.key
        group by s.slot;
end
$$;

-- The key of the lock that a session holds for each of its temporary queues and consumers.
create function mbus.temporary_key(name text) returns bigint
language sql immutable as $$ select pg_catalog.hashtextextended('mbus temporary ' || name, 0) $$;

-- Whether the session of a temporary queue or consumer still exists.
create function mbus.lives(name text) returns boolean
language sql stable as $$
    select exists (
        select from pg_locks as l
        where l.locktype = 'advisory' and l.granted and l.mode = 'ExclusiveLock' and l.objsubid = 1
          and l.database = (select d.oid from pg_database as d where d.datname = current_database())
          and (l.classid::bigint << 32) | l.objid::bigint = mbus.temporary_key(name))
$$;
