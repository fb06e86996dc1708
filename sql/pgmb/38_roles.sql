-- The roles and their rights. PUBLIC has none, and a writer of a captured table needs none.

-- Whether the caller has the role of the owner of a table.
create function pgmb.owns(tbl oid) returns boolean
language sql stable as $$
    select coalesce(pg_has_role((select c.relowner from pg_class as c where c.oid = tbl), 'usage'), false)
$$;

select pgchange.add_role(
    'pgmb', 'entry', told =>
    'The rights in every other grant: to make ids, and to read settings.',
    objects => array[
        'select on pgmb.installed, pgmb.config'
    ],
    functions => $$
        create_event_id create_random_bigint create_subscription_id extract_date_from_event_id get_config_value
    $$);

select pgchange.add_role(
    'pgmb', 'writer', told =>
    'Let a role publish events, for now or later, of any topic and to any subscription.',
    includes => 'pgmb.entry',
    objects => array[
        'usage on sequence pgmb.event_seq',
        'insert (id, topic, payload, metadata, subscription_id), select (id) on pgmb.events'
    ],
    functions => $$
        create_event_id_default other_events
    $$);

select pgchange.add_role(
    'pgmb', 'subscriber', told =>
    'Let a role subscribe groups, with the conditions in pgmb.condition and any params. Such roles trust each other.',
    includes => 'pgmb.entry',
    objects => array[
        'select, delete on pgmb.subscriptions',
        'insert (id, group_id, conditions_sql, params, last_active_at, expiry_interval) on pgmb.subscriptions',
        'update (conditions_sql, params, last_active_at, expiry_interval) on pgmb.subscriptions',
        'select on pgmb.condition, pgmb.subscription_groups'
    ],
    functions => $$
        condition_known make_group keep_alive
    $$);

select pgchange.add_role(
    'pgmb', 'conditions', told =>
    'Let a role subscribe with conditions of its own. They run in every poll with the rights of the owner of this schema, so such '
    'a role can do whatever that owner can.',
    includes => 'pgmb.subscriber',
    objects => array[
        'insert (conditions_sql) on pgmb.condition'
    ],
    functions => $$
        prepare_poll_for_events_fn event_partition
    $$);

select pgchange.add_role(
    'pgmb', 'owner', told =>
    'Let a role publish the mutations of its own tables. Such a role is trusted: it can publish any event.',
    includes => 'pgmb.entry pgchange.reader',
    objects => array[
        'usage on sequence pgmb.event_seq',
        'insert (topic, payload, metadata) on pgmb.events',
        'select, insert (tbl, name, inserts, updates, deletes), update (name, inserts, updates, deletes), delete on pgmb.pushed_table',
        'select, insert (tbl, op, message, before, after), update, delete on pgmb.push_fault'
    ],
    functions => $$
        push_table_mutations stop_table_mutations_push pushing to_recapture recapture replay_push_faults create_topic
        serialise_record_for_event serialised jsonb_diff pushed_by pushes note_push_fault topic_of push_body push_rows push_pairs
        push_update push_guard push_bar drop_alone check_pushable place_push_function place_push
        drop_push note_push owns note_missed check_own_rows publish_attached
    $$);

select pgchange.add_role(
    'pgmb', 'dispatcher', told =>
    'Let a role dispatch events, and see the progress of dispatching and of every group, and who reads it.',
    includes => 'pgmb.entry pgchange.viewer',
    functions => $$
        poll_for_events dispatch status dispatching groups spans partitions unread_by kept
    $$);

select pgchange.add_role(
    'pgmb', 'consumer', told =>
    'Let a role read events, in the database of the events and in that of the results. Such roles trust each other: each can read '
    'every event and move every group.',
    includes => 'pgmb.dispatcher pgchange.consumer',
    objects => array[
        'select on pgmb.events, pgmb.later, pgmb.dispatched, pgmb.subscription_events, pgmb.subscription_groups, pgmb.subscriptions'
    ],
    functions => $$
        micros rank_of cursor_at slices events_alone events_shared some_events held_here here is_native is_known register position lag
        point cursor_of point_of passed read_next_events release_group_lock set_group_cursor read_events replay_events keep_alive retry_events
        give_up_events
    $$);

select pgchange.add_role(
    'pgmb', 'maintainer', told =>
    'Let a role maintain the log: settings, dispatch, partitions, retention, expiry; and see which groups hold which partitions.',
    includes => 'pgmb.dispatcher pgchange.maintainer',
    objects => array[
        'select on pgmb.pushed_table',
        'update (value) on pgmb.config'
    ],
    functions => $$
        default_partition partitions_in get_partitions_and_bounds get_current_partition holders overdue crowded_default place_scheduled make_partitions
        trim_partitions drop_emptied trim_published expire_subscriptions forget_faults maintain_append_only_table
        maintain_events_table forget_dropped pushing to_recapture recapture health misfit_settings
    $$);

select pgchange.add_role(
    'pgmb', 'admin', told =>
    'Let a role administer the log and its groups: dispatch, maintain, skip, repair, drop, and retry faults.',
    includes => 'pgmb.consumer pgmb.maintainer pgchange.admin',
    objects => array[
        'select on pgmb.claims, pgmb.fault, pgmb.condition, pgmb.unread_events, pgmb.published, pgmb.dispatcher'
    ],
    functions => $$
        address_of dispatcher_now undispatched skip note_move replay_faults check_letter redrive events_without erase_letter
    $$);

alter table pgmb.pushed_table enable row level security;
create policy seen on pgmb.pushed_table for select using (true);
create policy owned on pgmb.pushed_table using (pgmb.owns(tbl));

-- A fault contains rows of a table, so only its owner may read it.
alter table pgmb.push_fault enable row level security;
create policy owned on pgmb.push_fault using (pgmb.owns(tbl));
-- After a table got a new owner, its capture still runs as the former owner.
create policy noted on pgmb.push_fault for insert with check (
    exists (
        select from pgmb.pushes(tbl) as p join pg_catalog.pg_proc as f on f.oid = p.function
        where p.relid = tbl and pg_has_role(f.proowner, 'usage')));

select pgchange.close_schema('pgmb', types => 'match', unpinned => $$
        address again at choose cursor_at cursor_hint cursors dispatch_key dispatch_pieces dispatch_some dispatched_batch due_before
        events_alone events_shared extract_date_from_event_id late micros move_dispatcher needs needs_after_dispatch needs_after_read
        now_micros over_gap partitions put rank_of retries serialise_record_for_event serialised
        set_group_cursor(text,text,boolean) slices undispatched unread_dispatches upkeep_key write_matches
    $$);

-- A role of the whole cluster: it stays when this schema is dropped.
do $$
begin
    if not exists (select from pg_catalog.pg_roles as r where r.rolname = 'pgmb_reader') then
        create role pgmb_reader;
    end if;
    perform pgmb.grant_consumer('pgmb_reader');
exception
    when insufficient_privilege then
        raise notice 'role pgmb_reader does not exist, and % may not create it: pgmb.grant_consumer() gives other roles the same '
                     'rights',
            current_user;
    when duplicate_object or unique_violation then
        perform pgmb.grant_consumer('pgmb_reader');
end
$$;
