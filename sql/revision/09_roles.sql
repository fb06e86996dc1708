-- Who may do what. PUBLIC may do nothing; a writer of a tracked table needs nothing.

create function revision.grant_owner(role regrole) returns void
language plpgsql
set search_path = pg_catalog, revision, pg_temp
as $$
begin
    perform pgchange.grant_reader(role);
    execute format($grants$
        grant usage on schema revision to %1$s;
        grant insert (commit_id, branch_id) on revision.commit_queue to %1$s;
        grant select on revision.commit_queue, revision.branch, revision.tracked, revision.fault to %1$s;
        grant insert (tbl, commit_id, branch_id, expression, key_ceiling), update (commit_id, existing_upto, existing_done), delete
            on revision.tracked to %1$s;
        grant insert (type, tbl) on revision.branch to %1$s;
        grant insert (tbl, kind, commit_id, message), delete on revision.fault to %1$s;
        grant execute on function
            revision.track(regclass, name, text), revision.untrack(regclass), revision.drop_capture(text), revision.bar(regclass), revision.drop_bar(regclass),
            revision.tracking(),
            revision.replay_faults(regclass), revision.recapture(),
            revision.key_column(oid), revision.own_branch(regclass),
            revision.owns(oid), revision.check_owner(regclass, text),
            revision.note_missed(regclass, regclass[]), revision.enqueue_attached(regclass),
            revision.check_trackable(regclass, name), revision.capture_body(regclass, name, bigint, text),
            revision.check_expression(regclass, name, text), revision.place_function(regclass, name, bigint, text, text),
            revision.key_attribute(revision.tracked), revision.key_trouble(revision.tracked),
            revision.is_captured(oid, oid), revision.note_departed(oid), revision.note_fault(oid, bigint, text), revision.departed(revision.tracked),
            revision.mend_key(revision.tracked), revision.drop_departed(revision.tracked),
            revision.register(regclass, name, bigint, text, bigint), revision.unregister(regclass),
            revision.place_triggers(regclass, text), revision.full_xid(xid), revision.is_native(),
            revision.native_from(), revision.trimmed_since(bigint, pg_snapshot),
            revision.check_reads_no_code(revision.tracked), revision.enqueue_row(regclass, bigint), revision.enqueue_chunk(regclass, integer)
            to %1$s;
        grant execute on procedure revision.enqueue_existing(regclass, integer) to %1$s
    $grants$, role);
end
$$;
comment on function revision.grant_owner(regrole) is
    'Let a role track the tables that it owns, and change nothing of what is known of others''. Such a role is trusted: it can put '
    'any commit in any branch, but not as another transaction.';

create function revision.grant_maintainer(role regrole) returns void
language plpgsql
set search_path = pg_catalog, revision, pg_temp
as $$
begin
    perform pgchange.grant_maintainer(role);
    execute format($grants$
        grant usage on schema revision to %1$s;
        grant select on revision.tracked, revision.installed to %1$s;
        grant execute on function
            revision.maintain_partitions(bigint, integer, boolean), revision.crowded_default(), revision.partitions(), revision.tracking(),
            revision.recapture(), revision.place_triggers(regclass, text), revision.health(),
            revision.departed(revision.tracked), revision.drop_departed(revision.tracked), revision.mend_key(revision.tracked)
            to %1$s
    $grants$, role);
end
$$;
comment on function revision.grant_maintainer(regrole) is 'Let a role keep the partitions of the queue and look at the tracking.';

alter table revision.tracked enable row level security;
create policy seen on revision.tracked for select using (true);
create policy registered on revision.tracked for insert with check (revision.owns(tbl));
create policy changed on revision.tracked for update using (true) with check (revision.owns(tbl));
create policy forgotten on revision.tracked for delete using (revision.owns(tbl));

alter table revision.branch enable row level security;
create policy seen on revision.branch for select using (true);
create policy own on revision.branch for insert with check (type = 'stable' and revision.owns(tbl));

-- What failed can show what is in a row: to the owner of the table only.
alter table revision.fault enable row level security;
create policy owned on revision.fault using (revision.owns(tbl));
-- The capture of a table that was handed on is still the former owner's.
create policy noted on revision.fault for insert with check (
    exists (
        select from pg_catalog.pg_trigger as t join pg_catalog.pg_proc as p on p.oid = t.tgfoid
        where t.tgrelid = tbl and t.tgname = 'pgchange_capture' and pg_has_role(p.proowner, 'usage')));

revoke all on all routines in schema revision from public;
revoke all on all tables in schema revision from public;
revoke all on schema revision from public;
