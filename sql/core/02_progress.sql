-- The versions of consumers' progress. A source numbers the batches of each consumer. If the results are in another database, that
-- database records the number, too. If the recorded number is higher than the source's own, the source has lost transactions.

-- Quote an argument for a shell.
create function pgchange.shell_quoted(argument text) returns text
language sql immutable as $$
    select case when argument ~ '^[[:alnum:]_@%+=:,./-]+$' then argument
                else '''' || replace(argument, '''', '''"''"''') || '''' end
$$;

create table pgchange.consumer (
    kind text,
    name text,
    version bigint not null,
    noted_at timestamptz not null default clock_timestamp(),
    primary key (kind, name)
);
comment on table pgchange.consumer is
    'The highest version that this source has given to the progress of each consumer, by its kind and the name that status shows. '
    'Each batch and each move by hand gets the next version. The row stays when the consumer is dropped, and a new consumer of the '
    'same name continues the count. So a source that was restored to a time before the drop cannot take the progress of the new '
    'consumer for that of the old.';

-- Return the version that follows a consumer's version at. It is higher than any version that this source has given to the
-- consumer. A version at far above these is refused, because the numbers would soon be used up. The commit is synchronous,
-- whatever the session's synchronous_commit.
create function pgchange.next_version(kind text, name text, at bigint) returns bigint
language plpgsql as $$
declare
    given bigint;
begin
    -- After a crash of this source, results in another database must not be ahead of the versions recorded here.
    if current_setting('synchronous_commit') in ('off', 'local') then
        perform set_config('synchronous_commit', 'on', true);
    end if;
    -- If at is far above 0 and the consumer is new, this inserts a row with the version 0, which the error below rolls back.
    insert into pgchange.consumer as c (kind, name, version)
    values (next_version.kind, next_version.name, case when next_version.at <= 2147483647 then next_version.at + 1 else 0 end)
    on conflict on constraint consumer_pkey do update
        set version = greatest(c.version, next_version.at) + 1, noted_at = excluded.noted_at
        where next_version.at - c.version <= 2147483647
    returning c.version into given;
    if coalesce(given <= at, true) then
        given := (select c.version from pgchange.consumer as c where c.kind = next_version.kind and c.name = next_version.name);
        raise invalid_parameter_value using
            message = format(
                'consumer %s cannot be at batch %s: the highest number that this source has given is %s', name, at, given),
            hint = 'pass the position of the consumer as it is recorded; if it was recorded for another source, drop the consumer '
                   'and let it begin anew';
    end if;
    return given;
end
$$;

-- Refuse a batch whose version differs from the claimed version. A consumer with a version that was never claimed could not go
-- on. claimed is null if the claim is recorded in another database.
create function pgchange.check_version(batch jsonb, claimed bigint) returns void
language plpgsql immutable as $$
declare
    version bigint := batch ->> 'version';
    began_at bigint := batch -> 'bounds' ->> 'from_version';
begin
    -- If the claim is in another database, accept any version that could follow the position at which the batch began.
    if coalesce(version = claimed, version > began_at and version - began_at <= 2147483647) is not true then
        raise exception using errcode = 'PC006',
            message = pg_catalog.format('batch %s was not claimed as version %s', batch ->> 'id', coalesce(version::text, 'null')),
            hint = 'roll back, claim again, and ack the batch as the claim returned it';
    end if;
end
$$;

-- Refuse to ack a batch whose consumer is not at the position at which the batch began.
create function pgchange.refuse_stale(consumer text, batch jsonb) returns void
language plpgsql immutable as $$
begin
    raise exception using errcode = 'PC006',
        message = pg_catalog.format('%s is not where batch %s began', consumer, batch ->> 'id'),
        hint = 'the consumer was moved since: roll back and claim again';
end
$$;

-- Refuse a position of another place than here, or with a higher version than the version known, which this source has given. here
-- is null if the transaction ids of the source are not valid any more.
create function pgchange.check_position(consumer text, "position" jsonb, here text, known bigint) returns void
language plpgsql stable as $$
declare
    at bigint := "position" ->> 'version';
begin
    if not pgchange.fits("position", here) then
        raise exception using errcode = 'PC004',
            message = pg_catalog.format('%s belongs to another database than this source', consumer),
            hint = 'if the source was restored or upgraded, run airflow-pgchange repair; else check the source''s connection';
    end if;
    -- On a standby a higher version is no loss: the standby may only be late.
    if at > coalesce(known, 0) and not pg_catalog.pg_is_in_recovery() then
        raise exception using errcode = 'PC003',
            message = pg_catalog.format('%s is at batch %s, but this source knows only %s: it lost its latest transactions',
                                        consumer, at, coalesce(known, 0)),
            hint = pg_catalog.format(
                'airflow-pgchange repair %s starts again from the changes that the source still has; the consumer then gets '
                'changes at least once',
                pgchange.shell_quoted(consumer));
    end if;
end
$$;

-- Refuse a point without its source, to which a consumer cannot be moved. Null, the beginning, is accepted.
create function pgchange.check_point(point jsonb, schema name) returns void
language plpgsql immutable as $$
begin
    if point is not null and point ->> 'source' is null then
        raise invalid_parameter_value using message = 'consumers cannot be moved to this point: it does not say where it was taken',
            hint = format('pass the whole value that %I.point() returned, or null for the beginning', schema);
    end if;
end
$$;

-- In the database of the changes, refuse a move of a consumer to a point of another database, or to a point in the future.
create function pgchange.check_move(consumer text, "position" jsonb, point jsonb, here text, is_past boolean, schema name) returns void
language plpgsql immutable as $$
begin
    if point ->> 'source' <> here or point is null and not pgchange.fits("position", here) then
        raise exception using errcode = 'PC004',
            message = format('consumer %s cannot be moved to a point of another database than this', consumer),
            hint = format(
                'call %1$I.note_move() first, in the database of the changes; then call %1$I.move_consumer() with the version that '
                'it returns, in the database of the progress', schema);
    end if;
    if not is_past then
        raise invalid_parameter_value using message = format(
            'consumers cannot be moved to the point %s: it lies in the future', point - 'source'),
            hint = format('%I.point() returns the present point', schema);
    end if;
end
$$;

-- How a consumer at version at continues after a repair, given the mark that mark() of the source returned. version: the version
-- from which it continues. behind: which of the mark's two positions it is put behind. is_lost: whether it has processed changes
-- that the source has lost. guarantee: how often it gets a change from then on.
create function pgchange.adoption(
    consumer text, at bigint, mark jsonb, out version bigint, out behind text, out is_lost boolean, out guarantee text
)
language plpgsql immutable as $$
declare
    known bigint := coalesce((mark ->> 'version')::bigint, 0);
    began_at bigint := coalesce((mark ->> 'from_version')::bigint, 0);
    unacked boolean := at = began_at;
begin
    if not unacked and at < known then
        raise exception using errcode = 'PC009',
            message = format(
                'consumer %s cannot be repaired: it is at batch %s, before the last claim that the source knows', consumer, at),
            hint = format('choose a point: airflow-pgchange move %s --to beginning, or --to now', pgchange.shell_quoted(consumer));
    end if;
    version := case when unacked then began_at else known end;
    behind := case when unacked then 'after' else 'upto' end;
    is_lost := at > known;
    guarantee := case when unacked or at = known then 'exactly once' else 'at least once' end;
end
$$;
