-- Who may do what. PUBLIC may do nothing; a writer of a captured table needs nothing.

create function pgmb.grant_entry(role regrole) returns void
language plpgsql
set search_path = pg_catalog, pgmb, pg_temp
as $$
begin
    if role is null then
        perform pgchange.refuse('null is not a role', 'name one, as in ''reader''');
    end if;
    execute format($grants$
        grant usage on schema pgmb to %1$s;
        grant select on pgmb.installed, pgmb.config to %1$s;
        grant execute on function
            pgmb.create_event_id(timestamptz, bigint), pgmb.create_event_id_default(), pgmb.create_random_bigint(),
            pgmb.create_subscription_id(), pgmb.extract_date_from_event_id(text), pgmb.get_config_value(pgmb.config_type)
            to %1$s
    $grants$, role);
end
$$;
comment on function pgmb.grant_entry(regrole) is 'What every other grant begins with: to make ids, and to see settings.';

create function pgmb.grant_writer(role regrole) returns void
language plpgsql
set search_path = pg_catalog, pgmb, pg_temp
as $$
begin
    perform pgmb.grant_entry(role);
    execute format($grants$
        grant usage on sequence pgmb.event_seq to %1$s;
        grant insert (id, topic, payload, metadata, subscription_id), select (id) on pgmb.events to %1$s;
        grant execute on function pgmb.other_events(text[], text[], jsonb[], jsonb[], text[]) to %1$s
    $grants$, role);
end
$$;
comment on function pgmb.grant_writer(regrole) is
    'Let a role publish events, for now or later, of any topic and to any subscription.';

create function pgmb.grant_subscriber(role regrole) returns void
language plpgsql
set search_path = pg_catalog, pgmb, pg_temp
as $$
begin
    perform pgmb.grant_entry(role);
    execute format($grants$
        grant select, delete on pgmb.subscriptions to %1$s;
        grant insert (id, group_id, conditions_sql, params, last_active_at, expiry_interval) on pgmb.subscriptions to %1$s;
        grant update (conditions_sql, params, last_active_at, expiry_interval) on pgmb.subscriptions to %1$s;
        grant select on pgmb.condition, pgmb.subscription_groups to %1$s;
        grant execute on function
            pgmb.condition_known(text), pgmb.make_group(pgmb.group_id), pgmb.keep_alive(pgmb.group_id, text[])
            to %1$s
    $grants$, role);
end
$$;
comment on function pgmb.grant_subscriber(regrole) is
    'Let a role subscribe groups, under the conditions in pgmb.condition, with any params. Such roles trust each other.';

create function pgmb.grant_conditions(role regrole) returns void
language plpgsql
set search_path = pg_catalog, pgmb, pg_temp
as $$
begin
    perform pgmb.grant_subscriber(role);
    execute format($grants$
        grant insert (conditions_sql) on pgmb.condition to %1$s;
        grant execute on function pgmb.prepare_poll_for_events_fn(text[]), pgmb.event_partition(text, integer) to %1$s
    $grants$, role);
end
$$;
comment on function pgmb.grant_conditions(regrole) is
    'Let a role subscribe under conditions of its own. They run in every poll with the rights of the owner of this schema: '
    'such a role can do whatever that owner can.';

create function pgmb.grant_owner(role regrole) returns void
language plpgsql
set search_path = pg_catalog, pgmb, pg_temp
as $$
begin
    perform pgmb.grant_entry(role);
    perform pgchange.grant_reader(role);
    execute format($grants$
        grant usage on sequence pgmb.event_seq to %1$s;
        grant insert (topic, payload, metadata) on pgmb.events to %1$s;
        grant select, insert (tbl, name, inserts, updates, deletes), update (name, inserts, updates, deletes), delete
            on pgmb.pushed_table to %1$s;
        grant select, insert (tbl, op, message, before, after), update, delete on pgmb.push_fault to %1$s;
        grant execute on function
            pgmb.push_table_mutations(regclass, boolean, boolean, boolean), pgmb.stop_table_mutations_push(regclass),
            pgmb.pushing(), pgmb.to_recapture(), pgmb.recapture(regclass), pgmb.recapture(), pgmb.replay_push_faults(regclass),
            pgmb.create_topic(text, text, text),
            pgmb.serialise_record_for_event(oid, text, record), pgmb.serialised(oid, text, record),
            pgmb.jsonb_diff(jsonb, jsonb), pgmb.pushed_by(oid, name),
            pgmb.pushes(regclass), pgmb.note_push_fault(oid, text, text, jsonb, jsonb), pgmb.topic_of(regclass, text),
            pgmb.push_body(regclass, text), pgmb.push_rows(regclass, text), pgmb.push_pairs(regclass, text),
            pgmb.push_update(regclass),
            pgmb.push_guards(regclass), pgmb.push_guard(regclass), pgmb.push_bar(regclass),
            pgmb.drop_bar(regclass, oid[]), pgmb.place_guard(regclass, text),
            pgmb.drop_guards(regclass, boolean), pgmb.check_pushable(regclass), pgmb.place_push_function(regclass, text),
            pgmb.place_push(regclass, text), pgmb.drop_push(regclass, text[], boolean), pgmb.note_push(regclass), pgmb.owns(oid),
            pgmb.note_missed(regclass, regclass[]),
            pgmb.check_own_rows(regclass), pgmb.publish_attached(regclass)
            to %1$s
    $grants$, role);
end
$$;
comment on function pgmb.grant_owner(regrole) is
    'Let a role publish the mutations of the tables that it owns. Such a role is trusted: it can publish any event.';

create function pgmb.grant_dispatcher(role regrole) returns void
language plpgsql
set search_path = pg_catalog, pgmb, pg_temp
as $$
begin
    perform pgmb.grant_entry(role);
    perform pgchange.grant_viewer(role);
    execute format($grants$
        grant execute on function
            pgmb.poll_for_events(), pgmb.dispatch(integer), pgmb.status(integer), pgmb.dispatching(), pgmb.groups(), pgmb.spans(),
            pgmb.partitions(), pgmb.unread_by(timestamptz, timestamptz, integer)
            to %1$s
    $grants$, role);
end
$$;
comment on function pgmb.grant_dispatcher(regrole) is
    'Let a role dispatch events, and see how far dispatching and every group is, and who reads it.';

create function pgmb.grant_consumer(role regrole) returns void
language plpgsql
set search_path = pg_catalog, pgmb, pg_temp
as $$
begin
    perform pgmb.grant_dispatcher(role);
    perform pgchange.grant_consumer(role);
    perform pgchange.open_given('pgmb', 'consumer', role);
    execute format($grants$
        grant select on pgmb.events, pgmb.later, pgmb.dispatched, pgmb.subscription_events, pgmb.subscription_groups,
            pgmb.subscriptions to %1$s;
        grant execute on function
            pgmb.micros(text), pgmb.rank_of(text), pgmb.cursor_at(bigint, bigint), pgmb.slices(text, text, text),
            pgmb.events_alone(text, text, text, text, text), pgmb.events_shared(text, text, text, text, text),
            pgmb.some_events(text, text, text, text, text, boolean),
            pgmb.held_here(text), pgmb.here(), pgmb.is_native(), pgmb.register(text), pgmb.position(text), pgmb.claim(text, jsonb, integer, integer),
            pgmb.lag(text, jsonb, integer), pgmb.point(), pgmb.passed(text, jsonb, jsonb),
            pgmb.read_next_events(varchar, pgmb.event_id, integer, boolean), pgmb.release_group_lock(varchar),
            pgmb.set_group_cursor(varchar, pgmb.event_id, boolean), pgmb.set_group_cursor(text, text, boolean),
            pgmb.read_events(pgmb.event_id[]), pgmb.replay_events(varchar, varchar, pgmb.event_id, integer),
            pgmb.keep_alive(pgmb.group_id, text[]),
            pgmb.retry_events(text[], text, jsonb, text, integer, interval),
            pgmb.give_up_events(pgmb.group_id, text[], text, jsonb, text, integer)
            to %1$s
    $grants$, role);
end
$$;
comment on function pgmb.grant_consumer(regrole) is
    'Let a role read events, in the database of the events and in that of the results. Such roles trust each other: each can '
    'read every event and move every group.';

create function pgmb.grant_maintainer(role regrole) returns void
language plpgsql
set search_path = pg_catalog, pgmb, pg_temp
as $$
begin
    perform pgmb.grant_dispatcher(role);
    perform pgchange.grant_maintainer(role);
    execute format($grants$
        grant select on pgmb.pushed_table to %1$s;
        grant update (value) on pgmb.config to %1$s;
        grant execute on function
            pgmb.get_partitions_and_bounds(oid), pgmb.get_current_partition(oid, timestamptz), pgmb.holders(),
            pgmb.overdue(timestamptz), pgmb.crowded_default(regclass, timestamptz),
            pgmb.place_scheduled(timestamptz, bigint), pgmb.make_partitions(regclass, timestamptz, boolean),
            pgmb.trim_partitions(regclass, timestamptz), pgmb.drop_emptied(regclass, timestamptz, integer),
            pgmb.trim_published(), pgmb.expire_subscriptions(timestamptz), pgmb.forget_faults(timestamptz),
            pgmb.maintain_append_only_table(regclass, timestamptz), pgmb.maintain_events_table(),
            pgmb.forget_dropped(),
            pgmb.pushing(), pgmb.to_recapture(), pgmb.recapture(regclass), pgmb.recapture(), pgmb.health(interval),
            pgmb.misfit_settings()
            to %1$s;
        grant execute on procedure pgmb.maintain_events_table(timestamptz) to %1$s
    $grants$, role);
end
$$;
comment on function pgmb.grant_maintainer(regrole) is
    'Let a role look after the log: settings, dispatch, partitions, retention, expiry; and see which groups hold what.';

create function pgmb.grant_admin(role regrole) returns void
language plpgsql
set search_path = pg_catalog, pgmb, pg_temp
as $$
begin
    perform pgmb.grant_consumer(role);
    perform pgmb.grant_maintainer(role);
    perform pgchange.open_given('pgmb', 'admin', role);
    execute format($grants$
        grant select on pgmb.claims, pgmb.fault, pgmb.condition, pgmb.unread_events, pgmb.published,
            pgmb.dispatcher to %1$s;
        grant execute on function
            pgmb.dispatcher_now(), pgmb.undispatched(pg_snapshot, xid8, bigint, pg_snapshot, xid8, bigint),
            pgmb.skip(text, jsonb, text), pgmb.skip_batch(text, text),
            pgmb.drop_group(text), pgmb.cursor_of(timestamptz), pgmb.point_of(timestamptz), pgmb.note_move(text, jsonb, pgmb.event_id),
            pgmb.move_group(text, pgmb.event_id, bigint, text),
            pgmb.replay_faults(varchar), pgmb.adopt_mark(text, jsonb),
            pgmb.check_letter(jsonb, jsonb), pgmb.redrive(bigint)
            to %1$s
    $grants$, role);
    perform pgchange.grant_admin(role);
end
$$;
comment on function pgmb.grant_admin(regrole) is
    'Let a role look after the log and its groups: dispatch, maintain, skip, repair, drop, and try again what failed.';

create function pgmb.owns(tbl oid) returns boolean
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select coalesce(pg_has_role((select c.relowner from pg_class as c where c.oid = tbl), 'usage'), false)
$$;
comment on function pgmb.owns(oid) is 'Whether the caller is a member of the owner of a table.';

alter table pgmb.pushed_table enable row level security;
create policy seen on pgmb.pushed_table for select using (true);
create policy owned on pgmb.pushed_table using (pgmb.owns(tbl));

-- What failed shows rows of a table: to its owner only.
alter table pgmb.push_fault enable row level security;
create policy owned on pgmb.push_fault using (pgmb.owns(tbl));
-- The capture of a table that was handed on is still the former owner's.
create policy noted on pgmb.push_fault for insert with check (
    exists (
        select from pgmb.pushes(tbl) as p join pg_catalog.pg_proc as f on f.oid = p.function
        where p.relid = tbl and pg_has_role(f.proowner, 'usage')));

-- A role of the whole cluster: it stays when this schema goes.
do $$
begin
    if not exists (select from pg_catalog.pg_roles as r where r.rolname = 'pgmb_reader') then
        create role pgmb_reader;
    end if;
    perform pgmb.grant_consumer('pgmb_reader');
exception
    when insufficient_privilege then
        raise notice 'there is no role pgmb_reader, and % may not create it: pgmb.grant_consumer() gives others the same rights',
            current_user;
    when duplicate_object or unique_violation then
        perform pgmb.grant_consumer('pgmb_reader');
end
$$;

revoke all on all routines in schema pgmb from public;
revoke all on all tables in schema pgmb from public;
revoke all on type pgmb.match from public;
revoke all on schema pgmb from public;
