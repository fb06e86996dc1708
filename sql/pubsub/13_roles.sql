-- Who may do what. PUBLIC may do nothing.

create function pubsub.grant_consumer(role regrole) returns void
language plpgsql
set search_path = pg_catalog, pubsub, pg_temp
as $$
begin
    perform pgchange.grant_consumer(role);
    perform pgchange.open_given('pubsub', 'consumer', role);
    execute format($grants$
        grant usage on schema revision, pubsub to %1$s;
        grant select on revision.commit_queue, revision.branch to %1$s;
        grant select on pubsub.watermark, pubsub.out_of_order, pubsub.installed to %1$s;
        grant execute on function
            pubsub.current_snapshot(integer),
            pubsub.unread(bigint, pg_snapshot, xid8, bigint, pg_snapshot, xid8, bigint, xid8, bigint),
            pubsub.cursor_of(jsonb), pubsub.changes(bigint, jsonb, bigint, bigint, bigint, bigint),
            pubsub.check_branch(bigint), pubsub.choose(bigint, jsonb, integer, boolean),
            pubsub.count_unread(bigint, jsonb, pg_snapshot, xid8, integer),
            pubsub.lag_of(jsonb, bigint, boolean, double precision, bigint, boolean, double precision, bigint),
            pubsub.lags(jsonb, boolean), pubsub.lag(bigint, jsonb, integer, boolean),
            pubsub.faults(bigint), pubsub.point(bigint, timestamptz), pubsub.passed(bigint, jsonb, jsonb),
            revision.here(), pubsub.check_origin(), pubsub.check_position(text, bigint, jsonb), pubsub.check_positions(jsonb),
            pubsub.register(text, bigint, boolean),
            pubsub.position(text, bigint), pubsub.claim(text, bigint, jsonb, integer, boolean, boolean, jsonb, integer),
            pubsub.lock_watermark(text, bigint, boolean),
            pubsub.poll(text, bigint, integer, boolean), pubsub.status(integer), pubsub.held_back_by(),
            pubsub.mark(text, bigint)
            to %1$s
    $grants$, role);
end
$$;
comment on function pubsub.grant_consumer(regrole) is
    'Let a role consume the commit queue, in the database of the commits and in that of the results. Such roles trust each '
    'other: each can advance any consumer.';

create function pubsub.grant_admin(role regrole) returns void
language plpgsql
set search_path = pg_catalog, pubsub, pg_temp
as $$
begin
    perform pubsub.grant_consumer(role);
    perform pgchange.open_given('pubsub', 'admin', role);
    perform pgchange.grant_admin(role);
    execute format($grants$
        grant select on revision.trimmed to %1$s;
        grant execute on function
            pubsub.adopt_mark(text, bigint, jsonb), pubsub.trim_commit_queue(interval), pubsub.check_letter(jsonb, jsonb),
            pubsub.letter_content(jsonb, jsonb)
            to %1$s
    $grants$, role);
end
$$;
comment on function pubsub.grant_admin(regrole) is
    'Let a role look after consumers: skip, send again, move, drop, repair, and trim the history.';

revoke all on all routines in schema pubsub from public;
revoke all on all tables in schema pubsub from public;
revoke all on schema pubsub from public;
