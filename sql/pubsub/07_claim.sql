-- The batch of a consumer, claimed at the source of the commits.

create function pubsub.check_history(branch_id bigint) returns void
language plpgsql stable security definer
as $$
declare
    gone record;
begin
    select sum(t.commits) as commits, max(t.upto::text::bigint) as upto into gone
    from revision.trimmed as t where t.branch_id = check_history.branch_id;
    if gone.commits > 0 then
        raise exception using errcode = 'PC005',
            message = format('%s commits of branch %s below transaction %s were trimmed: a new consumer will not get them',
                             gone.commits, branch_id, gone.upto),
            hint = 'say that it does without them: accept_trimmed => true';
    end if;
end
$$;
comment on function pubsub.check_history(bigint) is 'Refuse a branch of which history was trimmed.';

create function pubsub.check_history(consumer_id text, branch_id bigint, "position" jsonb) returns void
language plpgsql stable security definer
as $$
declare
    began_at bigint := coalesce(("position" ->> 'version')::bigint, 0);
    at pg_snapshot := ("position" ->> 'snapshot')::pg_snapshot;
    name constant text := pubsub.name_of(consumer_id, branch_id);
    gone record;
begin
    if began_at = 0 then
        perform pubsub.check_history(branch_id);
        return;
    end if;
    -- Trimming waits for where a consumer is, not for where it was before. The beginning that one was moved to is what is left.
    if not exists (
        select from pgchange.claim as c
        where c.kind = 'commit' and c.consumer = name
          and (began_at < c.from_version or began_at = c.version and c.batch is null and at::text <> '1:1:'))
    then
        return;
    end if;
    select sum(t.commits) as commits, max(t.upto::text::bigint) as upto into gone
    from revision.trimmed as t where t.branch_id = check_history.branch_id and t.upto > pg_snapshot_xmin(at);
    if gone.commits > 0 then
        raise exception using errcode = 'PC005',
            message = format('%s commits of branch %s below transaction %s were trimmed, and %s is at an earlier time',
                             gone.commits, branch_id, gone.upto, name),
            hint = format('airflow pgchange move %s --to beginning goes on with what is left', pgchange.shell_quoted(name));
    end if;
end
$$;
comment on function pubsub.check_history(text, bigint, jsonb) is
    'Refuse a position behind which history was trimmed: of a new consumer, of results from an earlier time, of a move to one.';

create function pubsub.claim(
    consumer_id text, branch_id bigint, "position" jsonb, max_changes integer, in_order boolean default false,
    accept_trimmed boolean default false, choice jsonb default null, max_attempts integer default null
) returns jsonb
language plpgsql volatile security definer
as $$
declare
    here text := pubsub.check_position(consumer_id, branch_id, "position");
    began_at bigint := coalesce(("position" ->> 'version')::bigint, 0);
    mark pgchange.claim;
    bounds jsonb;
    batch jsonb;
begin
    perform pubsub.check_branch(branch_id);
    perform pgchange.check_claim(max_changes);
    mark := pubsub.pending(consumer_id, branch_id, "position");
    if mark.version is not null then
        batch := pgchange.claim_again(mark, max_attempts);
        if batch -> 'bounds' ? 'letter' then
            perform pubsub.check_readable(branch_id, batch);
        end if;
        return batch;
    end if;
    if not accept_trimmed then
        perform pubsub.check_history(consumer_id, branch_id, "position");
    end if;
    if "position" -> 'letter' ->> 'id' is not null then
        batch := pubsub.letter_batch(branch_id, "position");
        bounds := pubsub.unmoved("position");
    else
        choice := coalesce(choice, pubsub.choose(branch_id, "position", max_changes, in_order));
        if choice is null then
            return null;
        end if;
        bounds := choice -> 'bounds' || jsonb_build_object('source', here, 'from_version', began_at);
        batch := (choice - 'bounds') || jsonb_build_object(
            'id', md5(concat_ws('|', consumer_id, branch_id, bounds - 'upto', choice -> 'count', choice -> 'slices' -> 0,
                                choice -> 'slices' -> -1))::uuid,
            'bounds', bounds || jsonb_build_object('in_order', in_order));
    end if;
    mark := pgchange.record(
        'commit', pubsub.name_of(consumer_id, branch_id), pubsub.address(consumer_id, branch_id), "position",
        pubsub.at("position"), pubsub.at(bounds), here, batch);
    return mark.batch;
end
$$;
comment on function pubsub.claim(text, bigint, jsonb, integer, boolean, boolean, jsonb, integer) is
    'Record and return the next batch of a consumer, or the one that it claimed and never acked, with the attempt counted, or '
    'that of a dead letter that is to be sent again, as it was recorded; null when nothing is ready. Call it on the primary of '
    'the source, in a transaction of its own, holding the lock.';
