-- Dead letters of the commit queue. While a letter is on its way, the claim of its consumer returns the same changes again.

-- Refuse a recorded batch whose changes are not all in this source any more.
create function pubsub.check_readable(consumer_id text, branch_id bigint, batch jsonb) returns void
language plpgsql stable security definer
set jit = off
set enable_sort = off
set enable_seqscan = off
set enable_bitmapscan = off
set max_parallel_workers_per_gather = 0
as $$
begin
    perform pgchange.check_readable(batch, case
        when not pgchange.came_along(batch -> 'bounds' ->> 'source', pubsub.check_origin()) then null
        -- Only trimmed changes can be missing.
        when not exists (
            select from revision.trimmed as t
            where t.branch_id = check_readable.branch_id
              and t.upto > pg_snapshot_xmin((batch -> 'bounds' -> 'after' ->> 'snapshot')::pg_snapshot))
            then (batch ->> 'count')::bigint
        else (
            select count(*)
            from jsonb_array_elements(batch -> 'slices') as s(slice)
            cross join lateral pubsub.changes(
                check_readable.branch_id, batch -> 'bounds',
                (s.slice -> 'after' ->> 0)::bigint, (s.slice -> 'after' ->> 1)::bigint,
                (s.slice -> 'upto' ->> 0)::bigint, (s.slice -> 'upto' ->> 1)::bigint)) end);
end
$$;

-- The content of a dead letter: the bounds of its batch. In the database with the commits, also the first hundred of them.
create function pubsub.letter_content(address jsonb, content jsonb) returns jsonb
language plpgsql stable as $$
declare
    branch_id constant bigint := address ->> 'branch_id';
begin
    -- The commits are in the database with the claims.
    if not pubsub.is_known(address ->> 'consumer_id', branch_id)
       or pgchange.came_along(content -> 'bounds' ->> 'source', revision.here()) is not true
    then
        return content;
    end if;
    return content || jsonb_build_object('commits', array(
        select jsonb_build_object(
            'id', case when content -> 'bounds' ? 'key' then to_jsonb(c.id) else to_jsonb(c.id::bigint) end,
            'created_at', c.created_at)
        from jsonb_array_elements(content -> 'slices') with ordinality as s(slice, place)
        cross join lateral pubsub.keyed_changes(
            branch_id, content -> 'bounds',
            (s.slice -> 'after' ->> 0)::bigint, (s.slice -> 'after' ->> 1)::bigint,
            (s.slice -> 'upto' ->> 0)::bigint, (s.slice -> 'upto' ->> 1)::bigint) as c
        order by s.place, c.txid, c.queue_id
        limit 100));
end
$$;
