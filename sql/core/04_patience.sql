-- How long maintenance waits for locks.

create function pgchange.patience(most interval) returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select greatest(1, extract(epoch from least(most, current_setting('deadlock_timeout')::interval / 2)) * 1000)::integer || 'ms'
$$;
comment on function pgchange.patience(interval) is
    'The lock_timeout of maintenance, so long at most: whoever waits for what it has locked looks for a deadlock later than it gives '
    'up, and is not the one that is ended.';
