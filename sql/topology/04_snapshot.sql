-- The snapshot of the catalogue, which a client gets before events.

-- The term and index of the last event that this transaction sees, even if it was trimmed. index is 0 if the term has no event.
create function topology.now_at(out term bigint, out index bigint)
language sql stable security definer as $$
    select coalesce(t.term, 0), coalesce(greatest(l.index, g.index), 0)
    from (select) as one
    left join lateral (select o.term from topology.term as o order by o.term desc limit 1) as t on true
    left join lateral (select max(o.index) as index from topology.log as o where o.term = t.term) as l on true
    left join lateral (select max(o.index) as index from topology.trimmed as o where o.term = t.term) as g on true
$$;

-- The catalogue as events: replicasets, then instances, then active buckets. All have the (term, index) of the last event that
-- the snapshot contains; later events have a greater one. One statement, so the snapshot is consistent.
create function topology.snapshot() returns table (event json)
language sql stable security definer as $$
    -- Join here instead of calling the functions of the triggers: a call for each row would cost more than all the rest.
    with at as materialized (
        select to_char(statement_timestamp() at time zone 'utc', 'YYYY-MM-DD"T"HH24:MI:SS"+00:00"') as taken_at,
               json_build_object('term', n.term, 'index', n.index) as raft
        from topology.now_at() as n
    ), picture as (
        select 1 as part, r.name as place, 0::bigint as number, json_build_object(
                   'op', 'replace', 'map', 'replicaset', 'timestamp', at.taken_at, 'raft', at.raft,
                   'replicaset_uuid', r.uuid, 'current_master_uuid', m.uuid) as event
        from topology._pico_replicaset as r
        cross join at
        left join topology._pico_instance as m on m.name = r.current_master_name
        union all
        select 2, '', i.raft_id, json_build_object(
                   'op', 'replace', 'map', 'instance', 'timestamp', at.taken_at, 'raft', at.raft,
                   'tier', i.tier, 'replicaset_uuid', r.uuid, 'instance_uuid', i.uuid,
                   'current_state', i.current_state ->> 0, 'address', a.address)
        from topology._pico_instance as i
        cross join at
        left join topology._pico_replicaset as r on r.name = i.replicaset_name
        left join topology._pico_peer_address as a on a.raft_id = i.raft_id and a.connection_type = 'pgproto'
        union all
        select 3, b.tier_name, b.bucket_id_start, json_build_object(
                   'op', 'replace', 'map', 'bucket', 'timestamp', at.taken_at, 'raft', at.raft,
                   'tier', b.tier_name, 'state', b.state,
                   'bucket_id', json_build_object('start', b.bucket_id_start, 'end', b.bucket_id_end),
                   'current_replicaset_uuid', r.uuid)
        from topology._pico_bucket as b
        cross join at
        left join topology._pico_replicaset as r on r.name = b.current_replicaset_name
        where b.state = 'active'
    )
    select json_strip_nulls(p.event) from picture as p order by p.part, p.place, p.number
$$;

-- The buckets that are moving now, which a snapshot does not contain: a multirange for each tier; null if there are none.
create function topology.unsettled() returns jsonb
language sql stable security definer
-- Force the index of moving ranges: without statistics the planner would read all ranges.
set enable_seqscan = off
as $$
    select jsonb_object_agg(u.tier, u.buckets)
    from (
        select b.tier_name as tier, range_agg(int8range(b.bucket_id_start, b.bucket_id_end, '[]')) as buckets
        from topology._pico_bucket as b where b.state <> 'active' group by b.tier_name
    ) as u
$$;

-- The progress of the buckets that a client's snapshot did not contain. Searches the log after the position (term, index).
-- buckets: returns those without an event so far, null if there are none. term, index: returns the last position searched.
-- arrived: some of the remaining buckets have settled, so only a new snapshot contains them. settled: no bucket moves now.
create function topology.lacking(
    inout buckets jsonb, inout term bigint, inout index bigint, out arrived boolean, out settled boolean
)
language sql stable security definer as $$
    with moving as materialized (
        select u.tier, u.buckets::int8multirange from jsonb_each_text(topology.unsettled()) as u(tier, buckets)
    ), announced as (
        select l.event ->> 'tier' as tier, range_agg(int8range(
                   (l.event -> 'bucket_id' ->> 'start')::bigint, (l.event -> 'bucket_id' ->> 'end')::bigint, '[]')) as buckets
        from topology.log as l
        where (l.term, l.index) > (lacking.term, lacking.index) and l.event ->> 'map' = 'bucket'
        group by 1
    ), unannounced as (
        select k.tier, k.buckets::int8multirange - coalesce(t.buckets, '{}') as buckets
        from jsonb_each_text(lacking.buckets) as k(tier, buckets) left join announced as t using (tier)
    )
    select jsonb_object_agg(u.tier, u.buckets) filter (where not isempty(u.buckets)), n.term, n.index,
           coalesce(bool_or(not isempty(u.buckets - coalesce(m.buckets, '{}'))), false), not exists (select from moving)
    from topology.now_at() as n
    left join unannounced as u on true
    left join moving as m on m.tier = u.tier
    group by n.term, n.index
$$;

-- The latest trim that deleted events after a position; null if none did.
create function topology.trimmed_behind(after_term bigint, after_index bigint) returns topology.trimmed
language plpgsql stable as $$
begin
    return (
        select t from topology.trimmed as t
        where (t.term, t.index) > (after_term, after_index)
        order by t.term desc, t.index desc
        limit 1);
end
$$;

-- The events after a position, in order. Raises an error if some of them were trimmed.
create function topology.events(after_term bigint, after_index bigint, max_events integer default null)
returns table (term bigint, index bigint, event json)
language plpgsql stable security definer as $$
declare
    gone topology.trimmed := topology.trimmed_behind(after_term, after_index);
begin
    if gone.term is not null then
        raise exception using errcode = 'PC005',
            message = format('events behind (%s, %s) were trimmed, up to (%s, %s)', after_term, after_index, gone.term, gone.index),
            hint = 'begin anew with topology.snapshot()';
    end if;
    return query
        select l.term, l.index, l.event from topology.log as l
        where (l.term, l.index) > (after_term, after_index)
        order by l.term, l.index
        limit max_events;
end
$$;

-- The secret from which relays derive the password salts of unknown users; the first call creates it. All relays of a catalogue
-- share it, so that comparing the salts of two relays does not reveal which users exist.
create function topology.salt_secret() returns bytea
language plpgsql volatile security definer as $$
begin
    insert into topology.relay_secret default values on conflict do nothing;
    return (select r.secret from topology.relay_secret as r);
end
$$;
