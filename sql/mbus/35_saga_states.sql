-- Where every saga is, why one does not get on, and forgetting those that ended.

-- That a saga is neither done nor undone in its time; null where it is, or still may be.
create function mbus.lateness(known mbus.saga) returns text
language sql stable as $$
    -- To undo it may take as long as to do it.
    select coalesce(mbus.overdue(known), (
        select format('it is not undone after %s', (clock_timestamp() - known.changed_at)::interval(0))
        where known.state = 'rolling back' and clock_timestamp() - known.changed_at > known.deadline - known.started_at))
$$;

-- Why a saga does not get on; null where it does.
create function mbus.saga_trouble(known mbus.saga) returns text
language sql stable security definer as $$
    select nullif(concat_ws('; ', mbus.lateness(known), string_agg(
        format('%s: message %s %s', concat_ws(' of ', m.kind, m.step), m.iid, t.trouble), '; ' order by m.iid)), '')
    from mbus.saga_message as m
    left join lateral (
        select m.tries - 1 + c.attempt as tries, c.consumer from mbus.claims_of(m) as c order by c.attempt desc limit 1
    ) as claimed on true
    cross join lateral (select coalesce(claimed.tries, m.tries) as tries, claimed.consumer) as c
    cross join lateral (
        select case
            when exists (select from mbus.dmq as d where d.iid = m.iid offset 0)
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

-- Whether the caller may post to one of the queues of a saga, or consume from it.
create function mbus.sees_saga(caller name, known bigint) returns boolean
language sql stable as $$
    select mbus.is_admin(caller) or exists (
        select from (
            select distinct (mbus.queue_of(m.iid)).qname from mbus.saga_message as m where m.saga = known offset 0
        ) as q
        where mbus.may(caller, 'post', q.qname) or mbus.may(caller, 'consume', q.qname))
$$;

create function mbus_sealed.saga_state(caller pgchange.caller, saga bigint) returns jsonb
language plpgsql stable security definer as $$
declare
    known mbus.sagas := (select s from mbus.sagas as s where s.id = saga);
begin
    if known.id is not null and not mbus.sees_saga(caller, saga) then
        perform mbus.deny();
    end if;
    return case when known.id is not null then to_jsonb(known) end;
end
$$;
comment on function mbus_sealed.saga_state(pgchange.caller, bigint) is
    'A saga, as mbus.sagas has it, for who may use a queue of it; null where there is none, or it was forgotten.';

-- Whether the caller may see all sagas.
create function mbus.watches_sagas(caller name) returns boolean
language sql stable as $$
    select mbus.is_admin(caller) or has_table_privilege(caller, 'mbus.sagas', 'select')
$$;

-- Whether the caller may see all sagas, or this one.
create function mbus.watches_saga(caller name, known bigint) returns boolean
language sql stable as $$
    select mbus.watches_sagas(caller) or mbus.sees_saga(caller, known)
$$;

-- The steps at which a saga is: whose turn it is to be done, or to be undone.
create function mbus.saga_at(known mbus.saga) returns text[]
language sql stable as $$
    select array(
        select m.step from mbus.saga_message as m
        where m.saga = known.id and not m.done
          and m.kind = case known.state when 'forward' then 'step' when 'rolling back' then 'compensation' end
          and not exists (select from mbus.saga_message as b where b.iid = any (m."after") and b.kind = 'step' and not b.done)
        order by m.iid)
$$;

-- Whether a message of a saga belongs to one of these queues.
create function mbus.goes_through(known bigint, queues text[]) returns boolean
language sql stable as $$
    select exists (select from mbus.saga_message as m where m.saga = known and mbus.qname_of(m.iid) = any (queues))
$$;

-- Of the latest sagas that went through each of these queues those that ended.
create function mbus.latest_ended_of(queues text[], most integer) returns setof mbus.saga
language sql stable as $$
    -- Of each queue the latest, however many sagas went through others. Those that have not ended come first in any case.
    select s.*
    from (
        select distinct x.saga from unnest(queues) as q(qname)
        cross join lateral (
            select distinct m.saga from mbus.saga_message as m where mbus.qname_of(m.iid) = q.qname order by m.saga desc limit most
        ) as x
    ) as found
    cross join lateral (
        select e.* from mbus.saga as e where e.id = found.saga and e.state in ('complete', 'rolled back') offset 0
    ) as s
$$;

create function mbus_sealed.latest_sagas(caller pgchange.caller, most integer default 100)
returns table (
    id bigint, name text, state text, steps bigint, done bigint, undone bigint, at text[], reason text, stuck text,
    started_at timestamptz, changed_at timestamptz, deadline timestamptz
)
language plpgsql stable security definer as $$
#variable_conflict use_column
declare
    sees_all boolean := mbus.watches_sagas(caller);
    queues text[] := case when not sees_all then array(
        select q.qname from mbus.queue as q where mbus.may(caller, 'post', q.qname) or mbus.may(caller, 'consume', q.qname)) end;
begin
    return query
        with not_ended as not materialized (
            select s from mbus.saga as s
            where s.state in ('forward', 'rolling back') and (sees_all or mbus.goes_through(s.id, queues))
        ),
        latest as materialized (
            -- What is stuck is among the oldest.
            select o.s, true as is_open from (
                (select n.s from not_ended as n order by (n.s).id limit most - most / 2)
                union
                (select n.s from not_ended as n order by (n.s).id desc limit most / 2)
            ) as o
            union all
            (select s, false from mbus.saga as s where sees_all and s.state in ('complete', 'rolled back') order by s.changed_at desc limit most)
            union all
            select s, false from mbus.latest_ended_of(queues, most) as s where not sees_all
        )
        select (l.s).id, (l.s).name, (l.s).state, m.steps, m.done, m.undone, mbus.saga_at(l.s), (l.s).reason,
               case when l.is_open then mbus.saga_trouble(l.s) end, (l.s).started_at,
               greatest((l.s).changed_at, m.changed_at), (l.s).deadline
        from (
            select x.* from latest as x
            order by x.is_open desc, case when x.is_open then (x.s).started_at else (x.s).changed_at end desc limit most
        ) as l
        cross join lateral (
            select count(*) filter (where m.kind = 'step') as steps, count(*) filter (where m.kind = 'step' and m.done) as done,
                   count(*) filter (where m.kind = 'compensation' and m.done) as undone, max(m.changed_at) as changed_at
            from mbus.saga_message as m where m.saga = (l.s).id
        ) as m
        where mbus.watches_saga(caller, (l.s).id)
        order by l.is_open desc, case when l.is_open then (l.s).started_at else (l.s).changed_at end desc;
end
$$;
comment on function mbus_sealed.latest_sagas(pgchange.caller, integer) is
    'Of the sagas that the caller may see those that have not ended, of many the oldest and the newest, and then the latest that ended: how '
    'many steps each has, and how many are done and undone; at which it is; why it is rolled back, and why it does not get on. Its cost does '
    'not grow with the number of those that ended.';

create function mbus_sealed.saga_steps(caller pgchange.caller, saga bigint)
returns table (
    step text, "after" text[], qname text, iid text, compensation text, state text, tries integer, error text, changed_at timestamptz
)
language plpgsql stable security definer as $$
#variable_conflict use_column
declare
    known mbus.saga := (select s from mbus.saga as s where s.id = saga_steps.saga);
    is_forward boolean := known.state in ('forward', 'complete');
    at text[] := mbus.saga_at(known);
    -- Others may have failed a try before, for the same reason even.
    cause text := (
        select m.iid from mbus.saga_message as m
        where not is_forward and m.saga = known.id and m.kind = 'step' and not m.done and m.error = known.reason
        order by m.changed_at desc limit 1);
begin
    if known.id is not null and not mbus.watches_saga(caller, known.id) then
        perform mbus.deny();
    end if;
    return query
        select m.step, array(select b.step from mbus.saga_message as b where b.iid = any (m."after") order by b.iid),
               (mbus.queue_of(m.iid)).qname, m.iid, c.iid,
               case
                   when is_forward and m.done then 'done'
                   when not is_forward and m.done and c.done then 'compensated'
                   -- What is done may be given up all the same, by another consumer that receives it.
                   when m.iid = cause or exists (select from mbus.dmq as d where d.iid = (t.turn).iid and not (t.turn).done) then 'refused'
                   when exists (select from mbus.claims_of(t.turn) as w where w.at_work and not (t.turn).done) then 'in work'
                   when is_forward then case when m.step = any (at) then 'ready' else 'waiting' end
                   when not m.done then 'left out'
                   when c.iid is null then 'done'
                   else 'to compensate'
               end,
               coalesce(x.tries, m.tries), coalesce(x.error, m.error), greatest(m.changed_at, x.changed_at)
        from mbus.saga_message as m
        left join mbus.saga_message as c on c.saga = m.saga and c.kind = 'compensation' and c.step = m.step
        cross join lateral (select case when is_forward then m else c end as turn) as t
        -- What is told of an attempt is that of the message whose turn it is, or was last.
        left join lateral (select c.* where not is_forward and m.done) as x on true
        where m.saga = known.id and m.kind = 'step'
        order by length(m.iid), m.iid;
end
$$;
comment on function mbus_sealed.saga_steps(pgchange.caller, bigint) is
    'The steps of a saga, for who may see it, each with those that it comes after. state: waiting, ready (its turn has come), in work, done, '
    'refused (it is a dead letter, or what it was refused for had the saga rolled back), to compensate, compensated, or left out: not done when '
    'the saga was rolled back. error is what its last try failed on.';

create function mbus_sealed.saga_retries(caller pgchange.caller, saga bigint) returns table (step text, due_at timestamptz)
language plpgsql stable security definer as $$
#variable_conflict use_column
declare
    known mbus.saga := (select s from mbus.saga as s where s.id = saga_retries.saga);
begin
    if known.id is not null and not mbus.watches_saga(caller, known.id) then
        perform mbus.deny();
    end if;
    return query
        select t.step, max(d.until)
        from (
            select m.step, m.iid, mbus.queue_of(m.iid) as queue from mbus.saga_message as m
            where m.saga = known.id and not m.done and m.kind in ('step', 'compensation') and mbus.turn_of(m.kind) = known.state
            offset 0
        ) as t
        -- Two steps, as entries() fails for a queue that was dropped.
        cross join lateral (select t.queue as known where (t.queue).id is not null offset 0) as q
        cross join lateral mbus.entries(q.known, t.iid) as e
        cross join lateral (
            select (mbus.message_of(q.known, e.id, null)).delayed_until::timestamptz as until where not e.gone offset 0
        ) as d
        where d.until > clock_timestamp()
        group by t.step;
end
$$;
comment on function mbus_sealed.saga_retries(pgchange.caller, bigint) is
    'The steps of a saga whose message was put back to come again later, or that of their compensation, each with the time at which it '
    'comes; for who may see the saga.';

create function mbus_sealed.saga_data(caller pgchange.caller, saga bigint) returns jsonb
language sql stable security definer as $$
    select mbus.shown((mbus.message_of(m.known, e.id, null)).data)
    from (
        select x.iid, mbus.queue_of(x.iid) as known from mbus.saga_message as x
        where x.saga = saga_data.saga order by x.kind <> 'bung', x.iid offset 0
    ) as m
    cross join lateral mbus.entries(m.known, m.iid) as e
    where (m.known).id is not null and mbus.may(caller, 'consume', (m.known).qname) and (not e.gone or mbus.is_admin(caller))
    limit 1
$$;
comment on function mbus_sealed.saga_data(pgchange.caller, bigint) is
    'What a saga was started with, as a message of it has it from whose queue the caller may consume, and that is not '
    'received, but for who may make queues; null where none is kept any more. Where it is long, that it is left out.';

create function mbus_sealed.stuck_sagas(caller pgchange.caller) returns setof text
language sql stable security definer as $$
    select format('saga %s %s is stuck: %s', s.name, s.id, s.stuck)
    from mbus.sagas as s
    where s.state in ('forward', 'rolling back') and s.stuck is not null and mbus.sees_saga(caller, s.id)
    order by s.id
$$;
comment on function mbus_sealed.stuck_sagas(pgchange.caller) is 'The sagas that do not get on without a person, of those in whose queues the caller may do something; a line for each.';

create function mbus.forget_sagas(older_than interval) returns bigint
language plpgsql security definer as $$
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
