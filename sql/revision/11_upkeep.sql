-- Maintenance of the partitions of the queue: partitions for the future, and partitions for the rows of the default partition.

-- The bounds of the partitions to create, from lower on. If the rate is high, the partitions are wider than width, because each
-- partition makes the planning of every query slower.
create function revision.bounds_from(lower bigint, now_at bigint, width bigint, ahead integer) returns bigint[]
language plpgsql stable as $$
declare
    needed bigint := greatest(revision.needed_ahead(), ahead * width);
    -- Widen the partitions so that at most ahead + 16 of them are created.
    step bigint := width * greatest(1, ceil(needed::numeric / width / (ahead + 16))::bigint);
    bounds bigint[] := array[lower];
    upper bigint;
begin
    while lower < now_at + needed loop
        upper := (greatest(lower, now_at) / step + 1) * step;
        if upper - lower < step / 2 and lower > now_at then
            upper := upper + step;
        end if;
        bounds := bounds || upper;
        lower := upper;
    end loop;
    return bounds;
end
$$;

-- The next range of transaction ids whose rows can move out of the default partition. All of these transactions have ended, and
-- no partition takes the ids. The range has a quarter of the default partition's ids, because each step reads the whole
-- partition, but at least width ids.
create function revision.next_to_move(width bigint, out lower bigint, out upper bigint)
language plpgsql stable as $$
declare
    settled bigint := pg_snapshot_xmin(pg_current_snapshot())::text::bigint;
begin
    lower := (select r.earliest from revision.range_of_default() as r);
    upper := least(
        settled, lower + greatest(width, (settled - lower) / 4),
        (select min(p.lower) from revision.partitions() as p where p.lower > next_to_move.lower));
end
$$;

-- Move the rows of a range of transaction ids from the default partition to a partition of their own. The constraint that keeps
-- new rows out must exist.
create function revision.move_from_default(lower bigint, upper bigint) returns text
language plpgsql
set lock_timeout = '200ms'
as $$
declare
    constraint_name text := format('pgchange_moving_%s_%s', lower, upper);
    part text := format('revision.%I', 'commit_queue_' || lower);
    moved bigint;
begin
    execute format('create table %s (like revision.commit_queue including defaults including indexes)', part);
    execute format('alter table %s add constraint pgchange_bounds check (txid >= %L and txid < %L)', part, lower, upper);
    perform pgchange.keep_to_owner(part::regclass);
    execute format(
        'with moved as (delete from revision.commit_queue_default as q where q.txid >= %L and q.txid < %L returning q.*) '
        'insert into %s select * from moved', lower, upper, part);
    get diagnostics moved = row_count;
    execute format('alter table revision.commit_queue_default validate constraint %I', constraint_name);
    perform set_config('lock_timeout', pgchange.patience('200 ms'), true);
    -- Lock the parent before its partitions, as every reader and writer does, so that there is no deadlock.
    perform pgchange.lock_briefly('lock table only revision.commit_queue in share update exclusive mode', '200 ms');
    perform pgchange.lock_briefly('lock table revision.commit_queue_default in access exclusive mode', '200 ms');
    execute format('alter table revision.commit_queue attach partition %s for values from (%L) to (%L)', part, lower, upper);
    execute format('alter table %s drop constraint pgchange_bounds', part);
    execute format('alter table revision.commit_queue_default drop constraint %I', constraint_name);
    return format('moved %s from the default partition to commit_queue_%s', pgchange.many(moved, 'commit'), lower);
end
$$;

-- Take a step that empties the default partition, and return a line about it.
create function revision.empty_default(width bigint) returns setof text
language plpgsql
set lock_timeout = '200ms'
as $$
declare
    span record;
begin
    select * into span from revision.moving();
    if span.lower is not null then
        return next revision.move_from_default(span.lower, span.upper);
        -- Rows that have come in the meantime are left to the next run, because each step creates a partition.
        if pg_snapshot_xmin(pg_current_snapshot())::text::bigint - span.upper > span.upper - span.lower then
            return next 'left rows of the default partition to the next transaction';
        end if;
        return;
    end if;
    select * into span from revision.next_to_move(width);
    if span.upper > span.lower then
        perform set_config('lock_timeout', pgchange.patience('200 ms'), true);
        perform pgchange.lock_briefly('lock table revision.commit_queue_default in access exclusive mode', '200 ms');
        execute format(
            'alter table revision.commit_queue_default add constraint %I check (txid < %L or txid >= %L) not valid',
            format('pgchange_moving_%s_%s', span.lower, span.upper), span.lower, span.upper);
        return next 'left rows of the default partition to the next transaction';
    else
        return next 'postponed partitions: all rows that can move have left the default partition; a vacuum must free its space '
                    'first';
    end if;
end
$$;

create function revision.maintain_partitions(width bigint default 1000000, ahead integer default 2) returns setof text
language plpgsql security definer as $$
declare
    now_at bigint := pg_snapshot_xmax(pg_current_snapshot())::text::bigint;
    lower bigint;
    bounds bigint[];
begin
    if width < 1 or ahead < 1 then
        raise invalid_parameter_value using message = 'partitions cannot be maintained: width and ahead must be at least 1';
    end if;
    if not pg_try_advisory_xact_lock(revision.upkeep_key()) then
        return next 'postponed partitions: another maintenance is at work';
        return;
    end if;
    perform revision.note_gaps();
    perform revision.note_pace();
    begin
        if exists (select from revision.moving() as m where m.lower is not null) or revision.default_is_large() then
            return query select * from revision.empty_default(width);
            return;
        end if;
        lower := revision.end_of_default(coalesce((select max(p.upper) from revision.partitions() as p), now_at));
        bounds := revision.bounds_from(lower, now_at, width, ahead);
        if cardinality(bounds) > 1 then
            return query select * from revision.add_partitions(bounds);
        elsif (select m.upper > m.lower from revision.next_to_move(width) as m) then
            return query select * from revision.empty_default(width);
            return;
        end if;
    exception when lock_not_available or object_in_use or deadlock_detected then
        return next 'postponed partitions: the queue is being written';
        return;
    end;
    return query select * from revision.drop_empty_partitions();
end
$$;
comment on function revision.maintain_partitions(bigint, integer) is
    'Keep partitions of the queue ahead of the current transaction ids: the given number of partitions of width ids each. If the '
    'cluster assigns more ids in ten times the time between two runs, more and wider partitions. Returns a line for each change. '
    'If a line begins with "left", call it again in a transaction of its own. Rows that were written without a partition move to one '
    'while writers go on. A few emptied partitions are kept.';

do $$ begin perform revision.maintain_partitions(); end $$;
