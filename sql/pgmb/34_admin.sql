-- Administration: status, groups and their readers, partitions and the groups that have not read them, and dropping a group.

select pgchange.make_sealed('pgmb');

-- Of some groups at cursors, those that may have unread events, by one query for all. A group before the last gap is returned
-- without a search, so that the query is planned for few partitions.
create function pgmb.maybe_unread(gids text[], cursors text[]) returns text[]
language plpgsql stable
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set enable_sort = off
set jit = off
as $$
declare
    afters constant text[] := array(
        select pgmb.over_gap(g.id, g.cursor) from unnest(gids, cursors) with ordinality as g(id, cursor, n) order by g.n);
    lowest constant text := coalesce((select max(g.high) from pgmb.gap as g where g.group_id = any (gids)), '');
    before constant text := (select left(l.last_id, 15) || 'g' from pgmb.dispatcher as l order by l.version desc limit 1);
begin
    return array(
        select g.id from unnest(gids, afters) as g(id, after)
        where g.after collate "C" < lowest or (
            select true from pgmb.dispatched as d
            where d.group_id = g.id and d.id > g.after and d.id >= lowest and d.id < before limit 1));
end
$$;

create function pgmb_sealed.status(caller pgchange.caller, upto integer default 1000) returns setof pgchange.consumer_status
language plpgsql volatile security definer
set jit = off
as $$
declare
    held bigint[] := pgchange.locks_held();
    known record;
    run record;
    waits record;
    unread constant text[] := (
        select pgmb.maybe_unread(array_agg(c.group_id::text), array_agg(c.cursor::text)) from pgmb.cursors() as c);
begin
    if coalesce(upto < 0, true) then
        raise invalid_parameter_value using message =
            'the status cannot be shown: upto must not be negative or null; give the number up to which ready changes are counted';
    end if;
    waits := pgmb.waiting(upto);
    for known in
        select g.id, coalesce(c.elsewhere, false) as elsewhere, c.batch_id, c.batch, c.attempt, c.error, c.claimed_at, c.version as claimed,
               c.leased_by, c.leased_until,
               c.batch is not null and (c.elsewhere or c.from_version = g.version) and c.leased_until > clock_timestamp() as is_leased,
               case when not c.elsewhere or c is null then coalesce(g.last_read_event_id, '')
                    when c.batch is null then c.upto else c.after end as cursor,
               case when not c.elsewhere or c is null then g.version
                    when c.batch is null then c.version else c.from_version end as version,
               case when c.elsewhere then c.claimed_at else g.updated_at end as updated_at,
               c is null and not exists (select from pgmb.subscriptions as s where s.group_id = g.id) as unknown
        from pgmb.subscription_groups as g left join pgmb.claims as c on c.group_id = g.id
        order by g.id
    loop
        if known.id = any (unread) then
            run := pgmb.next_events(known.id, known.cursor, upto::bigint + 1);
        else
            select 0::bigint as count, null::text as lowest into run;
        end if;
        return query select
            'event', pgmb.name_of(known.id), jsonb_build_object('group', known.id), known.version,
            case when run.count > upto then greatest(run.count, pgmb.estimate_unread(known.id, known.cursor, least(upto, 100)))
                 else run.count end,
            run.count <= upto,
            pgmb.age(run.lowest),
            waits.counted, pgmb.faults(known.id),
            pgmb.lock_key(known.id) = any (held) or coalesce(known.claimed > known.version, false) and pgmb.locked(known.id),
            case when known.claimed > known.version then known.batch_id end,
            case when known.claimed > known.version then known.attempt end,
            -- An error may quote the content of an event.
            case when known.claimed > known.version and has_table_privilege(caller, 'pgmb.events', 'select') then known.error end,
            case when known.claimed > known.version then known.claimed_at end,
            known.updated_at::timestamptz, null::text,
            case when known.elsewhere then 'progress' when known.unknown then 'changes' end,
            case when known.claimed > known.version then pgchange.whole_of(known.batch) end,
            case when known.is_leased then known.leased_by end, case when known.is_leased then known.leased_until end;
    end loop;
end
$$;
comment on function pgmb_sealed.status(pgchange.caller, integer) is
    'The status of every group, as in pgchange.status(). It has the ready events and their age, the faults, and the last claimed '
    'batch if that is not acked. Also whether a session reads the group now. waiting: events that no poll has dispatched yet, for '
    'any group. If the cursor of a group is in another database, only its last claim is known here. A batch that is acked may then '
    'be shown as in work.';

-- How much of the log each of these groups keeps from being deleted. That is the size of the complete partitions, from the first
-- event that the group has not read. An estimate by the sizes of the last vacuum.
create function pgmb.kept(consumers text[]) returns table (consumer text, bytes bigint, store text)
language plpgsql stable security definer
as $$
declare
    now_id constant pgmb.event_id := pgmb.create_event_id(clock_timestamp(), 0);
    names text[];
    firsts text[];
begin
    select array_agg(n.name), array_agg(f.lowest) into names, firsts
    from pgmb.cursors() as c
    cross join lateral pgmb.name_of(c.group_id) as n(name)
    cross join lateral pgmb.next_events(c.group_id, c.cursor, 1) as f
    where n.name = any (consumers) and f.count > 0;
    return query
        with written as materialized (
            select p.upper_bound, pgchange.estimated_size(p.partition_id) as bytes
            from unnest(array['pgmb.events', 'pgmb.dispatched']::regclass[]) as t(tbl)
            cross join lateral pgmb.partitions_in(t.tbl, (select min(f) from unnest(firsts) as f), now_id) as p
            where p.upper_bound <= now_id
        )
        select f.name, sum(w.bytes)::bigint, 'event log'
        from unnest(names, firsts) as f(name, id) join written as w on w.upper_bound > f.id collate "C"
        group by f.name;
end
$$;

create function pgmb.dispatching()
returns table (
    dispatched_at timestamptz, events bigint, waiting bigint, oldest_seconds double precision, at_work integer, restored text,
    faults bigint, astray bigint
)
language plpgsql volatile security definer as $$
begin
    return query
        select d.dispatched_at, d.total, w.counted, w.age, (select min(l) from pgchange.who_locks(pgmb.dispatch_key()) as l),
               case when d.restored_at > now() - interval '1 day' then d.restored end,
               (select count(*) from (select from pgmb.fault limit 1000) as bounded),
               (select count(*) from (select from pgmb.fault as f where f.group_id is null limit 1000) as bounded)
        from pgmb.dispatcher_now() as d, pgmb.waiting(1000) as w;
end
$$;
comment on function pgmb.dispatching() is
    'The last poll that had something to dispatch, the number of events so far, how many wait and since when, and which process '
    'dispatches now. restored: what was done after a restore in the last day. faults: the number of faults; astray: those for a '
    'subscription that does not exist any more. Both are counted up to a thousand.';

create function pgmb_sealed.groups(caller pgchange.caller)
returns table (
    group_id pgmb.group_id, subscriptions bigint, topics text[], parts text[], read_upto timestamptz, moved_at timestamptz, reader integer
)
language plpgsql stable security definer
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
begin
    return query
        select c.group_id,
               (select count(*) from (select from pgmb.subscriptions as s where s.group_id = c.group_id limit 1000) as some_of_them),
               array(
                   select distinct left(t.topic, 100)
                   from unnest(w.params) as p(params)
                   cross join lateral (
                       select jsonb_path_query(p.params, 'lax $.topics[0 to 9]') #>> '{}' union all select p.params ->> 'topic'
                   ) as t(topic)
                   where t.topic is not null order by 1),
               array(
                   select distinct format('%s of %s', p.params ->> 'partition', p.params ->> 'partitions')
                   from unnest(w.params) as p(params)
                   -- Any subscriber may write any value there.
                   where p.params ->> 'partition' ~ '^[0-9]{1,20}$' and p.params ->> 'partitions' ~ '^[0-9]{1,20}$' order by 1),
               pgmb.extract_date_from_event_id(c.cursor), c.since,
               (select min(l) from pgchange.who_locks(pgmb.lock_key(c.group_id)) as l)
        from pgmb.cursors() as c
        cross join lateral (
            -- Show params only to a caller that may read the subscriptions, because params may contain names.
            select array(
                select s.params from pgmb.subscriptions as s
                where s.group_id = c.group_id and has_table_privilege(caller, 'pgmb.subscriptions', 'select') limit 10) as params
        ) as w
        order by c.group_id;
end
$$;
comment on function pgmb_sealed.groups(pgchange.caller) is
    'Every group. subscriptions: their number, up to a thousand. topics, parts: those in the params of up to ten of them. '
    'read_upto: the time up to which it has read; moved_at: its last move; reader: the process that reads it now. A caller that '
    'may not read pgmb.subscriptions gets no topics and no parts.';

select pgchange.show_sealed('pgmb');

create function pgmb.spans() returns table (partition regclass, lower timestamptz, upper timestamptz, state text)
language plpgsql stable security definer as $$
declare
    at pgmb.event_id := pgmb.create_event_id(clock_timestamp(), 0);
begin
    return query
        with cut as (
            select * from pgmb.get_partitions_and_bounds('pgmb.events'::regclass)
        ), gaps as (
            select lag(c.upper_bound, 1, '') over (order by c.lower_bound) as lower_bound, c.lower_bound as upper_bound from cut as c
            union all
            select coalesce(max(c.upper_bound), ''), 'pn' from cut as c
        ), spans as (
            select * from cut
            union all
            select pgmb.default_partition('pgmb.events'), g.lower_bound, g.upper_bound from gaps as g
            where g.lower_bound < g.upper_bound and pgmb.default_holds('pgmb.events', g.lower_bound, g.upper_bound)
        )
        select s.partition_id,
               case when s.lower_bound = '' then '-infinity' else pgmb.extract_date_from_event_id(s.lower_bound) end,
               case when s.upper_bound = 'pn' then 'infinity' else pgmb.extract_date_from_event_id(s.upper_bound) end,
               case when s.lower_bound > at then 'ahead' when s.upper_bound > at then 'current'
                    when s.upper_bound <= pgmb.retained_from(now()) then 'old' else 'recent' end
        from spans as s
        order by s.lower_bound;
end
$$;
comment on function pgmb.spans() is
    'The partitions of the events in order of their time. state: whether each is ahead, current, recent, or older than '
    'partition_retention_period. The default partition appears for each span of time that has no other partition and of which it '
    'has rows.';

create function pgmb.partitions()
returns table (partition regclass, lower timestamptz, upper timestamptz, bytes bigint, state text)
language sql stable as $$
    -- A partition that is dropped meanwhile has no size.
    select s.partition, s.lower, s.upper, coalesce(pg_catalog.pg_total_relation_size(s.partition), 0), s.state
    from pgmb.spans() as s
    order by s.lower
$$;
comment on function pgmb.partitions() is 'The rows of pgmb.spans() with the size of each partition.';

create function pgmb.unread_by(lower timestamptz, upper timestamptz, upto integer default 1000)
returns table (group_id pgmb.group_id, events bigint, exact boolean)
language plpgsql stable security definer
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set jit = off
as $$
declare
    low text := pgmb.create_event_id(lower, 0);
    high text := pgmb.create_event_id(upper, 0);
begin
    if coalesce(upto < 1, true) then
        raise invalid_parameter_value using message = 'upto must be at least 1 event';
    end if;
    return query
        select c.group_id, sum(n.events)::bigint, sum(n.slices) < upto
        from pgmb.cursors() as c
        cross join lateral (select greatest(c.cursor, low collate "C") as after) as f
        -- The rank of the last slice of a dispatch is the number of its events for the group.
        cross join lateral (
            select max(pgmb.rank_of(d.id)) - case when left(d.id, 15) = left(f.after, 15) then pgmb.rank_of(f.after) else 0 end as events,
                   count(*) as slices
            from (
                select x.id from pgmb.dispatched as x
                where x.group_id = c.group_id and x.id > f.after and x.id < high
                order by x.group_id, x.id
                limit upto
            ) as d
            group by left(d.id, 15)
        ) as n
        where c.cursor < high
        group by c.group_id
        order by c.group_id;
end
$$;
comment on function pgmb.unread_by(timestamptz, timestamptz, integer) is
    'How many events that were dispatched in a span of time each group has not read. At most upto slices of a group are read; if '
    'it has more, the number is a lower bound. The cost depends on neither backlog nor history.';

-- Whether a group exists here, by its subscriptions or by its cursor.
create function pgmb.is_known(gid text) returns boolean
language plpgsql stable security definer as $$
begin
    return exists (select from pgmb.subscription_groups as g where g.id = gid);
end
$$;

-- The address of a group, by its name in status; null if it is not here.
create function pgmb.address_of(consumer text) returns jsonb
language plpgsql stable security definer as $$
begin
    return (select pgmb.address(g.id) from pgmb.subscription_groups as g where pgmb.name_of(g.id) = address_of.consumer);
end
$$;

-- Delete a group with its subscriptions, its cursor, its faults, and the dead letters of it and its handlers; true if it was
-- here.
create function pgmb.forget(gid text) returns boolean
language plpgsql as $$
begin
    -- Wait for a running poll. Otherwise events that it dispatches to this group would go to a later group of the same name.
    perform pg_advisory_xact_lock(pgmb.dispatch_key());
    delete from pgmb.fault as f where f.group_id = gid;
    delete from pgchange.letter as l where l.kind = 'event' and l.address ->> 'group' = gid;
    delete from pgmb.subscription_groups as g where g.id = gid;
    return found;
end
$$;
