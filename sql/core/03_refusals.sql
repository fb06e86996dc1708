-- Errors that several functions raise: each with the reason and a hint.

-- Raise an error with a reason and a hint.
create function pgchange.refuse(reason text, hint text) returns void
language plpgsql immutable as $$
begin
    raise exception using errcode = 'PC008', message = reason, hint = hint;
end
$$;

-- The hint for a role that lacks the rights of another role. Nobody is told to become a member of a superuser.
create function pgchange.membership_hint(caller name, needed name) returns text
language sql stable as $$
    select case
        when pg_has_role(caller, needed, 'member') then format('run first: set role %I', needed)
        when (select r.rolsuper from pg_roles as r where r.rolname = needed) then format('connect as %I', needed)
        else format('connect as %1$I, or let a superuser run: grant %1$I to %2$I', needed, caller)
    end
$$;

-- Refuse an action on a relation to all but its owner, and name the owner.
create function pgchange.check_owner(rel regclass, deed text) returns void
language plpgsql stable as $$
declare
    owner_name name := (
        select pg_get_userbyid(c.relowner) from pg_class as c
        where c.oid = rel and not pg_has_role(current_user, c.relowner, 'usage'));
begin
    if owner_name is not null then
        raise insufficient_privilege using
            message = format('only the owner of %s, %I, may %s, and not role %I', rel, owner_name, deed, current_user),
            hint = pgchange.membership_hint(current_user, owner_name);
    end if;
end
$$;

-- Refuse a transaction whose isolation level hides what others have just committed.
create function pgchange.check_isolation() returns void
language plpgsql stable as $$
declare
    level text := current_setting('transaction_isolation');
begin
    if level in ('repeatable read', 'serializable') then
        raise exception using errcode = 'PC007',
            message = format(
                'this needs a read committed transaction: in a %s transaction, changes that others have just committed are '
                'invisible', level),
            hint = 'use begin isolation level read committed, or alter role ... set default_transaction_isolation';
    end if;
end
$$;
