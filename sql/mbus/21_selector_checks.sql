-- Checks of selectors.

-- Raise an error for a condition whose result does not depend on the message alone. It calls a function that is not immutable,
-- has a subquery, or contains a time such as 'now' or 01/02/2026.
create function mbus.check_depends_on_message(selector text) returns void
language plpgsql as $$
declare
    readings text[];
begin
    -- PostgreSQL makes the same demands on the condition of an index. The index and its table are rolled back.
    create table mbus.t of mbus.qt_model;
    execute format(E'create index on mbus.t (id) where (%s\n)', selector);
    -- At this point PostgreSQL has read a time in the selector under the session's settings. Under a time zone where it is
    -- never the same day, and with another date order, the time may be read differently.
    perform set_config('timezone', 'Etc/GMT+12', true), set_config('datestyle', 'ISO, DMY', true),
            set_config('intervalstyle', 'sql_standard', true);
    execute format(E'create index on mbus.t (id) where (%s\n)', selector);
    perform set_config('timezone', 'Etc/GMT-14', true);
    execute format(E'create index on mbus.t (id) where (%s\n)', selector);
    perform set_config('timezone', 'UTC', true), set_config('datestyle', 'ISO, MDY', true),
            set_config('intervalstyle', 'postgres', true);
    readings := array(
        select distinct pg_get_expr(i.indpred, i.indrelid) from pg_index as i where i.indrelid = 'mbus.t'::regclass);
    if cardinality(readings) > 1 or position(now()::text in readings[1]) > 0 then
        raise invalid_object_definition using
            message = 'a time in it has another value in another session: write it in full, with its zone if it has a zone, as '
                      '2026-01-31 00:00+00';
    end if;
    raise exception using errcode = 'PCUND', message = 'made';
exception when sqlstate 'PCUND' then
    null;
end
$$;

-- Refuse a selector that is not an expression over a message, or depends on more than the message, with PostgreSQL's reason. The
-- caller holds the lock of mbus.queue_to_change().
create function mbus.check_selector(selector text) returns void
language plpgsql as $$
begin
    if selector is null then
        return;
    end if;
    -- Parse the selector in the place where it will be used, and between two kinds of brackets, so that its own brackets must
    -- be balanced.
    execute format(
        E'select from (select (null::mbus.qt_model).*) as t where false and (%1$s\n) and (array[%1$s\n])[1]', selector);
    perform mbus.check_depends_on_message(selector);
exception when others then
    raise syntax_error using message = format('Wrong selector:%s', selector),
        detail = case when sqlstate in ('42P17', '0A000') then
            'It is evaluated when a message is posted and whenever it is read, in different sessions. So it may depend on the '
            'message alone. ' else '' end || sqlerrm,
        hint = case sqlstate
            when '42P17' then 'now(), ''today'', current_user, times from texts and the like differ then: post their values '
                              'instead; mark your own function immutable if its result never changes'
            when '0A000' then 'a subquery reads more than the message: post its result with the message; for an hstore there are '
                              'akeys() and avals()'
            else 'a selector is an expression over a message t, such as (t.properties->''STATE'') = ''DONE''' end;
end
$$;

select pgchange.pin_settings('mbus.check_depends_on_message(text)', 'mbus.check_selector(text)');
