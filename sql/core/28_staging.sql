-- The staging schema: Spark writes the results of a batch here, and the consumer transaction merges them. Each attempt and target
-- has an UNLOGGED table; its comment names the batch and the attempt. A crash of the server empties the tables, and the batch is
-- tried again. The tables are in a schema of their own because consumers create them. A role that may create objects in a schema
-- could hide ours there by others. So nothing else is in this schema, and no function has it in its search_path.

-- Create the staging schema. Its owner and its comment identify it as ours. If another role has a schema of this name, creating
-- it fails.
create function pgchange.make_staging() returns void
language plpgsql as $$
begin
    -- If a core that was dropped manually left the schema behind, keep it.
    if not pgchange.ours('pgchange_staging', tell => false)
       or coalesce(obj_description(to_regnamespace('pgchange_staging'), 'pg_namespace') not like 'pgchange: %', true)
    then
        create schema pgchange_staging;
        comment on schema pgchange_staging is
            'pgchange: results of batches that Spark has staged. The consumer''s transaction merges them; others were left over. '
            'Consumers may create tables here, and nowhere in pgchange.';
    end if;
end
$$;

select pgchange.make_staging();

-- The fields in the comment of a staging table. made_at is null if the comment has another form: every role that may create
-- tables there can write any comment.
create function pgchange.staged_by(
    comment text, out batch_id text, out attempt integer, out target text, out made_at timestamptz
)
language plpgsql stable as $$
declare
    told jsonb;
begin
    -- Our comments are shorter, so do not parse a longer text.
    if length(comment) > 2000 then
        return;
    end if;
    told := substring(comment from '^pgchange (.*)$');
    batch_id := told ->> 'batch_id';
    attempt := told ->> 'attempt';
    target := told ->> 'target';
    made_at := told ->> 'made_at';
-- Any error, also of JSON that is nested deeper than the server's stack allows.
exception when others then
    made_at := null;
end
$$;

-- All staging tables, with the batch and attempt that made each.
create function pgchange.staged_tables()
returns table (tbl oid, name text, batch_id text, attempt integer, target text, made_at timestamptz)
language sql stable as $$
    select c.oid, c.relname::text, told.batch_id, told.attempt, told.target, told.made_at
    from pg_class c, lateral pgchange.staged_by(obj_description(c.oid, 'pg_class')) told
    where c.relnamespace = 'pgchange_staging'::regnamespace
      and c.relkind = 'r'
      and c.relname ~ '^b[0-9a-f]{16}_[0-9]+_[0-9a-f]{8}$'
      and told.made_at is not null
$$;

-- An attempt lives as long as its consumer's transaction, which took its advisory lock before anything was staged. So a staging
-- table counts as in use while any transaction that began before the table was made holds an advisory lock here. A session whose
-- transaction start is not visible to this role counts as such a transaction.

-- Staging tables older than an interval, the oldest first, and whether the attempt that made each may be alive. Without sizes,
-- because PostgreSQL locks a table to measure it, and any role may keep its tables locked.
create function pgchange.left_over(older_than interval)
returns table (tbl oid, name text, batch_id text, attempt integer, target text, made_at timestamptz, in_use boolean)
language sql volatile as $$
    with holders as (
        select case when a.xact_start is not null then a.xact_start
                    when a.state = 'idle' then 'infinity'
                    else '-infinity' end as since
        from pg_locks l
        join pg_stat_activity a using (pid)
        where l.locktype = 'advisory' and l.granted
          and l.database = (select d.oid from pg_database d where d.datname = current_database())
    )
    select s.tbl, s.name, s.batch_id, s.attempt, s.target, s.made_at,
           exists (select from holders h where h.since <= s.made_at)
    from pgchange.staged_tables() s
    where s.made_at < clock_timestamp() - older_than
    order by s.made_at
$$;

-- Staging tables older than an interval, with their sizes in bytes. in_use: the attempt that made the table may be alive, so it
-- will not be dropped.
create function pgchange.leftovers(older_than interval default '1 day')
returns table (
    name text, batch_id text, attempt integer, target text, made_at timestamptz, bytes bigint, in_use boolean
)
language sql volatile security definer as $$
    select l.name, l.batch_id, l.attempt, l.target, l.made_at, pg_total_relation_size(l.tbl), l.in_use
    from pgchange.left_over(older_than) l
    order by l.made_at
$$;

-- Drop the staging tables that are older than an interval and belong to no living attempt. Returns their names.
create function pgchange.drop_leftovers(older_than interval default '1 day') returns setof text
language plpgsql volatile security definer
set lock_timeout = '1s'
as $$
declare
    leftover text;
begin
    for leftover in select l.name from pgchange.left_over(older_than) l where not l.in_use loop
        begin
            -- The owner of the schema may drop a table of a consumer but not lock it, so lock_timeout limits the wait.
            perform set_config('lock_timeout', pgchange.patience('1 s'), true);
            execute format('drop table pgchange_staging.%I', leftover);
            return next leftover;
        exception
            when lock_not_available or deadlock_detected then
                raise notice 'staging table % is in use: left for the next run', leftover;
            when dependent_objects_still_exist then
                raise warning 'staging table % could not be dropped because other objects depend on it: drop these, and the next '
                              'run drops the table', leftover;
            when undefined_table then
                null;
        end;
    end loop;
end
$$;
