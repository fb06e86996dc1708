-- Findings about the event log.

-- Findings about settings that do not fit each other, old partitions that are kept, and partitions that only a manual call
-- creates. Findings about tables whose mutations are not published or were not, and about failing conditions. Also an event that
-- has waited for long_wait while a process dispatches, or for undispatched while no process does.
create function pgmb.health(long_wait interval default '5 minutes', undispatched interval default '1 hour') returns setof pgchange.finding
language sql volatile as $$
    select 'event', 'warning', null, m.told, null from pgmb.misfit_settings() as m(told)
    union all
    select 'event', 'warning', null, format('%s is old and kept: %s', o.partition, o.reason),
           'the groups that hold partitions: select * from pgmb.holders()'
    from pgmb.overdue() as o
    union all
    select 'event', 'warning', null, format('%s needs partitions: %s', t.name, c.reason), null
    from unnest(array['pgmb.dispatched', 'pgmb.events']) as t(name)
    cross join lateral pgmb.crowded_default(t.name::regclass) as c(reason)
    where c.reason is not null
    union all
    select 'event', 'error', null, line.told, line.call
    from pgmb.pushing() as p
    cross join lateral (values
        (p.untriggered <> '{}' or p.stale,
         format('%s: its mutations are not published%s', p.tbl, ' on ' || nullif(array_to_string(p.untriggered, ', '), '')),
         coalesce((select format(
             'end the inheritance of the foreign table %s, or detach it; then, as its owner: select pgmb.recapture()', f)
                   from pgchange.foreign_child(p.tbl) as f where f is not null), 'as its owner: select pgmb.recapture()')),
        (p.disabled <> '{}', format('%s: publishing its mutations is disabled on %s', p.tbl, array_to_string(p.disabled, ', ')), null),
        (p.faults > 0,
         format('%s: %s could not be made an event, see pgmb.push_fault', p.tbl, pgchange.many(p.faults, 'row')),
         format('when the cause is fixed, as its owner: select pgmb.replay_push_faults(%L)', p.tbl))
    ) as line(holds, told, call)
    where line.holds
    union all
    select 'event', 'error', null, pgchange.told_missed(p.tbl, m, 'event'), pgchange.bring_missed(m, 'pgmb', 'publish_attached')
    from pgmb.pushing() as p cross join lateral unnest(p.missed) as m
    union all
    select 'event', 'error', s.consumer, format('its conditions failed for %s, see pgmb.fault', pgchange.many(s.faults, 'event')),
           format('when the cause is fixed: select pgmb.replay_faults(%L)', s.feed ->> 'group')
    from pgmb.status(1) as s where s.faults > 0
    union all
    select 'event', line.severity, null, line.told, line.call
    from pgmb.dispatching() as d
    cross join lateral (values
        (d.restored is not null, 'warning', format('events: %s', d.restored), null),
        (d.astray > 0, 'warning', format(
            'events: %s polls found messages or retries for a subscription that does not exist', d.astray),
         'select * from pgmb.fault where group_id is null'),
        (d.at_work is not null and d.oldest_seconds > extract(epoch from long_wait), 'error',
         format('events: an event has waited for %s s while process %s dispatches', round(d.oldest_seconds), d.at_work),
         format('if a condition does not end: select pg_cancel_backend(%s), whose error names it', d.at_work)),
        (d.at_work is null and d.oldest_seconds > extract(epoch from undispatched) and exists (select from pgmb.status(0)), 'error',
         format('events: %s waiting to be dispatched, the oldest for %s, and nobody dispatches: no watcher looks, and no consumer claims',
                pgchange.many(d.waiting, 'event'), justify_hours(make_interval(secs => round(d.oldest_seconds::numeric)::double precision))),
         'select pgmb.poll_for_events()')
    ) as line(holds, severity, told, call)
    where line.holds
$$;
