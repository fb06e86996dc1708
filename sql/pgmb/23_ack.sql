-- An ack moves the group's cursor.

create function pgmb.ack(gid text, batch jsonb) returns bigint
language plpgsql security definer
set search_path = pg_catalog, pgmb, pg_temp
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
        raise exception using errcode = 'PC006',
            message = format('group %I is not where batch %s began', gid, batch ->> 'id'),
            hint = 'somebody moved its cursor; roll back and claim again';
    end if;
    return (batch ->> 'version')::bigint;
end
$$;
comment on function pgmb.ack(text, jsonb) is
    'Move a group''s cursor to the end of a batch, in the transaction that holds the group''s lock and writes the results.';
