-- The batch of a consumer, claimed at the source of the commits.

-- Refuse a branch whose history was trimmed.
create function pubsub.check_history(branch_id bigint) returns void
language plpgsql stable security definer as $$
declare
    gone record;
begin
    select sum(t.commits) as commits, max(t.upto::text::bigint) as upto into gone
    from revision.trimmed as t where t.branch_id = check_history.branch_id;
    if gone.commits > 0 then
        raise exception using errcode = 'PC005',
            message = format('%s commits of branch %s below transaction %s were trimmed: a new consumer will not get them',
                             gone.commits, branch_id, gone.upto),
            hint = 'accept that: accept_trimmed => true';
    end if;
end
$$;

-- Refuse a position before trimmed history. It can be the position of a new consumer, of results from an earlier time, or of a
-- move to an earlier time.
create function pubsub.check_history(consumer_id text, branch_id bigint, "position" jsonb) returns void
language plpgsql stable security definer as $$
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
    -- Trimming keeps everything from a consumer's present position on. It does not keep what follows an earlier position. A
    -- consumer that was moved to the beginning starts with the oldest commit that is left.
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
            hint = format(
                'continue with the oldest commits that are left: airflow-pgchange move %s --to beginning',
                pgchange.shell_quoted(name));
    end if;
end
$$;

-- The next batch for a consumer: choice, if a standby has chosen it, or else the batch that this server chooses. Refuses a position
-- before trimmed history. The next part of a split batch is always chosen here, because the standby does not know how the batch was
-- split. The function has no search_path of its own, which would slow down every claim.
create function pubsub.choose(
    consumer_id text, branch_id bigint, "position" jsonb, max_changes integer, in_order boolean, accept_trimmed boolean, choice jsonb
) returns jsonb
language plpgsql volatile as $$
begin
    perform pubsub.check_branch(branch_id);
    if not accept_trimmed then
        perform pubsub.check_history(consumer_id, branch_id, "position");
    end if;
    return coalesce(case when not "position" ? 'within' then choice end, pubsub.choose(branch_id, "position", max_changes, in_order));
end
$$;
