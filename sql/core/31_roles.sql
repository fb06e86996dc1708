-- The roles and their rights. PUBLIC has none; the functions of the feeds call these functions with the rights of their owner.
-- Each kind decides by its letter_rights() which letters a role may see and keep.

select pgchange.add_role(
    'pgchange', 'viewer', told =>
    'Let a role read the status and the findings. Its rights on each feed decide what it sees. The grant functions of the feeds '
    'call this function.',
    objects => array[
        'select on pgchange.registered, pgchange.held'
    ],
    functions => $$
        ours status health retention_health consumers_health lag_limit_of is_behind told_ready told_behind told_kept kept why_behind explained reasons with_grant
        has_stopped_looking many shell_quoted whole_of watchers latest_watchers watchers_health batches note_samples samples trends
    $$);

select pgchange.add_role(
    'pgchange', 'consumer', told =>
    'Let a role process batches of every feed, and stage their results. It needs its own rights on the tables into which they are '
    'merged. The grant functions of the feeds call this function.',
    includes => 'pgchange.viewer',
    objects => array[
        'usage, create on schema pgchange_staging'
    ],
    functions => $$
        who_locks locked locks_held check_claim check_attempts check_again check_poison check_on_give_up check_reason check_taken
        check_isolation check_version refuse_stale check_lease check_attempt lease_of lease_end halves part parts_behind
        full_xid snapshot_of snapshot_union snapshot_below snapshot_with note_watchers pinned_settings
    $$);

select pgchange.add_role(
    'pgchange', 'admin', told =>
    'Let a role see and keep the letters that its rights on their feeds allow. The grant functions of those feeds call this '
    'function.',
    includes => 'pgchange.viewer',
    objects => array[
        'select, insert (kind, consumer, address, content, changes, reason, error, attempts, batch_id), delete on pgchange.letter',
        'update (content, changes, error, reason) on pgchange.letter',
        'select, insert, update on pgchange.lag_limit'
    ],
    functions => $$
        has_letter_right chosen_letters check_letter_choice letter_gone check_letter check_sendable keeps_letter keeper_grant
        check_letter_keeper letter_hindrance letters letter_content came_along redrive drop_letters expire_letters erase_letters field_is keep_of_letter
        names_key write_letter letters_health limit_lag
    $$);

select pgchange.add_role(
    'pgchange', 'reader', told =>
    'Let a role capture tables: check whose code a query of them runs, and lock them while others use them.',
    functions => $$
        descendants code_in check_code settings pinned_settings refuse membership_hint keep_to_owner place_function
        check_owner check_capturable check_captured_once is_named are_named
        primary_key key_type key_type_trouble key_types unique_indexes
        key_order key_trouble other_keys check_key is_plain key_text key_parts key_condition key_settings
        key_now key_check triggers_of foreign_child place_bar place_guard came_with_rows told_missed bring_missed tell_missed unseen may_wait patience
        lock_briefly holds_tables holders stop_autovacuum take_locks lock_family
    $$);

select pgchange.add_role(
    'pgchange', 'maintainer', told =>
    'Let a role see the installed version, trim the records of old batches, drop leftovers of staging, and repair captures.',
    includes => 'pgchange.viewer pgchange.reader',
    objects => array[
        'select on pgchange.installed'
    ],
    functions => $$
        trim_batches trim_watchers staged_tables staged_by leftovers drop_leftovers
    $$);

alter table pgchange.letter enable row level security;
create policy seen on pgchange.letter for select using (pgchange.has_letter_right('see', kind, address));
create policy kept on pgchange.letter using (pgchange.has_letter_right('keep', kind, address));
alter table pgchange.lag_limit enable row level security;
create policy kept on pgchange.lag_limit using (pgchange.has_letter_right('keep', kind, address));

select pgchange.close_schema('pgchange', types => 'consumer_status finding', unpinned => $$
        check_again check_attempt check_attempts check_claim check_lease check_claimed check_known check_on_give_up check_position
        are_named check_version close_schema fits in_work is_named is_native last_claim lock_briefly next_number next_version note_claim note_end
        note_failed parts_left placed record refuse_stale settings unacked
    $$);
