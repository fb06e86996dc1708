-- Who may do what. PUBLIC may do nothing.

create function topology.grant_reader(role regrole) returns void
language plpgsql
set search_path = pg_catalog, topology, pg_temp
as $$
begin
    execute format($grants$
        grant usage on schema topology to %1$s;
        grant select on topology.installed, topology.term, topology.log,
            topology._pico_replicaset, topology._pico_instance, topology._pico_peer_address, topology._pico_bucket to %1$s;
        grant execute on function
            topology.begin_term(), topology.now_at(), topology.salt_secret(), topology.snapshot(), topology.unsettled(),
            topology.lacking(jsonb, bigint, bigint), topology.events(bigint, bigint, integer)
            to %1$s
    $grants$, role);
end
$$;
comment on function topology.grant_reader(regrole) is 'Let a role read the catalogue and its log: the relay''s role.';

create function topology.grant_consumer(role regrole) returns void
language plpgsql
set search_path = pg_catalog, topology, pg_temp
as $$
begin
    perform topology.grant_reader(role);
    perform pgchange.grant_consumer(role);
    perform pgchange.open_given('topology', 'consumer', role);
    execute format($grants$
        grant select on topology.consumer to %1$s;
        grant execute on function
            topology.here(), topology.is_native(), topology.register(text), topology.position(text), topology.lag(jsonb, integer),
            topology.slices(bigint, bigint, integer), topology.changes(jsonb, jsonb), topology.point(),
            topology.passed(jsonb, jsonb), topology.mark(text), topology.health(interval)
            to %1$s
    $grants$, role);
end
$$;
comment on function topology.grant_consumer(regrole) is
    'Let a role consume the log, in the catalogue''s database and in that of the results. Such roles trust each other.';

create function topology.grant_admin(role regrole) returns void
language plpgsql
set search_path = pg_catalog, topology, pg_temp
as $$
begin
    perform topology.grant_consumer(role);
    perform pgchange.open_given('topology', 'admin', role);
    execute format($grants$
        grant select on topology.trimmed to %1$s;
        grant execute on function topology.trim_log(interval) to %1$s
    $grants$, role);
    perform pgchange.grant_admin(role);
end
$$;
comment on function topology.grant_admin(regrole) is 'Let a role look after consumers: repair, move, drop, trim the log.';

create function topology.grant_writer(role regrole) returns void
language plpgsql
set search_path = pg_catalog, topology, pg_temp
as $$
begin
    perform topology.grant_reader(role);
    execute format($grants$
        grant execute on function
            topology.add_replicaset(text, text, text, double precision),
            topology.add_instance(text, text, text, text, text, bigint), topology.choose_master(text, text),
            topology.set_master(text, text),
            topology.set_state(text, text), topology.set_address(text, text), topology.remove_instance(text),
            topology.remove_replicaset(text), topology.assign_buckets(text, bigint, bigint, text),
            topology.move_buckets(text, bigint, bigint, text, text), topology.health(interval)
            to %1$s
    $grants$, role);
end
$$;
comment on function topology.grant_writer(regrole) is
    'Let a role change the catalogue, by the functions that refuse what would break it.';

revoke all on all routines in schema topology from public;
revoke all on all tables in schema topology from public;
revoke all on type topology.change from public;
revoke all on schema topology from public;
