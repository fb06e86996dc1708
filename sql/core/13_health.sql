-- What a person should look at, of every feed, with the call that mends it.

create type pgchange.finding as (kind text, severity text, consumer text, told text, call text);
comment on type pgchange.finding is
    'Something that a person should look at. kind: of which schema it is; severity: error where changes do not come or are lost, '
    'warning for what may lead there; consumer: whom it is about, if it is one; told: what is wrong; call: what mends it, in SQL or '
    'for the shell, and as whom; null where that is not one call.';

-- A number of things, in words.
create function pgchange.many(count bigint, what text) returns text
language sql immutable as $$
    select format('%s %s', count, what) || case when count = 1 then '' else 's' end
$$;

-- Consumers that are held back, or whose batch has failed that often; the call gives the batch up, where nothing can mend it.
-- standing: how they stand, for who has asked pgchange.status() already.
create function pgchange.consumers_health(many_attempts integer default 3, standing pgchange.consumer_status[] default null)
returns setof pgchange.finding
language sql volatile as $$
    select s.kind, line.severity, s.consumer, line.told, line.call
    from unnest(coalesce(standing, array(select c from pgchange.status() as c))) as s
    join pgchange.registered as r using (kind)
    cross join lateral (
        select case when s.ready is null then 'error' else 'warning' end,
               case when s.waiting > 0 then format('%s waiting for an older transaction: ', pgchange.many(s.waiting, 'change')) else '' end
                   || s.held_back_by,
               null
        where s.held_back_by is not null
        union all
        select 'error', format('batch %s has failed %s', s.batch_id, pgchange.many(s.attempt, 'time')) || coalesce(': ' || s.error, ''),
               'to give it up: airflow pgchange skip ' || pgchange.shell_quoted(s.consumer)
        where s.attempt >= many_attempts and not s.at_work and not r.tells_of_batches
    ) as line(severity, told, call)
$$;

-- Feeds that cannot be watched, as whoever watches them has noted lately.
create function pgchange.watchers_health(lately interval default '10 minutes') returns setof pgchange.finding
language sql stable as $$
    select w.kind, 'error', w.feed, format('it cannot be watched by %I since %s: %s', w.watched_by, w.since::timestamptz(0), w.error), null
    from pgchange.watchers() as w
    where w.error is not null and w.looked_at > clock_timestamp() - lately
$$;

-- Consumers that have dead letters, of those that the caller may see.
create function pgchange.letters_health() returns setof pgchange.finding
language sql stable as $$
    select 'letters', 'warning', l.consumer,
           format('%s since %s', pgchange.many(count(*), 'dead letter'), min(l.given_up_at)::timestamptz(0)),
           'airflow pgchange letters list --consumer ' || pgchange.shell_quoted(l.consumer)
    from pgchange.letter as l
    where not l.on_its_way
    group by l.consumer
    order by l.consumer
$$;

-- The transaction that holds an advisory lock and has been open for so long, with the call that ends it; told is the text with %s for
-- the transaction. A warning if nobody lets this role see when it began.
create function pgchange.lock_health(kind text, key bigint, told text, long_wait interval default '10 seconds')
returns setof pgchange.finding
language sql volatile as $$
    select kind, case when h.since is null then 'warning' else 'error' end, null, format(lock_health.told, h.told), 'to end it: ' || h.call
    from pgchange.lock_holder(key) as h
    where coalesce(h.since < clock_timestamp() - long_wait, true)
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
            -- What another try mends is the caller's to try again, here and below.
            when transaction_rollback or lock_not_available then
                raise;
            when others then
                raise warning 'what is wrong with % is left out: %', known.schema, sqlerrm;
        end;
    end loop;
    return query select * from pgchange.watchers_health();
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
        -- Of each kind it was warned already.
        when insufficient_privilege then
            null;
        when others then
            raise warning 'how consumers stand is left out: %', sqlerrm;
    end;
end
$$;
comment on function pgchange.health(pgchange.consumer_status[]) is
    'What a person should look at, as far as the caller may see it. What cannot be told is left out with a warning. standing: what '
    'pgchange.status() has just said, for who has asked it.';
