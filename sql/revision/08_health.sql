-- What a person should look at.

do $$
begin
    perform pgchange.register('revision');
end
$$;

create function revision.health() returns setof pgchange.finding
language sql volatile
set search_path = pg_catalog, revision, pg_temp
as $$
    select 'commit', 'error', null, line.told, line.call
    from revision.tracking() as t
    cross join lateral (values
        (t.untriggered <> '{}',
         format('%s: not captured on %s', t.tbl, array_to_string(t.untriggered, ', ')),
         'as its owner: select revision.recapture()'),
        (t.disabled <> '{}', format('%s: the capture is disabled on %s', t.tbl, array_to_string(t.disabled, ', ')), null),
        (t.key_renamed, format('%s: its key column was renamed: track it again under the new name', t.tbl), null),
        (t.faults > 0,
         format('%s: %s could not be placed, see revision.fault', t.tbl, pgchange.many(t.faults, 'commit')),
         format('when mended, as its owner: select revision.replay_faults(%L)', t.tbl))
    ) as line(holds, told, call)
    where line.holds
    union all
    select 'commit', 'error', null, pgchange.told_missed(t.tbl, m, 'commit'), pgchange.bring_missed(m, 'revision', 'enqueue_attached')
    from revision.tracking() as t cross join lateral unnest(t.missed) as m
    union all
    select 'commit', 'warning', null, format('revision.commit_queue needs partitions: %s', c.reason), null
    from revision.crowded_default() as c(reason) where c.reason is not null
$$;
comment on function revision.health() is
    'Tables whose rows are not all captured or whose commits could not be placed, partitions that came with rows, and partitions '
    'of the queue that are made only when somebody says so.';
