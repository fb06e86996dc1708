-- Who may do what with a queue. Every check asks for the session's user, as the functions run as the owner of this schema.

create function mbus.is_owner() returns boolean
language plpgsql stable
set search_path from current
as $$
begin
    return (select pg_has_role(session_user, n.nspowner, 'member') from pg_namespace as n where n.nspname = 'mbus');
end
$$;
comment on function mbus.is_owner() is 'Whether the session is that of the owner of this schema, and so of every queue.';

create function mbus.role_of(kind text, qname text default null, cname text default null) returns oid
language plpgsql stable
as $$
begin
    return (
        select r.oid from pg_roles as r join pg_shdescription as d on d.objoid = r.oid and d.classoid = 'pg_authid'::regclass
        where r.rolname = mbus.role_name(kind, qname, cname) and d.description = mbus.role_mark(kind, qname, cname));
end
$$;
comment on function mbus.role_of(text, text, text) is
    'A role of this database, of a queue or of a consumer; null for none, also where it is another database that has one so named.';

create function mbus.has_role(kind text, qname text default null, cname text default null) returns boolean
language plpgsql stable
as $$
begin
    return coalesce(pg_has_role(session_user, mbus.role_of(kind, qname, cname), 'member'), false);
end
$$;
comment on function mbus.has_role(text, text, text) is 'Whether the session''s user is a member of a role of ours.';

create function mbus.is_admin() returns boolean
language sql stable
set search_path from current
as $$
    select mbus.is_owner() or mbus.has_role('admin')
$$;
comment on function mbus.is_admin() is 'Whether the session may make, clear and drop queues and consumers.';

create function mbus.may(what text, qname text, cname text default null) returns boolean
language plpgsql stable
set search_path from current
as $$
declare
    known mbus.queue := (select q from mbus.queue as q where q.qname = may.qname);
    each_name text;
begin
    if mbus.is_owner() then
        return true;
    elsif exists (select from mbus.temporary as t where t.name = qname || ' ' || cname) then
        return mbus.may_still(qname, cname);
    end if;
    if known.is_roles_security_model then
        if mbus.has_role('admin') or mbus.has_role('admin', qname) then
            return true;
        elsif what = 'post' then
            return mbus.has_role('post', qname);
        elsif cname is not null then
            return mbus.has_role('consume', qname, cname);
        end if;
        for each_name in select c.name from mbus.consumer as c where c.qname = may.qname loop
            if mbus.has_role('consume', qname, each_name) then
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
          and has_function_privilege(session_user, p.oid, 'execute'));
end
$$;
comment on function mbus.may(text, text, text) is
    'Whether the session may post to a queue, or consume from it (by one consumer, or by any): by roles where the queue is under them, '
    'else by EXECUTE on the queue''s own functions. Who may consume may do so by the temporary consumers that it made.';

create function mbus.may_still(qname text, cname text) returns boolean
language sql stable
set search_path from current
as $$
    select mbus.is_admin() or mbus.has_role('admin', qname) or exists (
        select from mbus.temporary as t
        join mbus.consumer as c on c.qname = may_still.qname and c.name = may_still.cname
        cross join lateral (
            select x.id, x.selector from mbus.consumer as x
            where x.qname = c.qname and not x.temporary and mbus.may('consume', x.qname, x.name)
        ) as own
        where t.name = may_still.qname || ' ' || may_still.cname and t.made_by = session_user
        group by t.name, t.through, c.selector
        having case when c.selector is null then bool_or(own.selector is null) else t.through <@ array_agg(own.id) end)
$$;
comment on function mbus.may_still(text, text) is
    'Whether the session may consume by a temporary consumer: which it made, by rights that it has still.';

create function mbus.demand(what text, qname text, cname text default null) returns void
language plpgsql stable
set search_path from current
as $$
begin
    if mbus.may(what, qname, cname) is not true then
        perform mbus.deny();
    end if;
end
$$;
comment on function mbus.demand(text, text, text) is 'Refuse who may not.';

create function mbus.deny() returns void
language plpgsql
set search_path from current
as $$
begin
    raise insufficient_privilege using message = 'Access denied',
        hint = 'roles are granted by members of ' || mbus.role_name('admin') || ' and of the queue''s own admin role';
end
$$;
comment on function mbus.deny() is 'Refuse.';

create function mbus.can_make_roles() returns boolean
language sql stable
set search_path from current
as $$
    select r.rolsuper or r.rolcreaterole from pg_roles as r where r.rolname = current_user
$$;
comment on function mbus.can_make_roles() is 'Whether the owner of this schema may make roles.';

create function mbus.demand_role_making(of_what text) returns void
language plpgsql
set search_path from current
as $$
begin
    if not mbus.can_make_roles() then
        raise insufficient_privilege using
            message = format('%s cannot be under roles: %s, the owner of schema mbus, may not make roles', of_what, current_user),
            hint = format('alter role %I createrole; or make the queue without is_roles_security_model', current_user);
    end if;
end
$$;
comment on function mbus.demand_role_making(text) is 'Refuse what needs roles, where the owner may not make them.';

create function mbus.make_role(kind text, qname text default null, cname text default null) returns name
language plpgsql
set search_path from current
as $$
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
            message = format('role %s is there already, and is another''s', role),
            detail = coalesce('It is: ' || shobj_description(known, 'pg_authid'), 'It has no comment that says whose it is.'),
            hint = format('%s; if it is the role of %s after all: comment on role %I is %L',
                          case when qname is null then 'drop it if another system left it'
                               else 'give the queue or the consumer another name' end,
                          coalesce('queue ' || qname, 'this database'), role, mark);
    end if;
    return role;
end
$$;
comment on function mbus.make_role(text, text, text) is
    'Make a role that nobody logs in as, unless it is there; refused where one of that name is another''s.';

create function mbus.make_roles(qname text, cname text default null) returns void
language plpgsql
set search_path from current
as $$
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
comment on function mbus.make_roles(text, text) is 'The roles of a queue, or of a consumer; none where the owner may not make roles.';

create function mbus.drop_role(kind text, qname text default null, cname text default null) returns void
language plpgsql
set search_path from current
as $$
begin
    if mbus.can_make_roles() and mbus.role_of(kind, qname, cname) is not null then
        execute format('drop role %I', mbus.role_name(kind, qname, cname));
    end if;
end
$$;
comment on function mbus.drop_role(text, text, text) is 'Drop a role of ours, if it is there and the owner may.';

create function mbus.restore_roles() returns integer
language plpgsql security definer
set search_path from current
as $$
declare
    each_consumer record;
    made integer := 0;
begin
    if not mbus.is_owner() then
        perform mbus.deny();
    end if;
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
    'Make the roles of every queue and consumer that are missing, as after a restore: pg_dump does not hold roles. Who was granted them '
    'has to be told again.';

create function mbus.let_call(functions text[], who text) returns void
language plpgsql
set search_path from current
as $$
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
comment on function mbus.let_call(text[], text) is 'Grant a role, or public, the functions of these names.';

create function mbus.list() returns table (qname text, consumers text[])
language sql stable security definer
set search_path from current
as $$
    select q.qname, array(
        select c.name from mbus.consumer as c where c.qname = q.qname and mbus.may('consume', q.qname, c.name) order by c.name)
    from mbus.queue as q
    where mbus.is_admin() or mbus.may('post', q.qname) or mbus.may('consume', q.qname)
    order by q.qname
$$;
comment on function mbus.list() is 'The queues with which this session may do something, and by which of their consumers it may consume.';
