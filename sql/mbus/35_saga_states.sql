-- The state of every saga, why it is stuck, and deleting sagas that have ended.

-- The reason why a saga is late: it is neither complete nor rolled back in time. Null if it is, or still can be.
create function mbus.lateness(known mbus.saga) returns text
language sql stable as $$
    -- A rollback counts as late if it takes longer than the time from the saga's start to its deadline.
    select coalesce(mbus.overdue(known), (
        select format('it is not undone after %s', (clock_timestamp() - known.changed_at)::interval(0))
        where known.state = 'rolling back' and clock_timestamp() - known.changed_at > known.deadline - known.started_at))
$$;

-- Why a saga is stuck; null if it is not.
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
                then 'was received by a consumer that recorded no outcome: ' || mbus.way_out(m)
            when c.tries > 3
                then format('is at try %s%s: %s', c.tries, ' of consumer ' || c.consumer,
                            coalesce(m.error, 'its handler ended without an error message'))
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
    'Every saga, with its steps that are done, to do, undone and to undo. stuck: why it needs a person; null if it does not.';

-- Whether the caller may post to a queue of a saga, or consume from it.
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
        perform mbus.deny(caller);
    end if;
    return case when known.id is not null then to_jsonb(known) end;
end
$$;
comment on function mbus_sealed.saga_state(pgchange.caller, bigint) is
    'A saga, as in mbus.sagas, for a caller that may use a queue of it. Null if there is no such saga, or if it was deleted.';

-- Whether the caller may see all sagas.
create function mbus.watches_sagas(caller name) returns boolean
language sql stable as $$
    select mbus.is_admin(caller) or has_table_privilege(caller, 'mbus.sagas', 'select')
$$;

-- Whether the caller may see all sagas, or this saga.
create function mbus.watches_saga(caller name, known bigint) returns boolean
language sql stable as $$
    select mbus.watches_sagas(caller) or mbus.sees_saga(caller, known)
$$;

-- The steps whose turn it is, to be done or to be undone.
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

-- The ended sagas among the latest sagas of each of these queues.
create function mbus.latest_ended_of(queues text[], most integer) returns setof mbus.saga
language sql stable as $$
    -- Look up the latest sagas of each queue by its index, however many sagas have messages in other queues. Sagas that have not
    -- ended are listed first in any case.
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
            -- Half of the sagas are the oldest, because sagas that are stuck are among those. The other half are the newest.
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
    'The sagas that the caller may see. First come sagas that have not ended; if there are many, the oldest and the newest. Then '
    'come the latest that have ended. Each has its number of steps, how many are done and undone, the present steps, the reason '
    'for a rollback, and why it is stuck. The cost does not grow with the number of ended sagas.';

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
    -- Several steps may have failed, even for the same reason; the latest caused the rollback.
    cause text := (
        select m.iid from mbus.saga_message as m
        where not is_forward and m.saga = known.id and m.kind = 'step' and not m.done and m.error = known.reason
        order by m.changed_at desc limit 1);
begin
    if known.id is not null and not mbus.watches_saga(caller, known.id) then
        perform mbus.deny(caller);
    end if;
    return query
        select m.step, array(select b.step from mbus.saga_message as b where b.iid = any (m."after") order by b.iid),
               (mbus.queue_of(m.iid)).qname, m.iid, c.iid,
               case
                   when is_forward and m.done then 'done'
                   when not is_forward and m.done and c.done then 'compensated'
                   -- A message can be done although another consumer that received it has given it up.
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
        -- The attempts and the error are those of the message whose turn it is, or was last.
        left join lateral (select c.* where not is_forward and m.done) as x on true
        where m.saga = known.id and m.kind = 'step'
        order by length(m.iid), m.iid;
end
$$;
comment on function mbus_sealed.saga_steps(pgchange.caller, bigint) is
    'The steps of a saga, for a caller that may see it, each with the steps that it comes after. The states are waiting, ready '
    '(its turn has come), in work, done, to compensate, compensated, refused and left out. refused: the step is a dead letter, or '
    'its error had the saga rolled back. left out: it was not done when the saga was rolled back. error: the error of its last '
    'attempt.';

create function mbus_sealed.saga_retries(caller pgchange.caller, saga bigint) returns table (step text, due_at timestamptz)
language plpgsql stable security definer as $$
#variable_conflict use_column
declare
    known mbus.saga := (select s from mbus.saga as s where s.id = saga_retries.saga);
begin
    if known.id is not null and not mbus.watches_saga(caller, known.id) then
        perform mbus.deny(caller);
    end if;
    return query
        select t.step, max(d.until)
        from (
            select m.step, m.iid, mbus.queue_of(m.iid) as queue from mbus.saga_message as m
            where m.saga = known.id and not m.done and m.kind in ('step', 'compensation') and mbus.turn_of(m.kind) = known.state
            offset 0
        ) as t
        -- Look up the queue first, because entries() fails for a queue that was dropped.
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
    'The steps of a saga whose message, or whose compensation''s message, was put back to be received later, each with that time. '
    'For a caller that may see the saga.';

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
    'The data with which a saga was started. They are read from a message of a queue from which the caller may consume. Only an '
    'admin sees them in messages that were received. Null if no such message is left; long data are left out.';

create function mbus_sealed.stuck_sagas(caller pgchange.caller) returns setof text
language sql stable security definer as $$
    select format('saga %s %s is stuck: %s', s.name, s.id, s.stuck)
    from mbus.sagas as s
    where s.state in ('forward', 'rolling back') and s.stuck is not null and mbus.sees_saga(caller, s.id)
    order by s.id
$$;
comment on function mbus_sealed.stuck_sagas(pgchange.caller) is
    'The sagas that are stuck, a line for each, if the caller may use a queue of theirs.';

create function mbus.forget_sagas(older_than interval) returns bigint
language plpgsql security definer as $$
declare
    forgotten bigint;
begin
    if older_than < interval '0' then
        raise invalid_parameter_value using message = format('sagas cannot be deleted by a negative age, which %s is', older_than),
            hint = 'write it as interval ''30 days''';
    end if;
    delete from mbus.saga as s where s.state in ('complete', 'rolled back') and s.changed_at < clock_timestamp() - older_than;
    get diagnostics forgotten = row_count;
    return forgotten;
end
$$;
comment on function mbus.forget_sagas(interval) is
    'Delete the sagas that ended longer ago than older_than. Returns how many were deleted.';
