-- Views for people and other roles, running SQL for messages, and putting messages back.

-- Whether the caller may select from a view that receives by this function and still belongs to the owner of the queues.
create function mbus.may_receive(caller name, receiver regprocedure) returns boolean
language sql stable as $$
    select exists (
        select from mbus.receiving_views(array[receiver]) as v where has_any_column_privilege(caller, v, 'select'))
$$;

create function mbus.create_view(qname text, cname text default 'default', sname text default 'public', viewname text default null)
returns void
language plpgsql security definer as $$
declare
    known mbus.queue := mbus.queue_named(qname);
    c mbus.consumer := mbus.consumer_named(qname, coalesce(cname, 'default'));
    named text := coalesce(viewname, qname || '_q');
    key text := c.id || '$' || left(md5(coalesce(sname, 'public') || ' ' || coalesce(viewname, qname || '_q')), 12);
    seen text := 'seen$' || key;
    function text := 'view$' || key;
begin
    -- A role that may insert into the view posts with the rights of the view's owner, and needs no role of the queue.
    -- Only the view calls the sealed function: its body was parsed as its owner, and passes the role that selects.
    perform mbus.place(seen, 'caller pgchange.caller', 'setof mbus.qt_model', 'language plpgsql security definer',
        format($body$
begin
    if not mbus.may_receive(caller, 'mbus_sealed.%1$I(pgchange.caller)') then
        perform mbus.deny(caller);
    end if;
    return query select * from mbus.%2$I();
end
$body$, seen, 'receive$' || c.id),
        format('Receives a message for the role that selects from view %s.', named), place_in => 'mbus_sealed');
    execute format('grant execute on function mbus_sealed.%I(pgchange.caller) to public', seen);
    execute format(
        'create view %1$I.%2$I as select m.data, m.headers, m.properties, m.delayed_until, m.expires, m.iid, m.id, m.added '
        'from mbus_sealed.%3$I((current_user collate "default")::pgchange.caller) as m',
        coalesce(sname, 'public'), named, seen);
    perform pgchange.keep_to_owner(format('%I.%I', coalesce(sname, 'public'), named)::regclass);
    perform mbus.place(function, '', 'trigger', 'language plpgsql security definer',
        format($body$
declare
    known mbus.queue := mbus.queue_named(%2$L);
    had integer[];
begin
    if new.iid is not null then
        perform mbus.check_iid(known, new.iid);
        had := mbus.had_before(known, new.iid, mbus.got_now(known, new.iid));
    end if;
    insert into mbus.%1$I (data, headers, properties, delayed_until, expires, iid, not_for)
    values (new.data, mbus.headers_for(coalesce(new.headers, ''), %2$L), new.properties, new.delayed_until::timestamptz,
            new.expires::timestamptz, new.iid, had)
    returning id into new.id;
    if had is not null then
        perform mbus.check_comes_back(known, new.id, new.iid);
    end if;
    new.iid := coalesce(new.iid, %3$L || new.id);
    return new;
end
$body$, 'log$' || qname, qname, qname || '.'),
        format('Posts the rows inserted into view %s to queue %s.', named, qname));
    execute format('create trigger post instead of insert on %I.%I for each row execute function mbus.%I()',
        coalesce(sname, 'public'), named, function);
    execute format('comment on view %I.%I is %L', coalesce(sname, 'public'), named,
        format('A select receives a message of queue %s for consumer %s; an insert posts a message.', qname, c.name));
end
$$;
comment on function mbus.create_view(text, text, text, text) is
    'Make a view, by default public.<queue>_q. A role that may select from it receives, and a role that may insert into it posts, '
    'without a right to the queue itself.';

create function mbus.create_run_function(qname text) returns void
language plpgsql security definer as $$
declare
    known mbus.queue := mbus.queue_named(qname);
begin
    perform mbus.place('run_on_' || qname, 'exec text', 'integer', 'language plpgsql',
        format($body$
declare
    message mbus.qt_model;
    done integer := 0;
begin
    for message in select * from mbus.%1$I(1000) loop
        begin
            execute exec using message;
            done := done + 1;
        exception when others then
            perform mbus.post_dmq(
                message.data,
                message.headers operator(mbus.||) array['dmq.added', localtimestamp::text, 'dmq.error', sqlerrm]::mbus.hstore,
                message.properties, message.delayed_until, message.expires, message.iid);
        end;
    end loop;
    return done;
end
$body$, mbus.function_name('consumen', qname, 'default')),
        format(
            'Receive at most a thousand messages of queue %s and run SQL for each, with the rights of the caller. In the SQL, $1 '
            'is the message, a mbus.qt_model. Returns for how many it succeeded. The other messages go to the dmq.', qname),
        pinned => false);
end
$$;
comment on function mbus.create_run_function(text) is 'Make the function run_on_<queue>(exec).';

create function mbus_sealed.try_again(caller pgchange.caller, msgiid text, delay interval default interval '1 minute', error text default null) returns integer
language plpgsql security definer as $$
declare
    known mbus.queue := mbus.queue_of(msgiid);
    message record;
    got_now integer[];
    number bigint;
    tries integer;
begin
    if known.id is null then
        raise undefined_object using message = format('Unknown queue:%s', msgiid), hint = 'name a message by its iid';
    end if;
    perform mbus.demand(caller, 'consume', known.qname);
    execute format('select l.data, l.headers, l.properties, l.expires from mbus.%I as l where l.id = $1', 'log$' || known.qname)
    into message using (select max(e.id) from mbus.entries(known, msgiid) as e);
    got_now := mbus.got_now(known, msgiid);
    -- Refuse a message that was received before: it would go to all consumers again.
    if got_now is null then
        raise undefined_object using message = format('there is no message %s to put back', msgiid),
            hint = 'put it back in the transaction that received it';
    end if;
    -- The poster of the message may have set the property to any value.
    tries := coalesce(substring(message.properties -> 'tries' from '^[0-9]{1,8}$')::integer, 1) + 1;
    -- A consumer may put a message back without the right to post.
    execute format(
        'insert into mbus.%I (data, headers, properties, delayed_until, expires, iid, not_for) values ($1, $2, $3, $4, $5, $6, $7) '
        'returning id', 'log$' || known.qname)
    into number using message.data, message.headers,
        coalesce(message.properties, '') || hstore('tries', tries::text) || case when error is null then '' else hstore('error', error) end,
        clock_timestamp() + delay, message.expires, msgiid, mbus.had_before(known, msgiid, got_now);
    perform mbus.check_comes_back(known, number, msgiid);
    return tries;
end
$$;
comment on function mbus_sealed.try_again(pgchange.caller, text, interval, text) is
    'Put a message back that this transaction received, under its id, to be received again after a delay. Its property tries '
    'counts the attempts, and error has the last error. Returns the number of the next attempt.';
