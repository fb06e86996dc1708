-- The outcome of a received message of a saga: it is done, tried again, or the saga is rolled back.

-- The state of a saga in which a kind of message has its turn.
create function mbus.turn_of(kind text) returns text
language sql immutable as $$ select case when kind in ('step', 'end') then 'forward' else 'rolling back' end $$;

-- The advice on a lost message of a saga.
create function mbus.way_out(missing mbus.saga_message) returns text
language sql stable as $$
    select format('post it again under this iid: mbus.post(..., iid => %L)', missing.iid)
        || case when missing.kind = 'step' then format(', or undo the saga: mbus.saga_roll_back(%L, reason)', missing.iid) else '' end
$$;

-- Why the turn of a received message has not come: an earlier message was lost, with the advice. Null if its turn has come.
create function mbus.lost_before(message mbus.saga_message) returns text
language sql stable as $$
    select format('saga %s: the turn of message %s has not come: message %s before it was received or dropped, but not done: %s',
                  message.saga, message.iid, m.iid, mbus.way_out(m))
    from mbus.saga_message as m
    where m.iid = any (message."after") and m.kind <> 'bung' and not m.done
    order by m.iid
    limit 1
$$;

-- Refuse to go on if an earlier message was lost, because the saga would complete without that step.
create function mbus.check_turn(message mbus.saga_message) returns void
language plpgsql stable as $$
begin
    if mbus.lost_before(message) is not null then
        raise exception using errcode = 'PC008', message = mbus.lost_before(message);
    end if;
end
$$;

-- The consumers that have the message of a saga in a claimed batch, with the attempt. mine: this session works on it; at_work:
-- any session does.
create function mbus.claims_of(message mbus.saga_message) returns table (consumer text, attempt integer, mine boolean, at_work boolean)
language plpgsql stable as $$
declare
    known mbus.queue := mbus.queue_of(message.iid);
begin
    if known.id is not null then
        return query
        select c.name, b.attempt, coalesce(h.mine, false), h.slot is not null or mbus.is_leased(b)
        from mbus.entries(known, message.iid) as e
        join mbus.apart as a on a.consumer = any (e.wanted) and a.id = e.id
        join mbus.batch as b on b.number = a.batch
        join mbus.consumer as c on c.id = a.consumer
        left join lateral (select x.slot, x.mine from mbus.held_slots(c.qname, c.name) as x where x.slot = b.slot) as h on true
        where not e.gone;
    end if;
end
$$;

-- The attempt of this session, which has the message in work. Attempts whose handler died count, too.
create function mbus.tries_of(message mbus.saga_message) returns integer
language sql stable as $$
    -- A claim is recorded before its handler runs, so an attempt counts however it ends. A session that merely receives the
    -- message makes no attempt.
    select message.tries - 1 + coalesce(max(c.attempt), 1) from mbus.claims_of(message) as c where c.mine
$$;

-- Why a saga is to be rolled back if steps of it are not done; null before its deadline.
create function mbus.overdue(known mbus.saga) returns text
language sql stable as $$
    select format('its deadline was at %s', known.deadline::timestamptz(0))
    where known.state = 'forward' and known.deadline < clock_timestamp()
$$;

create function mbus_sealed.saga_turn(caller pgchange.caller, msgiid text) returns jsonb
language plpgsql stable security definer as $$
declare
    message mbus.saga_message;
    known mbus.saga;
    lost text;
begin
    perform mbus.demand(caller, 'consume', (mbus.queue_of(msgiid)).qname);
    select m.* into message from mbus.saga_message as m where m.iid = msgiid and not m.done;
    select s.* into known from mbus.saga as s where s.id = message.saga and s.state = mbus.turn_of(message.kind);
    if known.id is null then
        return null;
    end if;
    lost := mbus.lost_before(message);
    return jsonb_build_object(
        'saga', known.id, 'name', known.name, 'kind', message.kind, 'step', message.step,
        'tries', mbus.tries_of(message), 'reason', known.reason,
        'lost', lost, 'overdue', case when message.kind = 'step' or lost is not null then mbus.overdue(known) end, 'was_done', exists (
            select from mbus.saga_message as x
            where x.saga = known.id and x.kind = 'step' and x.step = message.step and x.done));
end
$$;
comment on function mbus_sealed.saga_turn(pgchange.caller, text) is
    'The work that a received message of a saga asks for. Null if its turn is over, or if it belongs to no saga; then nothing is '
    'to be done.';

create function mbus_sealed.saga_done(caller pgchange.caller, msgiid text) returns boolean
language plpgsql security definer as $$
declare
    message mbus.saga_message;
    known mbus.saga;
begin
    perform mbus.demand(caller, 'consume', (mbus.queue_of(msgiid)).qname);
    select m.* into message from mbus.saga_message as m where m.iid = msgiid;
    if message.kind in ('end', 'rolled back') then
        update mbus.saga as s set
            state = case message.kind when 'end' then 'complete' else 'rolled back' end, changed_at = clock_timestamp()
        where s.id = message.saga and s.state = mbus.turn_of(message.kind)
        returning s.* into known;
    else
        -- The lock of the row keeps others from rolling the saga back before this transaction commits.
        select s.* into known from mbus.saga as s where s.id = message.saga and s.state = mbus.turn_of(message.kind) for share;
    end if;
    if known.id is null then
        return false;
    end if;
    perform mbus.check_turn(message);
    update mbus.saga_message as m set done = true, error = null, changed_at = clock_timestamp() where m.iid = msgiid and not m.done;
    if found and message.kind = 'end' then
        perform mbus.take_rest(known.id, array['compensation', 'rolled back'], msgiid);
    end if;
    return found or message.kind = 'end';
end
$$;
comment on function mbus_sealed.saga_done(pgchange.caller, text) is
    'Record that the work of a saga''s message is done, in the transaction that receives the message. False if its turn is over; '
    'then the transaction must not keep results.';

create function mbus_sealed.saga_try_again(caller pgchange.caller, msgiid text, delay interval, error text) returns boolean
language plpgsql security definer as $$
declare
    turn jsonb := mbus_sealed.saga_turn(caller, msgiid);
begin
    if turn is null then
        return false;
    end if;
    -- If an earlier message was lost, the step was not tried, so the attempt does not count.
    update mbus.saga_message as m set
        tries = (turn ->> 'tries')::integer + case when turn ->> 'lost' is null then 1 else 0 end, error = saga_try_again.error, changed_at = clock_timestamp()
    where m.iid = msgiid;
    perform mbus_sealed.try_again(caller, msgiid, delay, saga_try_again.error);
    return true;
end
$$;
comment on function mbus_sealed.saga_try_again(pgchange.caller, text, interval, text) is
    'Put the message of a saga back in the transaction that received it, to be received again after a delay. False if its turn is '
    'over.';

create function mbus_sealed.saga_roll_back(caller pgchange.caller, msgiid text, reason text) returns boolean
language plpgsql security definer as $$
declare
    known bigint;
begin
    perform mbus.demand(caller, 'consume', (mbus.queue_of(msgiid)).qname);
    update mbus.saga as s set state = 'rolling back', reason = saga_roll_back.reason, changed_at = clock_timestamp()
    from mbus.saga_message as m
    where m.iid = msgiid and s.id = m.saga and s.state = 'forward' and mbus.turn_of(m.kind) = s.state
    returning s.id into known;
    if known is null then
        return false;
    end if;
    update mbus.saga_message as m set error = saga_roll_back.reason, changed_at = clock_timestamp() where m.iid = msgiid;
    perform mbus.take_rest(known, array['step', 'end'], msgiid);
    return true;
end
$$;
comment on function mbus_sealed.saga_roll_back(pgchange.caller, text, text) is
    'Roll back the saga of a step''s message. Takes the bung, which starts the compensations, and the rest of its steps without '
    'this message, which was received. False if another session has rolled it back, or if the saga is complete.';

-- Roll back the sagas whose deadline has passed before all their steps were done. Returns a line for each.
create function mbus.roll_back_overdue() returns setof text
language plpgsql security definer as $$
declare
    known mbus.saga;
begin
    for known in
        select s.* from mbus.saga as s
        where s.state = 'forward' and s.deadline < clock_timestamp()
          -- If all steps are done, only the end message is missing, so the saga is not rolled back.
          and exists (select from mbus.saga_message as m where m.saga = s.id and m.kind = 'step' and not m.done)
        order by s.id
        for update skip locked
    loop
        update mbus.saga as s set state = 'rolling back', reason = mbus.overdue(known), changed_at = clock_timestamp()
        where s.id = known.id;
        perform mbus.take_rest(known.id, array['step', 'end'], '');
        return next format('rolled back %s %s: %s', known.name, known.id, mbus.overdue(known));
    end loop;
end
$$;

-- Receive the bung of a saga, and its messages of these kinds that are not done, so that nobody handles them. but: the iid of a
-- message that stays.
create function mbus.take_rest(known bigint, kinds text[], but text) returns void
language plpgsql as $$
declare
    each_iid text;
begin
    -- Wait until no handler has the bung in work. If the bung were not taken, the compensations would be blocked for ever.
    perform mbus.take_for(mbus.queue_of(m.iid), m.iid, null)
    from mbus.saga_message as m where m.saga = known and m.kind = 'bung' and (mbus.queue_of(m.iid)).id is not null;
    for each_iid in
        select m.iid from mbus.saga_message as m
        where m.saga = known and m.kind = any (kinds) and not m.done and m.iid <> but and (mbus.queue_of(m.iid)).id is not null
        order by m.iid
    loop
        perform mbus.take_unless_held(each_iid);
    end loop;
end
$$;

-- Take a message unless it is in work.
create function mbus.take_unless_held(msgiid text) returns void
language plpgsql
set lock_timeout = '100ms'
as $$
begin
    perform set_config('lock_timeout', pgchange.patience('100 ms'), true);
    perform mbus.take_for(mbus.queue_of(msgiid), msgiid, null);
exception when lock_not_available or deadlock_detected or sqlstate 'PC015' then
    -- The message is in work. Its handler will learn that its turn is over. Waiting for the handler could be a deadlock.
    null;
end
$$;
