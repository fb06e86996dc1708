-- Settings and their valid values.

create function pgmb.get_config_value(config_id pgmb.config_type) returns text
language plpgsql stable as $$
begin
    return (select c.value from pgmb.config as c where c.id = config_id);
end
$$;
comment on function pgmb.get_config_value(pgmb.config_type) is 'The value of a setting.';

-- The value of a setting as an interval. Raises an error if it is not an interval, or out of range.
create function pgmb.interval_of(config_id pgmb.config_type, value text) returns interval
language plpgsql stable as $$
declare
    answer interval;
begin
    begin
        answer := value::interval;
    exception when data_exception then
        answer := null;
    end;
    -- A longer interval would reach back beyond the earliest timestamp.
    if answer is null or answer <= interval '0' or answer > interval '1000 years' then
        raise invalid_parameter_value using
            message = format(
                '%s must be a length of time, of up to 1000 years, not %s',
                    config_id, coalesce(quote_literal(value), 'null')),
            hint = 'write it as in ''30 minutes'' or ''7 days''';
    end if;
    return answer;
end
$$;

-- The value of a setting that is an interval.
create function pgmb.setting_as_interval(config_id pgmb.config_type) returns interval
language sql stable as $$
    select pgmb.interval_of(config_id, pgmb.get_config_value(config_id))
$$;

-- Refuse an invalid value of a setting, and deleting or renaming a setting.
create function pgmb.check_setting() returns trigger
language plpgsql security definer as $$
declare
    wanted interval;
begin
    if tg_op = 'DELETE' or tg_op = 'UPDATE' and new.id <> old.id then
        raise invalid_parameter_value using message = format('the setting %s cannot be deleted or renamed: it is needed', old.id),
            hint = 'change its value instead';
    end if;
    if new.id in ('partition_retention_period', 'future_intervals_to_create', 'partition_interval') then
        wanted := pgmb.interval_of(new.id, new.value);
    end if;
    if new.id = 'partition_interval' and (
        wanted < interval '1 second' or wanted <> date_trunc('second', wanted) or extract(month from wanted) <> 0
        or extract(year from wanted) <> 0)
    then
        raise invalid_parameter_value using
            message = format('a partition cannot be %s long', wanted),
            hint = 'use a whole number of seconds, at least 1; use days in place of months';
    end if;
    if new.id = 'poll_chunk_size' and coalesce(new.value !~ '^[0-9]{1,7}$' or new.value::integer not between 1 and 1000000, true)
    then
        raise invalid_parameter_value using
            message = format('poll_chunk_size must be a number, not %s', coalesce(quote_literal(new.value), 'null')),
            hint = 'give the maximum of events that a poll dispatches: 1 to 1000000';
    end if;
    if new.id = 'use_pg_cron' and coalesce(new.value not in ('true', 'false'), true) then
        raise invalid_parameter_value using
            message = format('use_pg_cron must be true or false, not %s', coalesce(quote_literal(new.value), 'null'));
    end if;
    if new.id = 'use_pg_cron' and new.value = 'true' then
        raise notice using message = 'pg_cron is not used here: maintenance of airflow_pgchange does its work',
            hint = 'run the maintenance DAG, pgchange_maintenance, every few minutes. Or let your own scheduler, which may be '
                   'pg_cron with cron.schedule, select pgmb.poll_for_events() as often as events are to be dispatched, and '
                   'pgmb.maintain_events_table()';
    end if;
    return new;
end
$$;

create trigger checked before insert or update or delete on pgmb.config
for each row execute function pgmb.check_setting();

-- How far ahead partitions are created at most.
create function pgmb.most_ahead() returns interval
language sql stable as $$
    -- Readers read every partition.
    select 1000 * pgmb.setting_as_interval('partition_interval')
$$;

-- The settings that do not fit each other, what happens instead, and the fix. They are set one at a time and in any order, so
-- maintenance checks them together.
create function pgmb.misfit_settings() returns setof text
language sql stable security definer as $$
    select misfit.told
    from pgmb.setting_as_interval('partition_interval') as width,
         pgmb.setting_as_interval('partition_retention_period') as retention,
         pgmb.setting_as_interval('future_intervals_to_create') as ahead
    cross join lateral (values
        (retention < width,
         format(
             'partition_retention_period, %s, is shorter than partition_interval, %s: as a partition is emptied as a whole, '
             'events are kept up to both together; set a shorter partition_interval', retention, width)),
        (ahead < width,
         format(
             'future_intervals_to_create, %s, is shorter than partition_interval, %s: one partition is created ahead all the '
             'same; set it at least that long', ahead, width)),
        (ahead > pgmb.most_ahead(),
         format(
             'future_intervals_to_create, %s, is more than 1000 partitions of %s: 1000 are created ahead; set a longer '
             'partition_interval, or a shorter future_intervals_to_create', ahead, width))
    ) as misfit(holds, told)
    where misfit.holds
$$;
