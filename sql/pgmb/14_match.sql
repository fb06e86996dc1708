-- Which subscriptions get which events. Conditions are evaluated by stable functions, inside exception blocks that write nothing.
-- So all conditions see the subscriptions as they were at one moment. Otherwise a subscription that is changed or replaced
-- meanwhile would get its events twice, or not at all.

create type pgmb.match as (group_id text, subscription_id text, ids text[]);
comment on type pgmb.match is 'Events that a subscription gets, in the order of their ids.';

-- The SQL of the events whose ids $1 lists; $2 is the lowest id, $3 the highest. skip_addressed leaves out the events that are
-- for a single subscription.
create function pgmb.chunk_sql(skip_addressed boolean) returns text
language sql immutable as $$
    -- Look up each id in the index, whatever the statistics say. With the bounds $2 and $3, PostgreSQL leaves out partitions.
    select 'unnest($1) as o(id) cross join lateral (select x.* from pgmb.events as x '
           'where x.id = o.id and x.id >= $2 and x.id <= $3 offset 0) as e'
           || case when skip_addressed then ' where e.subscription_id is null' else '' end
$$;

-- The SQL of the matches of a condition. addressed: some events are for a single subscription. $4 lists the subscriptions to
-- check, null for all.
create function pgmb.match_sql(condition pgmb.condition, addressed boolean) returns text
language plpgsql immutable as $$
declare
    -- If a table has no statistics yet, the planner confuses the two indexes. So this query says which index to use.
    subscribed constant text := format(
        'cross join lateral (select s.id, s.group_id from pgmb.subscriptions as s where s.condition_id %s = %s '
        'and ($4 is null or s.id = any ($4)) and (%s' || chr(10) || ')%s offset 0) as s',
        case when condition.by_params then '+ 0' else '' end, condition.id, condition.conditions_sql,
        -- PostgreSQL evaluates a condition without e only once for all events, even if it calls random(). So each condition names
        -- e.
        case when condition.of_event and condition.conditions_sql !~* '[[:<:]]e[[:>:]]' then ' and e.id <> '''' ' end);
begin
    return case when condition.by_topic then format(
        'select s.group_id, s.id as subscription_id, e.ids '
        'from (select e.topic, array_agg(e.id::text) as ids from %s group by e.topic) as e %s',
        pgmb.chunk_sql(skip_addressed => addressed), subscribed)
    else format(
        'select s.group_id, s.id as subscription_id, array_agg(e.id::text) as ids '
        'from (select e.* from %s offset 0) as e %s group by s.group_id, s.id',
        pgmb.chunk_sql(skip_addressed => addressed), subscribed)
    end;
end
$$;

-- Raise an error that names the condition at which a statement_timeout or a person cancelled dispatching, and up to five groups
-- that have it.
create function pgmb.name_condition(condition pgmb.condition, reason text) returns void
language plpgsql as $$
declare
    groups text := (
        select string_agg(quote_ident(g.group_id), ', ')
        from (select distinct s.group_id from pgmb.subscriptions as s where s.condition_id = condition.id order by 1 limit 5) as g
    );
begin
    raise exception using errcode = 'PC013',
        message = format('dispatching was cancelled at the condition %L of %s: %s', condition.conditions_sql, groups, reason),
        hint = 'if the condition is too slow or never ends, no group gets events: change or delete the subscriptions with this '
               'condition in pgmb.subscriptions';
end
$$;

-- Raise an error because there are more matches than the caller asked for at once.
create function pgmb.too_many() returns boolean
language plpgsql as $$
begin
    raise exception using errcode = 'PC014', message = 'so many events for so many subscriptions do not fit into memory';
end
$$;

-- The matches of a condition. The pairs of event and subscription for which the condition fails are left out as faults. After
-- budget faults, a subscription that fails has all the events as a single fault, without a search for the failing events. If
-- there are more than most_pairs matches, pgmb.too_many() is raised. budget and most_pairs are returned less the number found.
create function pgmb.evaluate(
    condition pgmb.condition, query text, ids text[], subscriptions text[], inout budget integer default 1000,
    inout most_pairs bigint default null, out matches pgmb.match[], out faults pgmb.fault[]
)
language plpgsql stable
set enable_hashjoin = off
set enable_mergejoin = off
set enable_seqscan = off
-- If the rows were sorted by subscription, ids would lose their order.
set enable_sort = off
set enable_hashagg = on
set max_parallel_workers_per_gather = 0
set jit = off
as $$
declare
    reason text;
    by_subscription boolean := cardinality(ids) = 1 or budget <= 0;
    half integer;
    part record;
begin
    begin
        execute 'select array_agg(row(m.group_id, m.subscription_id, m.ids)::pgmb.match), $5 - coalesce(max(m.pairs), 0) from ('
                'select q.*, sum(cardinality(q.ids)) over (rows unbounded preceding) as pairs from (' || query || ') as q) as m '
                'where $5 is null or m.pairs <= $5 or pgmb.too_many()'
        into matches, most_pairs using ids, ids[1], ids[cardinality(ids)], subscriptions, most_pairs;
        return;
    exception
        when query_canceled then
            perform pgmb.name_condition(condition, sqlerrm);
        when sqlstate 'PC014' then
            raise;
        when others or assert_failure then
            reason := sqlerrm;
    end;
    -- Failures are found by halving: first the events, and then the subscriptions. If very many fail, only the subscriptions
    -- are halved. The other subscriptions get their events in any case.
    if subscriptions is null and by_subscription then
        subscriptions := array(select s.id::text from pgmb.subscriptions as s where s.condition_id = condition.id order by 1);
    end if;
    if by_subscription and cardinality(subscriptions) <= 1 then
        faults := array(
            select (null, s.group_id, s.id, ids, reason, null)::pgmb.fault
            from pgmb.subscriptions as s where s.id = any (subscriptions));
        budget := budget - cardinality(subscriptions);
        return;
    end if;
    half := (case when by_subscription then cardinality(subscriptions) else cardinality(ids) end + 1) / 2;
    part := pgmb.evaluate(
        condition, query, case when by_subscription then ids else ids[:half] end,
        case when by_subscription then subscriptions[:half] else subscriptions end, budget, most_pairs);
    matches := part.matches;
    faults := part.faults;
    part := pgmb.evaluate(
        condition, query, case when by_subscription then ids else ids[half + 1:] end,
        case when by_subscription then subscriptions[half + 1:] else subscriptions end, part.budget, part.most_pairs);
    matches := matches || part.matches;
    faults := faults || part.faults;
    budget := part.budget;
    most_pairs := part.most_pairs;
end
$$;

-- Fix settings such as the time zone, so that a condition has the same result in every session that polls.
select pgchange.pin_settings('pgmb.evaluate(pgmb.condition, text, text[], text[], integer, bigint)');

-- Record events that were not dispatched to a subscription.
create function pgmb.note_faults(faults pgmb.fault[]) returns void
language sql as $$
    insert into pgmb.fault (group_id, subscription_id, event_ids, message)
    select f.group_id, f.subscription_id, f.event_ids, f.message from unnest(faults) as f
$$;

-- The matches of the condition TRUE, under which each subscription gets all events. The query is the same in each poll, so the
-- session keeps its plan.
create function pgmb.match_all(condition pgmb.condition, ids text[], most_pairs bigint) returns pgmb.match[]
language plpgsql stable
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set jit = off
as $$
declare
    matches pgmb.match[];
begin
    select array_agg(row(s.group_id, s.id, ids)::pgmb.match) into matches
    from (
        -- Read at most one subscription more than fits into most_pairs. The array has all ids once for each subscription, so it
        -- could be very large.
        select x.group_id, x.id from pgmb.subscriptions as x where x.condition_id = condition.id limit most_pairs / cardinality(ids) + 1
    ) as s;
    if cardinality(matches)::bigint * cardinality(ids) > most_pairs then
        perform pgmb.too_many();
    end if;
    return matches;
end
$$;

-- The conditions of which some subscription makes use, in the order of their numbers.
create function pgmb.used_conditions() returns pgmb.condition[]
language plpgsql stable
set enable_hashjoin = off
set enable_mergejoin = off
set enable_seqscan = off
as $$
begin
    -- Go from each condition with a subscription to the next by the index, so that conditions without a subscription cost nothing.
    return array(
        with recursive used(id) as (
            select min(s.condition_id) from pgmb.subscriptions as s
            union all
            select (select min(s.condition_id) from pgmb.subscriptions as s where s.condition_id > u.id)
            from used as u where u.id is not null
        )
        select c from used as u join pgmb.condition as c on c.id = u.id order by u.id);
end
$$;

-- Which subscriptions get which of the events, and the faults where a condition fails. ids must be in order. addressed: some
-- events are for a single subscription. A subscription can be listed several times, each time with other events. If there are
-- more than most_pairs matches, unless null, pgmb.too_many() is raised.
create function pgmb.matches(
    ids text[], addressed boolean, most_pairs bigint, out matches pgmb.match[], out faults pgmb.fault[]
)
language plpgsql stable
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
declare
    condition pgmb.condition;
    part record;
    more pgmb.match[];
begin
    matches := '{}';
    foreach condition in array pgmb.used_conditions() loop
        if not (condition.of_event or addressed) then
            more := pgmb.match_all(condition, ids, most_pairs);
            most_pairs := most_pairs - coalesce(cardinality(more), 0)::bigint * cardinality(ids);
            matches := matches || more;
            continue;
        end if;
        part := pgmb.evaluate(condition, pgmb.match_sql(condition, addressed), ids, null, most_pairs => most_pairs);
        most_pairs := part.most_pairs;
        matches := matches || part.matches;
        faults := faults || part.faults;
    end loop;
    if addressed then
        execute 'select array_agg(row(m.group_id, m.subscription_id, m.ids)::pgmb.match) from ('
                'select s.group_id, e.subscription_id, array_agg(e.id::text order by e.id) as ids from ('
                'select e.* from ' || pgmb.chunk_sql(skip_addressed => false)
                || ' where e.subscription_id is not null offset 0) as e '
                'left join pgmb.subscriptions as s on s.id = e.subscription_id group by s.group_id, e.subscription_id) as m'
        into more using ids, ids[1], ids[cardinality(ids)];
        faults := faults || array(
            select (
                null, null, m.subscription_id, m.ids,
                'they are only for this subscription, which was deleted: pgmb.read_events(event_ids) returns them as long as the '
                'log keeps them',
                null)::pgmb.fault
            from unnest(more) as m where m.group_id is null);
        matches := matches || array(select m from unnest(more) as m where m.group_id is not null);
    end if;
end
$$;
