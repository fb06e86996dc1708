-- Making and dropping queues. Each has a log, a sequence, two views, and functions of its own that carry its name.

create function mbus.make_log(known mbus.queue) returns void
language plpgsql
set search_path from current
as $$
declare
    sequence text := format('mbus.%I', 'seq$' || known.qname);
begin
    -- That of a queue of this name that was dropped is there still: its ids may be waited for, or be a saga's.
    if to_regclass(sequence) is null then
        execute format('create sequence %s', sequence);
        execute format('comment on sequence %s is %L', sequence, 'The ids of the messages of queue ' || known.qname || '.');
    end if;
    -- A message's transaction has its id before the message draws its own: what a reader cannot see yet, of a transaction with
    -- an id that is younger than its snapshot, has a higher id than any that was drawn before.
    execute format($table$
        create table mbus.%1$I (
            data %4$s,
            headers %4$s not null default %4$s(array[
                'seenby', '{' || current_database() || '}', 'source_db', current_database()::text,
                'destination_queue', %2$L, 'enqueue_time', clock_timestamp()::timestamp::text]),
            properties %4$s,
            delayed_until timestamptz,
            expires timestamptz,
            iid text,
            not_for integer[],
            id bigint primary key default case when pg_current_xact_id() is not null then nextval(%3$L) end,
            added timestamptz not null default clock_timestamp(),
            txid xid8 not null default pg_current_xact_id(),
            -- Malformed, it would fail who receives and not who posts.
            check (array_position((headers -> 'consume_after')::text[], null) is null),
            -- At the ends of time there are moments that the time zone of who receives has not.
            constraint times_of_every_time_zone check (
                (delayed_until between '0001-01-01 UTC' and '100000-01-01 UTC' or not isfinite(delayed_until))
                and (expires between '0001-01-01 UTC' and '100000-01-01 UTC' or not isfinite(expires))),
            special boolean not null generated always as (delayed_until is not null or headers ? 'consume_after') stored
        ) with (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000,
                autovacuum_vacuum_insert_scale_factor = 0.2, autovacuum_analyze_scale_factor = 0.2,
                autovacuum_vacuum_cost_delay = 0)
        $table$, 'log$' || known.qname, known.qname, sequence, pg_typeof((null::mbus.qt_model).data));
    execute format('create index on mbus.%I (txid, id)', 'log$' || known.qname);
    execute format('create index on mbus.%I (iid) where iid is not null', 'log$' || known.qname);
    execute format('comment on table mbus.%I is %L', 'log$' || known.qname,
        'The messages of queue ' || known.qname || ' in the order of id, also those that were received; COPY may fill it. not_for: '
        'the consumers that had a message before it was put back, or are to have it still; null for one that was not put back.');
    update mbus.queue as q set
        seq = to_regclass(sequence), began = coalesce(pg_sequence_last_value(to_regclass(sequence)), 0)
    where q.id = known.id;
end
$$;
comment on function mbus.make_log(mbus.queue) is 'Make the tables of a queue.';

create function mbus.create_queue(qname text, consumers_cnt integer, is_roles_security_model boolean default null) returns void
language plpgsql security definer
set search_path from current
as $$
declare
    known mbus.queue;
begin
    if not mbus.is_admin() then
        perform mbus.deny();
    end if;
    perform mbus.check_queue_name(qname);
    if consumers_cnt is null or consumers_cnt not between 1 and 1024 then
        raise invalid_parameter_value using message = format('a queue cannot have %s parts', consumers_cnt),
            hint = 'from 2 to 256 is reasonable, 1024 the most';
    end if;
    if create_queue.is_roles_security_model then
        perform mbus.demand_role_making('queue ' || qname);
    end if;
    perform pg_advisory_xact_lock(hashtextextended('mbus queues', 0));
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
comment on function mbus.create_queue(text, integer, boolean) is
    'Make a queue with so many parts that can be consumed at once, and its consumer default. A queue that is there keeps its '
    'messages, and gets its functions anew.';

create function mbus.drop_queue(qname text) returns void
language plpgsql security definer
set search_path from current
as $$
declare
    known mbus.queue := mbus.queue_named(qname);
    consumers mbus.consumer[];
    each_name text;
    each_function regprocedure;
begin
    if not mbus.is_admin() then
        perform mbus.deny();
    end if;
    known := mbus.queue_to_change(qname);
    consumers := array(select c from mbus.consumer as c where c.qname = known.qname);
    perform mbus.refuse_users(
        'queue ' || known.qname, consumers,
        mbus.queue_functions(known) || array(select f from unnest(consumers) as c, unnest(mbus.consumer_functions(known, c)) as f),
        array(select kind || known.qname from unnest(array['qt$', 'all$', 'log$']) as kind));
    -- First, as who posts locks the queue that is copied from before this one.
    for each_name in select t.src from mbus.trigger as t where t.dst = known.qname loop
        perform mbus.drop_trigger(each_name, known.qname);
    end loop;
    execute format('drop view mbus.%I, mbus.%I', 'qt$' || known.qname, 'all$' || known.qname);
    perform mbus.drop_views(c) from mbus.consumer as c where c.qname = known.qname;
    -- Its trigger goes with it, which otherwise keeps a function. Before what consumers change when they have read it.
    execute format('drop table mbus.%I', 'log$' || known.qname);
    perform mbus.forget_consumer(known, c) from mbus.consumer as c where c.qname = known.qname;
    for each_function in
        select p.oid::regprocedure from pg_proc as p
        where p.pronamespace = 'mbus'::regnamespace and p.proname = any (mbus.queue_functions(known))
    loop
        execute format('drop function %s', each_function);
    end loop;
    delete from mbus.receipt as r where r.queue = known.id;
    delete from mbus.fault as f where f.qname = known.qname;
    delete from dead_letter.letter as l where l.kind = 'queue' and l.address ->> 'queue' = known.qname;
    delete from mbus.queue as q where q.id = known.id;
    perform mbus.drop_role('post', known.qname);
    perform mbus.drop_role('admin', known.qname);
end
$$;
comment on function mbus.drop_queue(text) is 'Drop a queue with its messages, consumers, functions and roles, and nobody else''s. The sequence of its ids stays.';

create function mbus.function_name(kind text, qname text, cname text default null) returns text
language sql immutable
set search_path from current
as $$
    select concat_ws('_', kind, qname, 'by_' || cname)
$$;
comment on function mbus.function_name(text, text, text) is 'The name of a queue''s own function.';

create function mbus.queue_functions(known mbus.queue) returns text[]
language sql immutable
set search_path from current
as $$
    select array(
        select mbus.function_name(kind, known.qname)
        from unnest(array['post', 'postn', 'peek', 'clear_queue', 'run_on']) as kind)
        || array['copy$' || known.id, 'entries$' || known.id, 'awaited$' || known.id, 'any$' || known.id]
$$;
comment on function mbus.queue_functions(mbus.queue) is 'The names of a queue''s own functions, without those of its consumers.';

create function mbus.consumer_functions(known mbus.queue, c mbus.consumer) returns text[]
language sql immutable
set search_path from current
as $$
    select array(
        select mbus.function_name(kind, known.qname, c.name) from unnest(array['consume', 'consumen', 'take_from']) as kind)
        || array['look$' || c.id, 'safe$' || c.id, 'match$' || c.id, 'receive$' || c.id, 'find$' || c.id, 'single$' || c.id]
$$;
comment on function mbus.consumer_functions(mbus.queue, mbus.consumer) is 'The names of a consumer''s own functions.';

create function mbus.as_receiver(options text) returns text
language sql immutable
set search_path from current
as $$
    -- What is called below runs with these too: each of its own would be paid for at every message.
    select options || ' set enable_seqscan = off set enable_bitmapscan = off set enable_mergejoin = off set enable_hashjoin = off '
        'set enable_sort = off set jit = off set max_parallel_workers_per_gather = 0 set plan_cache_mode = force_generic_plan'
$$;
comment on function mbus.as_receiver(text) is 'The options of a function that looks for what a consumer may have next, or that calls one.';

create function mbus.place(
    name text, arguments text, returned text, options text, body text, note text, pinned boolean default true
) returns void
language plpgsql
set search_path from current
as $$
declare
    signature text := format('mbus.%I(%s)', mbus.check_length(name), regexp_replace(arguments, ' default [^,]*', '', 'g'));
begin
    execute format('create or replace function mbus.%I(%s) returns %s %s %s as %L',
        name, arguments, returned, options,
        case when pinned then format('set search_path = %s', current_setting('search_path')) end, body);
    execute format('comment on function %s is %L', signature, note);
    execute format('revoke all on function %s from public', signature);
end
$$;
comment on function mbus.place(text, text, text, text, text, text, boolean) is
    'Write one of the functions of a queue, anew if it is there; not pinned, it has the settings of those who call it, search_path too.';

create function mbus.open_door() returns void
language plpgsql
set search_path from current
as $$
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
        mbus.drop_trigger(text, text), mbus.create_view(text, text, text, text), mbus.create_run_function(text),
        mbus.feed_lock(text, text), mbus.feed_locked(text, text), mbus.feed_position(text, text),
        mbus.feed_claim(text, text, jsonb, integer, integer), mbus.feed_changes(text, text, jsonb, bigint, bigint),
        mbus.feed_ack(text, text, jsonb), mbus.feed_in_work(text, text, jsonb),
        mbus.feed_note_failure(text, text, jsonb, text), mbus.feed_lag(text, text, integer), mbus.feed_point(text),
        mbus.feed_passed(text, text, jsonb), mbus.feed_skip(text, text, jsonb, text), mbus.skip_batch(text, text, text),
        mbus.list(), mbus.retry_faults(text, text), mbus.try_again(text, interval, text), mbus.start_saga, mbus.saga_turn(text), mbus.saga_done(text),
        mbus.saga_try_again(text, interval, text), mbus.saga_roll_back(text, text), mbus.saga_state(bigint), mbus.stuck_sagas(),
        mbus.status(integer), pgchange.status(integer, text)
        to public;
end
$$;
comment on function mbus.open_door() is
    'From the first queue under roles on, everybody may call the functions that check roles: who lacks one is told Access denied. '
    'No table of theirs is opened by it. pgchange.status() tells everybody what their rights on each feed allow.';
