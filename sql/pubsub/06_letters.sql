-- Dead letters of the commit queue: on their way, the claim of their consumer hands the same changes out again.

create function pubsub.check_readable(branch_id bigint, batch jsonb) returns void
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
        -- Only what was trimmed can be missing.
        when not exists (
            select from revision.trimmed as t
            where t.branch_id = check_readable.branch_id
              and t.upto > pg_snapshot_xmin((batch -> 'bounds' ->> 'after')::pg_snapshot))
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
comment on function pubsub.check_readable(bigint, jsonb) is
    'Refuse a recorded batch whose changes this source cannot give any more, or not the same.';

create function pubsub.check_letter(address jsonb, content jsonb) returns void
language plpgsql stable security definer
as $$
begin
    -- The source is where the claims are.
    if exists (
        select from pgchange.claim as c
        where c.kind = 'commit' and c.consumer = pubsub.name_of(
            check_letter.address ->> 'consumer_id', (check_letter.address ->> 'branch_id')::bigint))
    then
        perform pubsub.check_readable((address ->> 'branch_id')::bigint, content);
    end if;
end
$$;
comment on function pubsub.check_letter(jsonb, jsonb) is
    'Refuse a dead letter whose batch cannot be read any more, in the database that holds the commits.';

create function pubsub.letter_content(address jsonb, content jsonb) returns jsonb
language plpgsql stable
as $$
declare
    branch_id constant bigint := address ->> 'branch_id';
begin
    -- The commits are where the claims are.
    if not pubsub.is_known(address ->> 'consumer_id', branch_id)
       or pgchange.came_along(content -> 'bounds' ->> 'source', revision.here()) is not true
    then
        return content;
    end if;
    return content || jsonb_build_object('commits', array(
        select jsonb_build_object('id', c.id, 'created_at', c.created_at)
        from jsonb_array_elements(content -> 'slices') with ordinality as s(slice, place)
        cross join lateral pubsub.changes(
            branch_id, content -> 'bounds',
            (s.slice -> 'after' ->> 0)::bigint, (s.slice -> 'after' ->> 1)::bigint,
            (s.slice -> 'upto' ->> 0)::bigint, (s.slice -> 'upto' ->> 1)::bigint) as c
        order by s.place, c.txid, c.queue_id
        limit 100));
end
$$;
comment on function pubsub.letter_content(jsonb, jsonb) is
    'What a dead letter holds: where its batch begins and ends and, in the database that holds the commits, the first hundred of them.';

create function pubsub.letter_batch(branch_id bigint, "position" jsonb) returns jsonb
language plpgsql stable
as $$
declare
    batch jsonb := "position" -> 'letter' -> 'batch';
begin
    perform pubsub.check_readable(branch_id, batch);
    return batch || jsonb_build_object('bounds', batch -> 'bounds' || jsonb_build_object(
        'letter', "position" -> 'letter' -> 'id', 'from_version', "position" -> 'version',
        'at', jsonb_build_object('snapshot', "position" -> 'snapshot', 'partial', "position" -> 'partial')));
end
$$;
comment on function pubsub.letter_batch(bigint, jsonb) is
    'The batch of the dead letter that a position carries: read by its recorded bounds, acked where the position is now.';

create function pubsub.unmoved("position" jsonb) returns jsonb
language sql stable
as $$
    select pg_catalog.jsonb_build_object(
        'after', "position" -> 'snapshot', 'snapshot', "position" -> 'snapshot', 'partial', "position" -> 'partial',
        'commit_id', null, 'in_order', null)
$$;
comment on function pubsub.unmoved(jsonb) is 'The bounds of a batch that leaves its watermark at the position where it is.';

create function pubsub.covers(at pubsub.watermark, bounds jsonb) returns boolean
language sql immutable
as $$
    select pgchange.snapshot_union(at.snapshot, (bounds ->> 'snapshot')::pg_snapshot)::text
           = pgchange.snapshot_union(at.snapshot, at.snapshot)::text
       and coalesce(
           pg_visible_in_snapshot((bounds -> 'partial' ->> 0)::xid8, at.snapshot)
           or coalesce(at.partial_txid = (bounds -> 'partial' ->> 0)::xid8
                       and at.partial_id >= (bounds -> 'partial' ->> 1)::bigint, false),
           true)
$$;
comment on function pubsub.covers(pubsub.watermark, jsonb) is 'Whether a watermark has passed a batch.';

create function pubsub.void_letters(consumer_id text, branch_id bigint, why text) returns void
language sql
as $$
    update pgchange.letter as l set void = why, on_its_way = false
    from pubsub.watermark as w
    where w.consumer_id = void_letters.consumer_id and w.branch_id = void_letters.branch_id
      and l.kind = 'commit' and l.address = pubsub.address(w.consumer_id, w.branch_id) and l.void is null
      and (l.content -> 'bounds' ->> 'source' is distinct from w.source or not pubsub.covers(w, l.content -> 'bounds'))
$$;
comment on function pubsub.void_letters(text, bigint, text) is
    'Never again send the letters of a consumer whose changes come by themselves, or mean something else now, as it was moved.';
