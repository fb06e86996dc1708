-- What a selector may be.

-- Fail for a condition that can give another answer for the same message: that calls what is not immutable, has a query of its own,
-- or a time such as 'now' or 01/02/2026.
create function mbus.check_depends_on_message(selector text) returns void
language plpgsql as $$
declare
    readings text[];
begin
    -- What PostgreSQL asks of the condition of an index: nothing of it stays.
    create table mbus.t of mbus.qt_model;
    execute format(E'create index on mbus.t (id) where (%s\n)', selector);
    -- A time that is written in it has been read by now: elsewhere, where it is never the same day, it may be read as another.
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
            message = 'a time that is written in it is another one in another session: '
                'write it out, with its zone where it has one, as 2026-01-31 00:00+00';
    end if;
    raise exception using errcode = 'PCUND', message = 'made';
exception when sqlstate 'PCUND' then
    null;
end
$$;

-- Refuse what is not an expression over a message, or does not depend on that alone, with PostgreSQL's reason. To be called by who
-- has the lock of mbus.queue_to_change().
create function mbus.check_selector(selector text) returns void
language plpgsql as $$
begin
    if selector is null then
        return;
    end if;
    -- Where it will stand, and between brackets of two kinds, so that its own are in pairs.
    execute format(
        E'select from (select (null::mbus.qt_model).*) as t where false and (%1$s\n) and (array[%1$s\n])[1]', selector);
    perform mbus.check_depends_on_message(selector);
exception when others then
    raise syntax_error using message = format('Wrong selector:%s', selector),
        detail = case when sqlstate in ('42P17', '0A000') then
            'It is asked about a message when it is posted and when it is read, then and again, in other sessions: so it may depend '
            'on the message alone. ' else '' end || sqlerrm,
        hint = case sqlstate
            when '42P17' then 'now(), ''today'', current_user, times out of texts and the like are other ones then: post what they depend on with '
                              'the message; a function of your own that always answers the same is to be marked immutable'
            when '0A000' then 'a query of its own looks at more than the message: post what it would find with it; '
                              'of an hstore there are akeys() and avals()'
            else 'a selector is an expression over a message t, such as (t.properties->''STATE'') = ''DONE''' end;
end
$$;

select pgchange.pin_settings('mbus.check_depends_on_message(text)', 'mbus.check_selector(text)');
