-- The resumable backfill: begun, chunk by chunk, paused, resumed, cancelled; its progress is for everybody to read.

create function tube.backfill_named(id bigint) returns tube.backfill
language plpgsql
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    found_row tube.backfill;
begin
    select b.* into found_row from tube.backfill as b where b.id = backfill_named.id for update;
    if found_row.id is null then
        raise exception using errcode = 'PC002', message = format('there is no backfill %s', coalesce(id::text, 'null')),
            hint = 'tube.backfills() lists them';
    end if;
    return found_row;
end
$$;
comment on function tube.backfill_named(bigint) is 'A backfill, locked until the transaction ends; refused where there is none.';

create function tube.unfinished_backfill(tube text, tbl regclass) returns tube.backfill
language plpgsql stable
set search_path = pg_catalog, tube, pg_temp
as $$
begin
    return (
        select b from tube.backfill as b
        where b.tube = unfinished_backfill.tube and b.tbl = unfinished_backfill.tbl
          and b.state in ('scheduled', 'running', 'paused'));
end
$$;
comment on function tube.unfinished_backfill(text, regclass) is
    'The unfinished backfill of a table, of which there is one at most; null where there is none.';

create function tube.fail_backfills(tube text, tbl regclass, reason text) returns void
language sql
set search_path = pg_catalog, tube, pg_temp
as $$
    update tube.backfill as b set
        state = 'failed', message = reason, updated_at = clock_timestamp(), finished_at = clock_timestamp()
    where b.tube = fail_backfills.tube and b.tbl = fail_backfills.tbl and b.state in ('scheduled', 'running', 'paused')
$$;
comment on function tube.fail_backfills(text, regclass, text) is
    'End what is not finished of the backfills of a table, with the reason.';

create function tube.estimated_rows(tbl regclass) returns bigint
language sql stable
set search_path = pg_catalog, tube, pg_temp
as $$
    -- As the planner does it, which itself would run what indexes of the table call.
    select coalesce(sum(ceil(
        pg_relation_size(c.oid) / b.size
        * case when c.relpages > 0 then c.reltuples / c.relpages else (b.size - 24) / (w.width + 28) end)), 0)::bigint
    from tube.descendants(tbl) as d(relid)
    join pg_class as c on c.oid = d.relid and c.relkind = 'r'
    cross join lateral (
        select sum(case when a.attlen > 0 then a.attlen else 32 end)
        from pg_attribute as a where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
    ) as w(width)
    cross join (select current_setting('block_size')::numeric) as b(size)
$$;
comment on function tube.estimated_rows(regclass) is 'How many rows a table has, as far as its size and its statistics tell.';

create function tube.backfill_begin(
    tube text, tbl regclass, order_col text, shard integer default null, chunk_size integer default 50000
) returns bigint
language plpgsql
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    known tube.tube := tube.named(tube);
    attached tube.attachment := tube.require_attachment(tube, tbl, shard);
    column_name name;
    running tube.backfill;
    made bigint;
begin
    if coalesce(chunk_size not between 1 and 1000000, true) then
        perform tube.refuse(format('a chunk cannot have %s rows', chunk_size), 'from 1 to 1000000');
    end if;
    perform tube.check_whole(tbl);
    attached := tube.lock_backfill(tube, tbl, shard);
    -- Not before: one that waits there with a lock on the table would keep writers from ending that the other waits for.
    column_name := tube.check_order(tbl, coalesce(nullif(trim(order_col), ''), quote_ident(attached.id_column)));
    running := tube.unfinished_backfill(known.name, tbl);
    if running.id is not null then
        if trim(order_col) <> '' and running.order_col <> column_name then
            perform tube.refuse(
                format('backfill %s of %s into tube %I, by %I, is not finished', running.id, tbl, tube, running.order_col),
                format('go on with it, or tube.backfill_cancel(%s)', running.id));
        end if;
        return running.id;
    end if;
    perform tube.check_replayed(tube, tbl, attached.shard);
    if not tube.has_order_index(tbl, column_name, attached.id_column) then
        raise notice 'no index gives the order of %, so every chunk sorts the whole table: create index on % (%, %) would help, '
                     'or larger chunks', quote_ident(column_name), tbl, quote_ident(column_name), quote_ident(attached.id_column);
    end if;
    insert into tube.backfill (tube, tbl, shard, order_col, order_type, chunk_size, start_seq, total)
    values (known.name, tbl, attached.shard, column_name, tube.order_type(tbl, column_name), chunk_size, nextval('tube.seq'),
            tube.estimated_rows(tbl))
    returning id into made;
    return made;
end
$$;
comment on function tube.backfill_begin(text, regclass, text, integer, integer) is
    'Begin a backfill of an attached table that tube.backfill_chunk() carries out, or find the one that is not finished, which '
    'keeps its chunk_size and, where a person paused it, stays so: returns its number. Without an order_col it goes by the ids. '
    'One of a table into a tube at a time. In a transaction of its own.';

create function tube.hindrance(job tube.backfill) returns text
language plpgsql stable
set search_path = pg_catalog, tube, pg_temp
as $$
begin
    return case
        when tube.schema_of(job.tbl) is null then 'the table is gone'
        when tube.id_column(job.tbl, job.tube) is null then 'the column of its ids is gone'
        when tube.order_type(job.tbl, job.order_col) is null then format('column %I is gone, or renamed', job.order_col)
        when tube.order_type(job.tbl, job.order_col) <> job.order_type then
            format('column %I, in whose order it goes, was %s and is %s', job.order_col, job.order_type,
                   tube.order_type(job.tbl, job.order_col))
    end;
end
$$;
comment on function tube.hindrance(tube.backfill) is 'Why a backfill cannot go on where it stopped; null where it can.';

create function tube.next_chunk(job tube.backfill) returns tube.backfill
language plpgsql
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    known tube.tube := tube.named(job.tube);
    attached tube.attachment := tube.require_attachment(job.tube, job.tbl, job.shard);
    start_seq jsonb := jsonb_build_object('start_seq', job.start_seq::text);
    began timestamptz;
    at tube.keyset;
begin
    perform tube.check_whole(job.tbl);
    if job.state = 'scheduled' then
        perform tube.put_control(known, attached, 'T', 'backfill_start', start_seq);
    end if;
    began := clock_timestamp();
    -- Pauses between chunks count, but not a rest of minutes: nobody was at work.
    if job.rated_from is null or job.updated_at < began - interval '5 min' then
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
        rate = case when at.looked_at = 0 then b.rate else (b.looked_at + at.looked_at - job.rated_looked_at)
            / greatest(extract(epoch from clock_timestamp() - job.rated_from), 0.000001) end,
        updated_at = clock_timestamp(), finished_at = case when at.finished then clock_timestamp() end
    where b.id = job.id
    returning b.* into job;
    return job;
end
$$;
comment on function tube.next_chunk(tube.backfill) is
    'Touch the rows of a backfill''s next chunk, and return it as it is then. The first one begins with backfill_start, and the '
    'last one ends with backfill_end.';

create function tube.backfill_chunk(
    id bigint, timeout interval default '60 seconds', out touched bigint, out looked_at bigint, out total bigint,
    out finished boolean, out state text
)
language plpgsql
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    job tube.backfill := (select b from tube.backfill as b where b.id = backfill_chunk.id);
    waited boolean;
    reason text;
    done_before bigint;
begin
    perform tube.check_level();
    -- Into another tube the same table may be backfilled at once, chunk by chunk in turn.
    perform pg_advisory_xact_lock(tube.backfill_key(job.tbl, job.shard));
    job := (select b from tube.backfill as b where b.id = backfill_chunk.id);
    waited := job.state = 'scheduled';
    if waited then
        -- Whoever was writing when the backfill's seq was drawn is waited for before the first row is read; and before its row
        -- is locked, for who wants to pause or cancel it.
        perform tube.wait_for_writers(array[job.tbl], timeout);
    end if;
    job := tube.backfill_named(id);
    done_before := job.done;
    if job.state = 'failed' then
        perform tube.refuse(format('backfill %s of %s failed: %s', job.id, job.tbl, job.message), 'mend that, and begin another');
    end if;
    reason := case when job.state in ('scheduled', 'running') then tube.hindrance(job) end;
    if reason is not null then
        -- Told by the next call: an error here would undo this.
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
    'Carry out the next chunk of a backfill, in a transaction of its own: how many ids it touched, how many rows are looked at '
    'of about how many in all, whether that was the last, and the state. A backfill that was paused or cancelled stays where it '
    'is. Before the first chunk it waits, as long as timeout says, for who was writing when the backfill began. Where the table '
    'or the column of its order is not what it was, the state is failed, and the next call tells why.';

create function tube.set_state(id bigint, allowed text[], wanted text, message text) returns void
language plpgsql
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    job tube.backfill := tube.backfill_named(id);
begin
    if job.state = wanted then
        return;
    end if;
    if job.state <> all (allowed) then
        perform tube.refuse(
            format('backfill %s is %s', id, job.state),
            'only a scheduled or running backfill can be paused, a paused one resumed, an unfinished one cancelled');
    end if;
    update tube.backfill as b set
        state = wanted, message = set_state.message, updated_at = clock_timestamp(), rated_from = null,
        finished_at = case when wanted = 'cancelled' then clock_timestamp() end
    where b.id = set_state.id;
end
$$;
comment on function tube.set_state(bigint, text[], text, text) is 'Bring a backfill into a state, from some others.';

create function tube.backfill_pause(id bigint) returns void
language sql
set search_path = pg_catalog, tube, pg_temp
as $$
    select tube.set_state(id, array['scheduled', 'running'], 'paused', 'paused by ' || session_user)
$$;
comment on function tube.backfill_pause(bigint) is
    'Pause a backfill behind the chunk in work, until tube.backfill_resume().';

create function tube.backfill_resume(id bigint) returns void
language plpgsql
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    job tube.backfill := tube.backfill_named(id);
begin
    perform tube.set_state(
        id, array['paused'], case when job.looked_at = 0 and not job.in_nulls then 'scheduled' else 'running' end, null);
end
$$;
comment on function tube.backfill_resume(bigint) is 'Let a paused backfill go on where it stopped.';

create function tube.backfill_cancel(id bigint) returns void
language sql
set search_path = pg_catalog, tube, pg_temp
as $$
    select tube.set_state(id, array['scheduled', 'running', 'paused'], 'cancelled', 'cancelled by ' || session_user)
$$;
comment on function tube.backfill_cancel(bigint) is
    'Give up a backfill: what it touched stays touched, and nothing is given up downstream.';

create function tube.backfills()
returns table (
    id bigint, tube text, tbl regclass, shard integer, order_col name, state text, looked_at bigint, total bigint,
    percent numeric, touched bigint, rate double precision, remaining interval, message text, started_by name,
    started_at timestamptz, updated_at timestamptz, finished_at timestamptz
)
language sql stable
set search_path = pg_catalog, tube, pg_temp
as $$
    select b.id, b.tube, b.tbl, b.shard, b.order_col, b.state, b.looked_at, b.total,
           case when b.state = 'done' then 100 else round(least(99.9, 100.0 * b.looked_at / greatest(b.total, 1)), 1) end,
           b.done,
           case when b.rate >= 1 then round(b.rate)
                when b.rate > 0 then round(b.rate::numeric, ceil(-log(b.rate::numeric))::integer)::double precision
                else b.rate end,
           case when b.state = 'running' and b.rate > 0 then make_interval(secs => round((b.total - b.looked_at) / b.rate)) end,
           b.message, b.started_by, b.started_at, b.updated_at, b.finished_at
    from tube.backfill as b
    order by b.finished_at is not null, b.id desc
$$;
comment on function tube.backfills() is
    'Every backfill that goes on where it stopped, those at work first: rows looked at of about how many, ids touched, rows a '
    'second, and how long it will take.';
