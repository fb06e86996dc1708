-- Who may do what. PUBLIC may do nothing; the functions of the feeds ask with the rights of their owner.

create function pgchange.grant_viewer(role regrole) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
    execute format($grants$
        grant usage on schema pgchange to %1$s;
        grant select on pgchange.registered to %1$s;
        grant execute on function
            pgchange.ours(name), pgchange.status(integer, text), pgchange.health(), pgchange.consumers_health(integer), pgchange.shell_quoted(text)
            to %1$s
    $grants$, role);
end
$$;
comment on function pgchange.grant_viewer(regrole) is
    'Let a role ask how things are: it is told what it may see by its rights on each feed. The grant functions of the feeds call this one.';

create function pgchange.grant_consumer(role regrole) returns void
language plpgsql
set search_path = pg_catalog, pgchange, pg_temp
as $$
begin
    perform pgchange.grant_viewer(role);
    execute format($grants$
        grant execute on function
            pgchange.who_locks(bigint), pgchange.locked(bigint), pgchange.check_claim(integer), pgchange.check_reason(text)
            to %1$s
    $grants$, role);
end
$$;
comment on function pgchange.grant_consumer(regrole) is
    'Let a role do what consumers of every feed do. The grant functions of the feeds call this one.';

create function pgchange.grant_reader(role regrole) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
    execute format('grant usage on schema pgchange to %s', role);
    execute format('grant execute on function pgchange.descendants(regclass), pgchange.code_in(regclass), pgchange.settings() to %s', role);
end
$$;
comment on function pgchange.grant_reader(regrole) is 'Let a role capture tables: see whose code a query of them runs, and under which settings.';

create function pgchange.grant_maintainer(role regrole) returns void
language plpgsql
set search_path = pg_catalog, pgchange, pg_temp
as $$
begin
    perform pgchange.grant_viewer(role);
    perform pgchange.grant_reader(role);
    execute format('grant select on pgchange.installed to %s', role);
end
$$;
comment on function pgchange.grant_maintainer(regrole) is 'Let a role see which version is installed, and mend captures.';

revoke all on all routines in schema pgchange from public;
revoke all on all tables in schema pgchange from public;
revoke all on type pgchange.consumer_status, pgchange.finding from public;
revoke all on schema pgchange from public;
