-- Changing the catalogue: replicasets and instances. Changes that would make it inconsistent are refused.

-- Lock the catalogue and return an instance. Raises an error if there is none of this name.
create function topology.instance_named(name text) returns topology._pico_instance
language plpgsql volatile as $$
declare
    known topology._pico_instance;
begin
    perform topology.hold();
    select i.* into known from topology._pico_instance as i where i.name = instance_named.name;
    if known.name is null then
        perform pgchange.refuse(
            format('there is no instance %s', coalesce(quote_literal(name), 'null')), 'select name from topology._pico_instance lists them');
    end if;
    return known;
end
$$;

-- Lock the catalogue and return a replicaset. Raises an error if there is none of this name.
create function topology.replicaset_named(name text) returns topology._pico_replicaset
language plpgsql volatile as $$
declare
    known topology._pico_replicaset;
begin
    perform topology.hold();
    select r.* into known from topology._pico_replicaset as r where r.name = replicaset_named.name;
    if known.name is null then
        perform pgchange.refuse(
            format('there is no replicaset %s', coalesce(quote_literal(name), 'null')),
            'select name from topology._pico_replicaset lists them');
    end if;
    return known;
end
$$;

create function topology.add_replicaset(
    name text, tier text default 'default', uuid text default gen_random_uuid()::text, weight double precision default 1
) returns text
language plpgsql volatile security definer as $$
begin
    if coalesce(name, '') = '' or coalesce(tier, '') = '' or coalesce(uuid, '') = '' then
        perform pgchange.refuse('a replicaset needs a name, a tier and a uuid', 'give a value for each of them that is not empty');
    end if;
    perform topology.hold();
    if exists (
        select from topology._pico_replicaset as r where r.name = add_replicaset.name or r.uuid = add_replicaset.uuid
    ) then
        perform pgchange.refuse(format('there is already a replicaset %L or one of uuid %L', name, uuid), 'choose another name and uuid');
    end if;
    insert into topology._pico_replicaset (name, uuid, current_master_name, target_master_name, tier, weight)
    values (add_replicaset.name, add_replicaset.uuid, '', '', add_replicaset.tier, add_replicaset.weight);
    return uuid;
end
$$;
comment on function topology.add_replicaset(text, text, text, double precision) is
    'Add a replicaset without instances and without a master. Returns its uuid.';

-- Raise an error if another instance with the same address is Online.
create function topology.check_alone(address text, raft_id bigint) returns void
language plpgsql stable as $$
declare
    other text;
begin
    -- A failover would take the one instance for the other, which may be the master of another replicaset.
    select i.name into other
    from topology._pico_peer_address as a join topology._pico_instance as i using (raft_id)
    where a.address = check_alone.address and a.connection_type = 'pgproto'
      and a.raft_id <> check_alone.raft_id and i.current_state ->> 0 = 'Online'
    order by i.name
    limit 1;
    if found then
        perform pgchange.refuse(
            format('%L is the address of instance %L, which is Online', address, other),
            'give this one its own with topology.set_address(), or set the other''s state first');
    end if;
end
$$;

-- Raise an error if an address is malformed, or if another instance with it is Online.
create function topology.check_address(address text, raft_id bigint) returns void
language plpgsql stable as $$
begin
    if coalesce(address, '') !~ '^.+:[0-9]{1,5}$' then
        perform pgchange.refuse(
            format('%s is no address of an instance', coalesce(quote_literal(address), 'null')), 'give host:port, or [::1]:port');
    end if;
    perform topology.check_alone(address, raft_id);
end
$$;

create function topology.add_instance(
    name text, replicaset text, address text, state text default 'Online', uuid text default gen_random_uuid()::text,
    raft_id bigint default null
) returns text
language plpgsql volatile security definer as $$
declare
    home topology._pico_replicaset := topology.replicaset_named(replicaset);
    number bigint := coalesce(raft_id, (select coalesce(max(i.raft_id), 0) + 1 from topology._pico_instance as i));
begin
    if coalesce(name, '') = '' or coalesce(uuid, '') = '' then
        perform pgchange.refuse('an instance needs a name and a uuid', 'give both');
    end if;
    perform topology.check_address(address, number);
    if state is null or state not in ('Online', 'Offline') then
        perform pgchange.refuse(format('%s is no state of a new instance', coalesce(quote_literal(state), 'null')), 'choose Online or Offline');
    end if;
    if exists (
        select from topology._pico_instance as i
        where i.name = add_instance.name or i.uuid = add_instance.uuid or i.raft_id = number
    ) then
        perform pgchange.refuse(
            format('there is already an instance %L, or one of uuid %L or raft id %s', name, uuid, number),
            'choose another name, uuid and raft id');
    end if;
    -- The address first, because the event of the new instance contains it.
    insert into topology._pico_peer_address (raft_id, address, connection_type) values (number, add_instance.address, 'pgproto')
    on conflict on constraint _pico_peer_address_pkey do update set address = excluded.address;
    insert into topology._pico_instance (name, uuid, raft_id, replicaset_name, current_state, target_state, tier)
    values (add_instance.name, add_instance.uuid, number, home.name, jsonb_build_array(state, 1), jsonb_build_array(state, 1), home.tier);
    return uuid;
end
$$;
comment on function topology.add_instance(text, text, text, text, text, bigint) is
    'Add an instance to a replicaset, with its address host:port. Returns its uuid.';

-- Record the address of an instance for clients, as host:port.
create function topology.set_address(instance text, address text) returns void
language plpgsql volatile security definer as $$
declare
    chosen topology._pico_instance := topology.instance_named(instance);
begin
    perform topology.check_address(address, chosen.raft_id);
    insert into topology._pico_peer_address (raft_id, address, connection_type)
    values (chosen.raft_id, set_address.address, 'pgproto')
    on conflict on constraint _pico_peer_address_pkey do update set address = excluded.address;
end
$$;

-- Raise an error if the instance is a master.
create function topology.check_not_master(chosen topology._pico_instance) returns void
language plpgsql stable as $$
begin
    if exists (select from topology._pico_replicaset as r where r.current_master_name = chosen.name) then
        perform pgchange.refuse(
            format('instance %L is the master of replicaset %L', chosen.name, chosen.replicaset_name),
            'make another one the master first: topology.set_master()');
    end if;
end
$$;

-- Raise an error if the replicaset owns buckets or is the target of a move.
create function topology.check_drained(replicaset text) returns void
language plpgsql stable as $$
begin
    if exists (
        select from topology._pico_bucket as b
        where check_drained.replicaset in (b.current_replicaset_name, b.target_replicaset_name)
    ) then
        perform pgchange.refuse(format('replicaset %L has buckets', replicaset), 'move them first: topology.move_buckets()');
    end if;
end
$$;

-- Remove an instance from the catalogue. A master can be removed only if it is the last instance and its replicaset has no
-- buckets.
create function topology.remove_instance(instance text) returns void
language plpgsql volatile security definer as $$
declare
    chosen topology._pico_instance := topology.instance_named(instance);
begin
    if exists (
        select from topology._pico_instance as i where i.replicaset_name = chosen.replicaset_name and i.name <> chosen.name
    ) then
        perform topology.check_not_master(chosen);
        update topology._pico_replicaset as r set target_master_name = r.current_master_name
        where r.target_master_name = chosen.name;
    else
        -- This is the last instance of its replicaset, so no other instance could become the master.
        perform topology.check_drained(chosen.replicaset_name);
        update topology._pico_replicaset as r set current_master_name = '', target_master_name = ''
        where r.current_master_name = chosen.name;
    end if;
    delete from topology._pico_instance as i where i.name = chosen.name;
    delete from topology._pico_peer_address as a where a.raft_id = chosen.raft_id;
end
$$;

-- Remove a replicaset from the catalogue. It must have neither instances nor buckets.
create function topology.remove_replicaset(replicaset text) returns void
language plpgsql volatile security definer as $$
declare
    chosen topology._pico_replicaset := topology.replicaset_named(replicaset);
begin
    if exists (select from topology._pico_instance as i where i.replicaset_name = chosen.name) then
        perform pgchange.refuse(format('replicaset %L has instances', chosen.name), 'remove them first: topology.remove_instance()');
    end if;
    perform topology.check_drained(chosen.name);
    delete from topology._pico_replicaset as r where r.name = chosen.name;
end
$$;
