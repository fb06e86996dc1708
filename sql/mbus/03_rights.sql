-- Who may do what with a queue. Every check asks for the session's user, as the functions run as the owner of this schema.

create function mbus.is_owner() returns boolean
language sql stable
set search_path from current
as $$
    select pg_has_role(session_user, n.nspowner, 'member') from pg_namespace as n where n.nspname = 'mbus'
$$;
comment on function mbus.is_owner() is 'Whether the session is that of the owner of this schema, and so of every queue.';

create function mbus.has_role(role name) returns boolean
language sql stable
set search_path from current
as $$
    select exists (select from pg_roles as r where r.rolname = role and pg_has_role(session_user, r.oid, 'member'))
$$;
comment on function mbus.has_role(name) is 'Whether the session''s user is a member of a role that is there.';

create function mbus.is_admin() returns boolean
language sql stable
set search_path from current
as $$
    select mbus.is_owner() or mbus.has_role(mbus.role_name('admin'))
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
    end if;
    if known.is_roles_security_model then
        if mbus.has_role(mbus.role_name('admin')) or mbus.has_role(mbus.role_name('admin', qname)) then
            return true;
        elsif what = 'post' then
            return mbus.has_role(mbus.role_name('post', qname));
        elsif cname is not null then
            return mbus.has_role(mbus.role_name('consume', qname, cname));
        end if;
        for each_name in select c.name from mbus.consumer as c where c.qname = may.qname loop
            if mbus.has_role(mbus.role_name('consume', qname, each_name)) then
                return true;
            end if;
        end loop;
        return false;
    end if;
    return exists (
        select from pg_proc as p
        where p.pronamespace = 'mbus'::regnamespace
          and case when what = 'post' then p.proname = 'post_' || qname
                   when cname is null then p.proname = any (array(
                       select format('consume_%s_by_%s', c.qname, c.name) from mbus.consumer as c where c.qname = may.qname))
                   else p.proname = format('consume_%s_by_%s', qname, cname) end
          and has_function_privilege(session_user, p.oid, 'execute'));
end
$$;
comment on function mbus.may(text, text, text) is
    'Whether the session may post to a queue, or consume from it (by one consumer, or by any): by roles where the queue is under them, '
    'else by EXECUTE on the queue''s own functions.';

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

create function mbus.make_role(role name) returns void
language plpgsql
set search_path from current
as $$
begin
    if not exists (select from pg_roles as r where r.rolname = role) then
        execute format('create role %I nologin', role);
    end if;
end
$$;
comment on function mbus.make_role(name) is 'Make a role that nobody logs in as, unless it is there.';

create function mbus.make_roles(qname text, cname text default null) returns void
language plpgsql
set search_path from current
as $$
declare
    managed name := case when cname is null then mbus.role_name('post', qname) else mbus.role_name('consume', qname, cname) end;
begin
    if not mbus.can_make_roles() then
        return;
    end if;
    perform mbus.make_role(mbus.role_name('admin'));
    perform mbus.make_role(mbus.role_name('admin', qname));
    perform mbus.make_role(managed);
    execute format(
        'grant %I to %I, %I with admin option', managed, mbus.role_name('admin', qname), mbus.role_name('admin'));
end
$$;
comment on function mbus.make_roles(text, text) is 'The roles of a queue, or of a consumer; none where the owner may not make roles.';

create function mbus.drop_role(role name) returns void
language plpgsql
set search_path from current
as $$
begin
    if mbus.can_make_roles() and exists (select from pg_roles as r where r.rolname = role) then
        execute format('drop role %I', role);
    end if;
end
$$;
comment on function mbus.drop_role(name) is 'Drop a role, if it is there and the owner may.';

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
