-- What is refused says why, and what to do instead.

-- Refuse something, with the reason and what to do.
create function pgchange.refuse(reason text, hint text) returns void
language plpgsql immutable as $$
begin
    raise exception using errcode = 'PC008', message = reason, hint = hint;
end
$$;

-- Refuse what only the owner of a relation may do, and name that owner.
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

-- Refuse a transaction that cannot see what others have just committed.
create function pgchange.check_isolation() returns void
language plpgsql stable as $$
declare
    level text := current_setting('transaction_isolation');
begin
    if level in ('repeatable read', 'serializable') then
        raise exception using errcode = 'PC007',
            message = format('this is done in a read committed transaction only: under the isolation of this one, %s, '
                             'one would not see what another has just committed', level),
            hint = 'begin isolation level read committed, or alter role ... set default_transaction_isolation';
    end if;
end
$$;
