-- Trying again, and sagas: steps that are all done, or all undone.
--
-- A saga is two sequences of messages: its steps and an end, and behind a bung, which only mbus.take() gets, their compensations and
-- an end of those. Who rolls back takes the bung, which sets the compensations free, and what is left of the steps; the end of the
-- steps takes the bung and the compensations. A message that could not be taken, because somebody has it in hand, is told
-- by the saga's state that its turn is over.

create function mbus.try_again(msgiid text, delay interval default interval '1 minute', error text default null) returns integer
language plpgsql security definer
set search_path from current
as $$
declare
    known mbus.queue := mbus.queue_of(msgiid);
    message record;
    tries integer;
begin
    if known.id is null then
        raise undefined_object using message = format('Unknown queue:%s', msgiid), hint = 'a message is named by its iid';
    end if;
    perform mbus.demand('consume', known.qname);
    execute format('select l.data, l.headers, l.properties, l.expires from mbus.%I as l where l.id = $1', 'log$' || known.qname)
    into message using (select max(e.id) from mbus.entries(known, msgiid) as e);
    if message is null then
        raise undefined_object using message = format('there is no message %s', msgiid), hint = 'put it back in the transaction that received it';
    end if;
    tries := coalesce((message.properties -> 'tries')::integer, 1) + 1;
    -- Who may receive it may put it back, also without the right to post.
    execute format(
        'insert into mbus.%I (data, headers, properties, delayed_until, expires, iid, only_for) values ($1, $2, $3, $4, $5, $6, $7)',
        'log$' || known.qname)
    using message.data, message.headers,
        coalesce(message.properties, '') || hstore('tries', tries::text) || case when error is null then '' else hstore('error', error) end,
        clock_timestamp() + delay, message.expires, msgiid, mbus.got_now(known, msgiid);
    return tries;
end
$$;
comment on function mbus.try_again(text, interval, text) is
    'Put a message back that this transaction received, under its id, to come again after a delay; its property tries counts, error says '
    'what it failed on. Returns which try the next one is.';

create table mbus.saga (
    id bigint generated always as identity primary key,
    name text not null,
    state text not null default 'forward' check (state in ('forward', 'complete', 'rolling back', 'rolled back')),
    reason text,
    started_at timestamptz not null default clock_timestamp(),
    changed_at timestamptz not null default clock_timestamp()
);
comment on table mbus.saga is 'Every saga that was started, and what has become of it. mbus.sagas shows them with their steps.';

create table mbus.saga_message (
    saga bigint not null references mbus.saga on delete cascade,
    iid text primary key,
    kind text not null check (kind in ('step', 'end', 'bung', 'compensation', 'rolled back')),
    step text,
    done boolean not null default false,
    tries integer not null default 1,
    error text,
    changed_at timestamptz not null default clock_timestamp()
);
create index on mbus.saga_message (saga);
comment on table mbus.saga_message is
    'The messages of sagas. kind: a step, the end of the steps, the bung, a compensation, the end of the compensations.';

create function mbus.start_saga(description jsonb, data hstore) returns bigint
language plpgsql security definer
set search_path from current
as $$
declare
    bung text := mbus.get_iid(description ->> 'bungs');
    final text := mbus.get_iid(description ->> 'end');
    known bigint;
    each_step record;
    steps jsonb := '{}';
    compensations text[] := '{}';
    rolled_back text;
    last_ones text[];
begin
    perform mbus.demand('post', q)
    from (
        select description ->> 'rolled_back' as q
        union select s ->> k from jsonb_array_elements(description -> 'steps') as s, unnest(array['queue', 'compensation']) as k
    ) as queues where q is not null;
    insert into mbus.saga (name) values (description ->> 'name') returning id into known;
    for each_step in
        select s ->> 'name' as name, s ->> 'queue' as queue, s ->> 'compensation' as compensation,
               array(select jsonb_array_elements_text(s -> 'after')) as "after"
        from jsonb_array_elements(description -> 'steps') with ordinality as x(s, n) order by n
    loop
        steps := steps || jsonb_build_object(each_step.name, mbus.saga_post(
            known, 'step', each_step.name, each_step.queue, data,
            array(select steps ->> a from unnest(each_step."after") as a), hstore('bung', bung)));
        if each_step.compensation is not null then
            compensations := compensations || mbus.saga_post(
                known, 'compensation', each_step.name, each_step.compensation, data, array[bung]);
        end if;
    end loop;
    rolled_back := mbus.saga_post(
        known, 'rolled back', null, description ->> 'rolled_back', data, array[bung] || compensations);
    perform mbus.saga_post(
        known, 'bung', null, description ->> 'bungs', data, '{}',
        hstore('id_to_take', (array(select i.value from jsonb_each_text(steps) as i) || final)::text), bung);
    last_ones := array(
        select steps ->> (s ->> 'name') from jsonb_array_elements(description -> 'steps') as s
        where not exists (select from jsonb_array_elements(description -> 'steps') as x where x -> 'after' ? (s ->> 'name')));
    perform mbus.saga_post(
        known, 'end', null, description ->> 'end', data, last_ones,
        hstore('id_to_take', (compensations || rolled_back || bung)::text), final);
    return known;
end
$$;
comment on function mbus.start_saga(jsonb, hstore) is
    'Post the messages of a saga, each with data; returns its number. The description is {name, bungs, end, rolled_back: queues, '
    'steps: [{name, queue, compensation: queue or null, after: [names]}]}, each step behind those that it comes after.';

create function mbus.saga_post(
    known bigint, kind text, step text, qname text, data hstore, "after" text[], properties hstore default '', iid text default null
) returns text
language plpgsql
set search_path from current
as $$
declare
    posted text := mbus.post(
        qname, data, case when "after" = '{}' then '' else hstore('consume_after', "after"::text) end,
        properties || hstore(array['saga', known::text, 'kind', kind, 'step', step]), iid => saga_post.iid);
begin
    insert into mbus.saga_message (saga, iid, kind, step) values (known, posted, kind, step);
    return posted;
end
$$;
comment on function mbus.saga_post(bigint, text, text, text, hstore, text[], hstore, text) is 'Post a message of a saga, and note whose it is.';

create function mbus.turn_of(kind text) returns text
language sql immutable
as $$ select case when kind in ('step', 'end') then 'forward' else 'rolling back' end $$;
comment on function mbus.turn_of(text) is 'The state of a saga in which a kind of message has its turn.';

create function mbus.saga_turn(msgiid text) returns jsonb
language plpgsql stable security definer
set search_path from current
as $$
begin
    perform mbus.demand('consume', (mbus.queue_of(msgiid)).qname);
    return (
        select jsonb_build_object(
            'saga', s.id, 'name', s.name, 'kind', m.kind, 'step', m.step, 'tries', m.tries, 'reason', s.reason,
            'was_done', exists (select from mbus.saga_message as x where x.saga = s.id and x.kind = 'step' and x.step = m.step and x.done))
        from mbus.saga_message as m join mbus.saga as s on s.id = m.saga
        where m.iid = msgiid and not m.done and s.state = mbus.turn_of(m.kind));
end
$$;
comment on function mbus.saga_turn(text) is
    'What the message of a saga that was received asks for; null where its turn is over, or it is no saga''s: then there is nothing to do.';

create function mbus.saga_done(msgiid text) returns boolean
language plpgsql security definer
set search_path from current
as $$
declare
    message mbus.saga_message;
    known mbus.saga;
begin
    perform mbus.demand('consume', (mbus.queue_of(msgiid)).qname);
    select m.* into message from mbus.saga_message as m where m.iid = msgiid;
    if message.kind in ('end', 'rolled back') then
        update mbus.saga as s set
            state = case message.kind when 'end' then 'complete' else 'rolled back' end, changed_at = clock_timestamp()
        where s.id = message.saga and s.state = mbus.turn_of(message.kind)
        returning s.* into known;
    else
        -- Nobody rolls back between this and the commit.
        select s.* into known from mbus.saga as s where s.id = message.saga and s.state = mbus.turn_of(message.kind) for share;
    end if;
    if known.id is null then
        return false;
    end if;
    update mbus.saga_message as m set done = true, error = null, changed_at = clock_timestamp() where m.iid = msgiid and not m.done;
    if found and message.kind = 'end' then
        perform mbus.take_rest(known.id, array['bung', 'compensation', 'rolled back'], msgiid);
    end if;
    return found or message.kind = 'end';
end
$$;
comment on function mbus.saga_done(text) is
    'Note that what the message of a saga asks for is done, in the transaction that receives it; false where its turn is over, so that '
    'nothing of it may be kept.';

create function mbus.saga_try_again(msgiid text, delay interval, error text) returns boolean
language plpgsql security definer
set search_path from current
as $$
begin
    if mbus.saga_turn(msgiid) is null then
        return false;
    end if;
    update mbus.saga_message as m set
        tries = mbus.try_again(msgiid, delay, saga_try_again.error), error = saga_try_again.error, changed_at = clock_timestamp()
    where m.iid = msgiid;
    return true;
end
$$;
comment on function mbus.saga_try_again(text, interval, text) is
    'Put the message of a saga back, in the transaction that received it, to come again after a delay; false where its turn is over.';

create function mbus.saga_roll_back(msgiid text, reason text) returns boolean
language plpgsql security definer
set search_path from current
as $$
declare
    known bigint;
begin
    perform mbus.demand('consume', (mbus.queue_of(msgiid)).qname);
    update mbus.saga as s set state = 'rolling back', reason = saga_roll_back.reason, changed_at = clock_timestamp()
    from mbus.saga_message as m
    where m.iid = msgiid and s.id = m.saga and s.state = 'forward'
    returning s.id into known;
    if known is null then
        return false;
    end if;
    update mbus.saga_message as m set error = saga_roll_back.reason, changed_at = clock_timestamp() where m.iid = msgiid;
    perform mbus.take_rest(known, array['bung', 'step', 'end'], msgiid);
    return true;
end
$$;
comment on function mbus.saga_roll_back(text, text) is
    'Roll back the saga of a message that was received: take the bung, which starts the compensations, and the rest of its steps. False '
    'where somebody else has done it, or the saga is complete.';

create function mbus.take_rest(known bigint, kinds text[], but text) returns void
language plpgsql
set search_path from current
as $$
declare
    each_iid text;
begin
    for each_iid in
        select m.iid from mbus.saga_message as m
        where m.saga = known and m.kind = any (kinds) and not m.done and m.iid <> but
        order by m.kind <> 'bung', m.iid
    loop
        perform mbus.take_unless_held(each_iid);
    end loop;
end
$$;
comment on function mbus.take_rest(bigint, text[], text) is 'Take the messages of a saga whose turn is over.';

create function mbus.take_unless_held(msgiid text) returns void
language plpgsql
set search_path from current
set lock_timeout = '100ms'
as $$
begin
    perform mbus.take_for(mbus.queue_of(msgiid), msgiid, null);
exception when lock_not_available then
    -- Who has it in hand finds that its turn is over; to wait for them could be to wait for each other.
    null;
end
$$;
comment on function mbus.take_unless_held(text) is 'Take a message that nobody has in hand.';
