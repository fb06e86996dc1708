-- Before anything is done to partitions: when that is refused, and which of them are empty.

-- Refuse to maintain the log as of a time around which there can be no partitions.
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
                'ids, and so partitions, are of times from 1970 to %s, and partitions are made for %s ahead; without a time it '
                'is maintained as of now', last::date, ahead));
    end if;
end
$$;

-- Refuse to maintain any other table than these two, or as of an impossible time, or in an unsuitable transaction.
create function pgmb.check_append_only(tbl regclass, current_ts timestamptz) returns void
language plpgsql stable as $$
begin
    if tbl is null or tbl not in ('pgmb.events'::regclass, 'pgmb.dispatched'::regclass) then
        perform pgchange.refuse(
            format('%s is not a table that is partitioned by time', coalesce(tbl::text, 'null')),
            'these are: pgmb.events, pgmb.dispatched');
    end if;
    perform pgmb.check_time(current_ts);
    perform pgchange.check_isolation();
end
$$;

-- Those of some partitions that hold nothing.
create function pgmb.empty_ones(parts regclass[]) returns regclass[]
language plpgsql stable as $$
declare
    part regclass;
    filled boolean;
    found regclass[] := '{}';
begin
    foreach part in array parts loop
        execute format('select exists (select from %s)', part) into filled;
        if not filled then
            found := found || part;
        end if;
    end loop;
    return found;
end
$$;
