-- Making and dropping consumers.

create function mbus.check_selector(selector text) returns void
language plpgsql
set search_path from current
set standard_conforming_strings = on
as $$
begin
    if selector is null then
        return;
    end if;
    -- Where it will stand, and between brackets of two kinds, so that its own are in pairs.
    execute format(
        E'select from (select (null::mbus.qt_model).*) as t where false and (%1$s\n) and (array[%1$s\n])[1]', selector);
    perform mbus.check_depends_on_message(selector);
exception when others then
    raise syntax_error using message = format('Wrong selector:%s', selector),
        detail = case when sqlstate in ('42P17', '0A000') then
            'It is asked about a message when it is posted and when it is read, then and again, in other sessions: so it may depend '
            'on the message alone. ' else '' end || sqlerrm,
        hint = case sqlstate
            when '42P17' then 'now(), ''today'', current_user, times out of texts and the like are other ones then: post what they depend on with '
                              'the message; a function of your own that always answers the same is to be marked immutable'
            when '0A000' then 'a query of its own looks at more than the message: post what it would find with it; '
                              'of an hstore there are akeys() and avals()'
            else 'a selector is an expression over a message t, such as (t.properties->''STATE'') = ''DONE''' end;
end
$$;
comment on function mbus.check_selector(text) is
    'Refuse what is not an expression over a message, or does not depend on that alone, with PostgreSQL''s reason. To be called by who '
    'has the lock of mbus.queue_to_change().';

create function mbus.check_depends_on_message(selector text) returns void
language plpgsql
set search_path from current
set standard_conforming_strings = on
set transform_null_equals = off
set timezone = 'UTC'
set datestyle = 'ISO, MDY'
set intervalstyle = postgres
as $$
declare
    readings text[];
begin
    -- What PostgreSQL asks of the condition of an index: nothing of it stays.
    create table mbus.t of mbus.qt_model;
    execute format(E'create index on mbus.t (id) where (%s\n)', selector);
    -- A time that is written in it has been read by now: elsewhere, where it is never the same day, it may be read as another.
    perform set_config('timezone', 'Etc/GMT+12', true), set_config('datestyle', 'ISO, DMY', true),
            set_config('intervalstyle', 'sql_standard', true);
    execute format(E'create index on mbus.t (id) where (%s\n)', selector);
    perform set_config('timezone', 'Etc/GMT-14', true);
    execute format(E'create index on mbus.t (id) where (%s\n)', selector);
    perform set_config('timezone', 'UTC', true), set_config('datestyle', 'ISO, MDY', true),
            set_config('intervalstyle', 'postgres', true);
    readings := array(
        select distinct pg_get_expr(i.indpred, i.indrelid) from pg_index as i where i.indrelid = 'mbus.t'::regclass);
    if cardinality(readings) > 1 or position(now()::text in readings[1]) > 0 then
        raise invalid_object_definition using
            message = 'a time that is written in it is another one in another session: '
                'write it out, with its zone where it has one, as 2026-01-31 00:00+00';
    end if;
    raise exception using errcode = 'PCUND', message = 'made';
exception when sqlstate 'PCUND' then
    null;
end
$$;
comment on function mbus.check_depends_on_message(text) is
    'Fail for a condition that can give another answer for the same message: that calls what is not immutable, has a query of its own, or '
    'a time such as ''now'' or 01/02/2026.';

create function mbus.make_consumer_functions(known mbus.queue, c mbus.consumer) returns void
language plpgsql
set search_path from current
as $$
begin
    perform mbus.make_match_function(c);
    perform mbus.make_look_function(known, c, false);
    perform mbus.make_look_function(known, c, true);
    perform mbus.make_find_function(known, c);
    perform mbus.make_single_function(known, c);
    perform mbus.make_consume_functions(known, c);
    if known.is_roles_security_model then
        perform mbus.let_call((mbus.consumer_functions(known, c))[1:3], 'public');
    end if;
end
$$;
comment on function mbus.make_consumer_functions(mbus.queue, mbus.consumer) is 'Write the functions of a consumer.';

create function mbus.make_queue_functions(known mbus.queue) returns void
language plpgsql
set search_path from current
as $$
begin
    perform mbus.make_post_functions(known);
    perform mbus.make_peek_function(known);
    perform mbus.make_clear_function(known);
    if known.is_roles_security_model then
        perform mbus.let_call((mbus.queue_functions(known))[1:4], 'public');
    end if;
end
$$;
comment on function mbus.make_queue_functions(mbus.queue) is 'Write the functions of a queue.';

create function mbus.catch_up(known mbus.queue, c mbus.consumer) returns void
language plpgsql
set search_path from current
-- The view has times as its reader's, and a selector has them in UTC.
set timezone = 'UTC'
as $$
declare
    failed mbus.picked[];
begin
    execute format($query$
        with passed as (
            select row(m.id, mod(m.id, %2$s), m.delayed_until::timestamptz, m.expires::timestamptz, m.headers -> 'consume_after',
                       mbus.%3$I((m.id, m.added, m.iid, m.delayed_until, m.expires, m.received,
                                  m.headers, m.properties, m.data)::mbus.qt_model))::mbus.picked as message
            from mbus.%1$I as m
            cross join mbus.stands_at($1, mod(m.id, %2$s)::integer) as p
            where mbus.passed(m.id, m.txid, p.done, p.late_xids, p.late_ids) and not m.gone
            offset 0
        ), kept as (
            insert into mbus.apart (consumer, id, part, due, expires, after)
            select $1, (m.message).id, (m.message).part, coalesce((m.message).due, '-infinity'), (m.message).expires, (m.message).after
            from passed as m
            where (m.message).ok
        ), received as (
            insert into mbus.receipt (queue, id, consumer)
            select distinct %4$s, r.id, $1
            from mbus.receipt as r join mbus.%1$I as m on m.id = r.id
            where r.queue = %4$s and m.gone
              and not exists (select from mbus.receipt as x where x.queue = %4$s and x.id = r.id and x.consumer is null)
        )
        select array(select m.message from passed as m where (m.message).ok is null)
        $query$, 'all$' || known.qname, known.consumers_cnt, 'match$' || c.id, known.id)
    into failed using c.id;
    perform mbus.set_apart(known, c.id, mbus.not_yet(c.id, failed));
    perform mbus.reconsider(c.id, array(select a.id from mbus.apart as a where a.consumer = c.id and a.after is not null));
end
$$;
comment on function mbus.catch_up(mbus.queue, mbus.consumer) is
    'Note apart, for a new consumer, what the others went past and is still there.';

create function mbus.add_consumer(known mbus.queue, cname text, selector text, temporary boolean) returns void
language plpgsql
set search_path from current
as $$
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
            detail = format('mbus.%s() is there already', mbus.function_name('consume', known.qname, cname)),
            hint = 'choose another name, or drop that consumer first';
    end if;
    perform mbus.check_length(mbus.function_name('take_from', known.qname, cname));
    if not temporary then
        if known.is_roles_security_model then
            perform mbus.demand_role_making(format('consumer %s of queue %s', cname, known.qname));
        end if;
        perform mbus.make_roles(known.qname, cname);
    end if;
    -- What the others have received by now is not for the new one: it begins where the first of them is, and what that
    -- one went past and is still there is noted apart.
    insert into mbus.consumer (name, qname, selector, temporary) values (cname, known.qname, selector, temporary) returning * into c;
    insert into mbus.position (consumer, part, version, done, late_xids, late_ids)
    select c.id, g.part, 1, coalesce(p.done, known.began), coalesce(p.late_xids, '{}'), coalesce(p.late_ids, '{}')
    from unnest(known.parts) as g(part)
    left join lateral (
        select p.*
        from mbus.consumer as x
        cross join mbus.stands_at(x.id, g.part) as p
        where x.qname = known.qname and x.id <> c.id
        order by p.done desc limit 1
    ) as p on true;
    perform mbus.make_consumer_functions(known, c);
    if to_regclass(format('mbus.%I', 'all$' || known.qname)) is not null then
        perform mbus.catch_up(known, c);
    end if;
    perform mbus.make_views(known);
end
$$;
comment on function mbus.add_consumer(mbus.queue, text, text, boolean) is 'Make a consumer, which receives what is in the queue and what comes.';

create function mbus.create_consumer(cname text, qname text, p_selector text default null, noindex boolean default false) returns void
language plpgsql security definer
set search_path from current
as $$
declare
    known mbus.queue := mbus.queue_named(qname, 'Wrong queue name:%s');
begin
    if not mbus.is_admin() and not (known.is_roles_security_model and mbus.has_role('admin', qname)) then
        perform mbus.deny();
    end if;
    -- A selector is SQL, and runs with the rights of the owner of the queues.
    if p_selector is not null and not mbus.is_owner() then
        perform mbus.deny();
    end if;
    known := mbus.queue_to_change(qname);
    perform mbus.add_consumer(known, cname, p_selector, false);
    if noindex then
        -- An index knows no alias, and is of use only with the operators that the selector has.
        raise notice E'set search_path to %;\ncreate index concurrently on mbus.% (id)%;\nreset search_path;', current_setting('search_path'), quote_ident('log$' || qname),
            case when p_selector is null then '' else format(E' where (%s\n)', regexp_replace(p_selector, '[[:<:]]t[.]', '', 'g')) end;
    end if;
end
$$;
comment on function mbus.create_consumer(text, text, text, boolean) is
    'Make a consumer of a queue. Its selector, SQL that only the owner of the queues may set, runs with that owner''s rights. No index is '
    'made for it; with noindex a NOTICE gives the text of one, for a selector that few messages match.';

create function mbus.receiving_views(receivers regprocedure[]) returns setof regclass
language sql stable
set search_path from current
as $$
    -- No name is trusted: anybody may make something else in a view's place, or a view of his own over the function.
    select distinct v.oid::regclass
    from unnest(receivers) as receiver
    join pg_depend as d on d.refclassid = 'pg_proc'::regclass and d.refobjid = receiver and d.classid = 'pg_rewrite'::regclass
    join pg_rewrite as r on r.oid = d.objid
    join pg_proc as p on p.oid = d.refobjid
    join pg_class as v on v.oid = r.ev_class and v.relkind = 'v' and v.relowner = p.proowner
$$;
comment on function mbus.receiving_views(regprocedure[]) is
    'The views that mbus.create_view() made and that call one of these functions: whatever they are named now, they have its owner.';

create function mbus.receivers(c mbus.consumer) returns regprocedure[]
language sql stable
set search_path from current
as $$
    select array(
        select p.oid::regprocedure from pg_proc as p
        where p.pronamespace = 'mbus'::regnamespace and p.proname like 'seen$' || c.id || '$%')
$$;
comment on function mbus.receivers(mbus.consumer) is 'The functions by which views receive for a consumer.';

create function mbus.drop_views(c mbus.consumer) returns void
language plpgsql
set search_path from current
as $$
declare
    each_view regclass;
begin
    for each_view in select v from mbus.receiving_views(mbus.receivers(c)) as v loop
        execute format('drop view %s', each_view);
    end loop;
end
$$;
comment on function mbus.drop_views(mbus.consumer) is 'Drop the views that receive for a consumer.';

create function mbus.refuse_users(used text, consumers mbus.consumer[], functions text[], relations text[]) returns void
language plpgsql stable
set search_path from current
as $$
declare
    users text;
begin
    with own(class, id) as (
        select 'pg_proc'::regclass::oid, p.oid from pg_proc as p
        where p.pronamespace = 'mbus'::regnamespace
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
        -- Parts of what is dropped, such as its defaults and triggers, go with it.
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
            hint = 'they would go with it: drop them first, or have them name it in a text only, as a function in plpgsql does';
    end if;
end
$$;
comment on function mbus.refuse_users(text, mbus.consumer[], text[], text[]) is
    'Refuse to drop a queue or a consumer, given its functions and relations, upon which others have built views, or functions with a '
    'body that PostgreSQL has read.';

create function mbus.forget_consumer(known mbus.queue, c mbus.consumer) returns void
language plpgsql
set search_path from current
as $$
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
        where p.pronamespace = 'mbus'::regnamespace
          and (p.proname = any (mbus.consumer_functions(known, c)) or p.proname ~ format('^(seen|view)[$]%s[$]', c.id))
    loop
        execute format('drop function %s', function);
    end loop;
    if not c.temporary then
        perform mbus.drop_role('consume', known.qname, c.name);
    end if;
end
$$;
comment on function mbus.forget_consumer(mbus.queue, mbus.consumer) is
    'Delete what there is of a consumer that no view has: its progress, functions and role.';

create function mbus.remove_consumer(known mbus.queue, c mbus.consumer) returns void
language plpgsql
set search_path from current
as $$
begin
    -- Whoever receives by it: what they write would stay, and messages of other queues would wait for it for good.
    perform pg_advisory_xact_lock(k)
    from (select mbus.part_key(c.id, p) as k from unnest(known.parts) as p order by k) as keys;
    -- What it had received would be nobody's otherwise, and there again.
    perform mbus.sweep(known, false);
    delete from mbus.consumer as x where x.id = c.id;
    perform mbus.make_views(known);
    -- Only now: the views of the queue do without its selector.
    perform mbus.refuse_users(
        format('consumer %s of queue %s', c.name, known.qname), array[c], mbus.consumer_functions(known, c), '{}');
    perform mbus.drop_views(c);
    perform mbus.forget_consumer(known, c);
end
$$;
comment on function mbus.remove_consumer(mbus.queue, mbus.consumer) is 'Remove a consumer from a queue that stays.';

create function mbus.drop_consumer(cname text, qname text) returns void
language plpgsql security definer
set search_path from current
as $$
declare
    known mbus.queue := mbus.queue_named(qname);
begin
    if not mbus.is_admin() and not (known.is_roles_security_model and mbus.has_role('admin', qname)) then
        perform mbus.deny();
    end if;
    known := mbus.queue_to_change(qname);
    perform mbus.remove_consumer(known, mbus.consumer_named(qname, cname));
end
$$;
comment on function mbus.drop_consumer(text, text) is 'Drop a consumer. Messages that only it was to receive stay, as those that no selector matches.';
