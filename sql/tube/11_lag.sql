-- What waits for a worker, and what is in the tubes: at a cost that knows no backlog.

create function tube.code_on(pods regclass) returns text
language plpgsql stable
set search_path = pg_catalog, pg_temp
set quote_all_identifiers = off
as $$
declare
    class record;
begin
    select c.relkind, c.relrowsecurity, r.rolname = current_user or r.rolsuper as is_trusted into class
    from pg_class as c join pg_roles as r on r.oid = c.relowner where c.oid = pods;
    return case
        -- The caller's own, and that of who may do anything anyway.
        when coalesce(class.is_trusted, true) then null
        when class.relkind <> 'r' then 'become something else than an ordinary table'
        when class.relrowsecurity then 'row security'
        when exists (select from pg_rewrite as r where r.ev_class = pods) then 'a rule'
        -- Foreign keys are triggers too, here of both tables.
        when exists (select from pg_trigger as t where t.tgrelid = pods) then 'a trigger'
        when exists (select from pg_inherits as i where i.inhparent = pods) then 'a child'
        when exists (select from pg_inherits as i where i.inhrelid = pods) then 'a parent'
        when exists (select from pg_constraint as c where c.conrelid = pods and c.contype in ('c', 'x')) then 'a constraint'
        -- PostgreSQL's own functions, types and operators are in no dependency. Expressions of both are computed by a mere plan.
        when exists (
            select from (
                select 'pg_class'::regclass, i.indexrelid from pg_index as i where i.indrelid = pods
                union all
                select 'pg_statistic_ext'::regclass, s.oid from pg_statistic_ext as s where s.stxrelid = pods
            ) as o(class, id)
            join pg_depend as d on d.classid = o.class and d.objid = o.id
            where d.refclassid in ('pg_proc'::regclass, 'pg_type'::regclass, 'pg_operator'::regclass)
        ) then 'an index or statistics with a function in them'
        -- What is of another type is cast, by whatever its owner made for that.
        when (
            select count(*) <> 7 or count(v.name) <> 7
            from pg_attribute as a
            left join pg_attrdef as d on d.adrelid = a.attrelid and d.adnum = a.attnum
            left join (values
                ('seq', 'bigint'::regtype,
                 'CASEWHEN(pg_current_xact_id()ISNOTNULL)THENnextval(''tube.seq''::regclass)ELSENULL::bigintEND'),
                ('op', 'character', '''T''::bpchar'), ('shard', 'integer', ''), ('ids', 'bigint[]', ''), ('payload', 'jsonb', ''),
                ('ts', 'timestamptz', 'statement_timestamp()'), ('txid', 'xid8', 'pg_current_xact_id()')
            ) as v(name, type, value) on a.attname = v.name and a.atttypid = v.type and coalesce(
                translate(pg_get_expr(d.adbin, d.adrelid), E' \n', '') = v.value, true)
            where a.attrelid = pods and a.attnum > 0 and not a.attisdropped
        ) then 'a column or a default of another kind'
    end;
end
$$;
comment on function tube.code_on(regclass) is
    'What of the code of somebody else would run where the caller only reads or deletes pods, or puts some: an expression, a '
    'policy, a trigger and the like; null where there is nothing of it. A superuser''s is nobody else''s.';

create function tube.code_hint(known tube.tube) returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select format('let %I, the owner of %s, take it away, or use the tube as that role', pg_get_userbyid(c.relowner), known.pods)
    from pg_class as c where c.oid = known.pods
$$;
comment on function tube.code_hint(tube.tube) is 'What to do about pods that hold code.';

create function tube.readable_tubes() returns setof tube.tube
language plpgsql volatile
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    known tube.tube;
    code text;
begin
    for known in
        select t.* from tube.tube as t
        where has_table_privilege(t.pods, 'select') and has_schema_privilege(tube.schema_of(t.pods), 'usage') order by t.name
    loop
        begin
            execute format('lock table only %s in access share mode nowait', tube.full_name(known.pods));
            code := tube.code_on(known.pods);
        exception when lock_not_available then
            raise notice 'the pods of tube %, %, are locked by somebody, and were not looked at', known.name, known.pods;
            continue;
        end;
        if code is null then
            return next known;
        else
            raise notice using
                message = format('the pods of tube %I, %s, have %s, and were not looked at', known.name, known.pods, code),
                hint = tube.code_hint(known);
        end if;
    end loop;
end
$$;
comment on function tube.readable_tubes() is
    'The tubes that the caller may read, by their names, without those whose pods hold code of somebody else: of these a notice.';

create function tube.due(known tube.tube, worker integer, "position" jsonb)
returns table (seq bigint, op character(1), shard integer, payload jsonb, ts timestamptz, is_due boolean)
language plpgsql volatile
set search_path = pg_catalog, tube, pg_temp
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
            'select l.seq, l.op, l.shard, l.payload, l.ts,
                    coalesce(l.seq < case when l.op is not distinct from ''B'' then $1 else $2 end, true)
                    and (cardinality($3) > 0 and l.payload ->> ''type'' = ''backfill_schedule''
                         and tube.table_named(l.payload ->> ''tbl'') = any ($3)) is not true
             from %1$s as l
             where l.ids = ''{}'' and %2$s = %3$s
             order by %2$s, l.seq limit 1000', known.pods, tube.belongs('l.shard', known.partitions), worker)
        using first_pod, first_incremental,
              array(select b.tbl from tube.backfill as b where b.tube = known.name and b.state = 'paused');
    end if;
end
$$;
comment on function tube.due(tube.tube, integer, jsonb) is
    'The first 1000 control pods of a worker, each with whether its turn has come: when the worker''s pods before it are done, '
    'for one of op B those of backfills too; and not while a person has paused the backfill that it asks for.';

create function tube.has_controls(known tube.tube, worker integer) returns boolean
language plpgsql volatile
set search_path = pg_catalog, tube, pg_temp
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
comment on function tube.has_controls(tube.tube, integer) is 'Whether there is any control pod for a worker.';

create function tube.count_unread(
    known tube.tube, worker integer, "position" jsonb, condition text, upto integer,
    out counted bigint, out exact boolean, out oldest timestamptz
)
language plpgsql volatile
set search_path = pg_catalog, tube, pg_temp
set jit = off
set enable_sort = off
set enable_seqscan = off
set enable_bitmapscan = off
set max_parallel_workers_per_gather = 0
as $$
declare
    touches bigint;
    low bigint;
    high bigint;
    whole bigint;
begin
    execute format(
        'select count(*), count(distinct (t.shard, t.id)), min(t.seq), max(t.seq), sum(t.size) filter (where t.n = 1), min(t.ts)
         from (
            select u.seq, u.shard, u.ts, cardinality(u.ids) as size, i.id, i.n
            from ((%s) union all (%s)) as u cross join lateral unnest(u.ids) with ordinality as i(id, n)
            limit %s) as t',
        tube.unread_sql(known, worker, 'incremental', "position", pg_current_snapshot(), extra => condition),
        tube.unread_sql(known, worker, 'backfill', "position", pg_current_snapshot(), extra => condition),
        upto::bigint + 1)
    into touches, counted, low, high, whole, oldest;
    exact := touches <= upto;
    if not exact then
        -- As many on the way to the latest seq as on the way so far.
        counted := whole + greatest(0, (select s.last_value from tube.seq as s) - high) * whole / (high - low + 1);
    end if;
end
$$;
comment on function tube.count_unread(tube.tube, integer, jsonb, text, integer) is
    'How many ids there are for a worker under a condition, each once: exact up to upto touches, beyond it an estimate from '
    'how thick they lay so far.';

create function tube.workers_with_pods(known tube.tube) returns setof integer
language plpgsql volatile
set search_path = pg_catalog, tube, pg_temp
set jit = off
set enable_sort = off
set enable_seqscan = off
set enable_bitmapscan = off
set max_parallel_workers_per_gather = 0
as $$
begin
    return query execute format($query$
        select k.worker
        from generate_series(0, %3$s - 1) as k(worker)
        cross join lateral tube.worker_now(%4$L, k.worker) as w
        where (select true from %1$s as l
               where (l.op = 'B') is false and %2$s = k.worker and l.seq > coalesce(w.done, 0)
               order by l.op = 'B', %2$s, l.seq limit 1)
           or (select true from %1$s as l
               where (l.op = 'B') is true and %2$s = k.worker and l.seq > coalesce(w.backfill_done, 0)
               order by l.op = 'B', %2$s, l.seq limit 1)
           or (select true from %1$s as l where l.ids = '{}' and %2$s = k.worker order by %2$s, l.seq limit 1)
           or (select true
               from unnest(array(
                   select pg_snapshot_xip(w.snapshot) union select pg_snapshot_xip(w.backfill_snapshot))) as late(txid)
               cross join lateral (
                   select from %1$s as l where l.txid = late.txid and %2$s = k.worker order by l.txid, l.seq limit 1) as l
               limit 1)
        order by k.worker
        $query$, known.pods, tube.belongs('l.shard', known.partitions), known.partitions, known.name);
end
$$;
comment on function tube.workers_with_pods(tube.tube) is
    'The workers of a tube that have anything to do, and perhaps some more: asked in one query for all of them, because planning '
    'the queries of tube.lag() is what a look at a worker without pods costs.';

create function tube.count_faults(tube text) returns bigint
language sql stable
set search_path = pg_catalog, tube, pg_temp
as $$
    select count(*)
    from (select from tube.fault as f where f.tube = count_faults.tube and f.kind = 'capture' limit 1000) as bounded
$$;
comment on function tube.count_faults(text) is 'The faults of the capture of a tube''s tables, up to 1000.';

create function tube.lag(tube text, workers integer, worker integer, "position" jsonb, upto integer default 1000) returns jsonb
language plpgsql volatile
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    known tube.tube := tube.named(tube);
    at jsonb := tube.position_or_start("position");
    held jsonb;
    ready record;
    waiting record;
    controls record;
begin
    perform tube.check_still_shared_by(known, workers, worker);
    if coalesce(upto < 0, true) then
        raise invalid_parameter_value using message = 'upto must not be negative';
    end if;
    held := tube.held_back(known, worker);
    ready := tube.count_unread(known, worker, at, tube.held_sql(held, false), upto);
    select 0::bigint as counted, true as exact, null::timestamptz as oldest into waiting;
    if held <> '[]' then
        waiting := tube.count_unread(known, worker, at, tube.held_sql(held, true), upto);
    end if;
    select count(*) filter (where d.is_due) as due, count(*) filter (where not d.is_due) as others,
           min(d.ts) filter (where d.is_due) as due_since, min(d.ts) filter (where not d.is_due) as others_since
    into controls from tube.due(known, worker, at) as d;
    return jsonb_build_object(
        'ready', ready.counted + controls.due, 'ready_exact', ready.exact,
        'ready_age', extract(epoch from clock_timestamp() - least(ready.oldest, controls.due_since)),
        'waiting', waiting.counted + controls.others, 'waiting_exact', waiting.exact,
        'waiting_age', extract(epoch from clock_timestamp() - least(waiting.oldest, controls.others_since)),
        'faults', tube.count_faults(tube));
end
$$;
comment on function tube.lag(text, integer, integer, jsonb, integer) is
    'How many ids are ready for a worker, with the control pods whose turn has come; and how many wait: of a table that came '
    'from another worker''s shard, whose pods are not done, and control pods with pods before them. Exact up to upto, its cost '
    'grows with upto and with nothing else. What an open transaction has touched nobody can see.';

create function tube.stats_of(known tube.tube, worker integer, kind text)
returns table (pods text, min_seq bigint, max_seq bigint, min_ts timestamptz, max_ts timestamptz)
language plpgsql volatile
set search_path = pg_catalog, tube, pg_temp
set jit = off
set enable_sort = off
set enable_seqscan = off
set enable_bitmapscan = off
set max_parallel_workers_per_gather = 0
as $$
declare
    at jsonb := tube.position_or_start(tube.position(known.name, worker));
    counted bigint;
begin
    execute 'select count(*), min(seq), max(seq), min(ts), max(ts) from (select seq, ts from (' || tube.unread_sql(
        known, worker, kind, at, pg_current_snapshot(), most => 1001) || ') as u) as t'
    into counted, min_seq, max_seq, min_ts, max_ts;
    pods := case when counted > 1000 then '1000+' else counted::text end;
    if counted > 1000 then
        execute format(
            'select l.seq, l.ts from %1$s as l
             where (l.op = ''B'') is %3$s and %2$s = %4$s and l.ids <> ''{}''
             order by l.op = ''B'' desc, %2$s desc, l.seq desc limit 1',
            known.pods, tube.belongs('l.shard', known.partitions), case kind when 'backfill' then 'true' else 'false' end, worker)
        into max_seq, max_ts;
    end if;
    return next;
end
$$;
comment on function tube.stats_of(tube.tube, integer, text) is 'How many pods of one kind a worker has, and from when to when.';

create function tube.tube_stats()
returns table (
    tube text, predicate text, partition integer, shards integer,
    inc_count text, inc_min_seq bigint, inc_max_seq bigint, inc_min_ts timestamptz, inc_max_ts timestamptz,
    backfill_count text, backfill_min_seq bigint, backfill_max_seq bigint, backfill_min_ts timestamptz,
    backfill_max_ts timestamptz, control_count text
)
language plpgsql volatile
set search_path = pg_catalog, tube, pg_temp
set jit = off
as $$
declare
    known tube.tube;
begin
    for known in select t.* from tube.readable_tubes() as t loop
        return query
            select known.name, known.predicate, k.worker,
                   (select count(distinct a.shard)::integer from tube.attachment as a
                    where a.tube = known.name and tube.worker_of(a.shard, known.partitions) = k.worker),
                   i.*, b.*,
                   (select case when count(*) >= 1000 then '1000+' else count(*)::text end
                    from tube.due(known, k.worker, tube.position_or_start(tube.position(known.name, k.worker))))
            from generate_series(0, known.partitions - 1) as k(worker)
            cross join lateral tube.stats_of(known, k.worker, 'incremental') as i
            cross join lateral tube.stats_of(known, k.worker, 'backfill') as b;
    end loop;
end
$$;
comment on function tube.tube_stats() is
    'Every tube, a row for each of its workers, with the pods that wait: counted up to 1000 and then said as 1000+, so that '
    'it costs the same at ten pods and ten million. shards are those of attached tables; the control pods are of both kinds.';

create function tube.point(tube text) returns jsonb
language plpgsql volatile
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    -- In this order: whatever the snapshot sees has a lower seq.
    s pg_snapshot := pg_current_snapshot();
    seq bigint := (select q.last_value from tube.seq as q);
begin
    perform tube.named(tube);
    return jsonb_build_object('snapshot', s, 'seq', seq, 'until', clock_timestamp()::timestamptz(0));
end
$$;
comment on function tube.point(text) is 'A point in a tube to wait for: all that was touched by what is committed now.';

create function tube.passed(tube text, workers integer, worker integer, "position" jsonb, goal jsonb) returns jsonb
language plpgsql volatile
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    known tube.tube := tube.named(tube);
    at jsonb := tube.position_or_start("position");
    seen pg_snapshot := goal ->> 'snapshot';
    high bigint := goal ->> 'seq';
    is_left boolean;
begin
    perform tube.check_still_shared_by(known, workers, worker);
    is_left := tube.first_unread(known, worker, 'incremental', at, seen, high) is not null
        or tube.first_unread(known, worker, 'backfill', at, seen, high) is not null;
    return jsonb_build_object('passed', not is_left, 'goal', goal);
end
$$;
comment on function tube.passed(text, integer, integer, jsonb, jsonb) is
    'Whether a worker has done all of its pods up to a point, and the point.';
