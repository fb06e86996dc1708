-- Temporary consumers, which live as long as the session that made them, and their removal.

-- The selectors of the consumers by which the caller may consume from a queue, as one condition. Null if such a consumer receives
-- everything, and for an admin.
create function mbus.bound_to(caller name, known mbus.queue) returns text
language sql stable as $$
    select case when bool_and(c.selector is not null) and not mbus.is_admin(caller) and not mbus.has_role(caller, 'admin', known.qname)
                then string_agg(distinct format(E'(%s\n)', c.selector), ' or ') end
    from mbus.consumer as c where c.qname = known.qname and not c.temporary and mbus.may(caller, 'consume', known.qname, c.name)
$$;

-- Make a consumer that lives as long as this session, and let the caller consume by it.
create function mbus.add_temporary_consumer(caller name, qname text, p_selector text) returns text
language plpgsql as $$
declare
    known mbus.queue;
    -- The name is short enough for the names of the functions of any queue.
    cname text := 'temp_' || left(mbus.temporary_name(), 12);
    keeper oid;
begin
    perform mbus.queue_named(qname);
    perform mbus.demand(caller, 'consume', qname);
    known := mbus.queue_to_change(qname);
    perform mbus.add_consumer(known, cname, coalesce(p_selector, mbus.bound_to(caller, known)), true);
    -- EXECUTE on its functions lets the caller consume by it. Besides the caller, only roles that may do everything have it.
    foreach keeper in array array_remove(array[
        -- Quote the name, because regrole folds a name to lower case, and takes digits for the oid of a role.
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
    'Make a consumer that lives as long as this session, and return its name. The caller may consume by it. It receives what the '
    'caller may receive, as long as the caller may: if the caller''s consumers have selectors, so has this. Only the owner of the '
    'queues may set a selector.';

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
            -- Another transaction uses the consumer. Waiting for it would make sessions that take messages wait, too, so leave
            -- the consumer to a later run.
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
    'Remove temporary queues and consumers whose sessions have ended, with their messages. Those in use stay until the next time.';

-- Move the positions of a consumer with a selector over the messages before the first that it wants, if there are many. Otherwise
-- the positions stay behind: such messages wake no session that would claim, and each search reads them again. Does nothing while
-- another transaction holds a part.
create function mbus.step_over(known mbus.queue, c integer) returns void
language plpgsql
set plan_cache_mode = force_generic_plan
set jit = off
as $$
declare
    worthwhile constant integer := 1000;
    horizon bigint;
    bound bigint;
    stands mbus.standing := mbus.stand(c, known.consumers_cnt, known.parts);
    seen mbus.seen;
begin
    -- At most a million at once, because the parts are locked meanwhile.
    horizon := least(coalesce(pg_sequence_last_value(known.seq), 0), stands.low + 1000000);
    if current_setting('transaction_isolation') <> 'read committed' or horizon < stands.low + worthwhile then
        return;
    end if;
    seen := mbus.look(known, c, stands, stands.low + worthwhile, 1);
    if seen.ids <> '{}' then
        return;
    end if;
    perform mbus.check_origin(known);
    begin
        if exists (select from unnest(known.parts) as p where not pg_try_advisory_xact_lock(mbus.part_key(c, p))) then
            raise lock_not_available;
        end if;
    exception when lock_not_available then
        -- This block has released the locks that it took.
        return;
    end;
    -- Read the bound after the horizon, as in mbus.from_log(). Then every id up to the horizon was drawn by a transaction below
    -- the bound.
    bound := mbus.bound_now();
    stands := mbus.stand(c, known.consumers_cnt, known.parts);
    seen := mbus.look(known, c, stands, horizon, 1);
    if seen.late_count = 0 then
        perform mbus.keep(
            c, stands, coalesce(abs(seen.ids[1]) - 1, horizon), mbus.open_in(seen.now, bound), false, seen.finished, null);
    end if;
end
$$;

-- Delete some messages of a queue that all consumers have received or that have expired, and return how many. A call takes a
-- fraction of a second however many messages wait. If it deletes many, call it again in another transaction.
create function mbus.maintain_queue(qname text) returns bigint
language plpgsql security definer
set lock_timeout = '1s'
as $$
declare
    deleted bigint;
    passing record;
begin
    perform set_config('lock_timeout', pgchange.patience('1 s'), true);
    deleted := coalesce((select mbus.sweep_some(q) from mbus.queue as q where q.qname = maintain_queue.qname), 0);
    -- Move the positions last, because they stay locked until this transaction ends. The number of locks is limited to about a
    -- thousand, because more may not fit into the lock table of the server. The order is random, so that each consumer gets its
    -- turn.
    for passing in
        select q as queue, c.id as consumer
        from mbus.queue as q
        cross join lateral (
            select x.id from mbus.consumer as x where x.qname = q.qname and x.selector is not null
            order by random() limit greatest(1, 1000 / q.consumers_cnt)
        ) as c
        where q.qname = maintain_queue.qname
    loop
        perform mbus.step_over(passing.queue, passing.consumer);
        exit when clock_timestamp() > statement_timestamp() + interval '500 ms';
    end loop;
    return deleted;
end
$$;

-- Delete messages of all queues that all consumers have received or that have expired. Also remove temporary queues and consumers
-- whose sessions have ended. Returns the number of messages. If it deletes many, the next call may find more.
create function mbus.maintain() returns bigint
language plpgsql security definer as $$
declare
    name text;
    deleted bigint := 0;
begin
    -- In random order, because the time may be over before the last queue. So each queue gets its turn.
    for name in select q.qname from mbus.queue as q order by random() loop
        deleted := deleted + mbus.maintain_queue(name);
        exit when clock_timestamp() > statement_timestamp() + interval '500 ms';
    end loop;
    -- Remove temporary queues last, because that blocks takes from the queue of a removed consumer until this transaction ends.
    perform mbus.clear_tempq();
    return deleted;
end
$$;
