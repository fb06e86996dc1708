-- What a person should look at.

create function pgmb.troubles(long_wait interval default '5 minutes') returns setof text
language sql volatile
set search_path = pg_catalog, pgmb, pg_temp
as $$
    select m.told from pgmb.misfit_settings() as m(told)
    union all
    select format('%s is old and kept: %s; who holds what: select * from pgmb.holders()', o.partition, o.reason)
    from pgmb.overdue() as o
    union all
    select format('%s needs partitions: %s', t.name, c.reason)
    from unnest(array['pgmb.dispatched', 'pgmb.events']) as t(name)
    cross join lateral pgmb.crowded_default(t.name::regclass) as c(reason)
    where c.reason is not null
    union all
    select line.told
    from pgmb.pushing() as p
    cross join lateral (values
        (p.untriggered <> '{}' or p.stale,
         format('%s: its mutations are not published%s; as its owner: select pgmb.refresh()',
                p.tbl, ' on ' || nullif(array_to_string(p.untriggered, ', '), ''))),
        (p.disabled <> '{}', format('%s: publishing its mutations is disabled on %s', p.tbl, array_to_string(p.disabled, ', '))),
        (p.faults > 0,
         format('%1$s: %2$s rows could not be made an event, see pgmb.push_fault; when mended, as its owner: '
                'select pgmb.replay_push_faults(%1$L)', p.tbl, p.faults))
    ) as line(holds, told)
    where line.holds
    union all
    select format('%s; %s', pgmb.told_missed(p.tbl, m), pgmb.bring_missed(m))
    from pgmb.pushing() as p cross join lateral unnest(p.missed) as m
    union all
    select format('group %1$s: its conditions failed for %2$s events, see pgmb.fault; when mended: select pgmb.replay_faults(%1$L)',
                  s.group_id, s.faults)
    from pgmb.status(1) as s where s.faults > 0
    union all
    select line.told
    from pgmb.dispatching() as d
    cross join lateral (values
        (d.restored is not null, format('events: %s', d.restored)),
        (d.astray > 0,
         format('events: %s polls found messages or retries for a subscription that is gone; '
                'select * from pgmb.fault where group_id is null', d.astray)),
        (d.at_work is not null and d.oldest_seconds > extract(epoch from long_wait),
         format('events: one has waited for %1$s s while process %2$s dispatches; if a condition does not end: '
                'select pg_cancel_backend(%2$s), whose error names it', round(d.oldest_seconds), d.at_work))
    ) as line(holds, told)
    where line.holds
$$;
comment on function pgmb.troubles(interval) is
    'What a person should look at, a line for each with what to do: settings that do not fit each other, partitions that stay although they are old or that are '
    'made only when somebody says so, tables whose mutations are not published or were not, conditions that fail, and an event that has '
    'waited that long for whoever dispatches.';
