-- What is handed out of the parts that a consumer has locked, and how far that brings it.

create function mbus.gone(known mbus.queue, c integer, above bigint) returns bigint[]
language plpgsql stable
set search_path from current
set enable_seqscan = off
set jit = off
as $$
begin
    return array(
        select r.id from mbus.receipt as r where r.queue = known.id and r.consumer is null and r.id > above
        union all
        select r.id from mbus.receipt as r where r.queue = known.id and r.consumer = c and r.id > above);
end
$$;
comment on function mbus.gone(mbus.queue, integer, bigint) is 'Messages above an id that a consumer received out of order, or that were taken.';

create function mbus.look(known mbus.queue, c integer, ats mbus.position[], upto bigint, most integer,
    out now pg_snapshot, out finished xid8[], out picks mbus.picked[])
language plpgsql
set search_path from current
set jit = off
as $$
declare
    dones bigint[] := array(
        select coalesce(a.done, 9223372036854775807) from generate_series(0, known.consumers_cnt - 1) as g(part)
        left join unnest(ats) as a on a.part = g.part order by g.part);
    above bigint := (select min(a.done) from unnest(ats) as a);
    has_late boolean := exists (select from unnest(ats) as a where a.late_xids <> '{}');
    gone bigint[] := mbus.gone(known, c, case when has_late then 0 else above end);
    query text := $query$
        with now as materialized (
            select s as snapshot,
                   array(select distinct x from unnest($1) as a, unnest(a.late_xids) as x
                         where pg_visible_in_snapshot(x, s) or x = pg_current_xact_id_if_assigned()) as finished
            from pg_current_snapshot() as s
        ), late as (
            select coalesce(array_agg(l.xid), '{}') as xids, coalesce(array_agg(a.part), '{}') as parts, coalesce(array_agg(l.upto), '{}') as ids
            from now, unnest($1) as a, unnest(a.late_xids, a.late_ids) as l(xid, upto)
            where l.xid = any (now.finished)
        )
        select n.snapshot, n.finished,
               array(select p from late as l, mbus.%I($2, $3, $4, l.xids, l.parts, l.ids, $5, $6) as p)
        from now as n
        $query$;
begin
    begin
        execute format(query, 'pick$' || c) into now, finished, picks using ats, above, upto, dones, gone, most;
    exception when others or assert_failure then
        if not exists (select from mbus.consumer as x where x.id = c and x.selector is not null)
           or sqlstate like '57%' or sqlstate like '40%' or sqlstate = '53200'
        then
            raise;
        end if;
        execute format(query, 'safe$' || c) into now, finished, picks using ats, above, upto, dones, gone, most;
    end;
end
$$;
comment on function mbus.look(mbus.queue, integer, mbus.position[], bigint, integer) is
    'What a consumer comes upon next, with the snapshot by which that was seen, and those of its late transactions that are finished. A '
    'selector that fails is asked about each message by itself.';

create function mbus.open_in(now pg_snapshot, bound bigint) returns xid8[]
language sql stable
set search_path from current
as $$
    select array(
        select x from (
            select pg_snapshot_xip(now) as x
            union all
            select g::text::xid8 from generate_series(pg_snapshot_xmax(now)::text::bigint, bound - 1) as g
        ) as o
        where x is distinct from pg_current_xact_id_if_assigned())
$$;
comment on function mbus.open_in(pg_snapshot, bigint) is 'The transactions below a bound that a snapshot does not see, but for this one.';

create function mbus.from_log(known mbus.queue, c integer, parts integer[], amt integer) returns bigint[]
language plpgsql
set search_path from current
set jit = off
as $$
declare
    -- In this order: an id at most the horizon was drawn by a transaction below the bound, and is seen or among the open ones.
    horizon bigint := coalesce(pg_sequence_last_value(known.seq::regclass), 0);
    bound bigint := mbus.xid_bound();
    ats mbus.position[];
    seen record;
    found bigint[] := '{}';
    fresh bigint[];
    aside bigint[];
    most integer := amt;
    reached bigint;
    last_id bigint;
    is_cut boolean;
    ends_late boolean;
begin
    loop
        ats := mbus.at(c, parts);
        seen := mbus.look(known, c, ats, horizon, most);
        perform mbus.note_fault(known, c, p) from unnest(seen.picks) as p where p.ok is null;
        aside := case when exists (select from unnest(seen.picks) as p where (p.after is not null or p.due is not null) and p.ok)
            then mbus.set_apart(known, c, array(
                select p from unnest(seen.picks) as p where (p.after is not null or p.due is not null) and p.ok))
            else '{}' end;
        fresh := array(
            select p.id from unnest(seen.picks) with ordinality as p(id, late, part, txid, due, expires, after, ok, n)
            where p.ok and p.id <> all (aside) order by p.n);
        is_cut := cardinality(found) + cardinality(fresh) > amt;
        fresh := fresh[1 : amt - cardinality(found)];
        found := found || fresh;
        -- Up to which message this look counts as done: the last handed out where there were more, else the last that was seen.
        last_id := case when is_cut then fresh[cardinality(fresh)] else (seen.picks[cardinality(seen.picks)]).id end;
        ends_late := coalesce((
            select p.late from unnest(seen.picks) as p where p.id = last_id order by p.late limit 1), false)
            and (is_cut or cardinality(seen.picks) = most);
        reached := case when is_cut or cardinality(seen.picks) = most then last_id else horizon end;
        perform mbus.keep(array(
            select mbus.moved(a, reached, mbus.open_in(seen.now, bound), ends_late, seen.finished, last_id) from unnest(ats) as a));
        if cardinality(found) >= amt or cardinality(seen.picks) < most then
            return found;
        end if;
        most := greatest(amt - cardinality(found), 500);
    end loop;
end
$$;
comment on function mbus.from_log(mbus.queue, integer, integer[], integer) is
    'The next messages of the log for a consumer that holds the locks of these parts, and its positions behind them.';

create function mbus.from_apart(known mbus.queue, c integer, parts integer[], amt integer) returns bigint[]
language plpgsql
set search_path from current
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
    free bigint[] := mbus.set_free(c, parts, greatest(amt, 1000));
    ready bigint[];
begin
    if free <> '{}' then
        perform mbus.reconsider(c, free);
    end if;
    ready := array(
        select a.id from mbus.apart as a
        where a.consumer = c and a.wait_consumer is null and not a.failed and a.due = '-infinity' and a.part = any (parts)
        order by a.id
        limit amt);
    if ready = '{}' then
        return ready;
    end if;
    ready := array(
        with gone as (
            delete from mbus.apart as a where a.consumer = c and a.id = any (ready) returning a.id, a.expires
        ), handed as (
            select g.id from gone as g
            where coalesce(g.expires > clock_timestamp(), true)
              and not exists (
                  select from mbus.receipt as r where r.queue = known.id and r.id = g.id and (r.consumer is null or r.consumer = c))
        ), noted as (
            insert into mbus.receipt (queue, id, consumer) select known.id, h.id, c from handed as h
        )
        select h.id from handed as h);
    -- Those that were dropped instead leave room.
    return case when ready = '{}' then mbus.from_apart(known, c, parts, amt) else ready end;
end
$$;
comment on function mbus.from_apart(mbus.queue, integer, integer[], integer) is
    'Messages apart that a consumer which holds the locks of these parts can have now.';

create function mbus.note_fault(known mbus.queue, c integer, p mbus.picked) returns void
language plpgsql
set search_path from current
as $$
begin
    insert into mbus.apart (consumer, id, part, due, expires, after, failed)
    values (c, p.id, p.part, coalesce(p.due, '-infinity'), p.expires, p.after, true)
    on conflict do nothing;
    if found then
        insert into mbus.fault (qname, consumer, message_id, message)
        select known.qname, x.name, p.id, 'the selector fails on this message: ' || x.selector from mbus.consumer as x where x.id = c;
    end if;
end
$$;
comment on function mbus.note_fault(mbus.queue, integer, mbus.picked) is
    'Keep a message on which a consumer''s selector failed, and report it.';
