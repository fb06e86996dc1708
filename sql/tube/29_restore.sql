-- Tubes whose pods and positions come from another cluster.

-- Whether there are pods or positions of transaction ids that this cluster has not reached, which came with a restored dump.
-- beyond: the caller's transaction id, if it is assigned, because its own rows are ahead of its snapshot, too.
create function tube.is_restored(known tube.tube, beyond xid8 default '0') returns boolean
language plpgsql volatile
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
    ahead boolean;
begin
    -- One statement, so that the same snapshot decides what the statement sees and what is ahead of it.
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

create function tube.rebase_after_restore(tube text) returns void
language plpgsql as $$
declare
    known tube.tube := tube.named(tube);
    high bigint;
begin
    if not has_table_privilege(known.pods, 'update') then
        raise exception using errcode = 'PC004',
            message = format('tube %I was restored from another cluster, whose transaction ids are not valid here', tube),
            hint = format('let the owner of %s run: select tube.rebase_after_restore(%L)', tube.full_name(known.pods), tube);
    end if;
    -- If data were loaded into a schema with triggers, these triggers drew numbers that pods of the dump have, too. Then the
    -- restore set the sequence to its value in the dump.
    perform pg_advisory_xact_lock(hashtextextended('pgchange tube.seq', 0));
    execute format('select max(p.seq) from %s as p', known.pods) into high;
    if high > (select s.last_value from tube.seq as s) then
        if not has_sequence_privilege('tube.seq', 'update') then
            raise exception using errcode = 'PC004',
                message = format('tube.seq is behind the pods of tube %I, so it would repeat their numbers', tube),
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
    -- Pods with a transaction id that this cluster has not reached get the lowest id, 3, so that every worker sees them. Pods that
    -- this transaction wrote keep its id, although that is above the snapshot, too.
    execute format(
        'update %s set txid = ''3''
         where txid >= pg_snapshot_xmax(pg_current_snapshot()) and txid is distinct from pg_current_xact_id_if_assigned()',
        known.pods);
    update tube.worker as w set
        snapshot = default, done = 0, backfill_snapshot = default, backfill_done = 0, batch = null, attempt = 0,
        leased_by = null, leased_until = null
    where w.tube = rebase_after_restore.tube;
end
$$;
comment on function tube.rebase_after_restore(text) is
    'Adapt a restored tube. Forget transaction ids that this cluster has not reached, and let every worker read all its pods '
    'again. If several pods have the same seq, all but the first get a new seq. A claim, and deleting pods manually, call this if '
    'they have the rights.';
