-- The roles and their rights. PUBLIC has none.

select pgchange.add_role(
    'topology', 'reader', told =>
    'Let a role read the catalogue and its log, as the relay does.',
    objects => array[
        'select on topology.installed, topology.term, topology.log, topology._pico_replicaset, topology._pico_instance, topology._pico_peer_address, topology._pico_bucket'
    ],
    functions => $$
        begin_term now_at salt_secret snapshot unsettled lacking events
    $$);

select pgchange.add_role(
    'topology', 'consumer', told =>
    'Let a role consume the log, in the catalogue''s database and in that of the results. Such roles trust each other.',
    includes => 'topology.reader pgchange.consumer',
    objects => array[
        'select on topology.consumer'
    ],
    functions => $$
        here is_native register position check_position(jsonb) lag slices changes point passed mark health
    $$);

select pgchange.add_role(
    'topology', 'admin', told =>
    'Let a role look after consumers: repair, move, drop, trim the log.',
    includes => 'topology.consumer pgchange.admin',
    objects => array[
        'select on topology.trimmed'
    ],
    functions => $$
        trim_log
    $$);

select pgchange.add_role(
    'topology', 'writer', told =>
    'Let a role change the catalogue, by the functions that refuse what would break it.',
    includes => 'topology.reader',
    functions => $$
        add_replicaset add_instance choose_master set_master set_state set_address remove_instance remove_replicaset assign_buckets
        move_buckets health
    $$);

select pgchange.close_schema('topology', types => 'change', unpinned => $$
        at put
    $$);
