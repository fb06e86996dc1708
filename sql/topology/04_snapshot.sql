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
    with at as materialized (
        select n.term, n.index, statement_timestamp() as taken_at from topology.now_at() as n
    ), picture as (
        select 1 as part, r.name as place, 0::bigint as number,
               ('replace', 'replicaset', topology.master_fields(r))::topology.change as change
        from topology._pico_replicaset as r
        union all
        select 2, '', i.raft_id, ('replace', 'instance', topology.instance_fields(i))::topology.change
        from topology._pico_instance as i
        union all
        select 3, b.tier_name, b.bucket_id_start, ('replace', 'bucket', topology.bucket_fields(b))::topology.change
        from topology._pico_bucket as b
        where b.state = 'active'
    )
    select topology.event(p.change, at.taken_at, at.term, at.index)
    from picture as p cross join at
    order by p.part, p.place, p.number
$$;
comment on function topology.snapshot() is
    'The catalogue as events, replicasets before instances before active buckets, all with the (term, index) of the last event '
    'that they contain: what follows has a greater one. One statement, so one moment.';

create function topology.unsettled() returns boolean
language sql stable security definer
set search_path = pg_catalog, topology, pg_temp
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
