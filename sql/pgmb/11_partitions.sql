-- Partitions of events and dispatched: made ahead of time, of the length that the settings say now.
--
-- The default partition stays, so that no publisher fails whatever its id. A new partition is made beside the table and
-- attached, and rows of the default one that belong in it are moved before. Only such as lie in the future: a reader under way
-- would look for rows where they were. So where the default one holds rows of the present, new ones begin behind them, and what
-- is written until then goes into the default one, where retention deletes it.
--
-- A publisher who was sent to the default one meanwhile would fail, as its row no longer belongs there: so for the moment of
-- attaching there is none at work. The default one is read before that moment, once, unless all is written there.
--
-- A query planned before does not miss what a new partition gets: it reads the default one too, and that is locked for the
-- attaching. So it has it locked already, and nothing is attached, or it must lock it, and is planned anew.

create function pgmb.get_partitions_and_bounds(table_id oid)
returns table (partition_id regclass, lower_bound pgmb.event_id, upper_bound pgmb.event_id)
language sql stable
set search_path = pg_catalog, pgmb, pg_temp
as $$
    select i.inhrelid::regclass, b.bound[1], b.bound[2]
    from pg_inherits as i
    join pg_class as c on c.oid = i.inhrelid
    cross join lateral regexp_match(
        pg_get_expr(c.relpartbound, c.oid), $re$FROM \('(\w+)'\) TO \('(\w+)'\)$re$) as b(bound)
    where i.inhparent = table_id and b.bound is not null
    order by 2
$$;
comment on function pgmb.get_partitions_and_bounds(oid) is
    'The partitions of a table with the ids that they take, from the lower bound to below the upper one, in their order; the '
    'default one excepted.';

create function pgmb.get_current_partition(table_id oid, current_ts timestamptz default now()) returns regclass
language sql stable
set search_path = pg_catalog, pgmb, pg_temp
as $$
    select p.partition_id
    from pgmb.get_partitions_and_bounds(table_id) as p
    where pgmb.create_event_id(current_ts, 0) >= p.lower_bound and pgmb.create_event_id(current_ts, 0) < p.upper_bound
$$;
comment on function pgmb.get_current_partition(oid, timestamptz) is
    'The partition that takes the ids of a time; null where that is the default one.';

create function pgmb.default_partition(tbl regclass) returns regclass
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select p.partdefid::regclass from pg_partitioned_table as p where p.partrelid = tbl
$$;
comment on function pgmb.default_partition(regclass) is 'The partition that takes what no other one takes.';

create function pgmb.end_of_partition(lower timestamptz, width interval) returns timestamptz
language sql immutable
set search_path = pg_catalog, pg_temp
-- A day has 24 hours, also where the clocks of whoever asks change.
set timezone = 'UTC'
as $$
    select date_bin(width, lower, 'epoch') + width
$$;
comment on function pgmb.end_of_partition(timestamptz, interval) is
    'Where a partition that begins at a time ends: the next whole multiple of width since 1970, in UTC.';

create function pgmb.present() returns pgmb.event_id
language plpgsql stable
set search_path = pg_catalog, pgmb, pg_temp
as $$
begin
    return greatest(
        pgmb.create_event_id(clock_timestamp(), 0)::text collate "C",
        pgmb.cursor_at(pgmb.micros((pgmb.dispatcher_now()).last_id) + 1, 0) collate "C");
end
$$;
comment on function pgmb.present() is
    'What is published or dispatched by now has an id below this one, unless it is to be delivered later.';

create function pgmb.default_holds(tbl regclass, lower_id pgmb.event_id, upper_id pgmb.event_id) returns boolean
language plpgsql
set search_path = pg_catalog, pgmb, pg_temp
as $$
declare
    held boolean;
begin
    execute format('select exists (select from %s where id >= %L and id < %L)', pgmb.default_partition(tbl), lower_id, upper_id)
    into held;
    return held;
end
$$;
comment on function pgmb.default_holds(regclass, pgmb.event_id, pgmb.event_id) is
    'Whether the default partition holds rows from an id on to before another. Those before pgmb.present() somebody may be reading.';

create function pgmb.fill_partitions(tbl regclass, spans tstzrange[]) returns bigint[]
language plpgsql
set search_path = pg_catalog, pgmb, pg_temp
set lock_timeout = '50ms'
as $$
declare
    rest regclass := pgmb.default_partition(tbl);
    lower_id pgmb.event_id := pgmb.create_event_id(lower(spans[1]), 0);
    upper_id pgmb.event_id := pgmb.create_event_id(upper(spans[cardinality(spans)]), 0);
    span tstzrange;
    held boolean;
    n bigint;
    moved bigint[] := '{}';
begin
    execute format('lock table %s in access exclusive mode', rest);
    if pgmb.default_holds(tbl, lower_id, pgmb.present()) then
        raise object_in_use using message = format('the default partition of %s holds rows that may be being read', tbl),
            hint = 'they stay there: select pgmb.make_partitions() makes partitions behind them';
    end if;
    held := pgmb.default_holds(tbl, lower_id, upper_id);
    foreach span in array spans loop
        n := 0;
        if held then
            execute format(
                'with moved as (delete from %s where id >= %L and id < %L returning *) insert into pgmb.%I select * from moved',
                rest, pgmb.create_event_id(lower(span), 0), pgmb.create_event_id(upper(span), 0), pgmb.partition_name(tbl, span));
            get diagnostics n = row_count;
        end if;
        moved := moved || n;
    end loop;
    -- This reads the default partition now, and once, so that attaching, which holds everybody up, need not. What lies between
    -- two of the spans has a partition already.
    execute format('alter table %s add constraint pgchange_moved check (id < %L or id >= %L)', rest, lower_id, upper_id);
    return moved;
end
$$;
comment on function pgmb.fill_partitions(regclass, tstzrange[]) is
    'Move the rows of the default partition that belong in new ones, given in their order; returns how many into each. Refused '
    'where some of them may be being read.';

create function pgmb.partition_name(tbl regclass, span tstzrange) returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select c.relname || to_char(lower(span) at time zone 'UTC', '_YYYYMMDD_HH24MISS') from pg_class as c where c.oid = tbl
$$;
comment on function pgmb.partition_name(regclass, tstzrange) is 'What the partition of a span of time is called.';

create function pgmb.prepare_partition(tbl regclass, span tstzrange) returns void
language plpgsql
set search_path = pg_catalog, pgmb, pg_temp
as $$
declare
    name text := pgmb.partition_name(tbl, span);
begin
    execute format('create table pgmb.%I (like %s including all)', name, tbl);
    execute format('comment on table pgmb.%I is %L', name, format('Of %s, from %s to before %s.', tbl, lower(span), upper(span)));
    execute format(
        'alter table pgmb.%I add constraint pgchange_bounds check (id >= %L and id < %L)', name,
        pgmb.create_event_id(lower(span), 0), pgmb.create_event_id(upper(span), 0));
end
$$;
comment on function pgmb.prepare_partition(regclass, tstzrange) is
    'Make the table of a partition beside the one that it is to belong to: nobody waits for that.';

create function pgmb.attach_partitions(tbl regclass, spans tstzrange[]) returns setof text
language plpgsql
set search_path = pg_catalog, pgmb, pg_temp
set lock_timeout = '50ms'
as $$
declare
    name text;
    span tstzrange;
    moved bigint[];
begin
    -- Before any other lock that polls take, as they do.
    perform pg_advisory_xact_lock(pgmb.layout_key());
    if pgmb.get_current_partition(tbl, clock_timestamp()) is null then
        -- Everybody writes into the default partition now: they must not be on their way there.
        execute format('lock table only %s in share row exclusive mode', tbl);
    end if;
    moved := pgmb.fill_partitions(tbl, spans);
    execute format('lock table only %s in share row exclusive mode', tbl);
    for i in 1..cardinality(spans) loop
        span := spans[i];
        name := pgmb.partition_name(tbl, span);
        execute format(
            'alter table %s attach partition pgmb.%I for values from (%L) to (%L)', tbl, name,
            pgmb.create_event_id(lower(span), 0), pgmb.create_event_id(upper(span), 0));
        execute format('alter table pgmb.%I drop constraint pgchange_bounds', name);
        return next format('added pgmb.%s, up to %s, %s rows moved into it', name, upper(span), moved[i]);
    end loop;
    execute format('alter table %s drop constraint pgchange_moved', pgmb.default_partition(tbl));
end
$$;
comment on function pgmb.attach_partitions(regclass, tstzrange[]) is
    'Attach partitions that were prepared, in their order, with the rows of the default one that belong in them. Who writes into '
    'the table waits while that is done, a moment, and who writes into the default one while its rows are moved; it gives up where '
    'it would have to wait for others.';

create function pgmb.missing_partitions(tbl regclass, current_ts timestamptz) returns setof tstzrange
language plpgsql stable
set search_path = pg_catalog, pgmb, pg_temp
as $$
declare
    width interval := pgmb.setting_as_interval('partition_interval');
    upto timestamptz := current_ts + greatest(width, pgmb.setting_as_interval('future_intervals_to_create'));
    lower timestamptz;
    upper timestamptz;
    part record;
begin
    select coalesce(pgmb.extract_date_from_event_id(max(p.upper_bound)), date_bin(width, current_ts, 'epoch')) into lower
    from pgmb.get_partitions_and_bounds(tbl) as p
    where p.lower_bound <= pgmb.create_event_id(current_ts, 0);
    if pgmb.default_holds(tbl, pgmb.create_event_id(lower, 0), pgmb.present()) then
        -- Not the very next one: attaching it may take some seconds.
        lower := pgmb.end_of_partition(pgmb.extract_date_from_event_id(pgmb.present()) + interval '5 seconds', width);
        upto := greatest(upto, lower + width);
    end if;
    for part in
        select pgmb.extract_date_from_event_id(p.lower_bound) as begins, pgmb.extract_date_from_event_id(p.upper_bound) as ends
        from pgmb.get_partitions_and_bounds(tbl) as p
        where p.upper_bound > pgmb.create_event_id(lower, 0)
        union all
        select 'infinity', 'infinity'
        order by 1
    loop
        while lower < least(part.begins, upto) loop
            -- Where nobody made any, one partition for all of the time.
            upper := least(part.begins, pgmb.end_of_partition(greatest(lower, current_ts), width));
            return next tstzrange(lower, upper);
            lower := upper;
        end loop;
        lower := greatest(lower, part.ends);
    end loop;
end
$$;
comment on function pgmb.missing_partitions(regclass, timestamptz) is
    'The spans of time, in their order and up to future_intervals_to_create from now, that still need a partition; where rows '
    'of the present are in the default one, from a whole multiple of partition_interval on that is some seconds ahead, and one at '
    'least.';

create function pgmb.crowded_default(tbl regclass, current_ts timestamptz default now()) returns text
language plpgsql stable security definer
set search_path = pg_catalog, pgmb, pg_temp
as $$
begin
    perform pgmb.check_append_only(tbl);
    return (
        select format(
            'all that is written goes into the default one, and publishers would wait while its %s are read; when they may: '
            'select pgmb.make_partitions(%L, stop_publishers => true)', pg_size_pretty(d.bytes), 'pgmb.' || tbl)
        from pg_table_size(pgmb.default_partition(tbl)) as d(bytes)
        where d.bytes > 16 * 1024 * 1024 and pgmb.get_current_partition(tbl, clock_timestamp()) is null
          and exists (select from pgmb.missing_partitions(tbl, current_ts)));
end
$$;
comment on function pgmb.crowded_default(regclass, timestamptz) is
    'Why partitions that a table needs are made only when somebody says that publishers may be stopped; else null.';

create function pgmb.make_partitions(
    tbl regclass, current_ts timestamptz default now(), stop_publishers boolean default false
) returns setof text
language plpgsql security definer
set search_path = pg_catalog, pgmb, pg_temp
as $$
declare
    -- Who has locked something keeps it to the end: others would wait while this one rests.
    tries integer := case when pg_current_xact_id_if_assigned() is null then 8 else 1 end;
    missing tstzrange[];
    crowded text;
begin
    perform pgmb.check_append_only(tbl);
    if not pg_try_advisory_xact_lock(pgmb.upkeep_key()) then
        return next format('postponed the partitions of %s: another maintenance is at work', tbl);
        return;
    end if;
    return query select * from pgmb.drop_misfits(tbl, current_ts, pgmb.setting_as_interval('partition_interval'));
    if found then
        tries := 1;
    end if;
    crowded := pgmb.crowded_default(tbl, current_ts);
    if crowded is not null and not stop_publishers then
        return next format('postponed the partitions of %s: %s', tbl, crowded);
        return;
    end if;
    missing := array(select m from pgmb.missing_partitions(tbl, current_ts) as m);
    if missing = '{}' then
        return;
    end if;
    -- All of them before the first is attached: from then on publishers wait.
    perform pgmb.prepare_partition(tbl, m) from unnest(missing) as m;
    loop
        begin
            return query select pgmb.attach_partitions(tbl, missing);
            return;
        exception
            when lock_not_available then
                tries := tries - 1;
            when object_in_use then
                tries := 0;
        end;
        exit when tries = 0;
        -- Who comes waits behind each try: in between everybody gets much longer.
        perform pg_sleep(0.5);
    end loop;
    execute (select string_agg(format('drop table pgmb.%I', pgmb.partition_name(tbl, m)), '; ') from unnest(missing) as m);
    return next format('postponed the partitions of %s from %s on: it is being written', tbl, lower(missing[1]));
end
$$;
comment on function pgmb.make_partitions(regclass, timestamptz, boolean) is
    'Keep partitions of partition_interval ready for future_intervals_to_create from now, one at least; a line for each thing '
    'done. Where publishers'' transactions are in the way it tries again for a few seconds, unless its transaction has written '
    'before. Of those made ahead with a longer interval the empty ones are replaced. Where nobody made any for long and the '
    'default partition has grown, it must be told that it may stop publishers while that is read.';
