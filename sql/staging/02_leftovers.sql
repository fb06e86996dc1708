-- An attempt lives as long as its consumer's transaction, which took its advisory lock before anything was staged. So a
-- staging table is in use while any transaction that began before the table was made holds an advisory lock here;
-- a session whose beginning we may not see counts as such a transaction.
-- Consumers may create in this schema, so functions that run as their owner do not have it in their search_path.

create function pgchange_staging.leftovers(older_than interval default '1 day')
returns table (
    name text, batch_id text, attempt integer, target text, made_at timestamptz, bytes bigint, in_use boolean
)
language sql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
    with holders as (
        select case when a.xact_start is not null then a.xact_start
                    when a.state = 'idle' then 'infinity'
                    else '-infinity' end as since
        from pg_locks l
        join pg_stat_activity a using (pid)
        where l.locktype = 'advisory' and l.granted
          and l.database = (select d.oid from pg_database d where d.datname = current_database())
    )
    select s.name, s.batch_id, s.attempt, s.target, s.made_at, s.bytes,
           exists (select from holders h where h.since <= s.made_at)
    from pgchange_staging.staged_tables() s
    where s.made_at < clock_timestamp() - older_than
    order by s.made_at
$$;
comment on function pgchange_staging.leftovers(interval) is
    'Staging tables older than an interval. in_use: the attempt that made it may be alive, so it will not be dropped.';

create function pgchange_staging.drop_leftovers(older_than interval default '1 day') returns setof text
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '1s'
as $$
declare
    leftover text;
begin
    for leftover in select l.name from pgchange_staging.leftovers(older_than) l where not l.in_use loop
        begin
            execute format('drop table pgchange_staging.%I', leftover);
            return next leftover;
        exception
            when lock_not_available then
                raise notice 'staging table % is being read or written: left for the next time', leftover;
            when dependent_objects_still_exist then
                raise warning 'staging table % has dependent objects: drop them, then it goes too', leftover;
            when undefined_table then
                null;
        end;
    end loop;
end
$$;
comment on function pgchange_staging.drop_leftovers(interval) is
    'Drop the staging tables that no living attempt uses and that are older than an interval; returns their names.';
