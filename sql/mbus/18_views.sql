-- Functions and views that are created again when a queue gets or loses a consumer.

-- Create the function that tells whether any message is in a queue. It reads the view of all messages only if there may be a
-- message that no consumer would reach.
create function mbus.make_any_function(known mbus.queue) returns void
language plpgsql as $$
declare
    -- If no consumer receives everything, messages that nobody wants stay.
    looks text := case when exists (select from mbus.consumer as c where c.qname = known.qname and c.selector is null) then ''
                       else format($body$
    is_sure := not exists (select from mbus.%I);$body$, 'log$' || known.qname) end;
    c mbus.consumer;
begin
    for c in select x.* from mbus.consumer as x where x.qname = known.qname order by x.id loop
        looks := looks || format($body$
    select s.* into start from mbus.starts_at(%1$s) as s;
    if start.has_apart and exists (
        select from mbus.apart as a cross join lateral (select x.id from mbus.%2$I as x where x.id = a.id offset 0) as l
        where a.consumer = %1$s
          and not exists (
              select from mbus.receipt as r
              where r.queue = %3$s and coalesce(r.consumer, 0) = any (array[0, %1$s]) and r.id = a.id offset 0))
    then
        return true;
    end if;
    if horizon > start.done or start.late_xids <> '{}' or start.busy <> '{}' then
        found := mbus.find$%1$s(start, horizon, '{}', 1);
        if %4$s then
            return true;
        end if;
        -- A message that has expired, and that no position has passed, is still in the queue.
        is_sure := is_sure and found.heads = '{}'
            and not exists (select from mbus.%2$I as l where l.id > start.done and l.expires <= clock_timestamp());
    end if;$body$, c.id, 'log$' || known.qname, known.id,
            -- If the selector failed, the messages that were found may include some that it does not match.
            case when c.selector is null then 'found.heads <> ''{}''' else 'found.heads[1].is_plain' end);
    end loop;
    perform mbus.place('any$' || known.id, '', 'boolean', 'language plpgsql stable',
        format($body$
declare
    horizon bigint := coalesce(pg_sequence_last_value(%1$L), 0);
    start mbus.start;
    found mbus.found;
    is_sure boolean := true;
begin%2$s
    return not is_sure and exists (select from mbus.%3$I);
end
$body$, format('mbus.%I', 'seq$' || known.qname), looks, 'qt$' || known.qname),
        format('Whether any message is in queue %s. Mostly the positions of its consumers show this.', known.qname),
        pinned => false);
end
$$;

-- Create the views of a queue, and the function for single messages, for its present consumers.
create function mbus.make_views(known mbus.queue) returns void
language plpgsql as $$
declare
    is_new constant boolean := to_regclass(format('mbus.%I', 'all$' || known.qname)) is null;
    received text := (
        select string_agg(format($sql$
            case when %1$s = any (w.wanted) and (
                %1$s = any (r.receipts)
                or l.id <= (select mbus.dones(%1$s))[1 + mod(l.id, %2$s)]
                   and not exists (
                       select from late as e
                       where e.consumer = %1$s and e.part = mod(l.id, %2$s) and e.xid = l.txid and l.id > e.upto)
                   and not exists (select from mbus.apart as a where a.consumer = %1$s and a.id = l.id)
            ) then %1$s end$sql$, c.id, known.consumers_cnt), ',' order by c.id) from mbus.consumer as c where c.qname = known.qname);
begin
    execute format($view$
        create or replace view mbus.%1$I as
        with late as materialized (select * from mbus.lates(%3$L))
        select l.id, l.added::timestamp as added, coalesce(l.iid, %4$L || l.id) as iid,
               l.delayed_until::timestamp as delayed_until, l.expires::timestamp as expires, s.received,
               l.headers, l.properties, l.data, l.txid, w.wanted,
               r.taken or case when w.wanted = '{}' then coalesce(l.not_for <> '{}', false) else w.wanted <@ s.received end as gone
        from mbus.%2$I as l%6$s
        cross join lateral (
            select coalesce(array_agg(r.consumer), '{}') as receipts, coalesce(bool_or(r.consumer is null), false) as taken
            from mbus.receipt as r where r.queue = %5$s and r.id = l.id
        ) as r
        cross join lateral (select array_remove(array[%7$s]::integer[], null) as received offset 0) as s
        $view$,
        'all$' || known.qname, 'log$' || known.qname, known.qname, known.qname || '.', known.id, mbus.wanted_by(known),
        coalesce(received, ''));
    if is_new then
        perform pgchange.keep_to_owner(format('mbus.%I', 'all$' || known.qname)::regclass);
    end if;
    execute format('comment on view mbus.%I is %L', 'all$' || known.qname,
        'Every message in the log of queue ' || known.qname || ', with the consumers that want it and those that received it, and '
        'whether it is gone.');
    -- This view is created once and never replaced. A reader locks it before the other view, so a session that replaced both
    -- could deadlock with the reader.
    if to_regclass(format('mbus.%I', 'qt$' || known.qname)) is null then
        execute format($view$
            create view mbus.%1$I as
            select a.id, a.added, a.iid, a.delayed_until, a.expires, a.received, a.headers, a.properties, a.data
            from mbus.%2$I as a where not a.gone
            $view$, 'qt$' || known.qname, 'all$' || known.qname);
        perform pgchange.keep_to_owner(format('mbus.%I', 'qt$' || known.qname)::regclass);
        execute format('comment on view mbus.%I is %L', 'qt$' || known.qname, 'The messages in queue ' || known.qname || '.');
    end if;
    perform mbus.make_entries_function(known);
    perform mbus.make_any_function(known);
end
$$;
