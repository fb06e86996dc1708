-- Ordering a queue by a property of its messages.

-- Create the trigger that gives all messages of a key ids of the same part, which is the remainder of the id. Drop the trigger if
-- the queue has no key.
create function mbus.make_key_trigger(known mbus.queue) returns void
language plpgsql
set client_min_messages = warning
as $$
begin
    execute format('drop trigger if exists keyed on mbus.%I', 'log$' || known.qname);
    if known.ordered_by is null then
        return;
    end if;
    perform mbus.place('key$' || known.id, '', 'trigger', 'language plpgsql',
        format($body$
declare
    part_of_key bigint;
begin
    if %1$s is not null then
        part_of_key := mod(mod(hashtextextended(%1$s, 0), %2$s) + %2$s, %2$s);
        while mod(new.id, %2$s) <> part_of_key loop
            new.id := nextval(%3$L);
        end loop;
    end if;
    return new;
end
$body$, format('(%s)', mbus.key_of(known, 'new')), known.consumers_cnt, format('mbus.%I', 'seq$' || known.qname)),
        format('Gives messages of queue %s with the same key ids of the same part.', known.qname));
    execute format('create trigger keyed before insert on mbus.%I for each row execute function mbus.%I()',
        'log$' || known.qname, 'key$' || known.id);
end
$$;

create function mbus_sealed.order_by(caller pgchange.caller, qname text, property text) returns void
language plpgsql security definer as $$
declare
    known mbus.queue := mbus.queue_named(qname);
    is_empty boolean;
begin
    if not mbus.is_admin(caller) then
        perform mbus.deny(caller);
    end if;
    known := mbus.queue_to_change(qname);
    if nullif(property, '') is not distinct from known.ordered_by then
        return;
    end if;
    execute format('lock table mbus.%I in access exclusive mode', 'log$' || qname);
    perform mbus.sweep(known, false);
    execute format('select not exists (select from mbus.%I)', 'log$' || qname) into is_empty;
    if not is_empty then
        perform pgchange.refuse(
            format('queue %s cannot be ordered: it has messages, whose order was not kept', qname),
            format('let its consumers receive them, and call mbus.clear_queue_%s(); or make another queue', qname));
    end if;
    update mbus.queue as q set ordered_by = nullif(property, '') where q.id = known.id returning * into known;
    -- Special messages are checked one by one before they are handed out.
    execute format(
        'alter table mbus.%I drop column special, add column special boolean not null generated always as '
        '(delayed_until is not null or headers ? ''consume_after''%s) stored',
        'log$' || qname, case when known.ordered_by is not null then format(' or (%s) is not null', format('properties -> %L', known.ordered_by)) else '' end);
    perform mbus.make_key_trigger(known);
    perform mbus.make_consumer_functions(known, c) from mbus.consumer as c where c.qname = known.qname;
end
$$;
comment on function mbus_sealed.order_by(pgchange.caller, text, text) is
    'Order a queue by a property. Messages with the same value of it go to one worker of a consumer at a time, in the order in '
    'which they were posted. Messages without the property are handed out as before. Null removes the order. Refused while the '
    'queue has messages.';
