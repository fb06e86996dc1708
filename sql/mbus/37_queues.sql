-- Making and dropping queues, with all objects from the files before. A queue has a log, a sequence, two views, and functions
-- that carry its name.

create function mbus_sealed.create_queue(caller pgchange.caller, qname text, consumers_cnt integer, is_roles_security_model boolean default null) returns void
language plpgsql security definer as $$
declare
    known mbus.queue;
begin
    if not mbus.is_admin(caller) then
        perform mbus.deny(caller);
    end if;
    perform mbus.check_queue_name(qname);
    if consumers_cnt is null or consumers_cnt not between 1 and 1024 then
        raise invalid_parameter_value using message = format('a queue cannot have %s parts', consumers_cnt),
            hint = 'use 2 to 256 parts; the maximum is 1024';
    end if;
    if create_queue.is_roles_security_model then
        perform mbus.demand_role_making('queue ' || qname);
    end if;
    perform mbus.hold_queues();
    select q.* into known from mbus.queue as q where q.qname = create_queue.qname;
    if known.id is null then
        insert into mbus.queue (qname, consumers_cnt, is_roles_security_model)
        values (create_queue.qname, create_queue.consumers_cnt, coalesce(create_queue.is_roles_security_model, false))
        returning * into known;
        perform mbus.make_log(known);
        select q.* into known from mbus.queue as q where q.id = known.id;
        perform mbus.make_roles(qname);
        perform mbus.make_queue_functions(known);
        perform mbus.add_consumer(known, 'default', null, false);
    else
        if known.consumers_cnt <> create_queue.consumers_cnt then
            raise notice 'queue % keeps its % parts', qname, known.consumers_cnt;
        end if;
        if create_queue.is_roles_security_model is not null then
            update mbus.queue as q set is_roles_security_model = create_queue.is_roles_security_model where q.id = known.id
            returning * into known;
        end if;
        perform mbus.make_roles(qname);
        perform mbus.make_queue_functions(known);
        perform mbus.make_consumer_functions(known, c) from mbus.consumer as c where c.qname = known.qname;
        perform mbus.make_views(known);
    end if;
    if known.is_roles_security_model then
        perform mbus.open_door();
    end if;
end
$$;
comment on function mbus_sealed.create_queue(pgchange.caller, text, integer, boolean) is
    'Make a queue with this number of parts, which can be consumed at the same time, and its consumer default. An existing queue '
    'keeps its messages, and its functions are created anew.';

create function mbus_sealed.drop_queue(caller pgchange.caller, qname text) returns void
language plpgsql security definer as $$
declare
    known mbus.queue := mbus.queue_named(qname);
    consumers mbus.consumer[];
    each_name text;
    each_function regprocedure;
begin
    if not mbus.is_admin(caller) then
        perform mbus.deny(caller);
    end if;
    known := mbus.queue_to_change(qname);
    consumers := array(select c from mbus.consumer as c where c.qname = known.qname);
    perform mbus.refuse_users(
        'queue ' || known.qname, consumers,
        mbus.queue_functions(known) || array(select f from unnest(consumers) as c, unnest(mbus.consumer_functions(known, c)) as f),
        array(select kind || known.qname from unnest(array['qt$', 'all$', 'log$']) as kind));
    -- Lock the source queues first, because a post locks the queue from which it is copied before this queue.
    for each_name in select t.src from mbus.trigger as t where t.dst = known.qname loop
        perform mbus_sealed.drop_trigger(caller, each_name, known.qname);
    end loop;
    execute format('drop view mbus.%I, mbus.%I', 'qt$' || known.qname, 'all$' || known.qname);
    perform mbus.drop_views(c) from mbus.consumer as c where c.qname = known.qname;
    -- Drop the log before the functions, because its trigger uses one of them. Drop it before the tables of consumers, because
    -- consumers read the log first, so that there is no deadlock.
    execute format('drop table mbus.%I', 'log$' || known.qname);
    perform mbus.forget_consumer(known, c) from mbus.consumer as c where c.qname = known.qname;
    for each_function in
        select p.oid::regprocedure from pg_proc as p
        where p.pronamespace in ('mbus'::regnamespace, 'mbus_sealed'::regnamespace) and p.proname = any (mbus.queue_functions(known))
        -- Drop a public function before the sealed function of the same name, which it calls.
        order by p.pronamespace = 'mbus_sealed'::regnamespace
    loop
        execute format('drop function %s', each_function);
    end loop;
    delete from mbus.receipt as r where r.queue = known.id;
    delete from mbus.position as p where p.consumer = -known.id;
    delete from mbus.fault as f where f.qname = known.qname;
    delete from pgchange.letter as l where l.kind = 'queue' and l.address ->> 'queue' = known.qname;
    delete from mbus.queue as q where q.id = known.id;
    perform mbus.drop_role('post', known.qname);
    perform mbus.drop_role('admin', known.qname);
end
$$;
comment on function mbus_sealed.drop_queue(pgchange.caller, text) is
    'Drop a queue with its messages, consumers, functions and roles, without objects of others. The sequence of its ids stays.';

-- Let everybody call the functions that check roles, from the first queue under roles on. A caller without a role then gets the
-- error Access denied. This gives access to no table. pgchange.status() shows each role what its rights on each feed allow.
create function mbus.open_door() returns void
language plpgsql as $$
begin
    grant usage on schema mbus, pgchange to public;
    grant select on pgchange.registered to public;
    grant execute on function
        mbus.post, mbus.consume(text, text), mbus.take(text), mbus.peek(text),
        mbus.is_msg_exists(text), mbus.get_iid(text), mbus.can_post(text), mbus.can_consume(text, text), mbus.estimated_messages(text),
        mbus.create_queue(text, integer, boolean), mbus.drop_queue(text), mbus.create_consumer(text, text, text, boolean),
        mbus.drop_consumer(text, text), mbus.create_temporary_queue(), mbus.create_temporary_consumer(text, text), mbus.clear_tempq(),
        mbus.post_temp, mbus.consume_temp(text),
        mbus.post_dmq, mbus.create_trigger(text, text, text),
        mbus.drop_trigger(text, text),
        mbus.take_lock(text, text), mbus.locked(text, text), mbus.position(text, text),
        mbus.claim(text, text, jsonb, integer, integer, text), mbus.changes(text, text, jsonb, bigint, bigint),
        mbus.ack(text, text, jsonb), mbus.in_work(text, text, jsonb), mbus.outcome(text, text, jsonb),
        mbus.lease(text, text, jsonb, text, interval), mbus.end_lease(text, text, jsonb), mbus.end_leases(text, text, text),
        mbus.resume(text, text, jsonb, jsonb),
        mbus.note_failure(text, text, jsonb, text, boolean), mbus.lag(text, text, integer), mbus.point(text),
        mbus.passed(text, text, jsonb), mbus.skip(text, text, jsonb, text), mbus.skip_batch(text, text, text),
        mbus.list(), mbus.retry_faults(text, text), mbus.try_again(text, interval, text), mbus.start_saga, mbus.saga_turn(text), mbus.saga_done(text),
        mbus.saga_try_again(text, interval, text), mbus.saga_roll_back(text, text), mbus.saga_state(bigint), mbus.stuck_sagas(),
        mbus.status(integer), mbus.queues(integer), mbus.latest_sagas(integer), mbus.saga_steps(bigint), mbus.saga_retries(bigint), mbus.saga_data(bigint), pgchange.ours(name, boolean),
        pgchange.with_grant(name, text, text), pgchange.status(integer, text)
        to public;
end
$$;
