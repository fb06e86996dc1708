-- Single messages: found along one index in the order of all parts, and received from their part.
--
-- A level says from where on to look, so that neither what was received nor the number of parts is paid for at every message. It only
-- repeats what follows from the positions: whoever raises one looks at what is between the last and the first message that is not
-- received, by a snapshot, and notes what that could not see: transactions that were open, and parts that others were at. Levels are only
-- added, nobody waits for another, and what a claim that is rolled back had found out goes with it.
--
-- What is found is received under the lock of its part, where the part still stands as the same snapshot saw it. What has to wait, or
-- comes from apart, goes the way of batches.

create type mbus.start as (
    version bigint, whole bigint, whole_xids xid8[], whole_ids bigint[],
    done bigint, late_xids xid8[], busy integer[], froms bigint[], has_apart boolean
);
comment on type mbus.start is
    'From where on a single message is looked for: the position of all parts that have no younger one, the level, and whether '
    'there are messages apart.';

create type mbus.head as (id bigint, part integer, version bigint, is_plain boolean);
comment on type mbus.head is
    'A message that a consumer may have next, and the version of the position of its part by which that was seen; what is not plain is '
    'received as by a batch.';

create type mbus.found as (now pg_snapshot, heads mbus.head[]);
comment on type mbus.found is 'The messages that a consumer may have next, in order, and the snapshot by which they were seen.';

create function mbus.starts_at(c integer) returns setof mbus.start
language sql stable rows 1
as $$
    select coalesce(w.version, 0), w.done, w.late_xids, w.late_ids,
           case when x.is_level then l.done else coalesce(w.done, 0) end,
           case when x.is_level then l.late_xids else coalesce(w.late_xids, '{}') end,
           case when x.is_level then l.busy else '{}' end, case when x.is_level then l.froms else '{}' end,
           exists (select from mbus.apart as a where a.consumer = c)
    from (values (0)) as one
    left join lateral (
        select p.version, p.done, p.late_xids, p.late_ids from mbus.position as p
        where p.consumer = c and p.part between -1 and -1
        order by p.part desc, p.version desc limit 1
    ) as w on true
    left join lateral (
        select l.done, l.late_xids, l.busy, l.froms from mbus.level as l
        where l.consumer = c
        order by l.done desc limit 1
    ) as l on true
    cross join lateral (select coalesce(l.done >= coalesce(w.done, 0), false)) as x(is_level)
$$;
comment on function mbus.starts_at(integer) is 'From where on the next single message of a consumer is looked for.';

create function mbus.make_find_function(known mbus.queue, c mbus.consumer) returns void
language plpgsql
set search_path from current
as $$
declare
    -- %%1$s are the rows, %%2$s is which of them, %%3$s which are wanted.
    seek text := $sql$
            select row(t.id, mod(t.id, %1$s)::integer, coalesce(p.version, start.version), %2$s)::mbus.head as head
            from %%1$s as t
            left join lateral (
                select p.version, p.done, p.late_xids, p.late_ids from mbus.position as p
                where p.consumer = %3$s and p.part between mod(t.id, %1$s)::integer and mod(t.id, %1$s)::integer and p.version > start.version
                order by p.part desc, p.version desc limit 1
            ) as p on true
            where %%2$s and mod(t.id, %1$s)::integer <> all (busy) and %%3$s
              -- Each by itself: most have been received, and are not asked about.
              and case when coalesce(
                      mbus.passed(t.id, t.pgchange_txid, p.done, p.late_xids, p.late_ids),
                      mbus.passed(t.id, t.pgchange_txid, start.whole, start.whole_xids, start.whole_ids)) then false
                  else not exists (
                      select from mbus.receipt as r
                      where r.queue = %4$s and coalesce(r.consumer, 0) = any (array[0, %3$s]) and r.id = t.id offset 0) end
            order by t.id$sql$;
    body text := $body$
    if start.late_xids <> '{}' or start.busy <> '{}' then
        found.heads := array(
            select x.head
            from (
                select s.head
                from unnest(start.late_xids) as e(xid)
                cross join lateral (%1$s
                    limit most
                ) as s
                where pg_visible_in_snapshot(e.xid, found.now) or e.xid = pg_current_xact_id_if_assigned()
                union all
                select s.head
                from unnest(start.busy, start.froms) as b(part, above)
                cross join lateral (%2$s
                    limit 1
                ) as s
                where b.part <> all (busy)
            ) as x
            order by (x.head).id
            limit most);
    end if;
    if cardinality(found.heads) < most then
        found.heads := found.heads || array(%3$s
            limit most - cardinality(found.heads));
    end if;
    return found;$body$;
    rows_of_log text := mbus.selectable(known);
    texts text[];
    is_safe boolean;
    made text;
    wanted text;
begin
    foreach is_safe in array array[false, true] loop
        made := format(seek, known.consumers_cnt, case when is_safe then 'false' else 'not t.pgchange_special' end, c.id, known.id);
        wanted := mbus.wanted_of(c, is_safe);
        texts := texts || format(body,
            format(made, rows_of_log, 't.pgchange_txid = e.xid and t.id <= start.done', wanted),
            format(made, rows_of_log,
                format('t.id > b.above and t.id <= start.done and mod(t.id, %s) = b.part', known.consumers_cnt), wanted),
            format(made, rows_of_log, 't.id > start.done and t.id <= horizon', wanted));
    end loop;
    perform mbus.place('find$' || c.id, 'start mbus.start, horizon bigint, busy integer[], most integer', 'mbus.found',
        'language plpgsql stable' || case when c.selector is not null then ' ' || pgchange.settings() else '' end,
        format($body$
#variable_conflict use_column
declare
    found mbus.found := row(pg_current_snapshot(), '{}');
begin%1$s%2$s
end
$body$, texts[1], case when c.selector is not null then format($body$
exception when others or assert_failure then
    if sqlstate ~ '^(40|53|57)' then
        raise;
    end if;
    found.heads := '{}';%s$body$, texts[2]) end),
        format('The messages that consumer %s of queue %s may have next, one at a time.', c.name, known.qname),
        pinned => false);
end
$$;
comment on function mbus.make_find_function(mbus.queue, mbus.consumer) is
    'Write a consumer''s own query for single messages, in which its selector stands. Where that fails, every message is received as by a '
    'batch, which knows what to do.';

create function mbus.heads_apart(c integer, parts integer[], free bigint[], most integer) returns mbus.head[]
language plpgsql stable
as $$
begin
    return array(
        select row(min(h.id), h.part, null, false)::mbus.head
        from (
            (select a.id, a.part from mbus.apart as a
             where a.consumer = c and a.wait_consumer is null and not a.failed and a.due = '-infinity' and a.part = any (parts)
             order by a.id limit most)
            union all
            select a.id, a.part from mbus.apart as a where a.consumer = c and a.id = any (free)
        ) as h
        group by h.part
        order by min(h.id));
end
$$;
comment on function mbus.heads_apart(integer, integer[], bigint[], integer) is
    'The messages apart that a consumer may have next, also of those that mbus.set_free() found, one a part.';

create function mbus.settle(queue integer, c integer, start mbus.start, h mbus.head, now pg_snapshot, bound bigint) returns boolean
language plpgsql
as $$
declare
    stood mbus.position;
    mine xid8 := pg_current_xact_id();
    open xid8[] := mbus.open_in(now, bound);
begin
    if open = '{}' then
        -- Mostly nobody else is at work, and this says it all.
        update mbus.position as p set
            version = p.version + 1, done = h.id, began = case when p.txid = mine then p.began else p.done end,
            began_xids = case when p.txid = mine then p.began_xids else '{}' end,
            began_ids = case when p.txid = mine then p.began_ids else '{}' end, txid = mine
        where p.ctid = (
                select x.ctid from mbus.position as x where x.consumer = c and x.part between h.part and h.part
                order by x.part desc, x.version desc limit 1)
          and p.version = h.version and p.version > start.version and p.late_xids = '{}'
          and start.version >= coalesce((
              select w.version from mbus.position as w where w.consumer = c and w.part between -1 and -1
              order by w.part desc, w.version desc limit 1), 0)
          and not exists (
              select from mbus.receipt as r
              where r.queue = settle.queue and coalesce(r.consumer, 0) = any (array[0, c]) and r.id = h.id);
        if found then
            return true;
        end if;
    end if;
    select p.* into stood from mbus.stands_at(c, h.part) as p;
    if coalesce(stood.version, 0) <> h.version or mbus.was_taken(queue, c, h.id) then
        return false;
    end if;
    perform mbus.keep_apart(
        c, row(array[h.part], start.version, array[h.version], null, null, null, null, null, null)::mbus.standing, h.id, open,
        h.id <= stood.done, array(select x from unnest(stood.late_xids) as x where pg_visible_in_snapshot(x, now) or x = mine), h.id);
    return true;
end
$$;
comment on function mbus.settle(integer, integer, mbus.start, mbus.head, pg_snapshot, bigint) is
    'Move a part on to a message that was found in it by a snapshot; false where another has moved it since, or taken that message.';

create function mbus.raise_level(c integer, start mbus.start, horizon bigint, bound bigint, next mbus.found, busy integer[]) returns void
language plpgsql
as $$
declare
    reached bigint := coalesce(next.heads[1].id - 1, horizon);
    froms bigint[];
    late xid8[];
begin
    -- What is late, or was left in a part that others were at, and can be had now, is had first.
    if reached <= start.done or cardinality(busy) > 64 then
        return;
    end if;
    select coalesce(array_agg(least(coalesce(p.done, 0), f.above)), '{}'), mbus.open_in(next.now, bound)
    into froms, late
    from unnest(busy) as b(part)
    left join lateral mbus.stands_at(c, b.part) as p on true
    left join unnest(start.busy, start.froms) as f(part, above) on f.part = b.part;
    if busy <> '{}' then
        late := array(
            select unnest(late)
            union select x from unnest(busy) as b(part) cross join mbus.stands_at(c, b.part) as p cross join unnest(p.late_xids) as x);
    end if;
    insert into mbus.level (consumer, done, late_xids, busy, froms) values (c, reached, late, busy, froms);
    delete from mbus.level as l
    where l.ctid = any (array(
        select x.ctid from mbus.level as x where x.consumer = c and x.done < reached for update skip locked));
end
$$;
comment on function mbus.raise_level(integer, mbus.start, bigint, bigint, mbus.found, integer[]) is
    'Have the next single message looked for behind what a consumer has received, given what was found next when busy parts are passed over.';

create function mbus.make_single_function(known mbus.queue, c mbus.consumer) returns void
language plpgsql
set search_path from current
as $$
begin
    perform mbus.place('single$' || c.id, '', 'bigint', 'language plpgsql',
        format($body$
#variable_conflict use_variable
declare
    held integer := coalesce(nullif(current_setting('mbus.held', true), ''), '0')::integer;
    start mbus.start;
    horizon bigint;
    bound bigint;
    free bigint[];
    found mbus.found;
    heads mbus.head[];
    h mbus.head;
    busy integer[] := '{}';
    others integer[];
    -- Of the first few, one is free mostly.
    few integer := 4;
    has_whole boolean;
    number bigint;
begin
    if current_setting('transaction_isolation') not in ('read committed', 'read uncommitted') then
        perform mbus.check_isolation();
    end if;
    <<looking>>
    loop
        bound := null;
        horizon := coalesce(pg_sequence_last_value(%3$L), 0);
        select s.* into start from mbus.starts_at(%2$s) as s;
        -- Mostly nobody has posted anything since.
        exit when horizon <= start.done and start.late_xids = '{}' and start.busy = '{}' and not start.has_apart;
        if not mbus.is_native() then
            perform mbus.check_origin(mbus.queue_named(%1$L));
        end if;
        found := mbus.find$%2$s(start, horizon, busy, few);
        heads := found.heads;
        if start.has_apart then
            others := array(select p from unnest(%4$L::integer[]) as p where p <> all (busy));
            free := mbus.set_free(%2$s, others, 2 * few, heads = '{}' or random() < 0.1);
            heads := array(select x from unnest(heads || mbus.heads_apart(%2$s, others, free, 2 * few)) as x order by x.id);
        end if;
        foreach h in array heads loop
            continue when h.part = any (busy);
            -- Past so many messages a transaction locks whole parts: locks are few.
            has_whole := held >= 64 and mbus.take_part(%2$s, h.part, true);
            if not has_whole and not mbus.take_part(%2$s, h.part, false) then
                busy := busy || h.part;
                continue;
            end if;
            if h.is_plain and (has_whole or pg_try_advisory_xact_lock(mbus.message_key(%5$s, h.id))) then
                bound := mbus.bound_now();
                continue looking when not mbus.settle(%5$s, %2$s, start, h, found.now, bound);
                number := h.id;
            else
                number := mbus.claim_from(mbus.queue_named(%1$L), %2$s, array[h.part], free, has_whole);
            end if;
            exit looking when number is not null;
            busy := busy || h.part;
        end loop;
        exit when heads = '{}';
        few := 2 * %6$s;
    end loop;
    if number is not null and not has_whole then
        perform set_config('mbus.held', (held + 1)::text, true);
    end if;
    -- Nothing for this consumer in a long stretch: now and then its parts are moved on, so that the log can be trimmed.
    if number is null and random() * 1000 < horizon - start.done then
        number := mbus.claim_from(
            mbus.queue_named(%1$L), %2$s, array(select p from unnest(%4$L::integer[]) as p where mbus.take_part(%2$s, p, false)), '{}', false);
    end if;
    -- What was passed over once need not be again.
    if number > start.done + 8 and random() < 0.25 or number is null and horizon > start.done + 8 and random() < 0.25 then
        bound := coalesce(bound, mbus.bound_now());
        perform mbus.raise_level(%2$s, start, horizon, bound, mbus.find$%2$s(start, horizon, busy, 1), busy);
    end if;
    return number;
end
$body$, known.qname, c.id, format('mbus.%I', 'seq$' || known.qname), known.parts, known.id, known.consumers_cnt),
        format('Receive a single message of queue %s for consumer %s: the oldest that nobody holds, locked by itself; its place in the log.',
            known.qname, c.name),
        pinned => false);
end
$$;
comment on function mbus.make_single_function(mbus.queue, mbus.consumer) is
    'Write how a consumer receives single messages. Who takes another message of their part need not wait.';

create function mbus.make_any_function(known mbus.queue) returns void
language plpgsql
set search_path from current
as $$
declare
    -- Where no consumer receives everything, what nobody wants stays.
    looks text := case when exists (select from mbus.consumer as c where c.qname = known.qname and c.selector is null) then ''
                       else format($body$
    is_sure := not exists (select from mbus.%I);$body$, 'log$' || known.qname) end;
    c mbus.consumer;
begin
    for c in select x.* from mbus.consumer as x where x.qname = known.qname order by x.id loop
        looks := looks || format($body$
    select s.* into start from mbus.starts_at(%1$s) as s;
    if start.has_apart and exists (
        select from mbus.apart as a join mbus.%2$I as l on l.id = a.id
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
        -- What expired and was not passed over yet is there still.
        is_sure := is_sure and found.heads = '{}'
            and not exists (select from mbus.%2$I as l where l.id > start.done and l.expires <= clock_timestamp());
    end if;$body$, c.id, 'log$' || known.qname, known.id,
            -- Where its selector fails, others are among what is found that it does not match.
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
        format('Whether any message is in queue %s. Mostly a look at where its consumers are tells.', known.qname),
        pinned => false);
end
$$;
comment on function mbus.make_any_function(mbus.queue) is
    'Write the question whether any message is in a queue: the view of its messages is asked only where that may depend on one which no '
    'consumer would come upon.';
