-- Subscriptions and their conditions. A condition runs in every poll with the rights of the owner of this schema.

-- Return why a text does not compile as a single query, or null if it does. The query is not run.
create function pgmb.compiles(statement text) returns text
language plpgsql stable as $$
declare
    planned refcursor;
begin
    -- A cursor takes a single statement only. So a text with a second statement after a semicolon is refused, and never run. A
    -- query that locks rows is refused too, because this function is stable.
    open planned for execute statement;
    close planned;
    return null;
exception when others then
    return sqlerrm;
end
$$;

create function pgmb.prepare_poll_for_events_fn(sql_statements text[]) returns void
language plpgsql security definer as $$
declare
    condition text;
    reason text;
    -- Check conditions against a subquery e, as a poll does. So a condition that uses a system column, such as e.ctid, is refused.
    tables constant text := '(select x.* from pgmb.events as x offset 0) as e, pgmb.subscriptions as s';
begin
    if sql_statements is null then
        perform pgchange.refuse(
            'null is not a list of conditions', 'give an array of conditions, as in array[''e.topic = ''''t'''''']');
    end if;
    foreach condition in array sql_statements loop
        -- A text that closes a bracket which it has not opened fails inside the other kind of bracket.
        reason := coalesce(
            pgmb.compiles(format(
                'select array[%s' || chr(10) || ']::boolean[] from %s limit 0', condition, tables)),
            pgmb.compiles(format(
                'select from %2$s where (%1$s' || chr(10) || ') limit 0', condition, tables)));
        if reason is not null then
            perform pgchange.refuse(
                format('the condition %L cannot be used: %s', condition, reason),
                'write an expression over e (the event) and s (the subscription) that is true or false');
        end if;
    end loop;
end
$$;
comment on function pgmb.prepare_poll_for_events_fn(text[]) is
    'Refuse a condition that does not compile, with its text and the reason. Polls need no other preparation.';

-- Whether a condition that reads only the topic can give a different answer each time, as with random().
create function pgmb.is_volatile(topical text) returns boolean
language plpgsql as $$
declare
    plan text;
begin
    -- PostgreSQL inlines a CTE that is used once unless it calls a volatile function. So if the plan has a CTE, the condition
    -- is volatile.
    execute format(
        'explain (format json) with pgchange_whole as (select (%s' || chr(10) || ') as held from '
        '(select null::varchar as topic) as e, pgmb.subscriptions as s) select held from pgchange_whole', topical) into plan;
    return strpos(plan, '"CTE Name": "pgchange_whole"') > 0;
end
$$;

-- Give these functions the settings of a poll.
select pgchange.pin_settings('pgmb.compiles(text)', 'pgmb.is_volatile(text)');

-- Refuse a condition that does not compile, and record what the condition reads.
create function pgmb.condition_added() returns trigger
language plpgsql security definer as $$
begin
    perform pgmb.prepare_poll_for_events_fn(array[new.conditions_sql]);
    new.by_params := new.conditions_sql ~ '[[:<:]]s[.]params[[:space:]]*@>';
    new.of_event := new.conditions_sql !~* '^true$';
    -- If a condition has e elsewhere than in e.topic, even in a text, it counts as a condition that reads more than the topic.
    new.by_topic := new.conditions_sql ~ '[[:<:]]e[.]topic[[:>:]]'
        and regexp_replace(new.conditions_sql, '[[:<:]]e[.]topic[[:>:]]', '', 'g') !~* '[[:<:]]e[[:>:]]'
        and pgmb.compiles(format(
            'select from (select null::varchar as topic) as e, pgmb.subscriptions as s where (%s' || chr(10) || ') limit 0',
            new.conditions_sql)) is null;
    if new.by_topic then
        new.by_topic := not pgmb.is_volatile(new.conditions_sql);
    end if;
    return new;
end
$$;

create trigger added before insert on pgmb.condition for each row execute function pgmb.condition_added();
insert into pgmb.condition (conditions_sql) values
    ('TRUE'), ('s.params @> jsonb_build_object(''topic'', e.topic)'),
    -- The conditions of airflow_pgchange.events.topical().
    ('s.params @> jsonb_build_object(''topics'', jsonb_build_array(e.topic))'),
    ('s.params @> jsonb_build_object(''topics'', jsonb_build_array(e.topic)) and pgmb.event_partition('
     'coalesce(e.payload ->> (s.params ->> ''by''), e.id), (s.params ->> ''partitions'')::integer) '
     '= (s.params ->> ''partition'')::integer');

-- The number of a condition that is in pgmb.condition, or null if it is not there.
create function pgmb.condition_known(conditions text) returns integer
language sql stable security definer as $$
    select c.id from pgmb.condition as c
    where md5(c.conditions_sql) = md5(conditions) and c.conditions_sql = conditions
$$;

-- Make a group if it does not exist, with nothing to read, and keep it from expiring until this transaction ends.
create function pgmb.make_group(gid pgmb.group_id) returns void
language plpgsql security definer
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
as $$
begin
    if strpos(gid, '/') > 0 then
        perform pgchange.refuse(
            format('the name of a group must have no slash, but %L has: it would look like a handler of another group', gid),
            'choose a name without a slash');
    end if;
    loop
        insert into pgmb.subscription_groups (id) values (gid) on conflict do nothing;
        if found then
            -- Events that were dispatched to an earlier group of this name are not for this group, and may have been deleted.
            delete from pgmb.dispatched as d where d.group_id = gid;
        end if;
        -- If the group has expired meanwhile, make it again.
        perform from pgmb.subscription_groups as g where g.id = gid for key share;
        exit when found;
    end loop;
end
$$;

-- Give a subscription its condition, adding the condition if it is new and the role may add it. Make the group of the
-- subscription.
create function pgmb.subscribing() returns trigger
language plpgsql as $$
begin
    new.condition_id := pgmb.condition_known(new.conditions_sql);
    if new.condition_id is null then
        if not has_column_privilege('pgmb.condition', 'conditions_sql', 'insert') then
            raise insufficient_privilege using
                message = format(
                    'the subscription cannot have the condition %L: it is not in pgmb.condition, and role %I may not add a '
                    'condition', new.conditions_sql, current_user),
                hint = format(
                    'let the owner of schema pgmb, whose rights conditions have, run: select pgmb.grant_conditions(%L); or use a '
                    'known condition with other params', quote_ident(current_user));
        end if;
        insert into pgmb.condition (conditions_sql) values (new.conditions_sql) on conflict do nothing;
        new.condition_id := pgmb.condition_known(new.conditions_sql);
    end if;
    perform pgmb.make_group(new.group_id);
    return new;
end
$$;

create trigger subscribing before insert or update of conditions_sql, group_id, condition_id on pgmb.subscriptions
    for each row execute function pgmb.subscribing();

create function pgmb.keep_alive(gid pgmb.group_id, sids text[] default null) returns integer
language plpgsql security definer as $$
declare
    kept integer;
begin
    if not exists (
        select from pgmb.subscriptions as s
        where s.group_id = gid and s.expiry_interval is not null and s.last_active_at + s.expiry_interval / 10 < now())
    then
        -- Almost every call returns here. The statement below costs twice as much, even if it finds nothing.
        return 0;
    end if;
    -- Skip subscriptions that another transaction is changing or removing, so that a reader does not wait for it. The next call
    -- records these subscriptions as in use.
    with idle as (
        select s.id from pgmb.subscriptions as s
        -- The ids are a subquery, because PostgreSQL hashes a list of thousands only once, in any plan.
        where s.group_id = gid and (sids is null or s.id in (select i.id from unnest(sids) as i(id)))
          and s.expiry_interval is not null
          and s.last_active_at + s.expiry_interval / 10 < now()
        for no key update skip locked
    )
    update pgmb.subscriptions as s set last_active_at = now() from idle as i where s.id = i.id;
    get diagnostics kept = row_count;
    return kept;
end
$$;
comment on function pgmb.keep_alive(pgmb.group_id, text[]) is
    'Record that the subscriptions of a group, or some of them, are in use: subscriptions that expire get their whole interval '
    'again. It writes at most once in a tenth of the interval, so it can be called with every batch.';
