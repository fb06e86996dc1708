-- Who may do what. PUBLIC may do nothing.

create function pgchange_staging.grant_consumer(role regrole) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
    execute format('grant usage, create on schema pgchange_staging to %s', role);
    execute format('grant select on pgchange_staging.installed to %s', role);
end
$$;
comment on function pgchange_staging.grant_consumer(regrole) is
    'Let a role stage results of its batches. It needs its own rights on the tables into which they are merged.';

create function pgchange_staging.grant_maintainer(role regrole) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
    execute format('grant usage on schema pgchange_staging to %s', role);
    execute format('grant select on pgchange_staging.installed to %s', role);
    execute format(
        'grant execute on function pgchange_staging.staged_tables(), pgchange_staging.told_by(text), pgchange_staging.leftovers(interval), '
        'pgchange_staging.drop_leftovers(interval) to %s', role);
end
$$;
comment on function pgchange_staging.grant_maintainer(regrole) is 'Let a role find and drop what was left over.';

revoke all on all routines in schema pgchange_staging from public;
revoke all on all tables in schema pgchange_staging from public;
revoke all on schema pgchange_staging from public;
