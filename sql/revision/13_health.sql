-- The findings of health about tracked tables, faults and the partitions of the queue.

do $$
begin
    perform pgchange.register('revision');
end
$$;

-- Findings about tables whose rows are not all captured, and about keys that do not identify rows any more. Also about commits
-- that could not be put in the queue, and about partitions that came with rows or were detached. Also when the partitions of the
-- queue run out.
create function revision.health() returns setof pgchange.finding
language sql volatile as $$
    with tracking as materialized (select * from revision.tracking())
    select 'commit', line.severity, null, line.told, line.call
    from tracking as t
    join revision.tracked as k on k.tbl = t.tbl
    cross join lateral (values
        (t.untriggered <> '{}', 'error',
         format('%s: not captured on %s', t.tbl, array_to_string(t.untriggered, ', ')),
         'as its owner: select revision.recapture()'),
        (t.disabled <> '{}', 'error', format('%s: the capture is disabled on %s', t.tbl, array_to_string(t.disabled, ', ')), null),
        (t.key_renamed, 'error', format(
            '%s: its key column was renamed or replaced', t.tbl), 'as its owner: select revision.recapture()'),
        (t.key_trouble is not null, 'error', format('%s: %s', t.tbl, t.key_trouble), null),
        (t.departed <> '{}', 'warning',
         format(
             '%s: %s was detached and still has its trigger, which does nothing there', t.tbl, array_to_string(t.departed, ', ')),
         'as its owner: select revision.recapture()'),
        (t.without_key > 0, 'error',
         format('%s: %s without a key, in no commit, see revision.fault', t.tbl, pgchange.many(t.without_key, 'row')),
         format('give them keys, put these into revision.commit_queue (%s, branch_id); then, as its owner: '
                'delete from revision.fault where tbl in (select pgchange.descendants(%L)) and commit_id is null and key is null '
                'and kind = ''capture''', revision.queue_column(k.key_types), t.tbl)),
        (t.faults > 0, 'error',
         format('%s: %s could not be put in the queue, see revision.fault', t.tbl, pgchange.many(t.faults, 'commit')),
         format('when the cause is fixed, as its owner: select revision.replay_faults(%L)', t.tbl))
    ) as line(holds, severity, told, call)
    where line.holds
    union all
    select 'commit', 'error', null, pgchange.told_missed(t.tbl, m, 'commit'), pgchange.bring_missed(m, 'revision', 'enqueue_attached')
    from tracking as t cross join lateral unnest(t.missed) as m
    union all
    select 'commit', 'warning', null, format('revision.commit_queue needs partitions: %s', r.reason), 'airflow-pgchange maintain'
    from revision.running_out() as r(reason) where r.reason is not null
$$;
