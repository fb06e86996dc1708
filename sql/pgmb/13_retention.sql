-- What is older than partition_retention_period goes, a partition at a time, when nobody needs anything in it.
--
-- A partition is emptied under a lock of its own that nobody waits for long, after a second look: an insert may have come
-- before the lock. Emptied ones are dropped by and by.

create function pgmb.empty_ones(parts regclass[]) returns regclass[]
language plpgsql stable
set search_path = pg_catalog, pgmb, pg_temp
as $$
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
comment on function pgmb.empty_ones(regclass[]) is 'Those of some partitions that hold nothing.';

create function pgmb.trim_partition(tbl regclass, part regclass, lower pgmb.event_id, upper pgmb.event_id) returns text
language plpgsql
set search_path = pg_catalog, pgmb, pg_temp
set lock_timeout = '200ms'
as $$
declare
    holder text := pgmb.holder_of(tbl, lower, upper);
begin
    if holder is not null then
        return format('kept %s: %s', part, holder);
    end if;
    execute format('lock table only %s in access exclusive mode', part);
    holder := pgmb.holder_of(tbl, lower, upper);
    if holder is not null then
        return format('kept %s: %s', part, holder);
    end if;
    execute format('truncate %s', part);
    return format('emptied %s', part);
exception when lock_not_available then
    return format('postponed %s: it is in use', part);
end
$$;
comment on function pgmb.trim_partition(regclass, regclass, pgmb.event_id, pgmb.event_id) is
    'Empty one partition that nobody needs; says what it did, or why not.';

create function pgmb.shrink_default(tbl regclass, edge pgmb.event_id) returns void
language plpgsql
set search_path = pg_catalog, pgmb, pg_temp
set lock_timeout = '50ms'
as $$
declare
    part regclass := pgmb.default_partition(tbl);
begin
    if pg_table_size(part) > 1024 * 1024 and not pgmb.default_holds(tbl, '', edge) then
        -- Where somebody publishes what is to come all the time some has come again, and the least of it under the lock.
        perform pgmb.set_most_aside(tbl, edge, 'pmg');
        execute format('lock table only %s in access exclusive mode', part);
        perform pgmb.set_aside(tbl, edge, 'pmg', 1000);
        if not pgmb.default_holds(tbl, '', 'pmg') then
            execute format('truncate %s', part);
        end if;
    end if;
exception when lock_not_available then
    null;
end
$$;
comment on function pgmb.shrink_default(regclass, pgmb.event_id) is
    'Give back the room of a default partition from which all was deleted or, from an id on, set aside, unless somebody is at '
    'work there: the next partition is made after a look through all of it.';

create function pgmb.trim_default(tbl regclass, cut pgmb.event_id) returns setof text
language plpgsql
set search_path = pg_catalog, pgmb, pg_temp
set lock_timeout = '50ms'
as $$
declare
    part regclass := pgmb.default_partition(tbl);
    span record;
    deleted bigint;
    gone bigint := 0;
    holders text[] := '{}';
begin
    for span in select * from pgmb.default_spans(tbl, cut) loop
        begin
            -- In one statement the rows and who needs them are seen at one moment.
            execute format('delete from %s where id >= $2 and id < $3 and (select pgmb.holder_of($1, $2, $3)) is null', part)
            using tbl, span.lower_bound, span.upper_bound;
            get diagnostics deleted = row_count;
        exception when lock_not_available then
            -- Somebody takes some of them away and has not committed that.
            return next format('postponed the old rows of %s: some are in use', part);
            exit;
        end;
        gone := gone + deleted;
        if deleted = 0 then
            holders := holders || coalesce(pgmb.holder_of(tbl, span.lower_bound, span.upper_bound), 'they came into use');
        end if;
    end loop;
    if gone > 0 then
        return next format('deleted %s rows of %s', gone, part);
    end if;
    return query select distinct format('kept old rows of %s: %s', part, h) from unnest(holders) as h;
end
$$;
comment on function pgmb.trim_default(regclass, pgmb.event_id) is
    'Delete what is old in the default partition: rows that came while there was no partition for their id. They go by spans as '
    'long as partitions are, each when nobody needs anything in it.';

create function pgmb.restored() returns boolean
language sql stable security definer
set search_path = pg_catalog, pgmb, pg_temp
as $$
    select (pgmb.dispatcher_now()).source <> pgmb.system_identifier()
$$;
comment on function pgmb.restored() is
    'Whether this is a copy in another cluster that has not dispatched yet: till then nobody can tell what was dispatched.';

create function pgmb.retained_from(current_ts timestamptz) returns pgmb.event_id
language sql stable
set search_path = pg_catalog, pgmb, pg_temp
as $$
    select pgmb.create_event_id(current_ts - pgmb.setting_as_interval('partition_retention_period'), 0)
$$;
comment on function pgmb.retained_from(timestamptz) is 'The id below which rows are older than partition_retention_period.';

create function pgmb.past_retention(tbl regclass, current_ts timestamptz default now())
returns table (partition_id regclass, lower_bound pgmb.event_id, upper_bound pgmb.event_id)
language sql stable
set search_path = pg_catalog, pgmb, pg_temp
as $$
    select p.*
    from pgmb.get_partitions_and_bounds(tbl) as p
    where p.upper_bound <= pgmb.retained_from(current_ts)
$$;
comment on function pgmb.past_retention(regclass, timestamptz) is
    'The partitions that are older than partition_retention_period, with their bounds.';

create function pgmb.overdue(current_ts timestamptz default now()) returns table (partition regclass, reason text)
language sql stable security definer
set search_path = pg_catalog, pgmb, pg_temp
as $$
    select distinct p.partition_id, n.reason
    from (
        select r.* from pgmb.past_retention('pgmb.events', current_ts) as r
        where pgmb.empty_ones(array[r.partition_id]) = '{}'
        union all
        select * from pgmb.default_spans('pgmb.events', pgmb.retained_from(current_ts))
    ) as p
    cross join lateral pgmb.holder_of('pgmb.events', p.lower_bound, p.upper_bound) as n(reason)
    where n.reason is not null
    order by 1, 2
$$;
comment on function pgmb.overdue(timestamptz) is
    'The partitions of events that are kept although they are older than partition_retention_period, each with one reason, and '
    'the default one for what it holds that is; pgmb.holders() says all.';

create function pgmb.trim_partitions(tbl regclass, current_ts timestamptz default now()) returns setof text
language plpgsql security definer
set search_path = pg_catalog, pgmb, pg_temp
as $$
declare
    part record;
begin
    perform pgmb.check_append_only(tbl);
    if not pg_try_advisory_xact_lock(pgmb.upkeep_key()) then
        return next format('postponed emptying partitions of %s: another maintenance is at work', tbl);
        return;
    end if;
    if pgmb.restored() then
        return next format('kept all of %s: it was restored here, and select pgmb.poll_for_events() comes first', tbl);
        return;
    end if;
    for part in select * from pgmb.past_retention(tbl, current_ts) loop
        if pgmb.empty_ones(array[part.partition_id]) = '{}' then
            return next pgmb.trim_partition(tbl, part.partition_id, part.lower_bound, part.upper_bound);
        end if;
    end loop;
    return query select * from pgmb.trim_default(tbl, pgmb.retained_from(current_ts));
    -- In any case: when the last of its rows went somebody may have been at work there.
    perform pgmb.shrink_default(tbl, pgmb.placed_from(current_ts));
end
$$;
comment on function pgmb.trim_partitions(regclass, timestamptz) is
    'Empty the partitions that are older than partition_retention_period and that nobody needs; a line for each thing done or '
    'kept, and for whom.';

create function pgmb.drop_partitions(tbl regclass, unwanted regclass[]) returns setof text
language plpgsql
set search_path = pg_catalog, pgmb, pg_temp
set lock_timeout = '50ms'
as $$
declare
    part regclass;
    filled boolean;
    done text[] := '{}';
begin
    -- The parent first, as every reader and writer does.
    execute format('lock table only %s in access exclusive mode', tbl);
    foreach part in array unwanted loop
        execute format('lock table %s in access exclusive mode', part);
        execute format('select exists (select from %s)', part) into filled;
        if not filled then
            done := done || format('dropped the empty partition %s', part);
            execute format('drop table %s', part);
        end if;
    end loop;
    return query select unnest(done);
exception when lock_not_available then
    return next format('postponed dropping empty partitions of %s: it is in use', tbl);
end
$$;
comment on function pgmb.drop_partitions(regclass, regclass[]) is
    'Drop those of some partitions that are empty. For a moment it locks the whole table, so it is done rarely, and not at all '
    'where somebody would have to wait long.';

create function pgmb.drop_emptied(tbl regclass, current_ts timestamptz default now(), spare integer default 8)
returns setof text
language plpgsql security definer
set search_path = pg_catalog, pgmb, pg_temp
as $$
declare
    emptied regclass[];
begin
    perform pgmb.check_append_only(tbl);
    if not pg_try_advisory_xact_lock(pgmb.upkeep_key()) then
        return next format('postponed dropping empty partitions of %s: another maintenance is at work', tbl);
        return;
    end if;
    emptied := pgmb.empty_ones(array(select p.partition_id from pgmb.past_retention(tbl, current_ts) as p));
    if cardinality(emptied) > spare then
        return query select * from pgmb.drop_partitions(tbl, emptied);
    end if;
end
$$;
comment on function pgmb.drop_emptied(regclass, timestamptz, integer) is
    'Drop the old partitions that are empty, when there are more than spare of them.';
