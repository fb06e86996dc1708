-- Expiry of subscriptions that were not used for longer than their expiry_interval. A group that has no subscription left is
-- deleted. The faults of deleted subscriptions are deleted later.

-- Delete some subscriptions of a group, and the group if it has none left.
create function pgmb.expire(gid pgmb.group_id, sids text[], current_ts timestamptz) returns text
language plpgsql
set lock_timeout = '200ms'
as $$
declare
    gone bigint;
    left_without boolean;
begin
    -- A transaction that makes another subscription of the group locks this row until it ends.
    perform pgchange.lock_briefly(format('select from pgmb.subscription_groups as g where g.id = %L for update', gid), '200 ms');
    perform set_config('lock_timeout', pgchange.patience('200 ms'), true);
    delete from pgmb.subscriptions as s
    where s.id = any (sids) and s.last_active_at + s.expiry_interval < current_ts;
    get diagnostics gone = row_count;
    left_without := not exists (select from pgmb.subscriptions as s where s.group_id = gid);
    if left_without then
        -- Wait for a running poll. Otherwise the events that it dispatches to this group would go to a later group of the same
        -- name.
        perform pgchange.lock_briefly(pgmb.dispatch_key(), '200 ms');
        delete from pgmb.subscription_groups as g where g.id = gid;
        perform pgchange.forget_claim('event', pgmb.name_of(gid));
    end if;
    return format(
        '%s subscriptions of group %s expired%s', gone, gid, case when left_without then ', and the group with them' else '' end);
exception when lock_not_available or deadlock_detected then
    return format('postponed the expiry of group %s: it is being changed, or events are being dispatched', gid);
end
$$;

-- Delete the subscriptions whose last_active_at is longer ago than their expiry_interval. Also delete each group that has no
-- subscription left, unless the group is being read. Returns a line for each group. Events that these subscriptions had not read
-- are no longer kept for them.
create function pgmb.expire_subscriptions(current_ts timestamptz default now()) returns setof text
language plpgsql security definer as $$
declare
    idle record;
begin
    for idle in
        select s.group_id, array_agg(s.id) filter (where s.last_active_at + s.expiry_interval < current_ts) as expired,
               bool_and(coalesce(s.last_active_at + s.expiry_interval < current_ts, false)) as all_of_them
        from pgmb.subscriptions as s
        group by 1
        having bool_or(s.last_active_at + s.expiry_interval < current_ts)
        order by 1
    loop
        if idle.all_of_them and not pg_try_advisory_xact_lock(pgmb.lock_key(idle.group_id)) then
            return next format('postponed the expiry of group %s: it is being read', idle.group_id);
            continue;
        end if;
        return next pgmb.expire(idle.group_id, idle.expired, current_ts);
    end loop;
end
$$;

-- Delete faults of deleted subscriptions, which cannot be repaired, when they are older than partition_retention_period. Until
-- then their events are kept.
create function pgmb.forget_faults(current_ts timestamptz default now()) returns setof text
language plpgsql security definer as $$
declare
    gone bigint;
begin
    delete from pgmb.fault as f
    where f.occurred_at < current_ts - pgmb.setting_as_interval('partition_retention_period')
      and not exists (select from pgmb.subscriptions as s where s.id = f.subscription_id);
    get diagnostics gone = row_count;
    if gone > 0 then
        return next format('deleted %s faults of deleted subscriptions', gone);
    end if;
end
$$;
