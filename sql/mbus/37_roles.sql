-- PUBLIC may do nothing, until there is a queue under roles.

do $$
begin
    if mbus.can_make_roles() and octet_length(mbus.role_name('admin')) <= 63 then
        perform mbus.make_role('admin');
    end if;
end
$$;

select pgchange.show_sealed('mbus');

create function mbus.grant_maintainer(role regrole) returns void
language plpgsql
set search_path from current
as $$
begin
    perform pgchange.grant_maintainer(role);
    execute format(
        'grant usage on schema mbus to %1$s; grant select on mbus.installed, mbus.sagas to %1$s; '
        'grant execute on function mbus.maintain(), mbus.roll_back_overdue(), mbus.forget_sagas(interval), mbus.health(integer), mbus.status(integer), mbus.queues(integer), '
        'mbus.saga_trouble(mbus.saga), mbus.latest_sagas(integer), mbus.saga_steps(bigint), mbus.saga_data(bigint) '
        'to %1$s', role);
end
$$;
comment on function mbus.grant_maintainer(regrole) is
    'Let a role delete from the queues what was received or expired, forget sagas that ended, and see what is wrong with them.';

create function mbus.grant_admin(role regrole) returns void
language plpgsql
set search_path from current
as $$
begin
    perform pgchange.grant_admin(role);
    execute format(
        'grant usage on schema mbus to %1$s; grant execute on function '
        'mbus.letter_rights(jsonb), mbus.check_letter(jsonb, jsonb), mbus.letter_content(jsonb, jsonb), mbus.redrive(bigint) '
        'to %1$s', role);
end
$$;
comment on function mbus.grant_admin(regrole) is
    'Let a role see, send again and drop the dead letters of the queues that it may consume from.';

revoke all on all routines in schema mbus from public;
revoke all on all tables in schema mbus from public;
revoke all on type mbus.qt_model, mbus.picked, mbus.obstacle from public;
revoke all on schema mbus from public;
