-- The status of consumers, and findings about queues.

-- The position, lag and batch of every consumer by which the caller may consume. trouble: why its lag is unknown, with the hint.
create function mbus.standings(caller pgchange.caller, upto integer)
returns table (qname text, cname text, at jsonb, lag jsonb, batch jsonb, trouble text)
language plpgsql volatile as $$
declare
    advice text;
begin
    for qname, cname in
        select l.qname, x.name from mbus_sealed.list(caller) as l cross join lateral unnest(l.consumers) as x(name) order by l.qname, x.name
    loop
        lag := null;
        batch := null;
        trouble := null;
        begin
            at := mbus.position(qname, cname);
            lag := mbus.lag_of(mbus.feed_consumer(caller, qname, cname), upto);
            batch := mbus_sealed.in_work(caller, qname, cname, at);
        exception
            -- The consumer was dropped meanwhile.
            when sqlstate 'PC002' then
                continue;
            when sqlstate 'PC003' or sqlstate 'PC004' or sqlstate 'PC005' then
                get stacked diagnostics trouble = message_text, advice = pg_exception_hint;
                trouble := trouble || ': ' || advice;
        end;
        return next;
    end loop;
end
$$;

create function mbus_sealed.status(caller pgchange.caller, upto integer default 1000) returns setof pgchange.consumer_status
language plpgsql volatile security definer as $$
begin
    return query
        select s.*
        from mbus.standings(caller, upto) as x
        left join lateral (
            -- Several batches may be leased. Show the lease that ends last.
            select b.leased_by, b.leased_until from mbus.batch as b
            where b.consumer = (x.at -> 'consumer')::integer and mbus.is_leased(b) order by b.leased_until desc limit 1
        ) as lease on true
        cross join lateral pgchange.standing(
            'queue', mbus.name_of(x.qname, x.cname), jsonb_build_object('queue', x.qname, 'consumer', x.cname),
            x.at || jsonb_build_object('updated_at', x.batch -> 'claimed_at'), x.lag,
            coalesce(x.batch || jsonb_build_object('batch_id', x.batch -> 'id'), '{}') || coalesce(to_jsonb(lease), '{}'),
            mbus.locked(x.qname, x.cname) or lease.leased_until is not null,
            x.trouble, null) as s;
end
$$;
comment on function mbus_sealed.status(pgchange.caller, integer) is
    'The status of every consumer by which the caller may consume, as in pgchange.status(). The batch is the oldest that was '
    'claimed and is neither acked nor at work.';

create function mbus_sealed.address_of(caller pgchange.caller, consumer text) returns jsonb
language sql stable security definer as $$
    select jsonb_build_object('queue', l.qname, 'consumer', x.name)
    from mbus_sealed.list(caller) as l cross join lateral unnest(l.consumers) as x(name)
    where mbus.name_of(l.qname, x.name) = address_of.consumer
$$;
comment on function mbus_sealed.address_of(pgchange.caller, text) is
    'The address of a consumer, as in dead letters, by its name in status. Null if there is no such consumer, or if the caller may '
    'not consume by it.';

-- The number of messages of a queue in the dmq, counted up to a number and one more.
create function mbus.dead_in(qname text, upto integer) returns bigint
language sql stable as $$
    -- Count the iids that begin with the name and a dot, as a range of bytes, in the order of the index. The order makes the
    -- planner use the index. From PostgreSQL 18 on, the planner takes the limit into account. Without the order it would read
    -- the table, which may begin with many messages of other queues.
    select count(*) from (
        select from mbus.dmq as d where d.iid ~>=~ (qname || '.') and d.iid ~<~ (qname || '/')
        order by d.iid using ~<~ limit upto + 1) as x
$$;

create function mbus_sealed.queues(caller pgchange.caller, upto integer default 1000)
returns table (
    qname text, consumer text, parts integer, selector text, ready bigint, delayed bigint, waiting bigint, in_work bigint,
    exact boolean, oldest_seconds double precision, dead bigint, dead_exact boolean, trouble text
)
language plpgsql volatile security definer as $$
#variable_conflict use_column
begin
    return query
        select x.qname, x.cname, q.consumers_cnt, c.selector, (x.lag ->> 'ready')::bigint, (x.lag ->> 'delayed')::bigint,
               (x.lag ->> 'waiting')::bigint - (x.lag ->> 'delayed')::bigint, w.messages,
               (x.lag -> 'ready_exact')::boolean and (x.lag -> 'waiting_exact')::boolean,
               case when (x.lag ->> 'ready')::bigint + (x.lag ->> 'waiting')::bigint + w.messages > 0 then
                   greatest((x.lag ->> 'ready_age')::double precision, (x.lag ->> 'waiting_age')::double precision,
                            extract(epoch from clock_timestamp() - w.oldest)::double precision) end,
               least(d.messages, upto), d.messages <= upto, x.trouble
        from mbus.standings(caller, upto) as x
        join mbus.queue as q on q.qname = x.qname
        join mbus.consumer as c on c.qname = x.qname and c.name = x.cname
        cross join lateral (
            select coalesce(sum(b.count), 0)::bigint as messages, min((b.batch ->> 'oldest')::timestamptz) as oldest
            from mbus.batch as b
            where b.consumer = c.id and (b.slot in (select h.slot from mbus.held_slots(x.qname, x.cname) as h) or mbus.is_leased(b))
        ) as w
        cross join lateral (select mbus.dead_in(x.qname, upto) as messages offset 0) as d
        order by x.qname, x.cname;
end
$$;
comment on function mbus_sealed.queues(pgchange.caller, integer) is
    'The queues from which the caller may consume, with a row for each consumer, because each gets its own copy of a message. The '
    'numbers of messages for the consumer: ready, delayed, waiting for another message, and in batches at work, exact or a lower '
    'bound. oldest_seconds: the age of the oldest of them. dead: the dead messages of the queue, from any consumer. trouble: why '
    'the numbers are unknown.';

-- The number of messages on which a selector failed, up to 1000 for each consumer, and for each queue with a trigger whose
-- selector failed.
create function mbus.failing() returns table (qname text, consumer text, failed bigint, example text)
language sql stable as $$
    select c.qname, c.name, f.failed, f.example
    from mbus.consumer as c
    cross join lateral (
        select count(*), max(b.message)
        from (select f.message from mbus.fault as f where f.qname = c.qname and f.consumer = c.name limit 1000) as b
    ) as f(failed, example)
    where f.failed > 0
    union all
    select q.qname, null, f.failed, f.example
    from mbus.queue as q
    cross join lateral (
        select count(*), max(b.message)
        from (select f.message from mbus.fault as f where f.qname = q.qname and f.consumer is null limit 1000) as b
    ) as f(failed, example)
    where f.failed > 0
$$;

-- Findings about failing selectors, batches with many failed attempts, stuck sagas, and a transaction that keeps others from
-- making and dropping queues and consumers.
create function mbus.health(many_attempts integer default 3) returns setof pgchange.finding
language sql stable security definer as $$
    select 'queue', 'error', mbus.name_of(f.qname, f.consumer),
           format('%s on which a selector failed, see mbus.fault, such as: %s', pgchange.many(f.failed, 'message'), f.example), null
    from mbus.failing() as f
    union all
    select 'queue', 'error', mbus.name_of(c.qname, c.name),
           format('batch %s has failed %s', b.batch ->> 'id', pgchange.many(b.attempt, 'time')),
           'to give it up: airflow-pgchange skip ' || pgchange.shell_quoted(mbus.name_of(c.qname, c.name)) || ' --reason ''...'''
    from mbus.batch as b join mbus.consumer as c on c.id = b.consumer
    where b.attempt >= many_attempts and not mbus.is_leased(b)
      and b.slot not in (select h.slot from mbus.held_slots(c.qname, c.name) as h)
    union all
    select 'queue', 'error', null, format('saga %s %s is stuck: %s', s.name, s.id, s.stuck), null
    from mbus.sagas as s where s.state in ('forward', 'rolling back') and s.stuck is not null
    union all
    select f.*
    from pgchange.lock_health(
        'queue', mbus.queues_key(), '%s has made or dropped a queue or a consumer: until it ends nobody else can') as f
$$;
