-- The master of a replicaset, and the instance that is chosen as the next master. A failover records its choice before it promotes,
-- so that a crash in between cannot lead to a second promotion.

-- Return an instance if it may become the master. Raises an error if it belongs to another replicaset or is not Online.
create function topology.candidate(home topology._pico_replicaset, instance text) returns topology._pico_instance
language plpgsql volatile as $$
declare
    chosen topology._pico_instance := topology.instance_named(instance);
begin
    if chosen.replicaset_name <> home.name then
        perform pgchange.refuse(
            format('instance %L belongs to replicaset %L, not %L', chosen.name, chosen.replicaset_name, home.name),
            'choose one of its own instances');
    end if;
    if chosen.current_state ->> 0 <> 'Online' then
        perform pgchange.refuse(
            format('instance %L is %s', chosen.name, chosen.current_state ->> 0),
            'choose an instance that is Online, or set its state first');
    end if;
    return chosen;
end
$$;

-- Raise an error if another instance of the replicaset may take writes: its master or the chosen next master, if Online.
create function topology.check_no_rival(home topology._pico_replicaset, chosen topology._pico_instance) returns void
language plpgsql volatile as $$
declare
    other text;
begin
    select i.name into other
    from topology._pico_instance as i
    where i.name in (home.current_master_name, home.target_master_name)
      and i.name <> chosen.name and i.current_state ->> 0 = 'Online'
    limit 1;
    if found then
        perform pgchange.refuse(
            format('instance %L is the master of replicaset %L, or was chosen to be it, and is Online', other, home.name),
            'if it takes writes it is the one for topology.set_master(); if not, stop it and set its state to Offline first');
    end if;
end
$$;

-- Record the next master before it is promoted. No other instance can be chosen while it is Online.
create function topology.choose_master(replicaset text, instance text) returns void
language plpgsql volatile security definer as $$
declare
    home topology._pico_replicaset := topology.replicaset_named(replicaset);
    chosen topology._pico_instance := topology.candidate(home, instance);
begin
    perform topology.check_no_rival(home, chosen);
    update topology._pico_replicaset as r set
        target_master_name = chosen.name,
        target_config_version = r.current_config_version + 1
    where r.name = home.name and r.target_master_name <> chosen.name;
end
$$;

create function topology.set_master(replicaset text, instance text) returns void
language plpgsql volatile security definer as $$
declare
    home topology._pico_replicaset := topology.replicaset_named(replicaset);
    chosen topology._pico_instance := topology.candidate(home, instance);
begin
    update topology._pico_replicaset as r set
        current_master_name = chosen.name,
        target_master_name = chosen.name,
        current_config_version = r.current_config_version + 1,
        target_config_version = r.current_config_version + 1
    where r.name = home.name and (r.current_master_name, r.target_master_name) <> (chosen.name, chosen.name);
end
$$;
comment on function topology.set_master(text, text) is
    'Record which instance of a replicaset is its master now, such as a standby that was promoted. Idempotent.';

-- When a master is Online again, cancel the choice of another instance. Raises an error while that instance is Online, because it
-- may have been promoted.
create function topology.take_back(chosen topology._pico_instance) returns void
language plpgsql volatile as $$
declare
    home topology._pico_replicaset;
begin
    select r.* into home from topology._pico_replicaset as r where r.current_master_name = chosen.name;
    if home.name is null then
        return;
    end if;
    perform topology.check_no_rival(home, chosen);
    update topology._pico_replicaset as r set
        target_master_name = chosen.name,
        target_config_version = r.current_config_version
    where r.name = home.name and r.target_master_name <> chosen.name;
end
$$;

create function topology.set_state(instance text, state text) returns void
language plpgsql volatile security definer as $$
declare
    chosen topology._pico_instance := topology.instance_named(instance);
    old text := chosen.current_state ->> 0;
    incarnation bigint := coalesce((chosen.current_state ->> 1)::bigint, 0);
    next_state jsonb;
begin
    if state is null or state not in ('Online', 'Offline', 'Expelled') then
        perform pgchange.refuse(
            format('%s is no state of an instance', coalesce(quote_literal(state), 'null')), 'choose Online, Offline or Expelled');
    end if;
    if old = state then
        return;
    end if;
    if old = 'Expelled' then
        perform pgchange.refuse(format('instance %L was expelled', chosen.name), 'add it as a new instance');
    end if;
    if state = 'Expelled' then
        perform topology.check_not_master(chosen);
    elsif state = 'Online' then
        perform topology.check_alone(topology.address_of(chosen.raft_id), chosen.raft_id);
        perform topology.take_back(chosen);
    end if;
    next_state := jsonb_build_array(state, incarnation + case when state = 'Online' then 1 else 0 end);
    update topology._pico_instance as i set current_state = next_state, target_state = next_state where i.name = chosen.name;
end
$$;
comment on function topology.set_state(text, text) is
    'Record that an instance is Online, Offline or Expelled. Expelled is final, and a master cannot be expelled. Idempotent.';

-- If plain SQL updates only current_master_name, set target_master_name to the same instance. Otherwise the previous master would
-- still count as the chosen next master.
create function topology.end_choice() returns trigger
language plpgsql as $$
begin
    new.target_master_name := new.current_master_name;
    return new;
end
$$;

create trigger choice_ended before update on topology._pico_replicaset for each row
    when (new.current_master_name <> old.current_master_name and new.target_master_name = old.target_master_name)
    execute function topology.end_choice();
