-- A backfill touches a whole table as pods of op B, in the order of a column. It has three steps, each in a transaction of its
-- own.
--
-- Step 1 draws a seq; step 2 waits for the writers of that moment; step 3 reads the rows. So a row that is not read, or is read
-- before it changed, is touched by a pod with a higher seq. Rows that the downstream has not written since that seq do not exist
-- any more.

-- An attachment with the current names of its id columns. Raises an error if the table is not attached, or under another shard.
create function tube.require_attachment(tube text, tbl regclass, shard integer) returns tube.attachment
language plpgsql stable as $$
declare
    known tube.tube := tube.named(tube);
    found_row tube.attachment := (
        select a from tube.attachment as a where a.tube = known.name and a.tbl = require_attachment.tbl
    );
begin
    if found_row.tube is null then
        perform pgchange.refuse(
            format('%s is not attached to tube %I', coalesce(tbl::text, 'null'), tube),
            'attach it first: otherwise changes during the backfill would be missed');
    end if;
    if shard <> found_row.shard then
        perform pgchange.refuse(
            format('%s is attached to tube %I as shard %s, not %s', tbl, tube, found_row.shard, shard),
            'leave the shard out, or attach the table again');
    end if;
    found_row.key := coalesce(tube.key_names(tbl, tube), found_row.key);
    perform tube.check_columns(tbl, found_row.key, known);
    return found_row;
end
$$;

-- Wait until no other backfill of a table and shard is at work, and keep others out until the transaction ends.
create function tube.lock_backfill(tube text, tbl regclass, shard integer) returns tube.attachment
language plpgsql volatile as $$
declare
    found_row tube.attachment;
begin
    perform pgchange.check_isolation();
    loop
        found_row := tube.require_attachment(tube, tbl, shard);
        perform pg_advisory_xact_lock(tube.backfill_key(tbl, found_row.shard));
        -- The shard may have changed while this session waited for the lock.
        exit when found_row.shard = (tube.require_attachment(tube, tbl, shard)).shard;
    end loop;
    return found_row;
end
$$;

-- Refuse a backfill if the workers have not replayed the previous backfill of the table and shard. The answer holds until the
-- transaction ends if tube.lock_backfill() was called before.
create function tube.check_replayed(tube text, tbl regclass, shard integer) returns void
language plpgsql volatile as $$
begin
    if tube.has_control(tube.named(tube), tbl, shard, array['backfill_end']) then
        perform pgchange.refuse(
            format('the previous backfill of %s into tube %I has not been replayed to its end yet', tbl, tube),
            'start again when the workers of the tube have finished (with tube_replay: its run after the backfill); select * from '
            'pgchange.status() shows what is left');
    end if;
end
$$;

-- Touch the next chunk rows of a table as pods of op B, and return the position behind them. like_ids is a null of the array type
-- of the ids.
create function tube.touch_slice(
    known tube.tube, attached tube.attachment, order_col name, at tube.keyset, chunk integer, pod_size integer, like_ids anyarray
) returns tube.keyset
language plpgsql
set jit = off
as $$
declare
    ids like_ids%type;
begin
    at.in_nulls := coalesce(at.in_nulls, false);
    select s.looked_at, s.upto_value, s.upto_id, s.ids into at.looked_at, at.last_value, at.last_id, ids
    from tube.judged_slice(attached, order_col, at.in_nulls, at.last_value, at.last_id, chunk, like_ids) as s;
    perform tube.put_pods(known.pods, 'B', attached.shard, ids, chunk_size => pod_size);
    at.touched := cardinality(ids);
    at.finished := false;
    if at.looked_at < chunk then
        -- The column of an inheritance child may be nullable even if its parent's column is not.
        at.finished := at.in_nulls or not exists (
            select from pgchange.descendants(attached.tbl) as d(relid)
            join pg_attribute as a on a.attrelid = d.relid and a.attname = order_col and not a.attnotnull);
        at.in_nulls := true;
        at.last_value := null;
        at.last_id := null;
    end if;
    return at;
end
$$;

-- The next slice of a backfill, with the type of the tube's ids. Under pinned settings, because the position is a text that the
-- next chunk reads in another session.
create function tube.backfill_slice(
    known tube.tube, attached tube.attachment, order_col name, at tube.keyset, chunk integer, pod_size integer
) returns tube.keyset
language plpgsql as $$
begin
    if known.key = '{bigint}' then
        return tube.touch_slice(known, attached, order_col, at, chunk, pod_size, null::bigint[]);
    end if;
    return tube.touch_slice(known, attached, order_col, at, chunk, pod_size, null::text[]);
end
$$;

select pgchange.pin_settings('tube.backfill_slice(tube.tube, tube.attachment, name, tube.keyset, integer, integer)');

-- The estimated number of rows of a table, by its size and its statistics.
create function tube.estimated_rows(tbl regclass) returns bigint
language sql stable as $$
    -- Computed as the planner does. The planner itself would run functions in the indexes of the table.
    select coalesce(sum(ceil(
        pg_relation_size(c.oid) / b.size
        * case when c.relpages > 0 then c.reltuples / c.relpages else (b.size - 24) / (w.width + 28) end)), 0)::bigint
    from pgchange.descendants(tbl) as d(relid)
    join pg_class as c on c.oid = d.relid and c.relkind = 'r'
    cross join lateral (
        select sum(case when a.attlen > 0 then a.attlen else 32 end)
        from pg_attribute as a where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
    ) as w(width)
    cross join (select current_setting('block_size')::numeric) as b(size)
$$;

create function tube.tube_backfill_schedule(in_tube text, order_col text, shard_from integer, shard_to integer) returns integer
language plpgsql as $$
declare
    known tube.tube := tube.named(in_tube);
    each_one tube.attachment;
    scheduled integer := 0;
begin
    if coalesce(shard_from > shard_to, true) then
        perform pgchange.refuse(format('there are no shards from %s to %s', shard_from, shard_to), 'give the lower number first');
    end if;
    for each_one in
        select a.* from tube.attachment as a
        where a.tube = known.name and a.shard between shard_from and shard_to and not tube.is_gone(a)
        order by a.shard, a.tbl
    loop
        if not tube.has_control(known, each_one.tbl, each_one.shard, array['backfill_schedule', 'backfill_end']) then
            perform tube.put_control(
                known, each_one, 'B', 'backfill_schedule',
                jsonb_build_object('order_col', tube.check_order(each_one.tbl, order_col)));
            scheduled := scheduled + 1;
        end if;
    end loop;
    return scheduled;
end
$$;
comment on function tube.tube_backfill_schedule(text, text, integer, integer) is
    'Ask the workers to backfill every attached table of a range of shards, by a control pod for each table. Tables that have '
    'such a pod, or whose previous backfill is not replayed, are left out. Returns the number of control pods.';

create function tube.tube_backfill_step1() returns text
language sql as $$
    select nextval('tube.seq')::text
$$;
comment on function tube.tube_backfill_step1() is
    'Begin a backfill. Returns the seq from which on pods count as written since. Call it in a transaction of its own.';

create function tube.tube_backfill_step2(timeout interval default '60 seconds') returns void
language sql as $$
    select tube.wait_for_writers(array(select distinct a.tbl from tube.attachment as a), timeout)
$$;
comment on function tube.tube_backfill_step2(interval) is
    'Wait for the transactions that are writing attached tables now, also prepared transactions. Call it in a transaction of its '
    'own.';

create function tube.tube_backfill_step3(
    step1 text, tube text, tbl regclass, order_col text, shard integer default null,
    fetch_chunk_size integer default 20000, insert_chunk_size integer default 250
) returns void
language plpgsql as $$
declare
    known tube.tube := tube.named(tube);
    attached tube.attachment := tube.require_attachment(tube, tbl, shard);
    column_name name;
    pod_size integer := tube.checked_chunk(insert_chunk_size);
    chunk integer;
    at tube.keyset;
    so_far tube.progress;
    since timestamptz;
    why text;
    advice text;
begin
    if coalesce(step1 !~ '^[0-9]{1,18}$', true) or step1::bigint > (select s.last_value from tube.seq as s) then
        perform pgchange.refuse(format('%L is not a result of step 1', step1),
            'give the value that tube.tube_backfill_step1() returned');
    end if;
    perform tube.check_bulk(attached.shard, fetch_chunk_size);
    perform tube.check_whole(tbl);
    attached := tube.lock_backfill(tube, tbl, shard);
    -- Only now: a session that waits for the backfill with a lock on the table would block the writers for which the other
    -- backfill waits.
    column_name := tube.check_order(tbl, order_col);
    begin
        perform tube.check_replayed(tube, tbl, attached.shard);
    exception when sqlstate 'PC008' then
        get stacked diagnostics why = message_text, advice = pg_exception_hint;
        raise notice using message = 'tube_backfill: skipped: ' || why, hint = advice;
        return;
    end;
    if (tube.unfinished_backfill(known.name, tbl)).id is not null then
        perform pgchange.refuse(
            format('another backfill of %s into tube %I is not finished', tbl, tube),
            'wait until it ends, or cancel it; select * from tube.backfills() shows it');
    end if;
    perform tube.clear_missed(known.name, tbl, clock_timestamp());
    -- Without an index each read sorts the table, so use few large chunks.
    chunk := case when tube.has_order_index(attached, column_name) then fetch_chunk_size
                  else greatest(fetch_chunk_size, 1000000) end;
    perform tube.put_control(known, attached, 'T', 'backfill_start', jsonb_build_object('start_seq', step1));
    so_far := tube.begun(tube.estimated_rows(tbl));
    raise notice 'tube_backfill: approx_size=%', so_far.approx_size;
    loop
        since := clock_timestamp();
        at := tube.backfill_slice(known, attached, column_name, at, chunk, pod_size);
        so_far := tube.told(so_far, at.touched, since, at.finished);
        exit when at.finished;
    end loop;
    if tube.require_attachment(tube, tbl, shard) is distinct from attached then
        perform pgchange.refuse(
            format(
                'the backfill of %s was undone: its predicate or its ids were changed meanwhile',
                tbl), 'begin again with step 1');
    end if;
    perform tube.put_control(known, attached, 'B', 'backfill_end', jsonb_build_object('start_seq', step1));
end
$$;
comment on function tube.tube_backfill_step3(text, text, regclass, text, integer, integer, integer) is
    'Insert the ids of an attached table for whose rows the predicate holds, as pods of op B in the order of order_col. The last '
    'pod is backfill_end: the downstream then deletes the rows that were not written since step 1. Only one backfill of a table '
    'and shard runs at a time. Call it in a transaction of its own.';
