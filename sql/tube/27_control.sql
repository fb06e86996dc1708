-- Control pods of a worker, which it handles in their turn.
--
-- After backfill_end and truncate, the downstream gives up rows: it names their ids, and they are touched. So they are handled
-- like deleted rows. A row that is still in the table is merely written again.

-- Whether a worker has any control pod.
create function tube.has_controls(known tube.tube, worker integer) returns boolean
language plpgsql volatile
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
    found_one boolean;
begin
    execute format(
        'select exists (select from %1$s as l where l.ids = ''{}'' and %2$s = %3$s)',
        known.pods, tube.belongs('l.shard', known.partitions), worker)
    into found_one;
    return found_one;
end
$$;

-- The first 1000 control pods of a worker, and whether their turn has come. It has when the worker's earlier pods are done; for
-- op B, those of backfills, too. It has not while a person has paused the backfill that the pod asks for.
create function tube.due(known tube.tube, worker integer, "position" jsonb)
returns table (seq bigint, op character(1), shard integer, payload jsonb, ts timestamptz, is_due boolean)
language plpgsql volatile
set jit = off
set enable_sort = off
set enable_seqscan = off
set enable_bitmapscan = off
set max_parallel_workers_per_gather = 0
as $$
declare
    first_incremental bigint;
    first_pod bigint;
begin
    if tube.has_controls(known, worker) then
        first_incremental := tube.first_unread(known, worker, 'incremental', "position");
        first_pod := least(first_incremental, tube.first_unread(known, worker, 'backfill', "position"));
        return query execute format(
            'select c.seq, c.op, c.shard, c.payload, c.ts, not (c.is_behind_pods or c.is_paused)
             from (
                select l.*,
                       coalesce(l.seq > case l.op when ''B'' then $1 else $2 end, false) as is_behind_pods,
                       cardinality($3) > 0 and l.payload ->> ''type'' is not distinct from ''backfill_schedule''
                           and coalesce(tube.table_named(l.payload ->> ''tbl'') = any ($3), false) as is_paused
                from %1$s as l
                where l.ids = ''{}'' and %2$s = %3$s
                order by %2$s, l.seq limit 1000) as c
             order by c.seq', known.pods, tube.belongs('l.shard', known.partitions), worker)
        using first_pod, first_incremental,
              array(select b.tbl from tube.backfill as b where b.tube = known.name and b.state = 'paused');
    end if;
end
$$;

create function tube.control_pods(tube text, workers integer, worker integer)
returns table (seq bigint, op character(1), shard integer, type text, tbl text, payload jsonb, ts timestamptz)
language plpgsql volatile as $$
declare
    known tube.tube := tube.named(tube);
begin
    perform tube.check_still_shared_by(known, workers, worker);
    return query
        select d.seq, d.op, d.shard, d.payload ->> 'type',
               coalesce(tube.full_name(tube.table_named(d.payload ->> 'tbl')), d.payload ->> 'tbl'), d.payload, d.ts
        from tube.due(known, worker, tube.position_or_start(tube.position(tube, worker))) as d
        where d.is_due
        order by d.seq;
end
$$;
comment on function tube.control_pods(text, integer, integer) is
    'The control pods of a worker whose turn has come because its earlier pods are done: at most 1000, in the order of seq.';

-- A control pod by its seq. Raises an error if it does not exist.
create function tube.control_pod(known tube.tube, workers integer, worker integer, seq bigint) returns record
language plpgsql volatile
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
    found_pod record;
begin
    perform tube.check_still_shared_by(known, workers, worker);
    execute format(
        'select l.op, l.shard, l.payload, l.ts from %s as l where l.ids = ''{}'' and %s = $1 and l.seq = $2', known.pods,
        tube.belongs('l.shard', workers))
    into found_pod using worker, seq;
    if found_pod.op is null then
        raise exception using errcode = 'PC009', message = format('worker %s of tube %I has no control pod %s', worker, known.name, seq),
            hint = 'this pod was handled already; tube.control_pods() lists the pods whose turn has come';
    end if;
    return found_pod;
end
$$;

-- Touch ids that the downstream has and that a control pod asks it to give up. For backfill_end, these are the ids of its tbl and
-- shard that were not written since start_seq; for truncate, all ids of its tbl. The touches get the op of the control pod. Call
-- it as often as needed, then tube.control_done() in the same transaction.
create function tube.collect_ids(tube text, workers integer, worker integer, seq bigint, ids anyarray) returns bigint
language plpgsql volatile as $$
declare
    known tube.tube := tube.named(tube);
    control record := tube.control_pod(known, workers, worker, seq);
    relation regclass := tube.table_named(control.payload ->> 'tbl');
    given ids%type := array(select i from unnest(ids) as i where i is not null);
begin
    -- Under the present shard of the table: under its old shard an id could be in work twice.
    perform tube.hold_shard(relation);
    perform tube.put_pods(known.pods, control.op, coalesce(tube.shard_of(known.name, relation), control.shard), given);
    return cardinality(given);
end
$$;

-- tube.collect_ids() for a tube whose ids are integers.
create function tube.collect(tube text, workers integer, worker integer, seq bigint, ids bigint[]) returns bigint
language sql volatile as $$
    select tube.collect_ids(tube, workers, worker, seq, ids)
$$;

-- Like tube.collect(), for a tube whose ids are texts.
create function tube.collect_keys(tube text, workers integer, worker integer, seq bigint, keys text[]) returns bigint
language sql volatile as $$
    select tube.collect_ids(tube, workers, worker, seq, tube.canonical_keys((tube.named(tube)).key, keys))
$$;

-- Delete a control pod that was handled, in the transaction that holds the worker's lock.
create function tube.control_done(tube text, workers integer, worker integer, seq bigint) returns void
language plpgsql volatile
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
    known tube.tube := tube.named(tube);
begin
    perform tube.control_pod(known, workers, worker, seq);
    execute format(
        'delete from %s as l where l.ids = ''{}'' and %s = $1 and l.seq = $2', known.pods, tube.belongs('l.shard', workers))
    using worker, seq;
end
$$;

-- Delete a control pod that can never be handled, and record it in tube.fault, in the transaction that holds the worker's lock.
create function tube.give_up(tube text, workers integer, worker integer, seq bigint, reason text) returns void
language plpgsql volatile as $$
declare
    known tube.tube := tube.named(tube);
    control record := tube.control_pod(known, workers, worker, seq);
begin
    insert into tube.fault (tube, tbl, kind, ids, message)
    values (known.name, coalesce(tube.table_named(control.payload ->> 'tbl'), known.pods), 'control', 0,
            format('control pod %s was given up: %s; it was %s', seq, reason, left(control.payload::text, 500)));
    perform tube.control_done(tube, workers, worker, seq);
end
$$;

-- Record whether control pods of a worker failed for now, in the transaction that holds its lock.
create function tube.note_controls(tube text, worker integer, failed boolean) returns void
language sql as $$
    update tube.worker as w set
        control_attempt = case when failed then w.control_attempt + 1 else 0 end,
        control_failed_at = case when failed then clock_timestamp() end
    where w.tube = note_controls.tube and w.worker = note_controls.worker and (failed or w.control_attempt > 0)
$$;

-- The backfill that a backfill_schedule pod asks for. It begins now, unless the table has an unfinished backfill, no matter which
-- role began it. Raises an error if a backfill was cancelled after the pod was written. Null if a backfill has ended and is not
-- replayed. Call it in a transaction of its own.
create function tube.backfill_scheduled(tube text, workers integer, worker integer, seq bigint) returns bigint
language plpgsql volatile as $$
declare
    known tube.tube := tube.named(tube);
    control record := tube.control_pod(known, workers, worker, seq);
    relation regclass := tube.table_named(control.payload ->> 'tbl');
    attached tube.attachment;
    running tube.backfill;
    cancelled bigint;
begin
    if relation is null then
        perform pgchange.refuse('the table of the control pod does not exist',
            'ask for a backfill of the table under its present name');
    end if;
    attached := tube.require_attachment(tube, relation, null);
    if tube.is_gone(attached) then
        perform pgchange.refuse(format(
            '%s cannot be backfilled: it is not attached to tube %I', relation, tube), 'attach it first');
    end if;
    if tube.has_control(known, relation, attached.shard, array['backfill_end']) then
        return null;
    end if;
    running := tube.unfinished_backfill(known.name, relation);
    if running.id is not null then
        return running.id;
    end if;
    select max(b.id) into cancelled
    from tube.backfill as b
    where b.tube = known.name and b.tbl = relation and b.state = 'cancelled' and b.finished_at > control.ts;
    if cancelled is not null then
        perform pgchange.refuse(format(
            'no backfill was begun: backfill %s was cancelled after the request', cancelled), 'ask for the backfill again');
    end if;
    return tube.backfill_begin(tube, relation, coalesce(control.payload ->> 'order_col', quote_ident(tube.default_order(attached))));
end
$$;
