-- Who may do what. PUBLIC may do nothing; the functions of the feeds ask with the rights of their owner. Which letters a role may
-- see and keep, each kind decides by its letter_rights().

create function pgchange.grant_viewer(role regrole) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
    execute format($grants$
        grant usage on schema pgchange to %1$s;
        grant select on pgchange.registered to %1$s;
        grant execute on function
            pgchange.ours(name, boolean), pgchange.status(integer, text), pgchange.health(pgchange.consumer_status[]),
            pgchange.consumers_health(integer, pgchange.consumer_status[]), pgchange.many(bigint, text), pgchange.shell_quoted(text),
            pgchange.watchers(), pgchange.watchers_health(interval), pgchange.batches(text, integer),
            pgchange.note_samples(jsonb), pgchange.samples(text, text), pgchange.trends(interval)
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
            pgchange.who_locks(bigint), pgchange.locked(bigint), pgchange.locks_held(), pgchange.check_claim(integer),
            pgchange.check_reason(text), pgchange.check_isolation(), pgchange.check_version(jsonb, bigint), pgchange.refuse_stale(text, jsonb),
            pgchange.full_xid(xid), pgchange.snapshot_of(bigint[], bigint), pgchange.snapshot_union(pg_snapshot, pg_snapshot),
            pgchange.snapshot_below(pg_snapshot, xid8), pgchange.snapshot_with(pg_snapshot, xid8),
            pgchange.note_watchers(jsonb), pgchange.pinned_settings()
            to %1$s;
        grant usage, create on schema pgchange_staging to %1$s
    $grants$, role);
end
$$;
comment on function pgchange.grant_consumer(regrole) is
    'Let a role do what consumers of every feed do, and stage results of its batches: it needs its own rights on the tables into '
    'which they are merged. The grant functions of the feeds call this one.';

create function pgchange.grant_admin(role regrole) returns void
language plpgsql
set search_path = pg_catalog, pgchange, pg_temp
as $$
begin
    perform pgchange.grant_viewer(role);
    execute format($grants$
        grant select, insert (kind, consumer, address, content, changes, reason, error, attempts, batch_id), delete
            on pgchange.letter to %1$s;
        grant execute on function
            pgchange.has_letter_right(text, text, jsonb), pgchange.chosen_letters(bigint, text, interval),
            pgchange.check_letter_choice(bigint, text, interval), pgchange.letter_gone(bigint),
            pgchange.check_letter(text, jsonb, jsonb), pgchange.check_sendable(bigint), pgchange.keeps_letter(bigint),
            pgchange.check_letter_keeper(bigint), pgchange.letter_hindrance(bigint), pgchange.letters(text, interval),
            pgchange.letter_content(bigint),
            pgchange.redrive(bigint, text, interval), pgchange.drop_letters(bigint, text, interval),
            pgchange.write_letter(text, text, jsonb, jsonb, bigint, text, text, integer, uuid), pgchange.letters_health()
            to %1$s
    $grants$, role);
end
$$;
comment on function pgchange.grant_admin(regrole) is
    'Let a role see and keep the letters that its rights on their feeds allow. The grant functions of those feeds call this one.';

create function pgchange.grant_reader(role regrole) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
    execute format($grants$
        grant usage on schema pgchange to %1$s;
        grant execute on function
            pgchange.descendants(regclass), pgchange.code_in(regclass), pgchange.check_code(regclass, text), pgchange.settings(),
            pgchange.pinned_settings(),
            pgchange.refuse(text, text), pgchange.check_owner(regclass, text), pgchange.check_capturable(regclass, text, name[]),
            pgchange.check_captured_once(regclass, name, name),
            pgchange.is_named(oid, smallint, name), pgchange.key_now(oid, name, smallint, name, smallint), pgchange.key_check(oid, name, smallint), pgchange.foreign_child(regclass), pgchange.place_bar(regclass, name, text),
            pgchange.came_with_rows(regclass[]), pgchange.told_missed(regclass, regclass, text),
            pgchange.bring_missed(regclass, name, name), pgchange.tell_missed(regclass, regclass[], text, name, name),
            pgchange.unseen(), pgchange.may_wait(interval), pgchange.patience(interval),
            pgchange.lock_briefly(text, interval), pgchange.lock_briefly(bigint, interval), pgchange.holds_tables(regclass[]),
            pgchange.holders(regclass, text), pgchange.stop_autovacuum(regclass, text), pgchange.take_locks(regclass[], text),
            pgchange.lock_family(regclass, text)
            to %1$s
    $grants$, role);
end
$$;
comment on function pgchange.grant_reader(regrole) is
    'Let a role capture tables: see whose code a query of them runs, and under which settings, and lock them beside others.';

create function pgchange.grant_maintainer(role regrole) returns void
language plpgsql
set search_path = pg_catalog, pgchange, pg_temp
as $$
begin
    perform pgchange.grant_viewer(role);
    perform pgchange.grant_reader(role);
    execute format($grants$
        grant select on pgchange.installed to %1$s;
        grant execute on function
            pgchange.trim_batches(interval, integer), pgchange.trim_watchers(interval),
            pgchange.staged_tables(), pgchange.staged_by(text), pgchange.leftovers(interval), pgchange.drop_leftovers(interval)
            to %1$s
    $grants$, role);
end
$$;
comment on function pgchange.grant_maintainer(regrole) is
    'Let a role see which version is installed, forget what became of batches long ago, drop what was left over in staging, and '
    'mend captures.';

alter table pgchange.letter enable row level security;
create policy seen on pgchange.letter for select using (pgchange.has_letter_right('see', kind, address));
create policy kept on pgchange.letter using (pgchange.has_letter_right('keep', kind, address));

revoke all on all routines in schema pgchange from public;
revoke all on all tables in schema pgchange from public;
revoke all on type pgchange.consumer_status, pgchange.finding from public;
revoke all on schema pgchange from public;
