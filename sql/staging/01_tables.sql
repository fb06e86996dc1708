-- Where Spark puts a batch's results until the consumer transaction merges them: one UNLOGGED table for each
-- attempt and target. Its comment says whose it is; a crash empties it, and the batch is tried again.

create schema pgchange_staging;
comment on schema pgchange_staging is
    'Results of batches that Spark has staged and that the consumer''s transaction merges, or that were left over.';

create table pgchange_staging.installed (
    version integer not null,
    checksum text,
    installed_at timestamptz not null default now(),
    constraint pgchange_staging_of_airflow_pgchange check (version >= 0)
);
comment on table pgchange_staging.installed is
    'One row for each version of this schema that was installed here, the newest last.';
-- The installer notes its checksum by an update, which a publication refuses without an identity.
alter table pgchange_staging.installed replica identity full;
insert into pgchange_staging.installed (version) values (1);

create function pgchange_staging.told_by(
    comment text, out batch_id text, out attempt integer, out target text, out made_at timestamptz
)
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    told jsonb;
begin
    told := substring(comment from '^pgchange (.*)$');
    batch_id := told ->> 'batch_id';
    attempt := told ->> 'attempt';
    target := told ->> 'target';
    made_at := told ->> 'made_at';
exception when data_exception then
    made_at := null;
end
$$;
comment on function pgchange_staging.told_by(text) is
    'What a staging table''s comment says; made_at is null where it is not one of ours, as anybody may write who may create '
    'tables here.';

create function pgchange_staging.staged_tables()
returns table (tbl oid, name text, batch_id text, attempt integer, target text, made_at timestamptz, bytes bigint)
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select c.oid, c.relname::text, told.batch_id, told.attempt, told.target, told.made_at, pg_total_relation_size(c.oid)
    from pg_class c, lateral pgchange_staging.told_by(obj_description(c.oid, 'pg_class')) told
    where c.relnamespace = 'pgchange_staging'::regnamespace
      and c.relkind = 'r'
      and c.relname ~ '^b[0-9a-f]{16}_[0-9]+_[0-9a-f]{8}$'
      and told.made_at is not null
$$;
comment on function pgchange_staging.staged_tables() is
    'Every staging table there is, with the batch and attempt that made it; sizes in bytes.';
