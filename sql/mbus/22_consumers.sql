-- Making consumers.

-- Create the functions of a consumer.
create function mbus.make_consumer_functions(known mbus.queue, c mbus.consumer) returns void
language plpgsql as $$
begin
    perform mbus.make_match_function(c);
    perform mbus.make_look_function(known, c, false);
    perform mbus.make_look_function(known, c, true);
    perform mbus.make_find_function(known, c);
    perform mbus.make_single_function(known, c);
    perform mbus.make_consume_functions(known, c);
    if known.is_roles_security_model and not c.temporary then
        perform mbus.let_call((mbus.consumer_functions(known, c))[1:3], 'public');
    end if;
end
$$;

-- Create the functions of a queue.
create function mbus.make_queue_functions(known mbus.queue) returns void
language plpgsql as $$
begin
    perform mbus.make_post_functions(known);
    perform mbus.make_peek_function(known);
    perform mbus.make_clear_function(known);
    if known.is_roles_security_model then
        perform mbus.let_call((mbus.queue_functions(known))[1:4], 'public');
    end if;
end
$$;

-- Set apart for a new consumer the messages that the positions of others have passed and that are still in the queue.
create function mbus.catch_up(known mbus.queue, c mbus.consumer) returns void
language plpgsql
-- A selector needs times in UTC, but the view has them in the time zone of its reader.
set timezone = 'UTC'
as $$
declare
    failed mbus.picked[];
begin
    execute format($query$
        with passed as (
            select row(m.id, mod(m.id, %2$s), m.delayed_until::timestamptz, m.expires::timestamptz, m.headers -> 'consume_after',
                       mbus.%3$I((m.id, m.added, m.iid, m.delayed_until, m.expires, m.received,
                                  m.headers, m.properties, m.data)::mbus.qt_model), %5$s)::mbus.picked as message
            from mbus.%1$I as m
            cross join mbus.stands_at($1, mod(m.id, %2$s)::integer) as p
            where mbus.passed(m.id, m.txid, p.done, p.late_xids, p.late_ids) and not m.gone
            offset 0
        ), kept as (
            insert into mbus.apart (consumer, id, part, due, expires, after, key)
            select $1, (m.message).id, (m.message).part, coalesce((m.message).due, '-infinity'), (m.message).expires, (m.message).after,
                   (m.message).key
            from passed as m
            where (m.message).ok
        ), received as (
            insert into mbus.receipt (queue, id, consumer)
            select distinct %4$s, r.id, $1
            from mbus.receipt as r cross join lateral (select x.gone from mbus.%1$I as x where x.id = r.id offset 0) as m
            where r.queue = %4$s and m.gone
              and not exists (select from mbus.receipt as x where x.queue = %4$s and x.id = r.id and x.consumer is null offset 0)
        )
        select array(select m.message from passed as m where (m.message).ok is null)
        $query$, 'all$' || known.qname, known.consumers_cnt, 'match$' || c.id, known.id, mbus.key_of(known, 'm'))
    into failed using c.id;
    perform mbus.set_apart(known, c.id, mbus.not_yet(c.id, failed));
    perform mbus.reconsider(c.id, array(select a.id from mbus.apart as a where a.consumer = c.id and (a.after is not null or a.key is not null)));
end
$$;

-- Make a consumer. It receives the messages that are in the queue and all that are posted later.
create function mbus.add_consumer(known mbus.queue, cname text, selector text, temporary boolean) returns void
language plpgsql as $$
declare
    c mbus.consumer;
begin
    perform mbus.check_consumer_name(cname);
    perform mbus.check_selector(selector);
    if exists (
        select from pg_proc as p
        where p.pronamespace = 'mbus'::regnamespace and p.proname = mbus.function_name('consume', known.qname, cname)
    ) then
        raise duplicate_object using
            message = format('Wrong consumer name:%s', cname),
            detail = format('mbus.%s() already exists', mbus.function_name('consume', known.qname, cname)),
            hint = 'choose another name, or drop that consumer first';
    end if;
    perform mbus.check_length(mbus.function_name('take_from', known.qname, cname));
    if not temporary then
        if known.is_roles_security_model then
            perform mbus.demand_role_making(format('consumer %s of queue %s', cname, known.qname));
        end if;
        perform mbus.make_roles(known.qname, cname);
    end if;
    -- A new consumer begins, in each part, at the position of the consumer that has come farthest. So it does not get messages that
    -- all others have received. Messages before this position that are still in the queue are put in mbus.apart for it. The first
    -- consumer of a queue has a single position for all parts.
    insert into mbus.consumer (name, qname, selector, temporary) values (cname, known.qname, selector, temporary) returning * into c;
    insert into mbus.position (consumer, part, version, done, late_xids, late_ids)
    select c.id, g.part, 1, coalesce(p.done, known.began), coalesce(p.late_xids, '{}'), coalesce(p.late_ids, '{}')
    from unnest(
        case when exists (select from mbus.consumer as x where x.qname = known.qname and x.id <> c.id) then known.parts
             else '{-1}' end) as g(part)
    left join lateral (
        select p.*
        from mbus.consumer as x
        cross join mbus.stands_at(x.id, g.part) as p
        where x.qname = known.qname and x.id <> c.id
        order by p.done desc limit 1
    ) as p on true;
    perform mbus.begin_level(c.id);
    perform mbus.make_consumer_functions(known, c);
    if to_regclass(format('mbus.%I', 'all$' || known.qname)) is not null then
        perform mbus.catch_up(known, c);
    end if;
    perform mbus.make_views(known);
end
$$;

-- Raise a notice with the index for a consumer.
create function mbus.tell_index(qname text, selector text) returns void
language plpgsql as $$
begin
    -- The condition of an index cannot have the alias t, so remove it. The planner uses the index only if its operators are those
    -- of the selector, so use the same search_path.
    raise notice E'set search_path to %;\ncreate index concurrently on mbus.% (id)%;\nreset search_path;', current_setting('search_path'), quote_ident('log$' || qname),
        case when selector is null then '' else format(E' where (%s\n)', regexp_replace(selector, '[[:<:]]t[.]', '', 'g')) end;
end
$$;

create function mbus_sealed.create_consumer(
    caller pgchange.caller, cname text, qname text, p_selector text default null, noindex boolean default false
) returns void
language plpgsql security definer as $$
declare
    known mbus.queue := mbus.queue_named(qname, 'Wrong queue name:%s');
begin
    if p_selector is not null then
        perform mbus.demand_selector(caller);
    elsif not mbus.is_admin(caller) and not (known.is_roles_security_model and mbus.has_role(caller, 'admin', qname)) then
        perform mbus.deny(caller, 'admin', qname);
    end if;
    perform mbus.add_consumer(mbus.queue_to_change(qname), cname, p_selector, false);
    if noindex then
        perform mbus.tell_index(qname, p_selector);
    end if;
end
$$;
comment on function mbus_sealed.create_consumer(pgchange.caller, text, text, text, boolean) is
    'Make a consumer of a queue. Its selector is SQL that runs with the rights of the owner of the queues, so only that owner may '
    'set it. No index is made for it. With noindex, a NOTICE has the text of an index, for a selector that few messages match.';
