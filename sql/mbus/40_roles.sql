-- The roles and their rights. PUBLIC has no rights until a queue is created with is_roles_security_model.

select pgchange.show_sealed('mbus');

select pgchange.add_role(
    'mbus', 'maintainer', told =>
    'Let a role delete messages that were received or expired, delete sagas that have ended, and read the findings.',
    includes => 'pgchange.maintainer',
    objects => array[
        'select on mbus.installed, mbus.sagas',
        'select (qname) on mbus.queue'
    ],
    functions => $$
        maintain maintain_queue clear_tempq roll_back_overdue forget_sagas health status queues saga_trouble latest_sagas saga_steps saga_retries saga_data
    $$);

select pgchange.add_role(
    'mbus', 'admin', told =>
    'Let a role see, send again, erase and drop the dead letters of the queues from which it may consume.',
    includes => 'pgchange.admin',
    functions => $$
        address_of letter_rights check_letter letter_content redrive erase_letter
    $$);

select pgchange.close_schema('mbus', types => 'qt_model picked obstacle', unpinned => $$
        apart_at awaited bound_now check_origin consume claim_from claim_ids dead_in fold freed_apart from_apart from_log gone has_role heads_apart
        hold_queues keep keep_apart keep_joined keep_together lock_key look matches message_key message_of number_in numbered open_in part_key
        parts_at passed qname_of queue_named queue_of queue_to_change queues_key raise_level receive_apart reception role_mark
        role_name role_of set_free settle stand stands_at starts_at take_part temporary_key trim_sometimes turn_key turn_of
        waits was_taken went_past xid_bound
    $$);

do $$
begin
    if mbus.can_make_roles() and octet_length(mbus.role_name('admin')) <= 63 then
        perform mbus.make_role('admin');
    end if;
end
$$;
