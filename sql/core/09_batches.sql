-- The attempts on batches of the last days, for people and the page. No claim and no ack depends on them.

create table pgchange.batch (
    kind text,
    consumer text,
    batch_id uuid,
    attempt integer,
    count bigint not null,
    claimed_at timestamptz,
    acked_at timestamptz,
    failed_at timestamptz,
    skipped_at timestamptz,
    split_at timestamptz,
    error text,
    seconds jsonb,
    number bigint not null,
    noted_at timestamptz not null default clock_timestamp(),
    run text default left(nullif(current_setting('pgchange.run', true), ''), 1000),
    outputs jsonb,
    primary key (kind, consumer, batch_id, attempt)
-- Free space in each page, so that an ack updates a row within its page.
) with (fillfactor = 70);
comment on table pgchange.batch is
    'Attempts on batches of the last days, by the name of their consumer. claimed_at, failed_at and split_at are recorded in the '
    'database of the changes; acked_at and skipped_at in the database of the progress. A batch that was split ended when its '
    'parts became batches. seconds: how long each phase took, if the worker reported it. number counts the attempts of a '
    'consumer, so that trimming finds the old attempts without reading the others. run: the run that made the attempt, from the '
    'setting pgchange.run of the session that claimed. For an Airflow task it is the DAG, run, task, map index and try, each '
    'percent-encoded and separated by slashes. outputs: the targets that the batch was written to, from the setting '
    'pgchange.outputs of the transaction of the ack: [{target, rows, version, location}, ...].';

create index batch_noted on pgchange.batch (noted_at);
create index batch_number on pgchange.batch (kind, consumer, number);

-- The number of a consumer's next attempt. Two concurrent attempts may get the same number. The functions that claims and acks call
-- have no search_path of their own, which would slow down every claim and ack.
create function pgchange.next_number(kind text, consumer text) returns bigint
language plpgsql stable as $$
begin
    return 1 + coalesce((
        select b.number from pgchange.batch as b
        where b.kind = next_number.kind and b.consumer = next_number.consumer
        order by b.number desc limit 1), 0);
end
$$;

-- Record in the database of the changes that a batch was claimed, with its attempt.
create function pgchange.note_claim(kind text, consumer text, batch jsonb) returns void
language plpgsql as $$
begin
    -- A dead letter that is sent again begins with a first attempt, which replaces the record of the earlier one.
    insert into pgchange.batch (kind, consumer, batch_id, attempt, number, count, claimed_at)
    values (
        kind, consumer, (batch ->> 'id')::uuid, (batch ->> 'attempt')::integer,
        -- This computes the same as pgchange.next_number(), without a query of its own.
        1 + coalesce((
            select l.number from pgchange.batch as l where l.kind = note_claim.kind and l.consumer = note_claim.consumer
            order by l.number desc limit 1), 0),
        (batch ->> 'count')::bigint, pg_catalog.clock_timestamp())
    on conflict on constraint batch_pkey do update set
        claimed_at = excluded.claimed_at, acked_at = null, failed_at = null, skipped_at = null, split_at = null, error = null,
        seconds = null, outputs = null,
        number = excluded.number, noted_at = excluded.noted_at, run = excluded.run;
end
$$;

-- Record the error of an attempt on a batch in the database of the changes.
create function pgchange.note_failed(kind text, consumer text, batch jsonb, error text) returns void
language plpgsql as $$
begin
    update pgchange.batch as b set
        failed_at = pg_catalog.clock_timestamp(), error = note_failed.error, seconds = note_failed.batch -> 'seconds'
    where b.kind = note_failed.kind and b.consumer = note_failed.consumer
      and b.batch_id = (note_failed.batch ->> 'id')::uuid and b.attempt = (note_failed.batch ->> 'attempt')::integer;
end
$$;

-- Record that a batch ended at its last attempt because it was split.
create function pgchange.note_split(kind text, consumer text, batch_id uuid, attempt integer) returns void
language plpgsql as $$
begin
    update pgchange.batch as b set split_at = pg_catalog.clock_timestamp()
    where b.kind = note_split.kind and b.consumer = note_split.consumer and b.batch_id = note_split.batch_id
      and b.attempt = note_split.attempt;
end
$$;

-- Record in the database of the progress that a batch was acked or skipped.
create function pgchange.note_end(kind text, consumer text, batch jsonb, skipped boolean default false) returns void
language plpgsql as $$
declare
    -- Update first, because most batches are acked in the database in which they were claimed.
    id uuid := batch ->> 'id';
    tried integer := (batch ->> 'attempt')::integer;
    noted text := pg_catalog.current_setting('pgchange.outputs', true);
    -- The page shows these targets. A list of over 10,000 characters is too long for the page, so it is not stored.
    to_store jsonb := case when not skipped and pg_catalog.length(noted) between 1 and 10000 then noted end;
begin
    update pgchange.batch as b set
        acked_at = case when not skipped then pg_catalog.clock_timestamp() end,
        skipped_at = case when skipped then pg_catalog.clock_timestamp() end,
        seconds = coalesce(batch -> 'seconds', b.seconds), outputs = to_store
    where b.kind = note_end.kind and b.consumer = note_end.consumer and b.batch_id = id and b.attempt = tried;
    if not found then
        insert into pgchange.batch (kind, consumer, batch_id, attempt, number, count, acked_at, skipped_at, error, seconds, outputs)
        values (kind, consumer, id, tried, pgchange.next_number(kind, consumer), (batch ->> 'count')::bigint,
                case when not skipped then pg_catalog.clock_timestamp() end, case when skipped then pg_catalog.clock_timestamp() end,
                batch ->> 'error', batch -> 'seconds', to_store);
    end if;
end
$$;

-- The outcome of an attempt on a batch, as far as this database has recorded it; null if it has no record.
create function pgchange.outcome(kind text, consumer text, batch jsonb) returns text
language plpgsql stable as $$
begin
    return (
        select case when b.acked_at is not null then 'acked'
                    when b.skipped_at is not null then 'skipped'
                    when b.split_at is not null then 'split'
                    when b.failed_at is not null then 'failed'
                    else 'claimed' end
        from pgchange.batch as b
        where b.kind = outcome.kind and b.consumer = outcome.consumer and b.batch_id = (outcome.batch ->> 'id')::uuid
          and b.attempt = (outcome.batch ->> 'attempt')::integer);
end
$$;

-- Delete attempts on batches that are older than keep, and all but the newest attempts of each consumer. Deletes at most ten
-- thousand rows of each kind. Returns texts: how many were deleted, and whether more may be left. Reads only the rows that it
-- deletes, and one row of each consumer.
create function pgchange.trim_batches(keep interval default '7 days', most integer default 1000) returns setof text
language plpgsql security definer
-- With few consumers, or without statistics, the planner would otherwise read the whole table.
set enable_seqscan = off
set enable_bitmapscan = off
set enable_mergejoin = off
set enable_hashjoin = off
set enable_sort = off
as $$
declare
    -- Further rows are left for the next transaction. Locked rows are skipped, so this never waits; the limit keeps acks from
    -- waiting for it.
    chunk constant integer := 10000;
    old bigint;
    gone bigint;
begin
    delete from pgchange.batch as b
    where b.ctid = any (array(
        select o.ctid from pgchange.batch as o where o.noted_at < now() - keep order by o.noted_at limit chunk for update skip locked));
    get diagnostics old = row_count;
    with recursive newest as (
        (select b.kind, b.consumer, b.number from pgchange.batch as b order by b.kind desc, b.consumer desc, b.number desc limit 1)
        union all
        select b.kind, b.consumer, b.number
        from newest as n
        cross join lateral (
            select o.kind, o.consumer, o.number from pgchange.batch as o where (o.kind, o.consumer) < (n.kind, n.consumer)
            order by o.kind desc, o.consumer desc, o.number desc limit 1
        ) as b
    )
    delete from pgchange.batch as b
    where b.ctid = any (array(
        select f.place
        from newest as n
        cross join lateral (
            select o.ctid as place from pgchange.batch as o
            where o.kind = n.kind and o.consumer = n.consumer and o.number <= n.number - most
            order by o.number limit chunk for update skip locked
        ) as f
        limit chunk));
    get diagnostics gone = row_count;
    if gone + old > 0 then
        return next format('deleted %s attempts on batches', gone + old);
    end if;
    if chunk in (gone, old) then
        return next 'left more attempts on batches for the next run';
    end if;
end
$$;
