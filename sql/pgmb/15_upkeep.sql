-- What a scheduler calls every few minutes.

create function pgmb.upkeep_key() returns bigint
language sql immutable
as $$
    select pg_catalog.hashtextextended('pgchange upkeep pgmb', 0)
$$;
comment on function pgmb.upkeep_key() is
    'The advisory lock of who makes, empties and drops partitions: one at a time, and who comes meanwhile steps aside.';

create function pgmb.check_append_only(tbl regclass) returns void
language plpgsql stable
set search_path = pg_catalog, pgmb, pg_temp
as $$
begin
    if tbl is null or tbl not in ('pgmb.events'::regclass, 'pgmb.dispatched'::regclass) then
        perform pgmb.refuse(
            format('%s is not a table that is kept by time', coalesce(tbl::text, 'null')),
            'these are: pgmb.events, pgmb.dispatched');
    end if;
    perform pgmb.check_isolation();
end
$$;
comment on function pgmb.check_append_only(regclass) is 'Refuse to maintain any other table than those kept here, or unsafely.';

create function pgmb.maintain_append_only_table(tbl regclass, current_ts timestamptz default now()) returns setof text
language plpgsql security definer
set search_path = pg_catalog, pgmb, pg_temp
as $$
begin
    -- What locks the whole table comes last, as locks are kept to the end.
    return query select * from pgmb.trim_partitions(tbl, current_ts);
    return query select * from pgmb.make_partitions(tbl, current_ts);
    return query select * from pgmb.drop_emptied(tbl, current_ts);
end
$$;
comment on function pgmb.maintain_append_only_table(regclass, timestamptz) is
    'Make the partitions of pgmb.events or pgmb.dispatched ahead, and let go of what is old and needed by nobody; a line for '
    'each thing done, postponed or kept.';

create function pgmb.maintain_events_table(current_ts timestamptz default now()) returns setof text
language plpgsql security definer
set search_path = pg_catalog, pgmb, pg_temp
as $$
begin
    return query select * from pgmb.expire_subscriptions(current_ts);
    return query select * from pgmb.forget_faults(current_ts);
    return query select * from pgmb.trim_published();
    -- What locks a whole table comes last for both, as locks are kept to the end.
    return query select * from pgmb.trim_partitions('pgmb.dispatched', current_ts);
    return query select * from pgmb.trim_partitions('pgmb.events', current_ts);
    return query select * from pgmb.make_partitions('pgmb.dispatched', current_ts);
    return query select * from pgmb.make_partitions('pgmb.events', current_ts);
    return query select * from pgmb.drop_emptied('pgmb.dispatched', current_ts);
    return query select * from pgmb.drop_emptied('pgmb.events', current_ts);
end
$$;
comment on function pgmb.maintain_events_table(timestamptz) is
    'Look after the log, in one transaction: select pgmb.maintain_events_table(). Subscriptions expire, partitions are made '
    'ahead, what is old and needed by nobody goes. A line for each thing done, postponed, or kept and for whom. It is a '
    'function: call is for procedures.';
