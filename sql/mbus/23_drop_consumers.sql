-- Dropping consumers, unless others use objects that would be dropped with them.

-- The views that mbus.create_view() made and that call one of these functions. They are found by their owner, also after a
-- rename.
create function mbus.receiving_views(receivers regprocedure[]) returns setof regclass
language sql stable as $$
    -- Do not trust names: another role may create an object in place of a view, or a view of its own over the function.
    select distinct v.oid::regclass
    from unnest(receivers) as receiver
    join pg_depend as d on d.refclassid = 'pg_proc'::regclass and d.refobjid = receiver and d.classid = 'pg_rewrite'::regclass
    join pg_rewrite as r on r.oid = d.objid
    join pg_proc as p on p.oid = d.refobjid
    join pg_class as v on v.oid = r.ev_class and v.relkind = 'v' and v.relowner = p.proowner
$$;

-- The functions by which views receive messages of a consumer.
create function mbus.receivers(c mbus.consumer) returns regprocedure[]
language sql stable as $$
    select array(
        select p.oid::regprocedure from pg_proc as p
        where p.pronamespace = 'mbus_sealed'::regnamespace and p.proname like 'seen$' || c.id || '$%')
$$;

-- Drop the views that receive messages of a consumer.
create function mbus.drop_views(c mbus.consumer) returns void
language plpgsql as $$
declare
    each_view regclass;
begin
    for each_view in select v from mbus.receiving_views(mbus.receivers(c)) as v loop
        execute format('drop view %s', each_view);
    end loop;
end
$$;

-- Refuse to drop a queue or a consumer, given its functions and relations, if others use them. Such users are views, and
-- functions whose bodies PostgreSQL has parsed.
create function mbus.refuse_users(used text, consumers mbus.consumer[], functions text[], relations text[]) returns void
language plpgsql stable as $$
declare
    users text;
begin
    with own(class, id) as (
        select 'pg_proc'::regclass::oid, p.oid from pg_proc as p
        where p.pronamespace in ('mbus'::regnamespace, 'mbus_sealed'::regnamespace)
          and (p.proname = any (functions) or exists (
              select from unnest(consumers) as c where p.proname ~ format('^(seen|view)[$]%s[$]', c.id)))
        union all
        select 'pg_class'::regclass, c.oid from pg_class as c
        where c.relnamespace = 'mbus'::regnamespace and c.relname = any (relations)
        union all
        select 'pg_class'::regclass, v from unnest(consumers) as c, mbus.receiving_views(mbus.receivers(c)) as v
    ), parts(class, id) as (
        select o.class, o.id from own as o
        union all
        select 'pg_type'::regclass, t.oid
        from own as o join pg_type as r on o.class = 'pg_class'::regclass and r.typrelid = o.id
        join pg_type as t on t.oid in (r.oid, r.typarray)
    ), theirs(class, id) as (
        select case when r.oid is null then d.classid else 'pg_class'::regclass end, coalesce(r.ev_class, d.objid)
        from parts as p
        join pg_depend as d on d.refclassid = p.class and d.refobjid = p.id and d.deptype = 'n'
        left join pg_rewrite as r on d.classid = 'pg_rewrite'::regclass and r.oid = d.objid
        -- Parts of a dropped object, such as its defaults and triggers, are dropped with it.
        where not exists (
            select from pg_depend as w join own as o on w.refclassid = o.class and w.refobjid = o.id
            where w.classid = d.classid and w.objid = d.objid and w.deptype in ('a', 'i') and r.oid is null)
        except
        select o.class, o.id from own as o
    )
    select string_agg(i.type || ' ' || i.identity, ', ' order by i.type, i.identity) into users
    from theirs as t cross join lateral pg_identify_object(t.class, t.id, 0) as i;
    if users is not null then
        raise dependent_objects_still_exist using message = format('%s is used by others: %s', used, users),
            hint = 'drop them first, as they would be dropped, too; or let them name it in a text only, as a function in plpgsql '
                   'does';
    end if;
end
$$;

-- Delete the objects and the progress of a consumer: its functions and its role, but not its views.
create function mbus.forget_consumer(known mbus.queue, c mbus.consumer) returns void
language plpgsql as $$
declare
    function regprocedure;
begin
    delete from mbus.position as p where p.consumer = c.id;
    delete from mbus.level as l where l.consumer = c.id;
    delete from mbus.apart as a where a.consumer = c.id;
    delete from mbus.wake as w where w.consumer = c.id;
    delete from mbus.receipt as r where r.queue = known.id and r.consumer = c.id;
    delete from mbus.fault as f where f.qname = known.qname and f.consumer = c.name;
    for function in
        select p.oid::regprocedure from pg_proc as p
        where p.pronamespace in ('mbus'::regnamespace, 'mbus_sealed'::regnamespace)
          and (p.proname = any (mbus.consumer_functions(known, c)) or p.proname ~ format('^(seen|view)[$]%s[$]', c.id))
        -- A public face before the sealed function that it calls.
        order by p.pronamespace = 'mbus_sealed'::regnamespace
    loop
        execute format('drop function %s', function);
    end loop;
    if not c.temporary then
        perform mbus.drop_role('consume', known.qname, c.name);
    end if;
end
$$;

-- Remove a consumer from a queue that stays.
create function mbus.remove_consumer(known mbus.queue, c mbus.consumer) returns void
language plpgsql as $$
begin
    -- Wait for sessions that receive by this consumer. Otherwise their receipts would stay, and messages of other queues would
    -- wait for these for ever.
    perform pg_advisory_xact_lock(k)
    from (select mbus.part_key(c.id, p) as k from unnest(known.parts) as p order by k) as keys;
    -- Delete messages that only this consumer had received. Otherwise they would be back in the queue, with no consumer to
    -- receive them.
    perform mbus.sweep(known, false);
    delete from mbus.consumer as x where x.id = c.id;
    perform mbus.make_views(known);
    -- Check the users after the views of the queue were made anew, because the old views used the consumer's selector.
    perform mbus.refuse_users(
        format('consumer %s of queue %s', c.name, known.qname), array[c], mbus.consumer_functions(known, c), '{}');
    perform mbus.drop_views(c);
    perform mbus.forget_consumer(known, c);
end
$$;

create function mbus_sealed.drop_consumer(caller pgchange.caller, cname text, qname text) returns void
language plpgsql security definer as $$
declare
    known mbus.queue := mbus.queue_named(qname);
begin
    if not mbus.is_admin(caller) and not (known.is_roles_security_model and mbus.has_role(caller, 'admin', qname)) then
        perform mbus.deny(caller, 'admin', qname);
    end if;
    known := mbus.queue_to_change(qname);
    perform mbus.remove_consumer(known, mbus.consumer_named(qname, cname));
end
$$;
comment on function mbus_sealed.drop_consumer(pgchange.caller, text, text) is
    'Drop a consumer. Messages that only this consumer was to receive stay in the queue, as messages that no selector matches.';
