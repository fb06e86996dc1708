-- Sagas: either all steps of a saga are done, or those that were done are compensated.
--
-- A saga is two sequences of messages. The first has its steps and an end. The second has their compensations and an end; it
-- waits behind the bung, a message that only mbus.take() can take. A rollback takes the bung, which frees the compensations, and
-- takes the remaining steps. The end of the steps takes the bung and the compensations. A message in work cannot be taken; its
-- handler learns from the state of the saga that its turn is over.

create table mbus.saga (
    id bigint generated always as identity primary key,
    name text not null,
    state text not null default 'forward' check (state in ('forward', 'complete', 'rolling back', 'rolled back')),
    reason text,
    started_at timestamptz not null default clock_timestamp(),
    changed_at timestamptz not null default clock_timestamp(),
    deadline timestamptz check (deadline > started_at)
);
create index on mbus.saga (id) where state in ('forward', 'rolling back');
create index on mbus.saga (changed_at) where state in ('complete', 'rolled back');
comment on table mbus.saga is
    'Every saga that was started, with its state. If its steps are not all done at its deadline, it is rolled back. mbus.sagas '
    'shows them with their steps.';

create table mbus.saga_message (
    saga bigint not null references mbus.saga on delete cascade,
    iid text primary key,
    kind text not null check (kind in ('step', 'end', 'bung', 'compensation', 'rolled back')),
    step text,
    "after" text[] not null,
    done boolean not null default false,
    tries integer not null default 1,
    error text,
    changed_at timestamptz not null default clock_timestamp()
);
create index on mbus.saga_message (saga);
-- The index begins with the queue of the message. With it, the latest sagas are found for a caller who may see few of them.
create index on mbus.saga_message (mbus.qname_of(iid), saga);
comment on table mbus.saga_message is
    'The messages of sagas. kind: a step, the end of the steps, the bung, a compensation, or the end of the compensations. after: '
    'the messages that it waits for. tries: the number of the next attempt, without attempts whose handler died; the claim counts '
    'those.';

-- Refuse a saga whose messages would not wait for each other.
create function mbus.check_saga(description jsonb) returns void
language plpgsql stable as $$
declare
    each_step record;
    earlier text[] := '{}';
begin
    for each_step in
        select s ->> 'name' as name, array(select jsonb_array_elements_text(s -> 'after')) as "after"
        from jsonb_array_elements(description -> 'steps') with ordinality as x(s, n) order by n
    loop
        if each_step.name is null or each_step.name = any (earlier) or not each_step."after" <@ earlier then
            raise invalid_parameter_value using
                message = format('saga %s: step %s appears twice, or before a step that it waits for',
                                 description ->> 'name', each_step.name),
                hint = 'give each step a name of its own, and put it behind the steps in its after';
        end if;
        earlier := earlier || each_step.name;
    end loop;
    if not exists (
        select from mbus.consumer as c where c.qname = description ->> 'bungs' and c.selector is null and not c.temporary)
    then
        raise invalid_parameter_value using
            message = format('saga %s: nothing waits behind a message of queue %s', description ->> 'name', description ->> 'bungs'),
            hint = 'it needs a consumer without a selector, by which nobody consumes';
    end if;
end
$$;

-- Post a message of a saga, and record it.
create function mbus.saga_post(
    known bigint, kind text, step text, qname text, data hstore, "after" text[], properties hstore default '', iid text default null
) returns text
language plpgsql as $$
declare
    posted text := mbus.post(
        qname, data, case when "after" = '{}' then '' else hstore('consume_after', "after"::text) end,
        properties || hstore(array['saga', known::text, 'kind', kind, 'step', step]), iid => saga_post.iid);
begin
    insert into mbus.saga_message (saga, iid, kind, step, "after") values (known, posted, kind, step, saga_post."after");
    return posted;
end
$$;

create function mbus_sealed.start_saga(caller pgchange.caller, description jsonb, data hstore) returns bigint
language plpgsql security definer as $$
declare
    bung text := mbus_sealed.get_iid(caller, description ->> 'bungs');
    final text := mbus_sealed.get_iid(caller, description ->> 'end');
    known bigint;
    each_step record;
    steps jsonb := '{}';
    compensations text[] := '{}';
    rolled_back text;
    last_ones text[];
begin
    perform mbus.demand(caller, 'post', q)
    from (
        select description ->> 'rolled_back' as q
        union select s ->> k from jsonb_array_elements(description -> 'steps') as s, unnest(array['queue', 'compensation']) as k
    ) as queues where q is not null;
    perform mbus.check_saga(description);
    insert into mbus.saga (name, deadline)
    values (description ->> 'name', clock_timestamp() + make_interval(secs => (description ->> 'within')::double precision))
    returning id into known;
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
        hstore('bung', bung) || hstore('id_to_take', (compensations || rolled_back || bung)::text), final);
    return known;
end
$$;
comment on function mbus_sealed.start_saga(pgchange.caller, jsonb, hstore) is
    'Post the messages of a saga, each with data. Returns its number. The description is {name, bungs, end, rolled_back: queues, '
    'within: seconds or null, steps: [{name, queue, compensation: queue or null, after: [names]}]}. Each step comes after the '
    'steps in its after.';
