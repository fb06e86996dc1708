-- The roles and their rights. PUBLIC has none, and a writer of a tracked table needs none.

select pgchange.add_role(
    'revision', 'owner', told =>
    'Let a role track its own tables. It cannot change the records of other tables. Such a role is trusted: it can put any commit '
    'in any branch, but not in the name of another transaction.',
    includes => 'pgchange.reader',
    objects => array[
        'insert (commit_id, key, branch_id) on revision.commit_queue',
        'select on revision.commit_queue, revision.branch, revision.tracked, revision.fault',
        'insert (tbl, key, branch_id, expression, key_ceiling), update (key, existing_upto, existing_done), delete on revision.tracked',
        'select, insert, delete on revision.enqueued',
        'insert (type, tbl, key) on revision.branch',
        'insert (tbl, kind, commit_id, key, message), delete on revision.fault'
    ],
    functions => $$
        track untrack drop_capture bar drop_bar tracking replay_faults recapture key_columns key_attributes still_fits queue_column beside_key key_order is_young own_branch check_branch owns check_owner note_missed
        enqueue_attached check_trackable capture_body check_expression function_for place_function key_trouble is_captured
        note_departed note_fault capture_row capture_query departed mend_key drop_departed register unregister place_triggers full_xid is_native native_from
        trimmed_since check_reads_no_code enqueue_row enqueue_chunk enqueue_existing
    $$);

select pgchange.add_role(
    'revision', 'maintainer', told =>
    'Let a role maintain the partitions of the queue, and read the status of tracking.',
    includes => 'pgchange.maintainer',
    objects => array[
        'select on revision.tracked, revision.installed'
    ],
    functions => $$
        maintain_partitions running_out partitions tracking recapture place_triggers health queue_column departed drop_departed mend_key
    $$);

alter table revision.tracked enable row level security;
create policy seen on revision.tracked for select using (true);
create policy registered on revision.tracked for insert with check (revision.owns(tbl));
create policy changed on revision.tracked for update using (true) with check (revision.owns(tbl));
create policy forgotten on revision.tracked for delete using (revision.owns(tbl));

alter table revision.enqueued enable row level security;
create policy owned on revision.enqueued using (revision.owns(tbl));

alter table revision.branch enable row level security;
create policy seen on revision.branch for select using (true);
create policy own on revision.branch for insert with check (type = 'stable' and revision.owns(tbl));

-- An error can contain data of a row, so only the owner of the table may read it.
alter table revision.fault enable row level security;
create policy owned on revision.fault using (revision.owns(tbl));
-- After a table got a new owner, its capture still runs as the former owner.
create policy noted on revision.fault for insert with check (
    exists (
        select from pg_catalog.pg_trigger as t join pg_catalog.pg_proc as p on p.oid = t.tgfoid
        where t.tgrelid = tbl and t.tgname = 'pgchange_capture' and pg_has_role(p.proowner, 'usage')));

select pgchange.close_schema('revision', unpinned => $$
        enqueue_existing still_fits upkeep_key
    $$);
