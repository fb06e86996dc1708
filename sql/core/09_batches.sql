-- The batches of the last days, for people and pages: what each attempt came to. No claim and no ack depends on it.

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
-- An ack changes a row in its place.
) with (fillfactor = 70);
comment on table pgchange.batch is
    'The attempts on batches of the last days, by the name of their consumer. claimed_at and failed_at are noted where the changes '
    'are, as split_at is, when the batch was split into parts that are batches of their own; acked_at and skipped_at where the progress '
    'is; seconds is how long each phase took, as far as whoever worked tells. '
    'number counts a consumer''s, so that all but the last of them are found without a look at these. run is who made the attempt, as '
    'the setting pgchange.run of the session that claimed says: of a task in Airflow its DAG, run, task, map index and try, each '
    'percent-encoded, with a slash between. outputs are the targets that the batch was written to, as the setting pgchange.outputs of the '
    'transaction of the ack says: [{target, rows, version, location}, ...].';

create index batch_noted on pgchange.batch (noted_at);
create index batch_number on pgchange.batch (kind, consumer, number);

-- The number of a consumer's next attempt; two at once may have the same.
-- These without search_paths of their own: claims and acks wait for them.
create function pgchange.next_number(kind text, consumer text) returns bigint
language plpgsql stable as $$
begin
    return 1 + coalesce((
        select b.number from pgchange.batch as b
        where b.kind = next_number.kind and b.consumer = next_number.consumer
        order by b.number desc limit 1), 0);
end
$$;

-- Note that a batch was claimed, with its attempt, where the changes are.
create function pgchange.note_claim(kind text, consumer text, batch jsonb) returns void
language plpgsql as $$
begin
    -- One that was given up and is sent again begins with a first attempt once more.
    insert into pgchange.batch (kind, consumer, batch_id, attempt, number, count, claimed_at)
    values (
        kind, consumer, (batch ->> 'id')::uuid, (batch ->> 'attempt')::integer,
        -- As pgchange.next_number() would, without a query of its own.
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

-- Note what the attempt on a batch failed on, where the changes are.
create function pgchange.note_failed(kind text, consumer text, batch jsonb, error text) returns void
language plpgsql as $$
begin
    update pgchange.batch as b set
        failed_at = pg_catalog.clock_timestamp(), error = note_failed.error, seconds = note_failed.batch -> 'seconds'
    where b.kind = note_failed.kind and b.consumer = note_failed.consumer
      and b.batch_id = (note_failed.batch ->> 'id')::uuid and b.attempt = (note_failed.batch ->> 'attempt')::integer;
end
$$;

-- Note that a batch ended because it was split, at its last attempt.
create function pgchange.note_split(kind text, consumer text, batch_id uuid, attempt integer) returns void
language plpgsql as $$
begin
    update pgchange.batch as b set split_at = pg_catalog.clock_timestamp()
    where b.kind = note_split.kind and b.consumer = note_split.consumer and b.batch_id = note_split.batch_id
      and b.attempt = note_split.attempt;
end
$$;

-- Note that a batch was acked, or skipped, where the progress is.
create function pgchange.note_end(kind text, consumer text, batch jsonb, skipped boolean default false) returns void
language plpgsql as $$
declare
    -- By an update first, as most batches are claimed where they are acked.
    id uuid := batch ->> 'id';
    tried integer := (batch ->> 'attempt')::integer;
    noted text := pg_catalog.current_setting('pgchange.outputs', true);
    -- Pages show them. A list of over 10,000 characters would be too long for a page, and is left out.
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

-- What became of an attempt on a batch, as far as this database knows; null if it knows nothing.
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

-- Forget attempts on batches that were noted longer ago, and all but so many of a consumer, at most ten thousand of either at a time;
-- says how many, and whether more may be left. What it reads is what it forgets, and one row of each consumer.
create function pgchange.trim_batches(keep interval default '7 days', most integer default 1000) returns setof text
language plpgsql security definer
-- Else a plan for few consumers, or for a table that was never analysed, reads all of it.
set enable_seqscan = off
set enable_bitmapscan = off
set enable_mergejoin = off
set enable_hashjoin = off
set enable_sort = off
as $$
declare
    -- What is left is for another transaction. Nobody waits for whom this waits, nor this for an ack.
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
        return next format('forgot %s attempts on batches', gone + old);
    end if;
    if chunk in (gone, old) then
        return next 'left attempts on batches to the next time';
    end if;
end
$$;
