-- The cursor of a group, as acks, moves and repairs set it.

-- Set the cursor of a group to a place, if the group is at version was and at place before, each unless null. Returns true if it
-- set the cursor. The function has no search_path of its own, which would slow down every ack.
create function pgmb.put(
    gid text, at jsonb, version bigint, source text, was bigint, before jsonb
) returns boolean
language plpgsql as $$
begin
    update pgmb.subscription_groups as g set
        version = put.version, last_read_event_id = nullif(at #>> '{}', ''), updated_at = now(),
        -- If the first dispatch after a restore has given the group its new place since the batch was claimed, that place stays.
        source = case when g.source <> put.source and g.source = pgmb.here() then g.source else put.source end
    where g.id = put.gid
      and (was is null or g.version = was)
      and (before is null or coalesce(g.last_read_event_id, '') = before #>> '{}');
    return found;
end
$$;
