-- Findings of every feed that need attention, each with the call that fixes it.

create type pgchange.finding as (kind text, severity text, consumer text, told text, call text);
comment on type pgchange.finding is
    'Something that needs attention. kind: the kind of its feed or schema. severity: error if changes are lost or do not arrive, '
    'warning for a possible cause of that. consumer: the consumer, if the finding is about a consumer. told: the problem. call: '
    'the call that fixes it, in SQL or for the shell, and as which role; null if a single call cannot fix it.';

-- A number with a noun, such as 1 change or 2 changes.
create function pgchange.many(count bigint, what text) returns text
language sql immutable as $$
    select format('%s %s', count, what) || case when count = 1 then '' else 's' end
$$;

-- The watcher of each feed that looked last. Names of watched feeds are cut at 600 characters. elsewhere: watchers that another
-- database has recorded.
create function pgchange.latest_watchers(elsewhere pgchange.watcher[] default '{}') returns setof pgchange.watcher
language sql stable as $$
    select distinct on (w.kind, w.feed) w.*
    from (select h.* from pgchange.watchers() as h union all select e.* from unnest(elsewhere) as e) as w
    order by w.kind, w.feed, w.looked_at desc
$$;

-- Whether a watcher has not looked lately, and did not end in the normal way. A sensor ends when its last look has started
-- work; then the consumer has made progress since.
create function pgchange.has_stopped_looking(w pgchange.watcher, s pgchange.consumer_status, lately interval default '10 minutes')
returns boolean
language sql volatile as $$
    select w.looked_at < clock_timestamp() - lately
       and (w.woke_at > w.looked_at - interval '10 seconds' and greatest(s.claimed_at, s.updated_at) > w.woke_at) is not true
$$;

-- Why a consumer is behind, as far as the database can tell. w: the watcher that looked at it last, or null.
create function pgchange.why_behind(s pgchange.consumer_status, w pgchange.watcher) returns text
language sql volatile as $$
    select case
        when s.at_work then
            'a task is at work on it' || coalesce(', on a batch claimed at ' || s.claimed_at::timestamptz(0), '')
            || case when s.leased_until is not null then
                   format(', leased by %s until %s', s.leased_by, s.leased_until::timestamptz(0)) else '' end
            || case when s.attempt > 1 then format(', at attempt %s', s.attempt) || coalesce(', after: ' || s.error, '') else '' end
        when s.batch_id is not null and s.error is not null then format('attempt %s at batch %s failed: %s', s.attempt, s.batch_id, s.error)
        when s.batch_id is not null then
            format('attempt %s at batch %s began at %s and did not finish', s.attempt, s.batch_id, s.claimed_at::timestamptz(0))
        when s.held_back_by is not null and coalesce(s.ready, 0) = 0 then s.held_back_by
        when w.looked_at is not null and pgchange.has_stopped_looking(w, s) then
            format('no watcher has looked at it since %s', w.looked_at::timestamptz(0))
        when w.error is not null then format('its watcher cannot look: %s', w.error)
        when w.looked_at is not null then
            'its watcher looks, but no task claims the changes'
            || coalesce('; it last woke a run at ' || w.woke_at::timestamptz(0), '; it has woken no run')
        when s.version > 0 then
            'no task is at work on it' || coalesce('; its last progress was at ' || s.updated_at::timestamptz(0), '')
        else 'no task has ever worked on it'
    end
$$;

-- How many bytes each of these consumers keeps from being trimmed, and in which store. A schema whose consumers keep something
-- has kept(consumers text[]), which returns the consumer, the bytes and the name of the store.
create function pgchange.kept(standing pgchange.consumer_status[]) returns table (kind text, consumer text, bytes bigint, store text)
language plpgsql volatile as $$
declare
    known record;
begin
    for known in
        select r.schema, r.kind, array_agg(s.consumer) as consumers
        from unnest(standing) as s
        join pgchange.registered as r on r.kind = s.kind
        join pg_namespace as n on n.nspname = r.schema
        join pg_proc as p on p.pronamespace = n.oid and p.proname = 'kept'
        where has_schema_privilege(n.oid, 'usage') and has_function_privilege(p.oid, 'execute')
        group by r.schema, r.kind
    loop
        continue when not pgchange.ours(known.schema);
        return query execute format('select %L, k.consumer, k.bytes, k.store from %I.kept($1) as k', known.kind, known.schema)
        using known.consumers;
    end loop;
end
$$;

-- How much a consumer keeps, in words that follow the reason why it is behind. Less than 1 GB is not worth attention.
create function pgchange.told_kept(bytes bigint, store text) returns text
language sql immutable as $$
    select case when bytes >= 1073741824
                then format('; it keeps about %s GB of the %s', round(bytes / 1073741824.0), store) else '' end
$$;

-- The status of consumers, with the watcher that looked last at each, why each is behind, and how much it keeps. why is null if
-- the consumer has no changes before it.
create function pgchange.explained(standing pgchange.consumer_status[] default null, elsewhere pgchange.watcher[] default '{}')
returns table (one pgchange.consumer_status, watcher pgchange.watcher, why text, keeps text)
language sql volatile as $$
    with known as materialized (
        select x as one, coalesce((x).ready, 0) + coalesce((x).waiting, 0) > 0 or (x).held_back_by is not null as has_changes
        from unnest(coalesce(standing, array(select c from pgchange.status() as c))) as x
    ), kept as materialized (
        select k.* from pgchange.kept(array(select s.one from known as s where s.has_changes)) as k
    )
    select s.one, w.one, case when s.has_changes then pgchange.why_behind(s.one, w.one) || h.keeps end, h.keeps
    from known as s
    left join (select x as one from pgchange.latest_watchers(elsewhere) as x) as w
        on (w.one).kind = (s.one).kind and (w.one).feed = left((s.one).consumer, 600)
    left join kept as k on k.kind = (s.one).kind and k.consumer = (s.one).consumer
    cross join lateral (select coalesce(pgchange.told_kept(k.bytes, k.store), '')) as h(keeps)
$$;

create function pgchange.reasons(standing pgchange.consumer_status[] default null, elsewhere pgchange.watcher[] default '{}')
returns table (kind text, consumer text, why text)
language sql volatile as $$
    select (e.one).kind, (e.one).consumer, e.why from pgchange.explained(standing, elsewhere) as e where e.why is not null
$$;
comment on function pgchange.reasons(pgchange.consumer_status[], pgchange.watcher[]) is
    'Why each consumer with changes before it is behind. A task is at work, its batch failed, a transaction holds it back, no '
    'watcher looks, or no task claims them. The reason also says how much it keeps from being trimmed, if that is 1 GB or more. '
    'standing: the rows of pgchange.status(), if the caller has just read them. elsewhere: the rows of pgchange.watchers() in the '
    'database with the progress of consumers whose changes are here.';

-- Whether the lag of a consumer exceeds a limit. A null limit is no limit.
create function pgchange.is_behind(s pgchange.consumer_status, max_age interval, max_changes bigint) returns boolean
language sql immutable as $$
    select coalesce(s.ready > 0 and s.oldest_seconds > extract(epoch from max_age), false)
        or coalesce(s.ready + coalesce(s.waiting, 0) > max_changes, false)
$$;

-- How many changes are ready for a consumer, and the age of the oldest, in words.
create function pgchange.told_ready(s pgchange.consumer_status) returns text
language sql stable as $$
    select case when s.ready_exact is false then 'about ' else '' end || pgchange.many(s.ready, 'change') || ' ready'
        || case when s.waiting > 0 then format(' and %s waiting', s.waiting) else '' end
        || coalesce(', the oldest for ' || justify_hours(make_interval(secs => round(s.oldest_seconds::numeric)::double precision)), '')
$$;

-- How many changes are ready, as pgchange.told_ready() says it, with the limits that this lag exceeds.
create function pgchange.told_behind(s pgchange.consumer_status, max_age interval, max_changes bigint) returns text
language sql stable as $$
    select format('%s (limit: %s)', pgchange.told_ready(s),
                  concat_ws(', ', max_age::text, case when max_changes is not null then pgchange.many(max_changes, 'change') end))
$$;

-- Findings about consumers. A consumer is held back by a transaction, its batch has failed many times, its lag exceeds the limit,
-- or its watcher has stopped looking. standing: the rows of pgchange.status(), if the caller has just read them.
create function pgchange.consumers_health(many_attempts integer default 3, standing pgchange.consumer_status[] default null)
returns setof pgchange.finding
language sql volatile as $$
    select (s.one).kind, line.severity, (s.one).consumer, line.told, line.call
    from pgchange.explained(standing) as s
    join pgchange.registered as r on r.kind = (s.one).kind
    cross join lateral pgchange.lag_limit_of((s.one).kind, (s.one).consumer) as l
    cross join lateral (
        select case when (s.one).ready is null then 'error' else 'warning' end,
               case when (s.one).waiting > 0
                    then format('%s waiting for an older transaction: ', pgchange.many((s.one).waiting, 'change')) else '' end
                   || (s.one).held_back_by || s.keeps,
               null
        where (s.one).held_back_by is not null
        union all
        select 'error',
               format('batch %s has failed %s', (s.one).batch_id, pgchange.many((s.one).attempt, 'time')) || coalesce(': ' || (s.one).error, ''),
               'to give it up: airflow-pgchange skip ' || pgchange.shell_quoted((s.one).consumer) || ' --reason ''...'''
        where (s.one).attempt >= many_attempts and not (s.one).at_work and not r.tells_of_batches
        union all
        select case when (s.one).at_work then 'warning' else 'error' end,
               pgchange.told_behind(s.one, l.max_age, l.max_changes) || ': ' || s.why,
               format('if this lag is acceptable: select pgchange.limit_lag(%L, max_age => null)', (s.one).consumer)
        where pgchange.is_behind(s.one, l.max_age, l.max_changes)
        union all
        select 'error', format('%s, and %s', pgchange.told_ready(s.one), s.why), null
        where coalesce((s.one).ready, 0) + coalesce((s.one).waiting, 0) > 0 and not (s.one).at_work and (s.one).batch_id is null and pgchange.has_stopped_looking(s.watcher, s.one)
          and not pgchange.is_behind(s.one, l.max_age, l.max_changes)
    ) as line(severity, told, call)
$$;

-- Feeds that a watcher could not read lately.
create function pgchange.watchers_health(lately interval default '10 minutes') returns setof pgchange.finding
language sql stable as $$
    select w.kind, 'error', w.feed, format('it cannot be watched by %I since %s: %s', w.watched_by, w.since::timestamptz(0), w.error), null
    from pgchange.watchers() as w
    where w.error is not null and w.looked_at > clock_timestamp() - lately
$$;

-- Consumers with dead letters, as far as the caller may see them. The letters of each are counted up to a thousand.
create function pgchange.letters_health() returns setof pgchange.finding
language plpgsql stable
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set jit = off
as $$
begin
    return query
        -- From consumer to consumer by the index, however many letters there are.
        with recursive named(consumer) as (
            (select l.consumer from pgchange.letter as l where not l.on_its_way order by l.consumer limit 1)
            union all
            select (
                select l.consumer from pgchange.letter as l
                where not l.on_its_way and l.consumer > n.consumer order by l.consumer limit 1)
            from named as n where n.consumer is not null
        )
        select 'letters', 'warning', n.consumer,
               format('%s%s since %s', case when k.letters > 1000 then 'more than ' end,
                      pgchange.many(least(k.letters, 1000), 'dead letter'), k.since::timestamptz(0)),
               'airflow-pgchange letters list --consumer ' || pgchange.shell_quoted(n.consumer)
        from named as n
        cross join lateral (
            select count(*), min(b.given_up_at)
            from (
                select l.given_up_at from pgchange.letter as l
                where l.consumer = n.consumer and not l.on_its_way order by l.consumer, l.given_up_at limit 1001
            ) as b
        ) as k(letters, since)
        where n.consumer is not null;
end
$$;

-- The transaction that has held an advisory lock for longer than long_wait, with the call that ends it. told: the finding, with
-- %s for the transaction. If this role cannot see when the transaction began, the finding is a warning.
create function pgchange.lock_health(kind text, key bigint, told text, long_wait interval default '10 seconds')
returns setof pgchange.finding
language sql volatile as $$
    select kind, case when h.since is null then 'warning' else 'error' end, null, format(lock_health.told, h.told), 'to end it: ' || h.call
    from pgchange.lock_holder(key) as h
    where coalesce(h.since < clock_timestamp() - long_wait, true)
$$;

create table pgchange.held (
    kind text primary key references pgchange.registered (kind) on delete cascade,
    consumer text,
    told text not null,
    held_at timestamptz not null default clock_timestamp()
);
comment on table pgchange.held is
    'Feeds whose history is larger than its limits, retention_bytes or retention_count, because a consumer has not processed it. '
    'As of the last trimming.';

-- Record which consumer keeps the history of a feed above its limits. Deletes the record if told is null.
create function pgchange.note_held(kind text, consumer text, told text) returns void
language sql as $$
    delete from pgchange.held as h where h.kind = note_held.kind;
    insert into pgchange.held (kind, consumer, told) select note_held.kind, note_held.consumer, note_held.told where note_held.told is not null;
$$;

-- Findings about history above its limits.
create function pgchange.retention_health() returns setof pgchange.finding
language sql stable as $$
    select h.kind, 'warning', h.consumer, h.told, null
    from pgchange.held as h join pgchange.registered as r on r.kind = h.kind
    where h.held_at > now() - interval '1 day' and pgchange.ours(r.schema)
    order by h.kind
$$;

-- The number of rows of a table, as PostgreSQL last counted them. If they were never counted, count them now.
create function pgchange.estimated_rows(tbl regclass) returns bigint
language plpgsql stable as $$
declare
    estimated bigint := (select c.reltuples::bigint from pg_class as c where c.oid = tbl);
begin
    if estimated < 0 then
        execute format('select count(*) from %s', tbl) into estimated;
    end if;
    return estimated;
end
$$;

-- Refuse limits of a history if all of them are null.
create function pgchange.check_retention(retention interval, retention_bytes bigint, retention_count bigint) returns void
language plpgsql immutable as $$
begin
    if num_nonnulls(retention, retention_bytes, retention_count) = 0 or retention < interval '0' or retention_bytes < 0 or retention_count < 0 then
        raise invalid_parameter_value using
            message = 'the history cannot be trimmed: how much history stays is retention, such as interval ''30 days'', '
                      'retention_bytes or retention_count, none of them negative';
    end if;
end
$$;

create function pgchange.health(standing pgchange.consumer_status[] default null) returns setof pgchange.finding
language plpgsql volatile
set client_min_messages = warning
as $$
declare
    known record;
begin
    for known in
        select r.schema from pgchange.registered as r
        where exists (
            select from pg_proc as p join pg_namespace as n on n.oid = p.pronamespace
            where (n.nspname, p.proname) = (r.schema, 'health'))
        order by r.schema
    loop
        continue when not pgchange.ours(known.schema);
        begin
            return query execute format('select * from %I.health()', known.schema);
        exception
            -- The caller can retry after a rollback or a lock timeout, here and below.
            when transaction_rollback or lock_not_available then
                raise;
            when others then
                raise warning 'the findings of % are left out: %', known.schema,
                    pgchange.with_grant(known.schema, sqlstate, sqlerrm);
        end;
    end loop;
    return query select * from pgchange.watchers_health();
    return query select * from pgchange.retention_health();
    begin
        return query select * from pgchange.letters_health();
    exception
        when transaction_rollback or lock_not_available then
            raise;
        when others then
            raise warning 'dead letters are left out: %', sqlerrm;
    end;
    begin
        return query select * from pgchange.consumers_health(standing => health.standing);
    exception
        when transaction_rollback or lock_not_available then
            raise;
        -- A role that may not see a kind of consumers has already got a warning about that kind from pgchange.status().
        when insufficient_privilege then
            null;
        when others then
            raise warning 'the findings about consumers are left out: %', sqlerrm;
    end;
end
$$;
comment on function pgchange.health(pgchange.consumer_status[]) is
    'Findings that need attention, as far as the caller may see them. Findings that cannot be read are left out with a warning. '
    'standing: the rows of pgchange.status(), if the caller has just read them.';
