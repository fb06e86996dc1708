-- Resumable backfills, carried out chunk by chunk.

create function tube.backfill_begin(
    tube text, tbl regclass, order_col text, shard integer default null, chunk_size integer default 50000
) returns bigint
language plpgsql as $$
declare
    known tube.tube := tube.named(tube);
    attached tube.attachment := tube.require_attachment(tube, tbl, shard);
    column_name name;
    running tube.backfill;
    made bigint;
begin
    if coalesce(chunk_size not between 1 and 1000000, true) then
        perform pgchange.refuse(format('a chunk cannot have %s rows', chunk_size), 'use a number from 1 to 1000000');
    end if;
    perform tube.check_whole(tbl);
    attached := tube.lock_backfill(tube, tbl, shard);
    -- Only now: a session that waits for the backfill with a lock on the table would block the writers for which the other
    -- backfill waits.
    column_name := tube.check_order(tbl, coalesce(nullif(trim(order_col), ''), quote_ident(tube.default_order(attached))));
    running := tube.unfinished_backfill(known.name, tbl);
    if running.id is not null then
        if trim(order_col) <> '' and running.order_col <> column_name then
            perform pgchange.refuse(
                format('backfill %s of %s into tube %I, by %I, is not finished', running.id, tbl, tube, running.order_col),
                format('continue it with this order, or cancel it: select tube.backfill_cancel(%s)', running.id));
        end if;
        return running.id;
    end if;
    perform tube.check_replayed(tube, tbl, attached.shard);
    if not tube.has_order_index(attached, column_name) then
        raise notice 'no index gives the order of %, so every chunk sorts the whole table: create index on % (%), or use larger '
                     'chunks', quote_ident(column_name), tbl, (
            select string_agg(quote_ident(c.name), ', ' order by c.place)
            from unnest(tube.order_columns(attached, column_name)) with ordinality as c(name, place));
    end if;
    perform tube.demand(known, format('backfill %s into tube', tbl), '{insert}');
    insert into tube.backfill (tube, tbl, shard, order_col, order_type, chunk_size, start_seq, total)
    values (known.name, tbl, attached.shard, column_name, tube.order_type(tbl, column_name), chunk_size, nextval('tube.seq'),
            tube.estimated_rows(tbl))
    returning id into made;
    return made;
end
$$;
comment on function tube.backfill_begin(text, regclass, text, integer, integer) is
    'Begin a backfill of an attached table, which tube.backfill_chunk() carries out, and return its id. If there is an unfinished '
    'backfill, return its id; it keeps its chunk_size, and stays paused if a person paused it. Without an order_col, the rows are '
    'read in the order of their ids. A table has one backfill into a tube at a time. Call it in a transaction of its own.';

create function tube.backfill_ask(tube text, tbl regclass, order_col text default null) returns bigint
language plpgsql as $$
declare
    known tube.tube := tube.named(tube);
    number bigint := tube.backfill_begin(tube, tbl, order_col);
    attached tube.attachment := tube.require_attachment(tube, tbl, null);
begin
    if not tube.has_control(known, tbl, attached.shard, array['backfill_schedule']) then
        perform tube.put_control(known, attached, 'B', 'backfill_schedule', jsonb_build_object(
            'order_col', (select quote_ident(b.order_col) from tube.backfill as b where b.id = number)));
    end if;
    return number;
end
$$;
comment on function tube.backfill_ask(text, regclass, text) is
    'Begin a backfill of an attached table, or find the unfinished backfill, like tube.backfill_begin(). Then ask the workers to '
    'carry it out, by a control pod. Call it in a transaction of its own.';

-- Why a backfill cannot be resumed; null if it can.
create function tube.hindrance(job tube.backfill) returns text
language plpgsql stable as $$
begin
    return case
        when tube.schema_of(job.tbl) is null then 'the table was dropped'
        when tube.key_names(job.tbl, job.tube) is null then 'the column of its ids was dropped'
        when tube.order_type(job.tbl, job.order_col) is null then format('column %I was dropped or renamed', job.order_col)
        when tube.order_type(job.tbl, job.order_col) <> job.order_type then
            format('its order column %I was %s and is %s', job.order_col, job.order_type,
                   tube.order_type(job.tbl, job.order_col))
    end;
end
$$;

-- Touch the rows of a backfill's next chunk, and return the changed backfill. The first chunk begins with the control pod
-- backfill_start, and the last chunk ends with backfill_end.
create function tube.next_chunk(job tube.backfill) returns tube.backfill
language plpgsql as $$
declare
    known tube.tube := tube.named(job.tube);
    attached tube.attachment := tube.require_attachment(job.tube, job.tbl, job.shard);
    start_seq jsonb := jsonb_build_object('start_seq', job.start_seq::text);
    began timestamptz;
    at tube.keyset;
    afresh boolean;
begin
    perform tube.check_whole(job.tbl);
    if job.state = 'scheduled' then
        perform tube.put_control(known, attached, 'T', 'backfill_start', start_seq);
    end if;
    began := clock_timestamp();
    -- The rate includes pauses between chunks, but not a rest of minutes, when nobody was at work. A single chunk has no pause,
    -- so an earlier rate stands until there are two chunks.
    afresh := job.rated_from is null or job.updated_at < began - interval '5 min';
    if afresh then
        job.rated_from := began;
        job.rated_looked_at := job.looked_at;
    end if;
    at := tube.backfill_slice(
        known, attached, job.order_col, (job.in_nulls, job.last_value, job.last_id, 0, 0, false), job.chunk_size, pod_size => 900);
    if at.finished then
        perform tube.put_control(known, attached, 'B', 'backfill_end', start_seq);
        perform tube.clear_missed(job.tube, job.tbl, job.started_at);
    end if;
    update tube.backfill as b set
        state = case when at.finished then 'done' else 'running' end,
        in_nulls = at.in_nulls, last_value = at.last_value, last_id = at.last_id,
        looked_at = b.looked_at + at.looked_at, done = b.done + at.touched,
        total = case when at.finished then b.looked_at + at.looked_at else greatest(b.total, b.looked_at + at.looked_at) end,
        rated_from = job.rated_from, rated_looked_at = job.rated_looked_at,
        rate = case when at.looked_at = 0 or afresh and b.rate is not null then b.rate else (b.looked_at + at.looked_at - job.rated_looked_at)
            / greatest(extract(epoch from clock_timestamp() - job.rated_from), 0.000001) end,
        updated_at = clock_timestamp(), finished_at = case when at.finished then clock_timestamp() end
    where b.id = job.id
    returning b.* into job;
    return job;
end
$$;

create function tube.backfill_chunk(
    id bigint, timeout interval default '60 seconds', out touched bigint, out looked_at bigint, out total bigint,
    out finished boolean, out state text
)
language plpgsql as $$
declare
    job tube.backfill := (select b from tube.backfill as b where b.id = backfill_chunk.id);
    waited boolean;
    reason text;
    done_before bigint;
begin
    perform pgchange.check_isolation();
    -- The table may be backfilled into another tube at the same time, with alternating chunks.
    perform pg_advisory_xact_lock(tube.backfill_key(job.tbl, job.shard));
    job := (select b from tube.backfill as b where b.id = backfill_chunk.id);
    waited := job.state = 'scheduled';
    if waited then
        -- Wait for the writers of the moment in which the seq was drawn before the first row is read. Wait before its row is
        -- locked, so that the backfill can be paused or cancelled meanwhile.
        perform tube.wait_for_writers(array[job.tbl], timeout);
    end if;
    job := tube.backfill_named(id);
    done_before := job.done;
    if job.state = 'failed' then
        perform pgchange.refuse(format('backfill %s of %s failed: %s', job.id, job.tbl, job.message),
            'fix the cause, and begin another backfill');
    end if;
    reason := case when job.state in ('scheduled', 'running') then tube.hindrance(job) end;
    if reason is not null then
        -- The next call raises the error: an error here would roll this update back.
        perform tube.fail_backfills(job.tube, job.tbl, reason);
        job.state := 'failed';
    elsif job.state = 'running' or job.state = 'scheduled' and waited then
        job := tube.next_chunk(job);
    end if;
    touched := job.done - done_before;
    looked_at := job.looked_at;
    total := job.total;
    finished := job.state = 'done';
    state := job.state;
end
$$;
comment on function tube.backfill_chunk(bigint, interval) is
    'Carry out the next chunk of a backfill. Returns how many ids it touched, how many rows of about how many were read, whether '
    'it was the last chunk, and the state. A paused or cancelled backfill stays as it is. The first chunk waits, at most timeout, '
    'for transactions that were writing when the backfill began. If the table or its order column has changed, the state is '
    'failed, and the next call raises the reason. Call it in a transaction of its own.';
