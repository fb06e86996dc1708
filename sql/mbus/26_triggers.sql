-- Triggers, which copy messages that are posted to a queue and match a selector to another queue.

-- Create the trigger of a queue's log that copies to other queues.
create function mbus.make_copy_function(known mbus.queue) returns void
language plpgsql
set client_min_messages = warning
as $$
declare
    copies text := '';
    each_trigger mbus.trigger;
    source text := format($sql$(
        select p.id, p.added::timestamp as added, coalesce(p.iid, %L || p.id) as iid, p.delayed_until::timestamp as delayed_until,
               p.expires::timestamp as expires, null::integer[] as received, p.headers, p.properties, p.data
        from posted as p
        -- A message that is put back was copied when it was posted.
        where p.not_for is null)$sql$, known.qname || '.');
begin
    execute format('drop trigger if exists copies on mbus.%I', 'log$' || known.qname);
    for each_trigger in select t.* from mbus.trigger as t where t.src = known.qname order by t.dst loop
        copies := copies || format($body$
    matching := '{}';
    begin
        matching := array(select t.id from %1$s as t where (%2$s
        ));
    exception when others or assert_failure then
        for number in select p.id from posted as p order by p.id loop
            begin
                if (select (%2$s
                    ) from %1$s as t where t.id = number) then
                    matching := matching || number;
                end if;
            exception when others or assert_failure then
                insert into mbus.fault (qname, message_id, message)
                values (%3$L, number, 'not copied to queue ' || %4$L || ', the selector of the trigger fails: ' || sqlerrm);
            end;
        end loop;
    end;
    if matching <> '{}' then
        insert into mbus.%5$I (data, headers, properties)
        select t.data, t.headers || hstore('destination_queue', %4$L), t.properties
        from %1$s as t where t.id = any (matching) order by t.id;
    end if;
$body$, source, coalesce(each_trigger.selector, 'true'), known.qname, each_trigger.dst, 'log$' || each_trigger.dst);
    end loop;
    if copies <> '' then
        perform mbus.place('copy$' || known.id, '', 'trigger', 'language plpgsql security definer ' || pgchange.settings(),
            format(E'#variable_conflict use_column\ndeclare\n    matching bigint[];\n    number bigint;\nbegin\n%s\n    return null;\nend',
                copies),
            format('Copies messages that are posted to queue %s to others.', known.qname));
        execute format('create trigger copies after insert on mbus.%I referencing new table as posted '
            'for each statement execute function mbus.%I()', 'log$' || known.qname, 'copy$' || known.id);
    end if;
end
$$;

-- Add a copy of the messages of src to dst. Refuse a loop.
create function mbus.add_trigger(src text, dst text, selector text) returns void
language plpgsql as $$
declare
    source mbus.queue;
begin
    perform mbus.queue_named(src), mbus.queue_named(dst);
    source := mbus.queue_to_change(src);
    perform mbus.queue_named(dst);
    perform mbus.check_selector(selector);
    if exists (
        with recursive reached as (
            select add_trigger.dst as qname
            union
            select t.dst from reached as r join mbus.trigger as t on t.src = r.qname
        )
        select from reached as r where r.qname = add_trigger.src
    ) then
        raise invalid_parameter_value using message = 'Loop detected',
            detail = format('messages of queue %s would come back to it from queue %s', src, dst);
    end if;
    insert into mbus.trigger (src, dst, selector) values (add_trigger.src, add_trigger.dst, add_trigger.selector)
    on conflict on constraint trigger_pkey do update set selector = excluded.selector;
    perform mbus.make_copy_function(source);
end
$$;

create function mbus_sealed.create_trigger(caller pgchange.caller, src text, dst text, selector text default null) returns void
language plpgsql security definer as $$
begin
    perform mbus.queue_named(src), mbus.queue_named(dst);
    if selector is not null then
        perform mbus.demand_selector(caller);
    elsif not mbus.is_admin(caller) then
        perform mbus.deny(caller);
    end if;
    perform mbus.add_trigger(src, dst, selector);
end
$$;
comment on function mbus_sealed.create_trigger(pgchange.caller, text, text, text) is
    'Copy data, headers and properties of messages that are posted to src and match a selector to dst. A loop is refused.';

create function mbus_sealed.drop_trigger(caller pgchange.caller, src text, dst text) returns void
language plpgsql security definer as $$
declare
    source mbus.queue := mbus.queue_named(src);
begin
    if not mbus.is_admin(caller) then
        perform mbus.deny(caller);
    end if;
    delete from mbus.trigger as t where t.src = drop_trigger.src and t.dst = drop_trigger.dst;
    perform mbus.make_copy_function(source);
end
$$;
comment on function mbus_sealed.drop_trigger(pgchange.caller, text, text) is 'Stop copying messages from src to dst.';
