-- The rights on queues. Every check gets the caller from the public face of a function. It never uses session_user: that may be a
-- superuser while code of another role runs.

-- Whether the caller has the rights of the owner of this schema, which owns every queue.
create function mbus.is_owner(caller name) returns boolean
language plpgsql stable as $$
begin
    return coalesce((select pg_has_role(caller, n.nspowner, 'usage') from pg_namespace as n where n.nspname = 'mbus'), false);
end
$$;

-- The role of this database, of a queue or of a consumer. Null if there is none, also if a role of this name belongs to another
-- database.
create function mbus.role_of(kind text, qname text default null, cname text default null) returns oid
language plpgsql stable as $$
begin
    return (
        select d.objoid from pg_shdescription as d
        where d.objoid = to_regrole(quote_ident(mbus.role_name(kind, qname, cname))) and d.classoid = 'pg_authid'::regclass
          and d.description = mbus.role_mark(kind, qname, cname));
end
$$;

-- Whether the caller has the rights of a role that mbus has created. A member without INHERIT needs `set role`.
create function mbus.has_role(caller name, kind text, qname text default null, cname text default null) returns boolean
language plpgsql stable as $$
begin
    return coalesce(pg_has_role(caller, mbus.role_of(kind, qname, cname), 'usage'), false);
end
$$;

-- Whether the caller may make, clear and drop queues and consumers.
create function mbus.is_admin(caller name) returns boolean
language sql stable as $$
    select mbus.is_owner(caller) or mbus.has_role(caller, 'admin')
$$;

-- Whether the caller may post to a queue, or consume from it by a consumer, or by any consumer. If the queue is under roles,
-- roles decide; else EXECUTE on the functions of the queue. A role that may consume may also use the temporary consumers that it
-- made.
create function mbus.may(caller name, what text, qname text, cname text default null) returns boolean
language plpgsql stable as $$
declare
    known mbus.queue := (select q from mbus.queue as q where q.qname = may.qname);
    each_name text;
begin
    if mbus.is_owner(caller) then
        return true;
    elsif exists (select from mbus.temporary as t where t.name = qname || ' ' || cname) then
        return mbus.may_still(caller, qname, cname);
    end if;
    if known.is_roles_security_model then
        if mbus.has_role(caller, 'admin') or mbus.has_role(caller, 'admin', qname) then
            return true;
        elsif what = 'post' then
            return mbus.has_role(caller, 'post', qname);
        elsif cname is not null then
            return mbus.has_role(caller, 'consume', qname, cname);
        end if;
        for each_name in select c.name from mbus.consumer as c where c.qname = may.qname loop
            if mbus.has_role(caller, 'consume', qname, each_name) then
                return true;
            end if;
        end loop;
        return false;
    end if;
    return exists (
        select from pg_proc as p
        where p.pronamespace = 'mbus'::regnamespace
          and case when what = 'post' then p.proname = mbus.function_name('post', qname)
                   when cname is null then p.proname = any (array(
                       select mbus.function_name('consume', c.qname, c.name) from mbus.consumer as c
                       where c.qname = may.qname and not c.temporary))
                   else p.proname = mbus.function_name('consume', qname, cname) end
          and has_function_privilege(caller, p.oid, 'execute'));
end
$$;

-- Whether the caller may consume by a temporary consumer. The caller must have EXECUTE on the consumer's functions, which its
-- maker got. The caller must also still have the rights by which the consumer was made.
create function mbus.may_still(caller name, qname text, cname text) returns boolean
language sql stable as $$
    select mbus.is_admin(caller) or mbus.has_role(caller, 'admin', qname) or exists (
        select from mbus.temporary as t
        join mbus.consumer as c on c.qname = may_still.qname and c.name = may_still.cname
        cross join lateral (
            select x.id, x.selector from mbus.consumer as x
            where x.qname = c.qname and not x.temporary and mbus.may(caller, 'consume', x.qname, x.name)
        ) as own
        where t.name = may_still.qname || ' ' || may_still.cname
          and has_function_privilege(caller, format('mbus.%I()', mbus.function_name('consume', may_still.qname, may_still.cname)), 'execute')
        group by t.name, t.through, c.selector
        having case when c.selector is null then bool_or(own.selector is null) else t.through <@ array_agg(own.id) end)
$$;

-- Raise an error if the caller does not have a right.
create function mbus.demand(caller name, what text, qname text, cname text default null) returns void
language plpgsql stable as $$
begin
    if mbus.may(caller, what, qname, cname) is not true then
        perform mbus.deny(caller, what, qname, cname);
    end if;
end
$$;

-- The grant that gives the caller a right: to post to a queue, to consume from it, or to administer it or all queues. If the owner
-- of this schema may not create roles, there are no roles to grant.
create function mbus.way_in(caller name, what text, qname text default null, cname text default null) returns text
language plpgsql stable as $$
declare
    known mbus.queue := (select q from mbus.queue as q where q.qname = way_in.qname);
    owner name := (select pg_get_userbyid(n.nspowner) from pg_namespace as n where n.nspname = 'mbus');
    consumer text := case what when 'consume' then coalesce(cname, 'default') end;
    role name;
begin
    if what <> 'admin' and not known.is_roles_security_model then
        return (
            select format('let %I run: ', owner)
                || string_agg(
                    format('grant execute on function mbus.%I(%s) to %I', p.proname, pg_get_function_identity_arguments(p.oid), caller),
                    '; ' order by p.oid)
            from pg_proc as p
            where p.pronamespace = 'mbus'::regnamespace and p.proname = mbus.function_name(what, known.qname, consumer));
    end if;
    role := (
        select r.rolname from pg_roles as r
        where r.oid = coalesce(
            case when known.is_roles_security_model then mbus.role_of(what, known.qname, consumer) end, mbus.role_of('admin')));
    if role is null or pg_has_role(caller, role, 'member') then
        return pgchange.membership_hint(caller, coalesce(role, owner));
    end if;
    return format('let %I run: grant %I to %I', owner, role, caller);
end
$$;

-- The code by which a function of a queue checks the right of its caller.
create function mbus.guard(kind text, qname text, cname text default null) returns text
language sql stable as $$
    -- Most callers have the only role that is needed. This check calls no function, because it runs for each message.
    select format($body$
    if not exists (
        select from pg_shdescription as d
        where d.objoid = to_regrole(%4$L) and d.classoid = 'pg_authid'::regclass and d.description = mbus.role_mark(%1$L, %2$L, %3$L)
          and pg_has_role(caller, d.objoid, 'usage'))
    then
        perform mbus.demand(caller, %1$L, %2$L, %3$L);
    end if;$body$, kind, qname, cname, quote_ident(mbus.role_name(kind, qname, cname)))
$$;

-- Raise the error for a missing right. The hint has the grant.
create function mbus.deny(caller name, what text default 'admin', qname text default null, cname text default null) returns void
language plpgsql as $$
begin
    raise insufficient_privilege using
        message = format('Access denied: role %I may not %s', caller, case what
            when 'post' then format('post to queue %s', qname)
            when 'consume' then concat_ws(' ', 'consume from queue', qname, 'as consumer ' || cname)
            else concat_ws(' ', 'administer', coalesce('queue ' || qname, 'all queues')) end),
        hint = mbus.way_in(caller, what, qname, cname);
end
$$;

-- Refuse a selector from anybody but the owner of the queues, because it runs with that owner's rights.
create function mbus.demand_selector(caller name) returns void
language plpgsql stable as $$
declare
    owner name := (select pg_get_userbyid(n.nspowner) from pg_namespace as n where n.nspname = 'mbus');
begin
    if not mbus.is_owner(caller) then
        raise insufficient_privilege using
            message = format(
                'Access denied: role %I may not set a selector, which runs with the rights of %I, the owner of schema mbus',
                caller, owner),
            hint = pgchange.membership_hint(caller, owner);
    end if;
end
$$;

-- Whether the owner of this schema may create roles.
create function mbus.can_make_roles() returns boolean
language sql stable as $$
    select r.rolsuper or r.rolcreaterole from pg_roles as r where r.rolname = current_user
$$;

-- Raise an error if roles are needed and the owner may not create them.
create function mbus.demand_role_making(of_what text) returns void
language plpgsql as $$
begin
    if not mbus.can_make_roles() then
        raise insufficient_privilege using
            message = format('%s cannot be under roles: %s, the owner of schema mbus, may not create roles', of_what, current_user),
            hint = format('alter role %I createrole; or make the queue without is_roles_security_model', current_user);
    end if;
end
$$;

-- Create a NOLOGIN role if it does not exist. Refuse a role of this name that mbus has not created.
create function mbus.make_role(kind text, qname text default null, cname text default null) returns name
language plpgsql as $$
declare
    role text := mbus.check_length(mbus.role_name(kind, qname, cname));
    mark text := mbus.role_mark(kind, qname, cname);
    known oid := (select r.oid from pg_roles as r where r.rolname = role);
begin
    if known is null then
        execute format('create role %I nologin', role);
        execute format('comment on role %I is %L', role, mark);
    elsif mbus.role_of(kind, qname, cname) is null then
        raise duplicate_object using
            message = format('role %s already exists and belongs to another system', role),
            detail = coalesce('It is: ' || shobj_description(known, 'pg_authid'), 'It has no comment that names its system.'),
            hint = format('%s; if the role was made for %s and only its comment is missing: comment on role %I is %L',
                          case when qname is null then 'drop it if another system left it'
                               else 'give the queue or the consumer another name' end,
                          coalesce('queue ' || qname, 'this database'), role, mark);
    end if;
    return role;
end
$$;

-- Create the roles of a queue, or of a consumer, if the owner may create roles.
create function mbus.make_roles(qname text, cname text default null) returns void
language plpgsql as $$
begin
    if not mbus.can_make_roles() then
        return;
    end if;
    execute format(
        'grant %I to %I, %I with admin option',
        case when cname is null then mbus.make_role('post', qname) else mbus.make_role('consume', qname, cname) end,
        mbus.make_role('admin', qname), mbus.make_role('admin'));
end
$$;

-- Drop a role that mbus has created, if it exists and the owner of the schema may drop it.
create function mbus.drop_role(kind text, qname text default null, cname text default null) returns void
language plpgsql as $$
begin
    if mbus.can_make_roles() and mbus.role_of(kind, qname, cname) is not null then
        execute format('drop role %I', mbus.role_name(kind, qname, cname));
    end if;
end
$$;

create function mbus.restore_roles() returns integer
language plpgsql security definer as $$
declare
    each_consumer record;
    made integer := 0;
begin
    perform mbus.demand_role_making('queues');
    perform mbus.make_role('admin');
    for each_consumer in select q.qname, c.name from mbus.queue as q left join mbus.consumer as c using (qname) where c.temporary is not true loop
        perform mbus.make_roles(each_consumer.qname);
        if each_consumer.name is not null then
            perform mbus.make_roles(each_consumer.qname, each_consumer.name);
        end if;
        made := made + 1;
    end loop;
    return made;
end
$$;
comment on function mbus.restore_roles() is
    'Create the missing roles of every queue and consumer, as after a restore: pg_dump does not contain roles. Grants of these '
    'roles must be repeated. Returns the number of queues and consumers.';

-- Grant EXECUTE on the functions of these names to a role, or to public.
create function mbus.let_call(functions text[], who text) returns void
language plpgsql as $$
declare
    function regprocedure;
begin
    for function in
        select p.oid::regprocedure from pg_proc as p
        where p.pronamespace = 'mbus'::regnamespace and p.proname = any (functions)
    loop
        execute format('grant execute on function %s to %s', function, who);
    end loop;
end
$$;

create function mbus_sealed.list(caller pgchange.caller) returns table (qname text, consumers text[])
language sql stable security definer as $$
    select q.qname, array(
        select c.name from mbus.consumer as c where c.qname = q.qname and mbus.may(caller, 'consume', q.qname, c.name) order by c.name)
    from mbus.queue as q
    where mbus.is_admin(caller) or mbus.may(caller, 'post', q.qname) or mbus.may(caller, 'consume', q.qname)
    order by q.qname
$$;
comment on function mbus_sealed.list(pgchange.caller) is
    'The queues that the caller may use, each with the consumers as which the caller may consume.';
