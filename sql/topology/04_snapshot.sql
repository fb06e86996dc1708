-- The whole picture, as a client gets it before it hears of changes.

create function topology.now_at(out term bigint, out index bigint)
language sql stable security definer
set search_path = pg_catalog, topology, pg_temp
as $$
    select coalesce(l.term, t.term, 0), coalesce(l.index, 0)
    from (select) as one
    left join lateral (select o.term from topology.term as o order by o.term desc limit 1) as t on true
    left join lateral (
        select g.term, g.index from topology.log as g where g.term = t.term order by g.index desc limit 1) as l on true
$$;
comment on function topology.now_at() is
    'The last event that this transaction sees: its term and index; index 0 for a term without any.';

create function topology.snapshot() returns table (event json)
language sql stable security definer
set search_path = pg_catalog, topology, pg_temp
as $$
    -- Joined and built here: a call of the functions that make one event would cost more than all the rest of a row.
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
comment on function topology.snapshot() is
    'The catalogue as events, replicasets before instances before active buckets, all with the (term, index) of the last event '
    'that they contain: what follows has a greater one. One statement, so one moment.';

create function topology.unsettled() returns boolean
language sql stable security definer
set search_path = pg_catalog, topology, pg_temp
-- There is an index of what is on its way; without statistics every range would be looked at instead.
set enable_seqscan = off
as $$
    select exists (select from topology._pico_bucket as b where b.state <> 'active')
$$;
comment on function topology.unsettled() is
    'Whether ranges of buckets are on their way: a snapshot that is taken now is without them.';

create function topology.events(after_term bigint, after_index bigint, max_events integer default null)
returns table (term bigint, index bigint, event json)
language sql stable security definer
set search_path = pg_catalog, topology, pg_temp
as $$
    select l.term, l.index, l.event from topology.log as l
    where (l.term, l.index) > (after_term, after_index)
    order by l.term, l.index
    limit max_events
$$;
comment on function topology.events(bigint, bigint, integer) is 'What happened behind an event, in order.';
