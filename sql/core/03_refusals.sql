-- Errors that several functions raise: each with the reason and a hint.

-- Raise an error with a reason and a hint.
create function pgchange.refuse(reason text, hint text) returns void
language plpgsql immutable as $$
begin
    raise exception using errcode = 'PC008', message = reason, hint = hint;
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
            message = format('only the owner of %s, %I, may %s', rel, owner_name, deed),
            hint = format('connect as %I, or set role %I', owner_name, owner_name);
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
