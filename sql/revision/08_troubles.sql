-- What a person should look at.

create function revision.troubles() returns setof text
language sql volatile
set search_path = pg_catalog, revision, pg_temp
as $$
    select line.told
    from revision.tracking() as t
    cross join lateral (values
        (t.untriggered <> '{}',
         format('%s: not captured on %s; as its owner: select revision.refresh_tracking()',
                t.tbl, array_to_string(t.untriggered, ', '))),
        (t.disabled <> '{}', format('%s: the capture is disabled on %s', t.tbl, array_to_string(t.disabled, ', '))),
        (t.key_renamed, format('%s: its key column was renamed: track it again under the new name', t.tbl)),
        (t.faults > 0,
         format('%1$s: %2$s commits could not be placed, see revision.fault; when mended, as its owner: '
                'select revision.replay_faults(%1$L)', t.tbl, t.faults))
    ) as line(holds, told)
    where line.holds
    union all
    select format('%s; %s', revision.told_missed(t.tbl, m), revision.bring_missed(m))
    from revision.tracking() as t cross join lateral unnest(t.missed) as m
    union all
    select format('revision.commit_queue needs partitions: %s', c.reason)
    from revision.crowded_default() as c(reason) where c.reason is not null
$$;
comment on function revision.troubles() is
    'What a person should look at, a line for each with what to do: tables whose rows are not all captured or whose commits '
    'could not be placed, partitions that came with rows, and partitions of the queue that are made only when somebody says so.';
