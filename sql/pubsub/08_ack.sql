-- The progress of a consumer, moved behind its batch where its results are.

-- Without a search_path of its own: an ack waits for this.
create function pubsub.advance(consumer_id text, branch_id bigint, batch jsonb) returns bigint
language plpgsql
as $$
declare
    bounds jsonb := batch -> 'bounds';
begin
    if bounds ? 'letter' then
        bounds := bounds || pubsub.unmoved(bounds -> 'at');
    end if;
    perform pgchange.check_claimed('commit', pubsub.name_of(consumer_id, branch_id), batch);
    update pubsub.watermark as w set
        version = (batch ->> 'version')::bigint,
        snapshot = (bounds ->> 'snapshot')::pg_snapshot,
        partial_txid = (bounds -> 'partial' ->> 0)::xid8,
        partial_id = (bounds -> 'partial' ->> 1)::bigint,
        commit_id = coalesce((bounds ->> 'commit_id')::bigint, w.commit_id),
        source = bounds ->> 'source',
        in_order = coalesce((bounds ->> 'in_order')::boolean, w.in_order),
        updated_at = now()
    where w.consumer_id = advance.consumer_id and w.branch_id = advance.branch_id
      and w.version = (bounds ->> 'from_version')::bigint
      and w.snapshot::text = bounds ->> 'after';
    if not found then
        perform pgchange.refuse_stale(pubsub.name_of(consumer_id, branch_id), batch);
    end if;
    return (batch ->> 'version')::bigint;
end
$$;
comment on function pubsub.advance(text, bigint, jsonb) is
    'Move a watermark behind a batch; behind one that is sent again by its version alone.';
