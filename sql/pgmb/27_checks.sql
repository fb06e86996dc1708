-- Checks before partitions are changed.

-- Refuse to maintain the log as of a time for which there can be no partitions.
create function pgmb.check_time(current_ts timestamptz) returns void
language plpgsql stable as $$
declare
    ahead interval := greatest(
        pgmb.setting_as_interval('partition_interval'),
        least(pgmb.setting_as_interval('future_intervals_to_create'), pgmb.most_ahead()));
    last timestamptz := pgmb.extract_date_from_event_id(pgmb.create_event_id('infinity', 0));
begin
    if coalesce(current_ts not between to_timestamp(0) and last - ahead, true) then
        perform pgchange.refuse(
            format('the log cannot be maintained as of %s', coalesce(current_ts::text, 'null')),
            format(
                'partitions exist for times from 1970 to %s, and are created for %s ahead; leave the time out to maintain the log '
                'as of now', last::date, ahead));
    end if;
end
$$;

-- Refuse to maintain any other table than these two, to maintain as of an impossible time, or in a transaction of another
-- isolation level.
create function pgmb.check_append_only(tbl regclass, current_ts timestamptz) returns void
language plpgsql stable as $$
begin
    if tbl is null or tbl not in ('pgmb.events'::regclass, 'pgmb.dispatched'::regclass) then
        perform pgchange.refuse(
            format('%s cannot be maintained: it is not partitioned by time', coalesce(tbl::text, 'null')),
            'choose pgmb.events or pgmb.dispatched');
    end if;
    perform pgmb.check_time(current_ts);
    perform pgchange.check_isolation();
end
$$;

-- The partitions of a list that are empty.
create function pgmb.empty_ones(parts regclass[]) returns regclass[]
language plpgsql stable as $$
declare
    part regclass;
    filled boolean;
    empty_parts regclass[] := '{}';
begin
    foreach part in array parts loop
        execute format('select exists (select from %s)', part) into filled;
        if not filled then
            empty_parts := empty_parts || part;
        end if;
    end loop;
    return empty_parts;
end
$$;
