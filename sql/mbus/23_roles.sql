-- PUBLIC may do nothing, until there is a queue under roles.

do $$
begin
    if mbus.can_make_roles() and octet_length(current_database()) <= 63 - length('mbus__admin') then
        perform mbus.make_role(mbus.role_name('admin'));
    end if;
end
$$;

revoke all on all functions in schema mbus from public;
revoke all on all tables in schema mbus from public;
revoke all on type mbus.qt_model, mbus.picked, mbus.obstacle from public;
revoke all on schema mbus from public;
