-- The number of a consumer's progress, by which a source knows whether it has lost what a consumer elsewhere has seen.

create table pgchange.consumer (
    name text primary key,
    version bigint not null,
    noted_at timestamptz not null default clock_timestamp()
);
comment on table pgchange.consumer is
    'The highest number that this source has given to the progress of each consumer, by the name that status shows: one for each '
    'batch, and one for each move by hand. It outlives the consumer: one of the same name goes on counting, so that a source '
    'that went back to a time before a drop never takes the new one''s progress for that of the old one.';

create function pgchange.next_version(name text, at bigint) returns bigint
language plpgsql
set search_path = pg_catalog, pgchange, pg_temp
as $$
declare
    given bigint := (select c.version from pgchange.consumer as c where c.name = next_version.name);
begin
    if at is null or at - coalesce(given, 0) > 2147483647 then
        raise invalid_parameter_value using
            message = format('consumer %s cannot be at batch %s: this source has given numbers up to %s', name, at, coalesce(given, 0)),
            hint = 'give its position as it is recorded; where it comes from another source, drop the consumer and let it begin anew';
    end if;
    -- Results elsewhere are not to be ahead of what this source knows after a crash.
    if current_setting('synchronous_commit') in ('off', 'local') then
        perform set_config('synchronous_commit', 'on', true);
    end if;
    insert into pgchange.consumer as c (name, version) values (next_version.name, next_version.at + 1)
    on conflict on constraint consumer_pkey do update
        set version = greatest(c.version, next_version.at) + 1, noted_at = excluded.noted_at
    returning c.version into given;
    return given;
end
$$;
comment on function pgchange.next_version(text, bigint) is
    'A number for what follows a consumer''s progress at, higher than any that this source has given to its name, and never so far '
    'above them that there would soon be none left. It lasts, whatever the session says of synchronous_commit: unless the '
    'transaction is rolled back.';

create function pgchange.check_version(batch jsonb, claimed bigint) returns void
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
declare
    version bigint := batch ->> 'version';
    began_at bigint := batch -> 'bounds' ->> 'from_version';
begin
    -- Where the claim is in another database, it is one of those that could follow.
    if coalesce(version = claimed, version > began_at and version - began_at <= 2147483647) is not true then
        raise exception using errcode = 'PC006',
            message = format('batch %s was not claimed as version %s', batch ->> 'id', coalesce(version::text, 'null')),
            hint = 'ack a batch as its claim returned it; roll back and claim again';
    end if;
end
$$;
comment on function pgchange.check_version(jsonb, bigint) is
    'Refuse a batch of another version than was claimed, which is null where the claim is in another database: a consumer at one '
    'that nobody claimed could not go on.';
