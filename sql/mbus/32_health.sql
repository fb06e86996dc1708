-- Where every saga is, and what a person should look at.

create function mbus.lateness(known mbus.saga) returns text
language sql stable
set search_path from current
as $$
    -- To undo it may take as long as to do it.
    select coalesce(mbus.overdue(known), (
        select format('it is not undone after %s', (clock_timestamp() - known.changed_at)::interval(0))
        where known.state = 'rolling back' and clock_timestamp() - known.changed_at > known.deadline - known.started_at))
$$;
comment on function mbus.lateness(mbus.saga) is 'That a saga is neither done nor undone in its time; null where it is, or still may be.';

create function mbus.saga_trouble(known mbus.saga) returns text
language sql stable security definer
set search_path from current
as $$
    select nullif(concat_ws('; ', mbus.lateness(known), string_agg(
        format('%s: message %s %s', concat_ws(' of ', m.kind, m.step), m.iid, t.trouble), '; ' order by m.iid)), '')
    from mbus.saga_message as m
    left join lateral (
        select m.tries - 1 + c.attempt as tries, c.consumer from mbus.claims_of(m) as c order by c.attempt desc limit 1
    ) as claimed on true
    cross join lateral (select coalesce(claimed.tries, m.tries) as tries, claimed.consumer) as c
    cross join lateral (
        select case
            when exists (select from mbus.dmq as d where d.iid = m.iid)
                then 'is among the dead letters: send it again' || case when m.kind = 'step'
                    then format(', or undo the saga: mbus.saga_roll_back(%L, reason)', m.iid) else '' end
            when (mbus.queue_of(m.iid)).id is null then 'has lost its queue'
            when not exists (select from mbus.entries(mbus.queue_of(m.iid), m.iid) as e where not e.gone)
                then 'was received by somebody who did not say what became of it: ' || mbus.way_out(m)
            when c.tries > 3
                then format('is at try %s%s: %s', c.tries, ' of consumer ' || c.consumer, coalesce(m.error, 'its handler ended without a word'))
        end as trouble
    ) as t
    where m.saga = known.id and not m.done and m.kind <> 'bung' and known.state = mbus.turn_of(m.kind) and t.trouble is not null
$$;
comment on function mbus.saga_trouble(mbus.saga) is 'Why a saga does not get on; null where it does.';

create view mbus.sagas as
select s.id, s.name, s.state, s.reason,
       array(select m.step from mbus.saga_message as m where m.saga = s.id and m.kind = 'step' and m.done order by m.changed_at, m.iid) as done,
       array(select m.step from mbus.saga_message as m
             where m.saga = s.id and m.kind = 'step' and not m.done and s.state = 'forward' order by m.iid) as to_do,
       array(select m.step from mbus.saga_message as m
             where m.saga = s.id and m.kind = 'compensation' and m.done order by m.changed_at, m.iid) as undone,
       array(select m.step from mbus.saga_message as m
             where m.saga = s.id and m.kind = 'compensation' and not m.done and s.state = 'rolling back' order by m.iid) as to_undo,
       s.started_at, greatest(s.changed_at, (select max(m.changed_at) from mbus.saga_message as m where m.saga = s.id)) as changed_at,
       s.deadline, mbus.saga_trouble(s) as stuck
from mbus.saga as s;
comment on view mbus.sagas is
    'Every saga with its steps that are done, to be done, undone and to be undone; stuck is why it does not get on without a person, and '
    'null where it does.';

create function mbus.sees_saga(known bigint) returns boolean
language sql stable
set search_path from current
as $$
    select mbus.is_admin() or exists (
        select from (
            select distinct (mbus.queue_of(m.iid)).qname from mbus.saga_message as m where m.saga = known offset 0
        ) as q
        where mbus.may('post', q.qname) or mbus.may('consume', q.qname))
$$;
comment on function mbus.sees_saga(bigint) is 'Whether the session may post to one of the queues of a saga, or consume from it.';

create function mbus.saga_state(saga bigint) returns jsonb
language plpgsql stable security definer
set search_path from current
as $$
declare
    known mbus.sagas := (select s from mbus.sagas as s where s.id = saga);
begin
    if known.id is not null and not mbus.sees_saga(saga) then
        perform mbus.deny();
    end if;
    return case when known.id is not null then to_jsonb(known) end;
end
$$;
comment on function mbus.saga_state(bigint) is
    'A saga, as mbus.sagas has it, for who may use a queue of it; null where there is none, or it was forgotten.';

create function mbus.stuck_sagas() returns setof text
language sql stable security definer
set search_path from current
as $$
    select format('saga %s %s is stuck: %s', s.name, s.id, s.stuck)
    from mbus.sagas as s
    where s.state in ('forward', 'rolling back') and s.stuck is not null and mbus.sees_saga(s.id)
    order by s.id
$$;
comment on function mbus.stuck_sagas() is 'The sagas that do not get on without a person, of those in whose queues the session may do something; a line for each.';

create function mbus.forget_sagas(older_than interval) returns bigint
language plpgsql security definer
set search_path from current
as $$
declare
    forgotten bigint;
begin
    if older_than < interval '0' then
        raise invalid_parameter_value using message = format('an age of sagas cannot be negative, as %s is', older_than),
            hint = 'write it as interval ''30 days''';
    end if;
    delete from mbus.saga as s where s.state in ('complete', 'rolled back') and s.changed_at < clock_timestamp() - older_than;
    get diagnostics forgotten = row_count;
    return forgotten;
end
$$;
comment on function mbus.forget_sagas(interval) is 'Forget the sagas that ended longer ago than an age; returns how many.';

do $$
begin
    perform pgchange.register('mbus', 'queue');
end
$$;

create function mbus.status(upto integer default 1000) returns setof pgchange.consumer_status
language plpgsql volatile security definer
set search_path from current
as $$
declare
    c record;
    at jsonb;
    lag jsonb;
    batch jsonb;
    told text;
    advice text;
begin
    for c in
        select l.qname, x.name from mbus.list() as l cross join lateral unnest(l.consumers) as x(name) order by l.qname, x.name
    loop
        lag := null;
        batch := null;
        told := null;
        begin
            at := mbus.feed_position(c.qname, c.name);
            lag := mbus.feed_lag(c.qname, c.name, upto);
            batch := mbus.feed_in_work(c.qname, c.name, at);
        exception
            -- It was dropped meanwhile.
            when sqlstate 'PC002' then
                continue;
            when sqlstate 'PC003' or sqlstate 'PC004' or sqlstate 'PC005' then
                get stacked diagnostics told = message_text, advice = pg_exception_hint;
                told := told || ': ' || advice;
        end;
        return query select
            'queue', mbus.name_of(c.qname, c.name), jsonb_build_object('queue', c.qname, 'consumer', c.name),
            (at ->> 'version')::bigint,
            (lag ->> 'ready')::bigint, (lag ->> 'ready_exact')::boolean, (lag ->> 'ready_age')::double precision,
            (lag ->> 'waiting')::bigint, (lag ->> 'faults')::bigint, mbus.feed_locked(c.qname, c.name),
            (batch ->> 'id')::uuid, (batch ->> 'attempt')::integer, batch ->> 'error', (batch ->> 'claimed_at')::timestamptz,
            (batch ->> 'claimed_at')::timestamptz, told, null::text;
    end loop;
end
$$;
comment on function mbus.status(integer) is
    'Every consumer by whom the session may consume, as pgchange.status() shows it; the batch is the oldest that was claimed and is '
    'neither acked nor at work.';

create function mbus.health(many_attempts integer default 3) returns setof pgchange.finding
language sql stable security definer
set search_path from current
as $$
    select 'queue', 'error', mbus.name_of(f.qname, f.consumer),
           format('%s messages on which a selector failed, see mbus.fault, such as: %s', count(*), max(f.message)), null
    from mbus.fault as f group by f.qname, f.consumer
    union all
    select 'queue', 'error', mbus.name_of(c.qname, c.name),
           format('batch %s has failed %s times', b.batch ->> 'id', b.attempt),
           'to give it up: airflow pgchange skip ' || pgchange.shell_quoted(mbus.name_of(c.qname, c.name))
    from mbus.batch as b join mbus.consumer as c on c.id = b.consumer
    where b.attempt >= many_attempts and b.slot not in (select h.slot from mbus.held_slots(c.qname, c.name) as h)
    union all
    select 'queue', 'error', null, format('saga %s %s is stuck: %s', s.name, s.id, s.stuck), null
    from mbus.sagas as s where s.state in ('forward', 'rolling back') and s.stuck is not null
$$;
comment on function mbus.health(integer) is
    'Selectors that fail, batches that failed so often, and sagas that are stuck.';
