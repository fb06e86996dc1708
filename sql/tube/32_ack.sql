-- Acks. An ack deletes the pods of a batch; if the batch was split, the ack of its last part deletes them.

-- Delete the pods of a batch whose ids are all done, and move the worker behind it, or to its next part. Returns the version of
-- the batch.
create function tube.advance(tube text, worker integer, batch jsonb) returns bigint
language plpgsql volatile
set jit = off
set enable_sort = off
set enable_seqscan = off
set enable_bitmapscan = off
set max_parallel_workers_per_gather = 0
as $$
declare
    known tube.tube := tube.named(tube);
    bounds jsonb := advance.batch -> 'bounds';
    moves_on boolean := bounds ->> 'moves_on';
    at tube.worker;
    parts jsonb;
    found bigint;
begin
    delete from tube.worker as w
    where w.tube = advance.tube and w.worker = advance.worker and w.version = (bounds ->> 'from_version')::bigint
    returning w.* into at;
    if at.version is null then
        perform pgchange.refuse_stale(tube.name_of(tube, worker), batch);
    end if;
    perform pgchange.check_version(batch, coalesce((at.batch ->> 'version')::bigint, 0));
    perform pgchange.check_attempt(tube.name_of(tube, worker), batch, at.attempt);
    if at.batch -> 'bounds' ? 'split' then
        parts := pgchange.parts_behind(tube.mark_of(at));
    end if;
    execute format(
        case when parts is null
             then 'with gone as (delete from %s where ctid = any (array(select u.place from (%s) as u)) returning 1) select count(*) from gone'
             else 'select count(*) from (%2$s) as u' end,
        known.pods, tube.pods_sql(known, worker, bounds))
    into found;
    if found <> (bounds ->> 'pods')::bigint then
        raise exception using errcode = 'PC006',
            message = format('batch %s cannot be acked: pods of it were deleted', batch ->> 'id'),
            hint = 'another session deleted them meanwhile; roll back and claim again';
    end if;
    if parts is not null then
        insert into tube.worker (
            tube, worker, version, snapshot, done, backfill_snapshot, backfill_done, control_attempt, control_failed_at, claimed_at, batch)
        values (
            at.tube, at.worker, (advance.batch ->> 'version')::bigint, at.snapshot, at.done, at.backfill_snapshot, at.backfill_done,
            at.control_attempt, at.control_failed_at, at.claimed_at,
            tube.part(known, worker, parts, (advance.batch ->> 'version')::bigint, (advance.batch ->> 'version')::bigint + 1));
        return (batch ->> 'version')::bigint;
    end if;
    -- A batch that ended among the pods of late transactions does not change the position: the rest of these pods is found again.
    if moves_on and (bounds ->> 'incremental')::bigint >= at.done then
        at.snapshot := bounds ->> 'upto';
        at.done := bounds ->> 'incremental';
    end if;
    if moves_on and (bounds ->> 'backfill')::bigint >= at.backfill_done then
        at.backfill_snapshot := bounds ->> 'upto';
        at.backfill_done := bounds ->> 'backfill';
    end if;
    insert into tube.worker (
        tube, worker, version, snapshot, done, backfill_snapshot, backfill_done, control_attempt, control_failed_at)
    values (
        at.tube, at.worker, (advance.batch ->> 'version')::bigint, at.snapshot, at.done, at.backfill_snapshot, at.backfill_done,
        at.control_attempt, at.control_failed_at);
    return (batch ->> 'version')::bigint;
end
$$;
