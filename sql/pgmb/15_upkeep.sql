-- What a scheduler calls every few minutes.

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
    return query select * from pgmb.maintain_append_only_table('pgmb.dispatched', current_ts);
    return query select * from pgmb.maintain_append_only_table('pgmb.events', current_ts);
end
$$;
comment on function pgmb.maintain_events_table(timestamptz) is
    'Look after the log, in one transaction: select pgmb.maintain_events_table(). Subscriptions expire, partitions are made '
    'ahead, what is old and needed by nobody goes. A line for each thing done, postponed, or kept and for whom. It is a '
    'function: call is for procedures.';
