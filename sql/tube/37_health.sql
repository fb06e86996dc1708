-- Findings about tubes.

-- The address of a worker in dead letters, by its name in status; null if there is no such worker.
create function tube.address_of(consumer text) returns jsonb
language sql stable as $$
    select jsonb_build_object('tube', t.name, 'worker', k.worker)
    from tube.readable_tubes() as t cross join lateral generate_series(0, t.partitions - 1) as k(worker)
    where tube.name_of(t.name, k.worker) = address_of.consumer
$$;

-- Findings about tables that do not touch their tube completely or were dropped. Also about rows that are in no pod, and pods
-- whose table has code of its owner. Also about control pods that were given up or failed many times.
create function tube.health(many_attempts integer default 3) returns setof pgchange.finding
language sql volatile as $$
    select 'tube', line.severity, null, line.told, line.call
    from tube.attachments() as a
    cross join lateral (values
        (a.untriggered <> '{}' or a.stale, 'error',
         format('%s: not captured for tube %s%s', a.tbl, a.tube, ' on ' || nullif(array_to_string(a.untriggered, ', '), '')),
         'as its owner: select tube.recapture()'),
        (a.disabled <> '{}', 'error',
         format('%s: the capture for tube %s is disabled on %s', a.tbl, a.tube, array_to_string(a.disabled, ', ')), null),
        (a.id_trouble is not null, case when a.id_trouble like '%can be null:%' then 'warning' else 'error' end,
         format('%s: %s', a.tbl, a.id_trouble), null),
        (a.lost is not null, 'error', format('%s: %s', a.tbl, a.lost), null),
        (a.predicate_waits, 'warning',
         format('%s: tube %s has another predicate than its owner agreed to', a.tbl, a.tube),
         format('as its owner: select tube.tube_table_ensure_attached(%L, %L)', a.tube, a.tbl)),
        (a.faults > 0, 'error',
         format('%s: %s statements whose ids tube %s could not determine, judge or store, see tube.fault', a.tbl, a.faults, a.tube),
         format('when the cause is fixed: select tube.clear_faults(%L)', a.tube))
    ) as line(holds, severity, told, call)
    where line.holds
    union all
    select 'tube', 'error', null, m.told, m.call from tube.missed() as m
    union all
    select 'tube', 'warning', null,
           format('tube %s: a table that touched it was dropped, or has lost its triggers and its name', a.tube),
           format('as the owner of its pods: select tube.tube_table_ensure_detached(%L, %L)', a.tube, a.tbl::oid)
    from tube.attachment as a where tube.is_gone(a)
    union all
    select 'tube', 'error', null,
           format('tube %s: the table of its pods was dropped, so changes of its tables are lost', t.name),
           format('select tube.tube_ensure_absent(%L), or make it again with tube.tube_ensure_exists, attach and backfill', t.name)
    from tube.tube as t where not tube.are_pods(t.pods, t.name)
    union all
    select 'tube', 'error', null,
           format('tube %s: %s control pods were given up, such as: %s', t.name, f.given_up, f.example),
           format('when the cause is fixed: select tube.clear_faults(%L)', t.name)
    from tube.tube as t
    cross join lateral (
        select count(*), max(b.message)
        from (select f.message from tube.fault as f where f.tube = t.name and f.kind = 'control' limit 1000) as b
    ) as f(given_up, example)
    where f.given_up > 0
    union all
    select 'tube', 'error', null,
           format('tube %s: its pods, %s, have %s, so other roles do not read them', t.name, t.pods, c.code), tube.code_hint(t)
    from tube.tube as t cross join lateral tube.code_on(t.pods) as c(code)
    where c.code is not null and tube.are_pods(t.pods, t.name)
    union all
    select 'tube', 'error', tube.name_of(w.tube, w.worker),
           format(
               'its control pods have failed %s; the log of the task that handles them has the reason',
               pgchange.many(w.control_attempt, 'time')), null
    from tube.worker as w join tube.tube as t on t.name = w.tube
    where w.control_attempt >= many_attempts
      and tube.are_pods(t.pods, t.name)
      and case when has_table_privilege(t.pods, 'select') and tube.code_on(t.pods) is null
               then tube.has_controls(t, w.worker) else true end
$$;
