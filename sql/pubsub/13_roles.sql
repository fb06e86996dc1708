-- Who may do what. PUBLIC may do nothing.

create function pubsub.grant_consumer(role regrole) returns void
language plpgsql
set search_path = pg_catalog, pubsub, pg_temp
as $$
begin
    perform pgchange.grant_consumer(role);
    execute format($grants$
        grant usage on schema revision, pubsub to %1$s;
        grant select on revision.commit_queue, revision.branch to %1$s;
        grant select on pubsub.watermark, pubsub.out_of_order, pubsub.installed to %1$s;
        grant execute on function
            pubsub.snapshot_of(bigint[], bigint), pubsub.snapshot_union(pg_snapshot, pg_snapshot),
            pubsub.snapshot_below(pg_snapshot, xid8), pubsub.snapshot_with(pg_snapshot, xid8),
            pubsub.current_snapshot(integer),
            pubsub.unread(bigint, pg_snapshot, xid8, bigint, pg_snapshot, xid8, bigint, xid8, bigint),
            pubsub.cursor_of(jsonb), pubsub.changes(bigint, jsonb, bigint, bigint, bigint, bigint),
            pubsub.check_branch(bigint), pubsub.choose(bigint, jsonb, integer, boolean),
            pubsub.count_unread(bigint, jsonb, pg_snapshot, xid8, integer), pubsub.lag(bigint, jsonb, integer, boolean),
            pubsub.faults(bigint), pubsub.point(bigint, timestamptz), pubsub.passed(bigint, jsonb, jsonb),
            pubsub.passed_point(bigint, jsonb, jsonb),
            pubsub.passed_commit(bigint, jsonb, bigint, xid8), pubsub.lock_key(text, bigint), pubsub.locked(text, bigint),
            pubsub.here(), pubsub.check_origin(), pubsub.check_position(text, bigint, jsonb),
            pubsub.register(text, bigint, boolean),
            pubsub.position(text, bigint), pubsub.claim(text, bigint, jsonb, integer, boolean, boolean, jsonb, integer),
            pubsub.ack(text, bigint, jsonb), pubsub.in_work(text, bigint, jsonb), pubsub.skip(text, bigint, jsonb, text),
            pubsub.note_failure(text, bigint, jsonb, text), pubsub.lock_watermark(text, bigint, boolean),
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
set search_path = pg_catalog, pubsub, dead_letter, pg_temp
as $$
begin
    perform pubsub.grant_consumer(role);
    perform dead_letter.grant_admin(role);
    execute format($grants$
        grant select on revision.trimmed to %1$s;
        grant execute on function
            pubsub.pending(text, bigint, jsonb), pubsub.skip_batch(text, bigint, text), pubsub.note_move(text, bigint, jsonb, jsonb), pubsub.move_consumer(text, bigint, jsonb, bigint),
            pubsub.is_known(text, bigint), pubsub.drop_consumer(text, bigint), pubsub.adopt_mark(text, bigint, jsonb),
            pubsub.trim_commit_queue(interval), pubsub.letter_rights(jsonb), pubsub.check_letter(jsonb, jsonb),
            pubsub.redrive(bigint)
            to %1$s
    $grants$, role);
end
$$;
comment on function pubsub.grant_admin(regrole) is
    'Let a role look after consumers: skip, send again, move, drop, repair, and trim the history.';

revoke all on all routines in schema pubsub from public;
revoke all on all tables in schema pubsub from public;
revoke all on schema pubsub from public;
