-- Changing the catalogue: the owners of buckets. A range moves active -> copying -> copied -> active; an aborted copy goes
-- copying -> aborting-copy -> active.

-- Raise an error if the numbers are not a range of buckets.
create function topology.check_range(from_bucket bigint, to_bucket bigint) returns void
language plpgsql immutable as $$
begin
    if coalesce(from_bucket < 0 or to_bucket < from_bucket or to_bucket = 9223372036854775807, true) then
        perform pgchange.refuse(
            format('there are no buckets from %s to %s', coalesce(from_bucket::text, 'null'), coalesce(to_bucket::text, 'null')),
            'give the lower one first; buckets are numbered from 0 to 9223372036854775806');
    end if;
end
$$;

create function topology.assign_buckets(tier text, from_bucket bigint, to_bucket bigint, replicaset text) returns void
language plpgsql volatile security definer as $$
declare
    home topology._pico_replicaset := topology.replicaset_named(replicaset);
    taken record;
begin
    perform topology.check_range(from_bucket, to_bucket);
    if home.tier is distinct from tier then
        perform pgchange.refuse(
            format('replicaset %L is of tier %L, not %s', home.name, home.tier, coalesce(quote_literal(tier), 'null')),
            'choose a replicaset of the tier');
    end if;
    select b.* into taken from topology._pico_bucket as b
    where b.tier_name = tier and b.bucket_id_start <= to_bucket and b.bucket_id_end >= from_bucket
    order by b.bucket_id_start
    limit 1;
    if found then
        perform pgchange.refuse(
            format('buckets %s to %s of tier %L belong to replicaset %L', taken.bucket_id_start, taken.bucket_id_end, tier,
                   taken.current_replicaset_name),
            'move them: topology.move_buckets()');
    end if;
    insert into topology._pico_bucket (
        tier_name, bucket_id_start, bucket_id_end, state, current_replicaset_name, target_replicaset_name)
    values (tier, from_bucket, to_bucket, 'active', home.name, home.name);
end
$$;
comment on function topology.assign_buckets(text, bigint, bigint, text) is
    'Assign a range of buckets without an owner to a replicaset of their tier. Both ends are inclusive. Clients get the range '
    'with their next snapshot.';

-- Split the range that contains a bucket, so that a range begins at this bucket.
create function topology.split_at(tier text, bucket bigint) returns void
language plpgsql volatile as $$
declare
    whole topology._pico_bucket;
begin
    select b.* into whole from topology._pico_bucket as b
    where b.tier_name = tier and b.bucket_id_start < bucket and b.bucket_id_end >= bucket;
    if found then
        update topology._pico_bucket as b set bucket_id_end = bucket - 1
        where b.tier_name = tier and b.bucket_id_start = whole.bucket_id_start;
        whole.bucket_id_start := bucket;
        insert into topology._pico_bucket select whole.*;
    end if;
end
$$;

create function topology.move_buckets(
    tier text, from_bucket bigint, to_bucket bigint, state text, target text default null
) returns bigint
language plpgsql volatile security definer as $$
declare
    steps constant jsonb := '{"copying": ["active"], "copied": ["copying"], "aborting-copy": ["copying"], "active": ["copied", "aborting-copy"]}';
    goal topology._pico_replicaset;
    wrong topology._pico_bucket;
    covered bigint;
begin
    perform topology.check_range(from_bucket, to_bucket);
    if not coalesce(steps ? state, false) then
        perform pgchange.refuse(
            format('%s is no state of buckets', coalesce(quote_literal(state), 'null')), 'choose copying, copied, aborting-copy or active');
    end if;
    if (state = 'copying') <> (target is not null) then
        perform pgchange.refuse(
            'a target is given where a move begins, and only there', 'give the replicaset that gets the buckets with state copying');
    end if;
    perform topology.hold();
    if state = 'copying' then
        goal := topology.replicaset_named(target);
        if goal.tier is distinct from tier then
            perform pgchange.refuse(
                format('replicaset %L is of tier %L, not %L', goal.name, goal.tier, tier), 'buckets move within their tier');
        end if;
    end if;
    select sum(least(b.bucket_id_end, to_bucket) - greatest(b.bucket_id_start, from_bucket) + 1) into covered
    from topology._pico_bucket as b
    where b.tier_name = tier and b.bucket_id_start <= to_bucket and b.bucket_id_end >= from_bucket;
    if covered is distinct from to_bucket - from_bucket + 1 then
        perform pgchange.refuse(
            format('of buckets %s to %s of tier %s only %s are assigned', from_bucket, to_bucket,
                   coalesce(quote_literal(tier), 'null'), coalesce(covered, 0)),
            'assign the others first: topology.assign_buckets()');
    end if;
    select b.* into wrong from topology._pico_bucket as b
    where b.tier_name = tier and b.bucket_id_start <= to_bucket and b.bucket_id_end >= from_bucket
      and (not steps -> move_buckets.state ? b.state or b.current_replicaset_name = goal.name)
    order by b.bucket_id_start
    limit 1;
    if found then
        perform pgchange.refuse(
            format('buckets %s to %s are %s at replicaset %L: they cannot become %s%s', wrong.bucket_id_start, wrong.bucket_id_end,
                   wrong.state, wrong.current_replicaset_name, state, ' at ' || quote_literal(goal.name)),
            'a move goes from active to copying, copied and active; a move that is given up goes from copying to aborting-copy and active');
    end if;
    perform topology.split_at(tier, from_bucket), topology.split_at(tier, to_bucket + 1);
    update topology._pico_bucket as b set
        state = move_buckets.state,
        current_replicaset_name = case
            when b.state = 'copied' then coalesce(b.target_replicaset_name, b.current_replicaset_name)
            else b.current_replicaset_name end,
        target_replicaset_name = case
            when move_buckets.state = 'copying' then goal.name
            when b.state = 'aborting-copy' then b.current_replicaset_name
            else b.target_replicaset_name end
    where b.tier_name = tier and b.bucket_id_start between from_bucket and to_bucket;
    return covered;
end
$$;
comment on function topology.move_buckets(text, bigint, bigint, text, text) is
    'Move a range of buckets to its next state: copying (with the target replicaset), copied (clients get this event), active; '
    'or aborting-copy, active. Both ends are inclusive. Ranges are split as needed. Returns the number of buckets.';
