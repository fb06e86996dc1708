-- An ack moves the group's cursor.

-- Without a search_path of its own: an ack waits for this.
create function pgmb.advance(gid text, batch jsonb) returns bigint
language plpgsql
as $$
declare
    bounds jsonb := batch -> 'bounds';
begin
    perform pgchange.check_claimed('event', pgmb.name_of(gid), batch);
    update pgmb.subscription_groups as g set
        version = (batch ->> 'version')::bigint, last_read_event_id = bounds ->> 'upto',
        source = bounds ->> 'source', updated_at = now()
    where g.id = gid and g.version = (bounds ->> 'from_version')::bigint
      and coalesce(g.last_read_event_id, '') = bounds ->> 'after';
    if not found then
        perform pgchange.refuse_stale(pgmb.name_of(gid), batch);
    end if;
    return (batch ->> 'version')::bigint;
end
$$;
comment on function pgmb.advance(text, jsonb) is
    'Move a group''s cursor to the end of a batch, if it is where the batch began; the version that it is at now.';
