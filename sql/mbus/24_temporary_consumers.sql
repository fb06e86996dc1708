-- Temporary consumers, which live as long as the session that made them, and what clears away after those that are gone.

-- The selectors of the consumers by whom the caller may consume from a queue, as one; null where one of them receives everything, as
-- for an admin.
create function mbus.bound_to(caller name, known mbus.queue) returns text
language sql stable as $$
    select case when bool_and(c.selector is not null) and not mbus.is_admin(caller) and not mbus.has_role(caller, 'admin', known.qname)
                then string_agg(distinct format(E'(%s\n)', c.selector), ' or ') end
    from mbus.consumer as c where c.qname = known.qname and not c.temporary and mbus.may(caller, 'consume', known.qname, c.name)
$$;

-- Make a consumer that lives as long as this session, and let its maker consume by it.
create function mbus.add_temporary_consumer(caller name, qname text, p_selector text) returns text
language plpgsql as $$
declare
    known mbus.queue;
    -- Of a length that any queue's functions can have with it.
    cname text := 'temp_' || left(mbus.temporary_name(), 12);
    keeper oid;
begin
    perform mbus.queue_named(qname);
    perform mbus.demand(caller, 'consume', qname);
    known := mbus.queue_to_change(qname);
    perform mbus.add_consumer(known, cname, coalesce(p_selector, mbus.bound_to(caller, known)), true);
    -- What lets its maker consume by it is EXECUTE on its functions, which nobody else has but who may do everything.
    foreach keeper in array array_remove(array[
        -- Quoted: regrole folds a name to lower case, and reads digits as the number of a role.
        to_regrole(quote_ident(caller)), case when known.is_roles_security_model then mbus.role_of('admin') end,
        case when known.is_roles_security_model then mbus.role_of('admin', qname) end], null)
    loop
        perform mbus.let_call((mbus.consumer_functions(known, mbus.consumer_named(qname, cname)))[1:3], keeper::regrole::text);
    end loop;
    perform pg_advisory_lock(mbus.temporary_key(qname || ' ' || cname));
    insert into mbus.temporary (name, is_queue, through) values (qname || ' ' || cname, false, array(
        select c.id from mbus.consumer as c
        where c.qname = known.qname and not c.temporary and mbus.may(caller, 'consume', c.qname, c.name)));
    return cname;
end
$$;

create function mbus_sealed.create_temporary_consumer(caller pgchange.caller, qname text, p_selector text default null) returns text
language plpgsql security definer as $$
begin
    if p_selector is not null then
        perform mbus.demand_selector(caller);
    end if;
    return mbus.add_temporary_consumer(caller, qname, p_selector);
end
$$;
comment on function mbus_sealed.create_temporary_consumer(pgchange.caller, text, text) is
    'Make a consumer that lives as long as this session, whose user may consume by it; returns its name. It receives what its maker '
    'may, as long as it may: who consumes by selectors only is bound to them here too. A selector may be set by the owner of the queues only.';

create function mbus.clear_tempq() returns void
language plpgsql security definer
set lock_timeout = '200ms'
as $$
declare
    left_over mbus.temporary;
begin
    for left_over in select t.* from mbus.temporary as t where not mbus.lives(t.name) for update skip locked loop
        begin
            perform set_config('lock_timeout', pgchange.patience('200 ms'), true);
            if left_over.is_queue then
                delete from mbus.tempq as t where t.tqname = left_over.name;
            else
                perform pgchange.lock_briefly(mbus.queues_key(), '200 ms');
                perform pgchange.lock_briefly(k, '200 ms')
                from (
                    select mbus.part_key(c.id, p) as k
                    from mbus.consumer as c join mbus.queue as q using (qname) cross join lateral unnest(q.parts) as p
                    where c.temporary and c.qname || ' ' || c.name = left_over.name
                    order by k
                ) as keys;
                perform mbus.remove_consumer(q, c)
                from mbus.consumer as c join mbus.queue as q using (qname)
                where c.temporary and c.qname || ' ' || c.name = left_over.name;
            end if;
            delete from mbus.temporary as t where t.name = left_over.name;
        exception when lock_not_available or deadlock_detected then
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

-- Delete some messages of a queue that everybody has received or that expired; returns how many. It takes a fraction of a second at any
-- backlog: where many were deleted, call it again in another transaction.
create function mbus.maintain_queue(qname text) returns bigint
language plpgsql security definer
set lock_timeout = '1s'
as $$
begin
    perform set_config('lock_timeout', pgchange.patience('1 s'), true);
    return coalesce((select mbus.sweep_some(q) from mbus.queue as q where q.qname = maintain_queue.qname), 0);
end
$$;

-- Delete from all queues what everybody has received and what expired, and temporary queues and consumers whose sessions ended;
-- returns how many messages. Where many were deleted, more may be left to the next call.
create function mbus.maintain() returns bigint
language plpgsql security definer as $$
declare
    name text;
    deleted bigint := 0;
begin
    -- From any queue on: where the time is over before the last one, each gets its turn.
    for name in select q.qname from mbus.queue as q order by random() loop
        deleted := deleted + mbus.maintain_queue(name);
        exit when clock_timestamp() > statement_timestamp() + interval '500 ms';
    end loop;
    -- Last: until this transaction ends nobody takes from the queue of a consumer that it removes.
    perform mbus.clear_tempq();
    return deleted;
end
$$;
