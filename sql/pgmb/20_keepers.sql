-- Who may keep the log and publish mutations. PUBLIC may do nothing; a writer of a captured table needs nothing.

create function pgmb.grant_entry(role regrole) returns void
language plpgsql
set search_path = pg_catalog, pgmb, pg_temp
as $$
begin
    if role is null then
        perform pgmb.refuse('null is no role', 'name one, as in ''reader''');
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

create function pgmb.grant_dispatcher(role regrole) returns void
language plpgsql
set search_path = pg_catalog, pgmb, pg_temp
as $$
begin
    perform pgmb.grant_entry(role);
    execute format(
        'grant execute on function pgmb.poll_for_events(), pgmb.dispatch(integer), pgmb.status(integer) to %s', role);
end
$$;
comment on function pgmb.grant_dispatcher(regrole) is 'Let a role dispatch events, and see how far every group is.';

create function pgmb.grant_maintainer(role regrole) returns void
language plpgsql
set search_path = pg_catalog, pgmb, pg_temp
as $$
begin
    perform pgmb.grant_dispatcher(role);
    execute format($grants$
        grant select on pgmb.pushed_table to %1$s;
        grant update (value) on pgmb.config to %1$s;
        grant execute on function
            pgmb.get_partitions_and_bounds(oid), pgmb.get_current_partition(oid, timestamptz), pgmb.holders(),
            pgmb.overdue(timestamptz), pgmb.crowded_default(regclass, timestamptz),
            pgmb.place_scheduled(timestamptz, bigint), pgmb.make_partitions(regclass, timestamptz, boolean),
            pgmb.trim_partitions(regclass, timestamptz), pgmb.drop_emptied(regclass, timestamptz, integer),
            pgmb.trim_published(), pgmb.expire_subscriptions(timestamptz), pgmb.forget_faults(timestamptz),
            pgmb.maintain_append_only_table(regclass, timestamptz), pgmb.maintain_events_table(timestamptz),
            pgmb.forget_dropped(),
            pgmb.pushing(), pgmb.to_mend(), pgmb.mend(regclass), pgmb.refresh(), pgmb.dispatching()
            to %1$s
    $grants$, role);
end
$$;
comment on function pgmb.grant_maintainer(regrole) is
    'Let a role look after the log: settings, dispatch, partitions, retention, expiry; and see who holds what.';

create function pgmb.grant_pusher(role regrole) returns void
language plpgsql
set search_path = pg_catalog, pgmb, pg_temp
as $$
begin
    perform pgmb.grant_entry(role);
    execute format($grants$
        grant usage on sequence pgmb.event_seq to %1$s;
        grant insert (topic, payload, metadata) on pgmb.events to %1$s;
        grant select on pgmb.pushed_table to %1$s;
        grant select, insert (tbl, op, message, before, after), update, delete on pgmb.push_fault to %1$s;
        grant execute on function
            pgmb.push_table_mutations(regclass, boolean, boolean, boolean), pgmb.stop_table_mutations_push(regclass),
            pgmb.pushing(), pgmb.to_mend(), pgmb.mend(regclass), pgmb.refresh(), pgmb.replay_push_faults(regclass),
            pgmb.create_topic(text, text, text),
            pgmb.serialise_record_for_event(oid, text, record), pgmb.serialised(oid, text, record),
            pgmb.jsonb_diff(jsonb, jsonb), pgmb.refuse(text, text), pgmb.descendants(regclass), pgmb.pushed_by(oid, name),
            pgmb.pushes(regclass), pgmb.note_push_fault(oid, text, text, jsonb, jsonb), pgmb.topic_of(regclass, text),
            pgmb.push_body(regclass, text), pgmb.push_rows(regclass, text), pgmb.push_update(regclass),
            pgmb.push_guards(regclass), pgmb.push_guard(regclass), pgmb.place_guard(regclass, text),
            pgmb.drop_guards(regclass, boolean),
            pgmb.lock_for_capture(regclass, boolean), pgmb.check_pushable(regclass), pgmb.place_push_function(regclass, text),
            pgmb.place_push(regclass, text), pgmb.drop_push(regclass, text[], boolean), pgmb.note_push(regclass)
            to %1$s
    $grants$, role);
end
$$;
comment on function pgmb.grant_pusher(regrole) is
    'Let a role publish the mutations of the tables that it owns. Such a role is trusted: it can publish any event.';

-- What failed shows rows of a table: to its owner only.
alter table pgmb.push_fault enable row level security;
create policy owned on pgmb.push_fault using (
    pg_has_role((select c.relowner from pg_catalog.pg_class as c where c.oid = tbl), 'usage'));

-- The first partitions, before anybody publishes.
do $$ begin perform pgmb.maintain_events_table(); end $$;
