-- The partitions of events and dispatched. They are made ahead of time, with the length that the settings have now.
--
-- The default partition stays, so that no publisher fails, whatever the id of its event. A new partition is made beside the table
-- and then attached. At that moment the default partition must have none of its rows. Rows of the future, which no query reads
-- yet, are set aside in pgmb.later first. Rows of the present stay, because a running query would look for them where they were.
-- So new partitions begin after these rows. Rows written until then go into the default partition, where retention deletes them.
--
-- A publisher that was sent to the default partition meanwhile would fail, because its row no longer belongs there. So no
-- publisher may be at work at the moment of attaching. The table is locked first, as every session does, and then the default
-- partition. The work under these locks is limited. The default partition is read once, up to 16 MB, and rows that have just come
-- are set aside.
--
-- A query that was planned before still finds the rows that a new partition gets. The query reads the default partition too,
-- which attaching locks. So if the query has the lock already, nothing is attached. Otherwise the query must wait for the lock,
-- and is planned again.

-- The partition that takes the rows that no other partition takes.
create function pgmb.default_partition(tbl regclass) returns regclass
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select p.partdefid::regclass from pg_partitioned_table as p where p.partrelid = tbl
$$;

-- The partitions with ids from lower_id to below upper_id, without the default partition. Reading the bounds of a partition takes
-- ten times as long as reading its name, which pgmb.partition_name() gives it. So if the name says that a partition is elsewhere,
-- its bounds are not read.
create function pgmb.partitions_in(tbl regclass, lower_id pgmb.event_id, upper_id pgmb.event_id)
returns table (partition_id regclass, lower_bound pgmb.event_id, upper_bound pgmb.event_id)
language plpgsql stable
set timezone = 'UTC'
as $$
declare
    rest constant regclass := pgmb.default_partition(tbl);
    form constant text := (select p.relname || '\_2_______\_______\_2_______\_______' from pg_class as p where p.oid = tbl);
    lowest text := to_char(pgmb.extract_date_from_event_id(lower_id), 'YYYYMMDD_HH24MISS');
    highest text := to_char(pgmb.extract_date_from_event_id(upper_id), 'YYYYMMDD_HH24MISS');
begin
    -- Names can be compared up to the year 2999.
    lowest := case when lowest ~ '^2.{14}$' then lowest end;
    highest := case when highest ~ '^2.{14}$' then highest end;
    return query
        select q.relid, q.bounds[2]::pgmb.event_id, q.bounds[4]::pgmb.event_id
        from (
            select i.inhrelid::regclass as relid, string_to_array(pg_get_expr(c.relpartbound, c.oid), '''') as bounds
            from pg_inherits as i
            join pg_class as c on c.oid = i.inhrelid
            -- The default partition has no bounds, so it is left out. Otherwise this would wait for its lock.
            where i.inhparent = tbl and i.inhrelid is distinct from rest
              and (c.relname not like form
                   or (lowest is null or right(c.relname, 15) collate "C" >= lowest)
                  and (highest is null or left(right(c.relname, 31), 15) collate "C" <= highest))
            offset 0
        ) as q
        where q.bounds[2] < upper_id and q.bounds[4] > lower_id;
end
$$;

create function pgmb.get_partitions_and_bounds(table_id oid)
returns table (partition_id regclass, lower_bound pgmb.event_id, upper_bound pgmb.event_id)
language sql stable as $$
    select p.* from pgmb.partitions_in(table_id::regclass, '', 'pn') as p order by p.lower_bound
$$;
comment on function pgmb.get_partitions_and_bounds(oid) is
    'The partitions of a table, in order, without the default partition. Each takes the ids from its lower bound to below its '
    'upper bound.';

create function pgmb.get_current_partition(table_id oid, current_ts timestamptz default now()) returns regclass
language sql stable as $$
    select p.partition_id
    from pgmb.get_partitions_and_bounds(table_id) as p
    where pgmb.create_event_id(current_ts, 0) >= p.lower_bound and pgmb.create_event_id(current_ts, 0) < p.upper_bound
$$;
comment on function pgmb.get_current_partition(oid, timestamptz) is
    'The partition that takes the ids of a time; null if that is the default partition.';

-- Where a partition that begins at a time ends: the next whole multiple of width since 1970, in UTC.
create function pgmb.end_of_partition(lower timestamptz, width interval) returns timestamptz
language sql immutable
-- A day has 24 hours, also in a session whose time zone has daylight saving.
set timezone = 'UTC'
as $$
    select date_bin(width, lower, 'epoch') + width
$$;

-- All events published or dispatched until now have an id below this id, unless they are to be delivered later.
create function pgmb.present() returns pgmb.event_id
language plpgsql stable as $$
begin
    return greatest(
        pgmb.create_event_id(clock_timestamp(), 0)::text collate "C",
        pgmb.cursor_at(pgmb.micros((pgmb.dispatcher_now()).last_id) + 1, 0) collate "C");
end
$$;

-- Whether the default partition has rows with ids from lower_id to below upper_id. Rows with ids before pgmb.present() cannot be
-- moved, because a query may be reading them.
create function pgmb.default_holds(tbl regclass, lower_id pgmb.event_id, upper_id pgmb.event_id) returns boolean
language plpgsql
-- Use the index, even if old statistics make the planner expect to find a row at once.
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
    held boolean;
begin
    execute format('select exists (select from %s where id >= %L and id < %L)', pgmb.default_partition(tbl), lower_id, upper_id)
    into held;
    return held;
end
$$;

-- The name of the partition of a span of time.
create function pgmb.partition_name(tbl regclass, span tstzrange) returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select c.relname || to_char(lower(span) at time zone 'UTC', '_YYYYMMDD_HH24MISS')
           || to_char(upper(span) at time zone 'UTC', '_YYYYMMDD_HH24MISS')
    from pg_class as c where c.oid = tbl
$$;

-- Make the table of a partition beside the table that it will belong to. No session waits for that.
create function pgmb.prepare_partition(tbl regclass, span tstzrange) returns void
language plpgsql as $$
declare
    name text := pgmb.partition_name(tbl, span);
begin
    execute format('create table pgmb.%I (like %s including all)', name, tbl);
    perform pgchange.keep_to_owner(format('pgmb.%I', name)::regclass);
    if not exists (select from pg_index as i where i.indrelid = tbl and i.indisprimary) then
        -- If the partition has no key, it needs a replica identity. Otherwise no row can be deleted under a publication for all
        -- tables.
        execute format('alter table pgmb.%I replica identity full', name);
    end if;
    execute format('comment on table pgmb.%I is %L', name, format('Of %s, from %s to before %s.', tbl, lower(span), upper(span)));
    execute format(
        'alter table pgmb.%I add constraint pgchange_bounds check (id >= %L and id < %L)', name,
        pgmb.create_event_id(lower(span), 0), pgmb.create_event_id(upper(span), 0));
end
$$;

-- Attach prepared partitions, in order, and drop misfits, which are empty and too long. Writers of the table wait while it
-- attaches. It gives up if it would have to wait for other sessions, unless stop_publishers is true. Then it waits for a minute
-- at most.
create function pgmb.attach_partitions(
    tbl regclass, spans tstzrange[], misfits regclass[] default '{}', stop_publishers boolean default false
) returns setof text
language plpgsql
set lock_timeout = '50ms'
as $$
declare
    rest regclass := pgmb.default_partition(tbl);
    lower_id pgmb.event_id := pgmb.create_event_id(lower(spans[1]), 0);
    upper_id pgmb.event_id := pgmb.create_event_id(upper(spans[cardinality(spans)]), 0);
    name text;
    span tstzrange;
    part regclass;
begin
    -- A transaction that reads first and then publishes would wait for this transaction, and this transaction for the other. So
    -- during the long wait, readers are kept out too.
    if stop_publishers then
        perform set_config('lock_timeout', '60s', true);
        -- Take this lock first, so that no autovacuum is working on the default partition once publishers wait.
        execute format('lock table %s in share update exclusive mode', rest);
        execute format('lock table only %s in access exclusive mode', tbl);
    else
        perform pgchange.lock_briefly(
            format(
                'lock table only %s in %s mode', tbl,
                case when misfits <> '{}' then 'access exclusive' else 'share row exclusive' end),
            '50 ms');
    end if;
    perform set_config('lock_timeout', pgchange.patience('50 ms'), true);
    -- Lock the default partition before other partitions, because dropping a partition locks it, too.
    perform pgchange.lock_briefly(format('lock table %s in access exclusive mode', rest), '50 ms');
    foreach part in array misfits loop
        perform pgchange.lock_briefly(format('lock table %s in access exclusive mode', part), '50 ms');
        if pgmb.empty_ones(array[part]) = '{}' then
            raise object_in_use using message = format('%s is no longer empty', part);
        end if;
        return next format('dropped the empty partition %s', part);
        execute format('drop table %s', part);
    end loop;
    if spans = '{}' then
        return;
    end if;
    -- Set aside the rows that have come since the last call without locks.
    perform pgmb.set_aside(tbl, lower_id, upper_id, case when stop_publishers then null else 1000 end);
    if pgmb.default_holds(tbl, lower_id, upper_id) then
        raise object_in_use using message = format(
            'no partition can be attached to %s from %s on: its default partition has rows of that time', tbl, lower(spans[1])),
            hint = 'rows of the present stay there, and pgmb.make_partitions() makes partitions that begin after them; '
                   'pgmb.place_scheduled() moves rows of the future out of the way';
    end if;
    -- Adding the constraint reads the default partition once for all new partitions. Times between two of them have a partition
    -- already.
    execute format('alter table %s add constraint pgchange_free check (id < %L or id >= %L)', rest, lower_id, upper_id);
    foreach span in array spans loop
        name := pgmb.partition_name(tbl, span);
        execute format(
            'alter table %s attach partition pgmb.%I for values from (%L) to (%L)', tbl, name,
            pgmb.create_event_id(lower(span), 0), pgmb.create_event_id(upper(span), 0));
        execute format('alter table pgmb.%I drop constraint pgchange_bounds', name);
        return next format('added pgmb.%s, up to %s', name, upper(span));
    end loop;
    execute format('alter table %s drop constraint pgchange_free', rest);
end
$$;

-- The empty partitions that were made ahead while partition_interval was longer than now.
create function pgmb.misfits(tbl regclass, current_ts timestamptz) returns regclass[]
language plpgsql stable as $$
declare
    width interval := pgmb.setting_as_interval('partition_interval');
begin
    return pgmb.empty_ones(array(
        select p.partition_id from pgmb.partitions_in(tbl, pgmb.create_event_id(current_ts, 0), 'pn') as p
        where p.lower_bound > pgmb.create_event_id(current_ts, 0)
          and pgmb.extract_date_from_event_id(p.upper_bound) > pgmb.end_of_partition(
              pgmb.extract_date_from_event_id(p.lower_bound), width)));
end
$$;

-- The spans of time that still need a partition, in order and up to future_intervals_to_create from now. If the default partition
-- has rows of the present, the spans begin at a whole multiple of partition_interval that is some seconds ahead. Then there is at
-- least one span.
create function pgmb.missing_partitions(tbl regclass, current_ts timestamptz) returns setof tstzrange
language plpgsql stable as $$
declare
    width interval := pgmb.setting_as_interval('partition_interval');
    upto timestamptz := current_ts
        + greatest(width, least(pgmb.setting_as_interval('future_intervals_to_create'), pgmb.most_ahead()));
    lower timestamptz;
    upper timestamptz;
    part record;
begin
    select coalesce(pgmb.extract_date_from_event_id(max(p.upper_bound)), date_bin(width, current_ts, 'epoch')) into lower
    from pgmb.get_partitions_and_bounds(tbl) as p
    where p.lower_bound <= pgmb.create_event_id(current_ts, 0);
    if pgmb.default_holds(tbl, pgmb.create_event_id(lower, 0), pgmb.present()) then
        -- Do not choose the very next multiple, because attaching can take some seconds.
        lower := pgmb.end_of_partition(pgmb.extract_date_from_event_id(pgmb.present()) + interval '5 seconds', width);
        upto := greatest(upto, lower + width);
    end if;
    for part in
        select pgmb.extract_date_from_event_id(p.lower_bound) as begins, pgmb.extract_date_from_event_id(p.upper_bound) as ends
        from pgmb.partitions_in(tbl, pgmb.create_event_id(lower, 0), 'pn') as p
        -- The misfits are a subquery, so that they are computed only once, and not for each partition.
        where p.partition_id <> all ((select pgmb.misfits(tbl, current_ts))::regclass[])
        union all
        select 'infinity', 'infinity'
        order by 1
    loop
        while lower < least(part.begins, upto) loop
            -- If no partitions were made for some time, one partition takes that whole time.
            upper := least(part.begins, pgmb.end_of_partition(greatest(lower, current_ts), width));
            return next tstzrange(lower, upper);
            lower := upper;
        end loop;
        lower := greatest(lower, part.ends);
    end loop;
end
$$;

-- Events of the future are set aside from this id on, because there is no partition for them.
create function pgmb.placed_from(current_ts timestamptz) returns pgmb.event_id
language plpgsql stable as $$
begin
    return pgmb.create_event_id(coalesce(
        (select min(lower(m)) from pgmb.missing_partitions('pgmb.events', current_ts) as m),
        (select pgmb.extract_date_from_event_id(max(p.upper_bound))
         from pgmb.get_partitions_and_bounds('pgmb.events'::regclass) as p)), 0);
end
$$;
