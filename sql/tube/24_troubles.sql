-- What a person should look at.

create function tube.troubles(many_attempts integer default 3) returns setof text
language sql volatile
set search_path = pg_catalog, tube, pg_temp
as $$
    select line.told
    from tube.attachments() as a
    cross join lateral (values
        (a.untriggered <> '{}' or a.stale,
         format('%s: not captured for tube %s%s; as its owner: select tube.refresh()',
                a.tbl, a.tube, ' on ' || nullif(array_to_string(a.untriggered, ', '), ''))),
        (a.disabled <> '{}',
         format('%s: the capture for tube %s is disabled on %s', a.tbl, a.tube, array_to_string(a.disabled, ', '))),
        (a.lost is not null, format('%s: %s', a.tbl, a.lost)),
        (a.predicate_waits,
         format('%1$s: tube %2$s has another predicate than its owner agreed to; as its owner: '
                'select tube.tube_table_ensure_attached(%2$L, %1$L)', a.tbl, a.tube)),
        (a.faults > 0,
         format('%1$s: %2$s statements whose ids tube %3$s could not tell, judge or keep, see tube.fault; '
                'when mended: select tube.clear_faults(%3$L)', a.tbl, a.faults, a.tube))
    ) as line(holds, told)
    where line.holds
    union all
    select m.told from tube.missed() as m
    union all
    select format('tube %1$s: a table that touched it was dropped, or has lost its triggers and its name; as the owner of its pods: '
                  'select tube.tube_table_ensure_detached(%1$L, %2$L)', a.tube, a.tbl::oid)
    from tube.attachment as a where tube.is_gone(a)
    union all
    select format('tube %1$s: the table of its pods is gone, and what its tables change is lost; '
                  'select tube.tube_ensure_absent(%1$L), or make it again with tube.tube_ensure_exists, attach and backfill', t.name)
    from tube.tube as t where not tube.are_pods(t.pods, t.name)
    union all
    select format('tube %1$s: %2$s control pods were given up, such as: %3$s; when mended: select tube.clear_faults(%1$L)',
                  f.tube, count(*), max(f.message))
    from tube.fault as f where f.kind = 'control' group by f.tube
    union all
    select format('tube %s: its pods, %s, have %s, and are read by nobody else: %s', t.name, t.pods, c.code, tube.code_hint(t))
    from tube.tube as t cross join lateral tube.code_on(t.pods) as c(code)
    where c.code is not null and tube.are_pods(t.pods, t.name)
    union all
    select format('tube:%s/%s: its control pods have failed %s times; the log of the task that works them off says why',
                  w.tube, w.worker, w.control_attempt)
    from tube.worker as w join tube.tube as t on t.name = w.tube
    where w.control_attempt >= many_attempts
      and tube.are_pods(t.pods, t.name)
      and case when has_table_privilege(t.pods, 'select') and tube.code_on(t.pods) is null
               then tube.has_controls(t, w.worker) else true end
$$;
comment on function tube.troubles(integer) is
    'What a person should look at, a line for each with what to do: tables that do not touch their tube as they should or were '
    'dropped, rows that are in no pod, pods that have code of their keepers, and control pods that were given up or failed so often.';
