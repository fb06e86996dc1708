-- Settings: which values they can have.

create function pgmb.interval_of(config_id pgmb.config_type, value text) returns interval
language plpgsql stable
set search_path = pg_catalog, pgmb, pg_temp
as $$
declare
    answer interval;
begin
    begin
        answer := value::interval;
    exception when data_exception then
        answer := null;
    end;
    -- A longer one would reach back beyond the earliest time that there is.
    if answer is null or answer <= interval '0' or answer > interval '1000 years' then
        raise invalid_parameter_value using
            message = format(
                '%s must be a length of time, of up to 1000 years, not %s', config_id, coalesce(quote_literal(value), 'null')),
            hint = 'write it as in ''30 minutes'' or ''7 days''';
    end if;
    return answer;
end
$$;
comment on function pgmb.interval_of(pgmb.config_type, text) is
    'A value of a setting as an interval; refused where it is not one.';

create function pgmb.setting_as_interval(config_id pgmb.config_type) returns interval
language sql stable
set search_path = pg_catalog, pgmb, pg_temp
as $$
    select pgmb.interval_of(config_id, pgmb.get_config_value(config_id))
$$;
comment on function pgmb.setting_as_interval(pgmb.config_type) is 'The value of a setting that is a length of time.';

create function pgmb.check_setting() returns trigger
language plpgsql security definer
set search_path = pg_catalog, pgmb, pg_temp
as $$
declare
    wanted interval;
begin
    if tg_op = 'DELETE' or tg_op = 'UPDATE' and new.id <> old.id then
        raise invalid_parameter_value using message = format('the setting %s is needed', old.id),
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
            hint = 'a partition is a whole number of seconds long, at least one; instead of months write days';
    end if;
    if new.id = 'poll_chunk_size' and coalesce(new.value !~ '^[0-9]{1,7}$' or new.value::integer not between 1 and 1000000, true)
    then
        raise invalid_parameter_value using
            message = format('poll_chunk_size must be a number, not %s', coalesce(quote_literal(new.value), 'null')),
            hint = 'how many events one poll dispatches at most: 1 to 1000000';
    end if;
    if new.id = 'use_pg_cron' and new.value is distinct from 'false' then
        raise invalid_parameter_value using message = 'pg_cron is not used here',
            hint = 'run the maintenance DAG, pgchange_maintenance, every few minutes, or let a scheduler of your own select '
                'pgmb.poll_for_events() as often as events are to be dispatched, and select pgmb.maintain_events_table(); with '
                'pg_cron itself, cron.schedule does that too';
    end if;
    return new;
end
$$;
comment on function pgmb.check_setting() is 'Refuse a value that a setting cannot have.';

create trigger checked before insert or update or delete on pgmb.config
for each row execute function pgmb.check_setting();

create function pgmb.check_settings() returns trigger
language plpgsql security definer
set search_path = pg_catalog, pgmb, pg_temp
as $$
declare
    width interval := pgmb.setting_as_interval('partition_interval');
    retention interval := pgmb.setting_as_interval('partition_retention_period');
    ahead interval := pgmb.setting_as_interval('future_intervals_to_create');
begin
    if retention < width then
        raise invalid_parameter_value using
            message = format('partition_retention_period, %s, is shorter than partition_interval, %s', retention, width),
            hint = 'a partition is emptied as a whole: keep events at least that long; two settings can change in one '
                'transaction';
    end if;
    if ahead < width and new.id = 'future_intervals_to_create' then
        raise invalid_parameter_value using
            message = format('future_intervals_to_create, %s, is shorter than partition_interval, %s', ahead, width),
            hint = 'at least one partition must be made ahead; two settings can change in one transaction';
    end if;
    if ahead > 1000 * width then
        raise invalid_parameter_value using
            message = format('in %s there are more than 1000 partitions of %s', ahead, width),
            hint = 'set a longer partition_interval, or a shorter future_intervals_to_create';
    end if;
    return null;
end
$$;
comment on function pgmb.check_settings() is 'Refuse values that do not fit each other, when a transaction has set them all.';

-- At the commit, because of two settings that are changed together one is changed first. An interval longer than what is made
-- ahead is not an error: there is always one partition ahead.
create constraint trigger fitting after insert or update on pgmb.config
deferrable initially deferred
for each row execute function pgmb.check_settings();
