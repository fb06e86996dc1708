-- Administration: status, repair, move, drop, trim.

-- The addresses of all consumers whose progress is in this database.
create function topology.consumers() returns setof jsonb
language sql stable security definer as $$
    select jsonb_build_object('consumer_id', c.consumer_id) from topology.consumer as c order by c.consumer_id
$$;

-- The catalogue's record of a consumer: the bounds of its last claimed batch. The first call after a restore also records the new
-- place of the catalogue.
create function topology.mark(consumer_id text) returns jsonb
language plpgsql volatile security definer as $$
declare
    known jsonb := pgchange.mark('topology', topology.name_of(consumer_id));
begin
    if not topology.is_native() then
        perform pgchange.note_origin('topology.origin');
    end if;
    if exists (
        select from topology.now_at() as n
        where ((known -> 'upto' ->> 0)::bigint, (known -> 'upto' ->> 1)::bigint) > (n.term, n.index))
    then
        raise exception using errcode = 'PC004',
            message = format('the last batch of consumer %s is beyond the log: the log was restored without it',
                             topology.name_of(consumer_id)),
            hint = format('restore the whole dump; or choose a point: airflow-pgchange move %s',
                          pgchange.shell_quoted(topology.name_of(consumer_id)));
    end if;
    return known || jsonb_build_object('source', topology.here());
end
$$;

-- Delete a consumer's progress. Returns whether it was in this database.
create function topology.forget(consumer_id text) returns boolean
language plpgsql as $$
begin
    delete from topology.consumer as c where c.consumer_id = forget.consumer_id;
    return found;
end
$$;

create function topology.trim_log(
    retention interval default null, retention_bytes bigint default null, retention_count bigint default null
) returns text
language plpgsql volatile security definer as $$
declare
    -- The number of newest events to keep. To convert retention_bytes into a number, each event counts as the average size of an
    -- event.
    newest bigint;
    holder text;
    gone record;
begin
    perform pgchange.check_retention(retention, retention_bytes, retention_count);
    perform topology.hold();
    newest := least(retention_count, case when retention_bytes is not null then (
        select count(*) * least(1, retention_bytes::numeric / greatest(pg_total_relation_size('topology.log'), 1)) from topology.log) end)::bigint;
    with needed as (
        select c.term, c.index from topology.consumer as c
        union all
        select (m.after ->> 0)::bigint, (m.after ->> 1)::bigint from pgchange.claim as m
        where m.kind = 'topology' and not exists (
            select from topology.consumer as c where c.consumer_id = m.address ->> 'consumer_id')
        union all
        select (m.upto ->> 0)::bigint, (m.upto ->> 1)::bigint from pgchange.claim as m
        where m.kind = 'topology' and m.batch is null
        union all
        -- A stored dead letter does not prevent trimming. A dead letter that is being sent again still needs its events.
        select (l.content -> 'slices' -> 0 -> 'after' ->> 0)::bigint, (l.content -> 'slices' -> 0 -> 'after' ->> 1)::bigint
        from pgchange.letter as l
        where l.kind = 'topology' and l.on_its_way
    ), old as (
        -- Find the last old event by position. Timestamps are not monotonic: clocks are set back, and servers' clocks differ.
        select l.term, l.index from topology.log as l
        where l.written_at < now() - retention
        order by l.term desc, l.index desc
        limit 1
    ), excess as (
        select l.term, l.index from topology.log as l order by l.term desc, l.index desc offset newest limit case when newest is null then 0 else 1 end
    ), gone_events as (
        delete from topology.log as l
        where exists (
            select from (select * from old union all select * from excess) as o where (l.term, l.index) <= (o.term, o.index))
          and not exists (select from needed as n where (n.term, n.index) < (l.term, l.index))
        returning l.term, l.index
    )
    select count(*) as events, (max(array[g.term, g.index])) as upto into gone from gone_events as g;
    if (select count(*) from topology.log) > newest then
        -- More events remain than the limit allows, because a consumer still needs them.
        holder := (select topology.name_of(c.consumer_id) from topology.consumer as c order by c.term, c.index limit 1);
    end if;
    perform pgchange.note_held(
        'topology', holder,
        case when holder is not null then format('the log of the catalogue is larger than its retention: %s has not processed the oldest of it', holder) end);
    if gone.events = 0 then
        return null;
    end if;
    insert into topology.trimmed (term, index, events) values (gone.upto[1], gone.upto[2], gone.events);
    return format('trimmed %s events of the catalogue''s log', gone.events);
end
$$;
comment on function topology.trim_log(interval, bigint, bigint) is
    'Delete events up to the last event older than retention, or beyond the newest retention_bytes or retention_count events, '
    'except those that a consumer still needs. For a consumer whose progress is in another database, its last claim counts. '
    'Returns a text with the number of events, null if none was deleted. A new consumer begins with the oldest event that is left.';

-- Findings about transactions, also prepared ones, that changed the catalogue and have been open longer than long_wait. A warning
-- if this role may not see when such a transaction began.
create function topology.health(long_wait interval default '10 seconds') returns setof pgchange.finding
language sql volatile security definer as $$
    select f.*
    from pgchange.lock_health(
        'topology', topology.lock_key(),
        '%s has changed the catalogue: until it ends nobody else can change it, and clients do not hear of it', long_wait) as f
$$;
