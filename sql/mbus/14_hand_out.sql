-- Handing out messages: read them in the parts of the log that a consumer has locked, and move its positions there past them.

-- Refuse a queue whose transaction ids are not those of this cluster.
create function mbus.check_origin(known mbus.queue) returns void
language plpgsql stable as $$
begin
    if not mbus.is_native() then
        raise exception using errcode = 'PC004',
            message = format('queue %s was restored from a dump, or upgraded: its transaction ids are not valid here',
                             known.qname),
            hint = 'run select mbus.rebase_after_restore()';
    end if;
end
$$;

-- Messages above an id that a consumer received out of order, or that were taken.
create function mbus.gone(known mbus.queue, c integer, above bigint) returns int8multirange
language plpgsql stable as $$
begin
    return (
        select coalesce(range_agg(int8range(r.id, r.id, '[]')), '{}') from mbus.receipt as r
        where r.queue = known.id and coalesce(r.consumer, 0) = any (array[0, c]) and r.id > above);
end
$$;

-- The messages that a consumer reaches next. Its query is planned with the settings of the functions that receive.
create function mbus.look(known mbus.queue, c integer, stands mbus.standing, horizon bigint, most integer) returns mbus.seen
language plpgsql as $$
declare
    answer record;
begin
    execute format('select mbus.%I($1, $2, $3, $4) as seen', 'look$' || c) into answer
    using stands, horizon, mbus.gone(known, c, stands.low), most;
    return answer.seen;
end
$$;

-- The messages that a consumer would reach next, up to an id. The caller receives none of them.
create function mbus.look_ahead(known mbus.queue, c integer, upto bigint, most integer) returns mbus.seen
language plpgsql
set enable_seqscan = off
set enable_bitmapscan = off
set enable_mergejoin = off
set enable_hashjoin = off
set enable_sort = off
set jit = off
set max_parallel_workers_per_gather = 0
set plan_cache_mode = force_generic_plan
as $$
begin
    perform mbus.check_origin(known);
    return mbus.look(known, c, mbus.stand(c, known.consumers_cnt, known.parts), upto, most);
end
$$;

-- The next messages of the log for a consumer that holds the locks of these parts, in order. Moves its positions behind them.
create function mbus.from_log(known mbus.queue, c integer, parts integer[], amt integer) returns bigint[]
language plpgsql as $$
declare
    -- Read the sequence before the bound. Then every id up to the horizon was drawn by a transaction below the bound. Its message
    -- is visible, or its transaction is among those that are open.
    horizon bigint := coalesce(pg_sequence_last_value(known.seq), 0);
    bound bigint := mbus.bound_now();
    stands mbus.standing;
    seen mbus.seen;
    found bigint[];
    aside mbus.apart[];
    most integer := amt;
    last_id bigint;
    last_seen integer;
    is_cut boolean;
    is_full boolean;
    ends_late boolean;
begin
    loop
        stands := mbus.stand(c, known.consumers_cnt, parts);
        seen := mbus.look(known, c, stands, horizon, most);
        is_full := cardinality(seen.ids) = most;
        found := seen.ids;
        if seen.special <> '{}' then
            aside := mbus.not_yet(c, seen.special);
            found := array(
                select abs(i) from unnest(seen.ids) with ordinality as s(i, n)
                where abs(i) not in (
                    select a.id from unnest(aside) as a union all select p.id from unnest(seen.special) as p where not p.ok)
                order by n);
        end if;
        is_cut := cardinality(found) > amt;
        if is_cut then
            found := found[1 : amt];
        end if;
        -- The last message that counts as seen. If there were more messages than requested, it is the last message handed out,
        -- else the last message of the query.
        last_id := case when is_cut then found[amt] else abs(seen.ids[cardinality(seen.ids)]) end;
        if seen.special <> '{}' then
            -- Do not set apart messages behind the last message handed out. They will be reached again, and could otherwise be
            -- received twice.
            last_seen := case when is_cut then coalesce(array_position(seen.ids, last_id), array_position(seen.ids, -last_id)) end;
            perform mbus.set_apart(
                known, c,
                array(select a from unnest(aside) as a where a.id not in (select abs(i) from unnest(seen.ids[last_seen + 1 :]) as i)));
        end if;
        ends_late := false;
        if seen.late_count > 0 then
            ends_late := (is_cut or is_full) and last_id in (select abs(i) from unnest(seen.ids[1 : seen.late_count]) as i);
            found := array(select i from unnest(found) as i order by i);
        end if;
        perform mbus.keep(
            c, stands, case when is_cut or is_full then last_id else horizon end, mbus.open_in(seen.now, bound), ends_late,
            seen.finished, last_id);
        -- Return without a second query. It would count the messages of the first query as received, and so hand out messages
        -- that wait for them in the same answer.
        if found <> '{}' or not is_full then
            return found;
        end if;
        most := greatest(amt, 500);
    end loop;
end
$$;

-- The messages apart that a consumer can receive now, in order, while it holds the locks of these parts. This includes messages
-- that mbus.set_free() found. They stay apart until mbus.receive_apart().
create function mbus.from_apart(known mbus.queue, c integer, parts integer[], amt integer, free bigint[]) returns bigint[]
language plpgsql as $$
declare
    ready bigint[];
    dropped bigint;
begin
    if free is null then
        return '{}';
    elsif free <> '{}' then
        -- Skip rows that another session is taking or that maintenance is deleting, instead of waiting for them.
        perform mbus.reconsider(c, array(
            select a.id
            from (select distinct f.id from unnest(free) as f(id)) as f
            cross join lateral (
                select x.id from mbus.apart as x
                where x.consumer = c and x.id = f.id and x.part = any (parts)
                offset 0 for update skip locked
            ) as a));
        delete from mbus.wake as w where w.consumer = c and w.part = any (parts) and w.id = any (free);
    end if;
    loop
        ready := array(
            select a.id from mbus.apart as a
            where a.consumer = c and a.wait_consumer is null and not a.failed and a.due = '-infinity' and a.part = any (parts)
            order by a.id
            limit amt
            for update skip locked);
        exit when ready = '{}';
        -- Delete messages apart that have expired, or were received or deleted meanwhile. The session that did so could not see
        -- rows of a transaction that was still open.
        execute format($query$
            delete from mbus.apart as a
            where a.ctid = any (array(select x.place from mbus.apart_at($1, $2) as x))
              and (a.expires <= clock_timestamp()
                   or exists (
                       select from mbus.receipt as r
                       where r.queue = $3 and r.id = a.id and (r.consumer is null or r.consumer = $1) offset 0)
                   or not exists (select from mbus.%I as l where l.id = a.id offset 0))
            $query$, 'log$' || known.qname)
        using c, ready, known.id;
        get diagnostics dropped = row_count;
        -- If messages were dropped, look again, because the answer has room for others.
        exit when dropped = 0;
    end loop;
    if known.ordered_by is not null and ready <> '{}' and cardinality(ready) < amt then
        ready := mbus.with_followers(c, ready, amt);
    end if;
    return ready;
end
$$;

-- Receive messages apart, and wake the messages that wait for them.
create function mbus.receive_apart(known mbus.queue, c integer, ids bigint[]) returns void
language plpgsql as $$
begin
    delete from mbus.apart as a where a.ctid = any (array(select x.place from mbus.apart_at(c, ids) as x));
    insert into mbus.receipt (queue, id, consumer) select known.id, i, c from unnest(ids) as i;
    perform mbus.wake_up(array[c], ids);
end
$$;
