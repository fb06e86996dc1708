-- A tube whose pods and positions come from another cluster.

-- Whether there are pods or positions of transactions that this cluster has not reached: those of a restored dump. Who has a
-- transaction id gives it, for what it wrote itself is ahead of its snapshot too.
create function tube.is_restored(known tube.tube, beyond xid8 default '0') returns boolean
language plpgsql volatile
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

create function tube.rebase_after_restore(tube text) returns void
language plpgsql as $$
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
        snapshot = default, done = 0, backfill_snapshot = default, backfill_done = 0, batch = null, attempt = 0,
        leased_by = null, leased_until = null
    where w.tube = rebase_after_restore.tube;
end
$$;
comment on function tube.rebase_after_restore(text) is
    'In a restored dump transaction ids come from another cluster: those that this one has not reached are forgotten, and '
    'every worker looks at all its pods again; of pods with one seq all but one get another. A claim, and deleting pods by hand, '
    'does it by itself where it may.';
