-- A claim is recorded before it is worked on, so that a retry is the same batch under the same id; an ack deletes the pods.

create function tube.claim(
    tube text, workers integer, worker integer, "position" jsonb, max_changes integer, max_attempts integer default null
) returns jsonb
language plpgsql volatile
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    known tube.tube := tube.named(tube);
    at tube.worker;
    choice jsonb;
    slices jsonb;
    made jsonb;
begin
    perform tube.check_still_shared_by(known, workers, worker);
    if max_changes is null or max_changes < 1 then
        raise invalid_parameter_value using message = 'a batch has at least 1 change';
    end if;
    if pg_current_xact_id_if_assigned() is not null then
        raise exception using errcode = 'PC007', message = 'this transaction has already written something',
            hint = 'claim in a transaction of its own';
    end if;
    at := tube.worker_now(tube, worker);
    if at.version is distinct from ("position" ->> 'version')::bigint then
        raise exception using errcode = 'PC006',
            message = format('worker %s of tube %I is not where its position says', worker, tube),
            hint = 'it went on, or the number of workers changed meanwhile: claim again';
    end if;
    if tube.is_restored(known) then
        perform tube.rebase_after_restore(tube);
        at := tube.worker_now(tube, worker);
    end if;
    if at.batch is not null
       and (select count(*) from tube.pods_of(tube, worker, at.batch -> 'bounds')) = (at.batch -> 'bounds' ->> 'pods')::bigint
    then
        if at.attempt >= max_attempts then
            raise exception using errcode = 'PC010',
                message = format('batch %s of worker %s of tube %I has failed, at attempt %s', at.batch ->> 'id', worker, tube, at.attempt),
                hint = format('mend what it fails on and raise max_attempts, or give it up: airflow pgchange skip tube:%s/%s, '
                              'or select tube.skip_batch(%L, %s, ''...'')', tube, worker, tube, worker);
        end if;
        update tube.worker as w set attempt = w.attempt + 1, claimed_at = clock_timestamp()
        where w.tube = claim.tube and w.worker = claim.worker and w.version = at.version
        returning w.attempt into at.attempt;
        return at.batch || jsonb_build_object('attempt', at.attempt);
    end if;

    if not tube.has_unread(known, worker) then
        return null;
    end if;
    choice := tube.choose(known, worker, tube.position(tube, worker), max_changes);
    delete from tube.moved as m where m.tube = claim.tube and not tube.is_left(known, m);
    if (choice ->> 'pods')::bigint = 0 then
        return null;
    end if;
    slices := tube.slices(tube, worker, choice);
    made := jsonb_build_object(
        'id', md5(concat_ws('|', tube, workers, worker, at.version, choice - 'upto'))::uuid,
        'version', at.version + 1, 'attempt', 1, 'slices', slices,
        'count', (select sum((s.slice -> 'count')::bigint) from jsonb_array_elements(slices) as s(slice)),
        'bounds', choice || jsonb_build_object('from_version', at.version),
        'lsn', pg_current_wal_insert_lsn(), 'oldest', choice -> 'oldest');
    update tube.worker as w set batch = made, attempt = 1, error = null, claimed_at = clock_timestamp()
    where w.tube = claim.tube and w.worker = claim.worker and w.version = at.version;
    return made;
end
$$;
comment on function tube.claim(text, integer, integer, jsonb, integer, integer) is
    'Record and return the next batch of a worker, or the one that it claimed and never acked, with the attempt counted; null '
    'when nothing is ready. Call it in a transaction of its own, holding the worker''s lock.';

create function tube.ack(tube text, worker integer, batch jsonb) returns bigint
language plpgsql volatile
set search_path = pg_catalog, tube, pg_temp
set jit = off
set enable_sort = off
set enable_seqscan = off
set enable_bitmapscan = off
set max_parallel_workers_per_gather = 0
as $$
declare
    known tube.tube := tube.named(tube);
    bounds jsonb := ack.batch -> 'bounds';
    moves_on boolean := bounds ->> 'moves_on';
    at tube.worker;
    deleted bigint;
begin
    delete from tube.worker as w
    where w.tube = ack.tube and w.worker = ack.worker and w.version = (bounds ->> 'from_version')::bigint
    returning w.* into at;
    if at.version is null then
        raise exception using errcode = 'PC006',
            message = format('worker %s of tube %I is not where batch %s began', worker, tube, batch ->> 'id'),
            hint = 'somebody moved it; roll back and claim again';
    elsif (ack.batch ->> 'version')::bigint is distinct from (at.batch ->> 'version')::bigint then
        raise exception using errcode = 'PC006',
            message = format('batch %s of worker %s of tube %I was not claimed as version %s', batch ->> 'id', worker, tube,
                             coalesce(ack.batch ->> 'version', 'null')),
            hint = 'ack a batch as its claim returned it; roll back and claim again';
    end if;
    execute format(
        'with gone as (delete from %s where ctid = any (array(select u.place from (%s) as u)) returning 1) select count(*) from gone',
        known.pods, tube.pods_sql(known, worker, bounds))
    into deleted;
    if deleted <> (bounds ->> 'pods')::bigint then
        raise exception using errcode = 'PC006',
            message = format('pods of batch %s are gone', batch ->> 'id'),
            hint = 'somebody deleted them meanwhile; roll back and claim again';
    end if;
    -- One that ended among the pods of late transactions leaves the position where it is: the rest of them is found again.
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
        at.tube, at.worker, (ack.batch ->> 'version')::bigint, at.snapshot, at.done, at.backfill_snapshot, at.backfill_done,
        at.control_attempt, at.control_failed_at);
    return (batch ->> 'version')::bigint;
end
$$;
comment on function tube.ack(text, integer, jsonb) is
    'Delete the pods of a batch whose ids are all done, in the transaction that holds the worker''s lock.';

create function tube.is_restored(known tube.tube, beyond xid8 default '0') returns boolean
language plpgsql volatile
set search_path = pg_catalog, tube, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
    ahead boolean;
begin
    -- The same snapshot decides what the statement sees and what is ahead of it.
    execute format(
        'select exists (select from %s as p where p.txid >= pg_snapshot_xmax(pg_current_snapshot()) and p.txid > $1) or exists (
            select from tube.worker as w
            where w.tube = %L
              and greatest(pg_snapshot_xmax(w.snapshot), pg_snapshot_xmax(w.backfill_snapshot)) >
                  greatest(pg_snapshot_xmax(pg_current_snapshot()), $1))', known.pods, known.name)
    using beyond into ahead;
    return ahead;
end
$$;
comment on function tube.is_restored(tube.tube, xid8) is
    'Whether there are pods or positions of transactions that this cluster has not reached: those of a restored dump. Who has '
    'a transaction id gives it, for what it wrote itself is ahead of its snapshot too.';

create function tube.rebase_after_restore(tube text) returns void
language plpgsql
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    known tube.tube := tube.named(tube);
    high bigint;
begin
    if not has_table_privilege(known.pods, 'update') then
        raise exception using errcode = 'PC004',
            message = format('tube %I was restored from another cluster: its transaction ids mean something else here', tube),
            hint = format('let the owner of %s run: select tube.rebase_after_restore(%L)', tube.full_name(known.pods), tube);
    end if;
    -- Where data were loaded over the triggers, these drew numbers that the dump's pods have too, and then the sequence was set
    -- to what it was in the dump.
    perform pg_advisory_xact_lock(hashtextextended('pgchange tube.seq', 0));
    execute format('select max(p.seq) from %s as p', known.pods) into high;
    if high > (select s.last_value from tube.seq as s) then
        if not has_sequence_privilege('tube.seq', 'update') then
            raise exception using errcode = 'PC004',
                message = format('tube.seq is behind the pods of tube %I, and would number others like them', tube),
                hint = format('let the owner of schema tube run: grant update on sequence tube.seq to %I; then run again: '
                              'select tube.rebase_after_restore(%L)', current_user, tube);
        end if;
        perform setval('tube.seq', high);
    end if;
    execute format(
        'update %1$s as p set seq = nextval(''tube.seq'')
         from (
             select l.ctid as place, row_number() over (partition by l.seq order by l.ids = ''{}'') as n from %1$s as l
         ) as same
         where p.ctid = same.place and same.n > 1', known.pods);
    -- Those of this transaction are ahead of its snapshot too, and keep theirs.
    execute format(
        'update %s set txid = ''3''
         where txid >= pg_snapshot_xmax(pg_current_snapshot()) and txid is distinct from pg_current_xact_id_if_assigned()',
        known.pods);
    update tube.worker as w set
        snapshot = default, done = 0, backfill_snapshot = default, backfill_done = 0, batch = null, attempt = 0
    where w.tube = rebase_after_restore.tube;
end
$$;
comment on function tube.rebase_after_restore(text) is
    'In a restored dump transaction ids come from another cluster: those that this one has not reached are forgotten, and '
    'every worker looks at all its pods again; of pods with one seq all but one get another. A claim, and deleting pods by hand, '
    'does it by itself where it may.';
