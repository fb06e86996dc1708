-- Triggers that turn changes of the catalogue into events.

-- The uuid of a replicaset by its name; null if there is none.
create function topology.replicaset_uuid(name text) returns text
language sql stable as $$
    select r.uuid from topology._pico_replicaset as r where r.name = replicaset_uuid.name
$$;

-- The uuid of an instance by its name; null if there is none.
create function topology.instance_uuid(name text) returns text
language sql stable as $$
    select i.uuid from topology._pico_instance as i where i.name = instance_uuid.name
$$;

-- The address at which clients reach an instance; null if there is none.
create function topology.address_of(raft_id bigint) returns text
language sql stable as $$
    select a.address from topology._pico_peer_address as a
    where a.raft_id = address_of.raft_id and a.connection_type = 'pgproto'
$$;

-- The event fields of a whole instance.
create function topology.instance_fields(instance topology._pico_instance) returns json
language sql stable as $$
    select json_build_object(
        'tier', instance.tier,
        'replicaset_uuid', topology.replicaset_uuid(instance.replicaset_name),
        'instance_uuid', instance.uuid,
        'current_state', instance.current_state ->> 0,
        'address', topology.address_of(instance.raft_id))
$$;

-- The event fields of a replicaset with its master. The master's uuid is null if the master is not in the catalogue.
create function topology.master_fields(replicaset topology._pico_replicaset) returns json
language sql stable as $$
    select json_build_object(
        'replicaset_uuid', replicaset.uuid,
        'current_master_uuid', topology.instance_uuid(replicaset.current_master_name))
$$;

-- The event fields of a bucket range with its owner. The owner of a copied range is its target, because the copy is complete.
create function topology.bucket_fields(bucket topology._pico_bucket) returns json
language sql stable as $$
    select json_build_object(
        'tier', bucket.tier_name,
        'state', bucket.state,
        'bucket_id', json_build_object('start', bucket.bucket_id_start, 'end', bucket.bucket_id_end),
        'current_replicaset_uuid', topology.replicaset_uuid(
            case when bucket.state = 'copied' then coalesce(bucket.target_replicaset_name, bucket.current_replicaset_name)
                 else bucket.current_replicaset_name end))
$$;

-- Events of replicasets: insert, another master, delete. A replicaset that loses its master without a new one is no event.
-- If instances were inserted before their replicaset, its insert writes events of them too.
create function topology.capture_replicaset() returns trigger
language plpgsql security definer
-- The session keeps a plan that it made for a few rows. With many rows, a nested loop in it would take too long.
set enable_nestloop = off
as $$
begin
    if tg_op = 'INSERT' then
        perform topology.append(array(
            select ('replace', e.map, e.fields)::topology.change
            from now_there as r
            cross join lateral (
                select -1, 'replicaset', json_build_object('replicaset_uuid', r.uuid)
                union all
                select i.raft_id, 'instance', json_build_object('replicaset_uuid', r.uuid, 'instance_uuid', i.uuid)
                from topology._pico_instance as i where i.replicaset_name = r.name
                union all
                select null, 'replicaset', topology.master_fields(r) where topology.instance_uuid(r.current_master_name) is not null
            ) as e(place, map, fields)
            order by r.name, e.place));
    elsif tg_op = 'UPDATE' then
        perform topology.append(array(
            select ('replace', 'replicaset', topology.master_fields(r))::topology.change
            from now_there as r join before as b using (uuid)
            where r.current_master_name <> b.current_master_name
              and topology.instance_uuid(r.current_master_name) is not null
            order by r.name));
    else
        perform topology.append(array(
            select ('delete', 'replicaset', json_build_object('replicaset_uuid', b.uuid))::topology.change
            from before as b order by b.name));
    end if;
    return null;
end
$$;

-- Events of instances: insert, changes such as the state, delete. If a replicaset named this instance as its master before the
-- instance was inserted, the insert writes an event of that replicaset too.
create function topology.capture_instance() returns trigger
language plpgsql security definer
-- The session keeps a plan that it made for a few rows. With many rows, a nested loop in it would take too long.
set enable_nestloop = off
as $$
begin
    if tg_op = 'INSERT' then
        perform topology.append(array(
            select ('replace', e.map, e.fields)::topology.change
            from now_there as i
            cross join lateral (
                select 1, 'instance', topology.instance_fields(i)
                union all
                select 2, 'replicaset', topology.master_fields(r)
                from topology._pico_replicaset as r where r.current_master_name = i.name
            ) as e(place, map, fields)
            order by i.raft_id, e.place));
    elsif tg_op = 'UPDATE' then
        perform topology.append(array(
            select ('replace', 'instance', json_build_object(
                'tier', case when i.tier <> b.tier then i.tier end,
                'replicaset_uuid', case when i.replicaset_name <> b.replicaset_name then topology.replicaset_uuid(i.replicaset_name) end,
                'instance_uuid', i.uuid,
                'current_state', case when i.current_state -> 0 <> b.current_state -> 0 then i.current_state ->> 0 end))::topology.change
            from now_there as i join before as b using (uuid)
            where (i.tier, i.replicaset_name, i.current_state -> 0) <> (b.tier, b.replicaset_name, b.current_state -> 0)
            order by i.raft_id));
    else
        perform topology.append(array(
            select ('delete', 'instance', json_build_object('instance_uuid', b.uuid))::topology.change
            from before as b order by b.raft_id));
    end if;
    return null;
end
$$;

-- Events of addresses: a new address of an instance in the catalogue.
create function topology.capture_address() returns trigger
language plpgsql security definer
-- The session keeps a plan that it made for a few rows. With many rows, a nested loop in it would take too long.
set enable_nestloop = off
as $$
begin
    if tg_op = 'INSERT' then
        perform topology.append(array(
            select ('replace', 'instance', json_build_object('instance_uuid', i.uuid, 'address', a.address))::topology.change
            from now_there as a join topology._pico_instance as i using (raft_id)
            where a.connection_type = 'pgproto'
            order by raft_id));
    else
        perform topology.append(array(
            select ('replace', 'instance', json_build_object('instance_uuid', i.uuid, 'address', a.address))::topology.change
            from now_there as a
            join topology._pico_instance as i using (raft_id)
            left join before as b using (raft_id, connection_type)
            where a.connection_type = 'pgproto' and a.address is distinct from b.address
            order by raft_id));
    end if;
    return null;
end
$$;

-- Events of buckets: a range whose copy to its new owner is complete.
create function topology.capture_bucket() returns trigger
language plpgsql security definer
-- The session keeps a plan that it made for a few rows. With many rows, a nested loop in it would take too long.
set enable_nestloop = off
as $$
begin
    if tg_op = 'INSERT' then
        perform topology.append(array(
            select ('replace', 'bucket', topology.bucket_fields(n))::topology.change
            from now_there as n
            where n.state = 'copied'
            order by n.tier_name, n.bucket_id_start));
    else
        perform topology.append(array(
            select ('replace', 'bucket', topology.bucket_fields(n))::topology.change
            from now_there as n left join before as b using (tier_name, bucket_id_start)
            where n.state = 'copied'
              and (n.bucket_id_end, n.state, n.current_replicaset_name, n.target_replicaset_name)
                  is distinct from (b.bucket_id_end, b.state, b.current_replicaset_name, b.target_replicaset_name)
            order by tier_name, bucket_id_start));
    end if;
    return null;
end
$$;

-- Refuse to change the keys of a row: its past events, and rows that name it, would refer to nothing.
create function topology.keep_keys() returns trigger
language plpgsql as $$
begin
    raise exception using errcode = 'PC008',
        message = format('the name, uuid and raft id of %L cannot be changed, because past events refer to them', old.name),
        hint = 'delete the row, and insert another';
end
$$;

create trigger keys_kept before update on topology._pico_replicaset for each row
    when ((old.name, old.uuid) is distinct from (new.name, new.uuid)) execute function topology.keep_keys();
-- A comparison of rows would have other parentheses after a restore, so that the trigger would look changed.
create trigger keys_kept before update on topology._pico_instance for each row
    when (old.name is distinct from new.name or old.uuid is distinct from new.uuid or old.raft_id is distinct from new.raft_id)
    execute function topology.keep_keys();

do $$
declare
    captured record;
begin
    for captured in
        select *
        from (values ('replicaset', 'replicaset', 'insert update delete'), ('instance', 'instance', 'insert update delete'),
                     ('peer_address', 'address', 'insert update'), ('bucket', 'bucket', 'insert update')) as c(tbl, name, ops)
    loop
        execute format(
            'create trigger a_turn before insert or update or delete or truncate on topology._pico_%s '
            'for each statement execute function topology.take_turn()', captured.tbl);
        if captured.ops like '%insert%' then
            execute format(
                'create trigger insert_captured after insert on topology._pico_%s '
                'referencing new table as now_there for each statement execute function topology.capture_%s()',
                captured.tbl, captured.name);
        end if;
        if captured.ops like '%update%' then
            execute format(
                'create trigger update_captured after update on topology._pico_%s '
                'referencing old table as before new table as now_there '
                'for each statement execute function topology.capture_%s()', captured.tbl, captured.name);
        end if;
        if captured.ops like '%delete%' then
            execute format(
                'create trigger delete_captured after delete on topology._pico_%s '
                'referencing old table as before for each statement execute function topology.capture_%s()',
                captured.tbl, captured.name);
        end if;
    end loop;
end
$$;
