-- Deleting messages that every consumer has received. The dead rows cost readers nothing, because positions are beyond them.

-- Delete messages that every consumer has passed, of the next most messages. Returns how many were deleted.
create function mbus.trim(known mbus.queue, most integer) returns bigint
language plpgsql
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
    consumers integer[] := array(select c.id from mbus.consumer as c where c.qname = known.qname);
    begun bigint;
    low bigint;
    late xid8[];
    kept bigint[];
    trimmed bigint := 0;
begin
    -- Do nothing unless a consumer receives every message. If one does, a message that all positions have passed was certainly
    -- received.
    if not exists (select from mbus.consumer as c where c.qname = known.qname and c.selector is null)
       or not pg_try_advisory_xact_lock(hashtextextended('mbus trim', known.id))
    then
        return 0;
    end if;
    begun := coalesce((
        select p.done from mbus.position as p where p.consumer = -known.id and p.part = 0 order by p.version desc limit 1), known.began);
    -- This transaction can still put back the messages that it has received, so do not delete these.
    with stands as (
        select case when m.mine then p.began else p.done end as done,
               case when m.mine then p.began_xids || p.late_xids else p.late_xids end as late
        from unnest(consumers) as c
        cross join unnest(known.parts) as g(part)
        cross join mbus.stands_at(c, g.part) as p
        cross join lateral (select coalesce(p.txid = pg_current_xact_id_if_assigned(), false) as mine) as m
    )
    select min(s.done), coalesce((select array_agg(distinct x) from stands as e, unnest(e.late) as x), '{}') into low, late from stands as s;
    -- Stop before messages that a feed has claimed. Trimming passes each message once, so only a sweep would delete these
    -- later.
    low := least(low, begun + most, (select min(b.lowest) - 1 from mbus.batch as b where b.consumer = any (consumers)));
    if low <= begun then
        return 0;
    end if;
    kept := array(
        select a.id from mbus.apart as a where a.consumer = any (consumers) and a.id > begun and a.id <= low
        union
        select r.id from mbus.receipt as r
        where r.queue = known.id and r.id > begun and r.id <= low and r.txid = pg_current_xact_id());
    -- In most cases either all messages of a stretch wait for something, or none does.
    if cardinality(kept) < low - begun then
        execute format($query$
            with trimmed as (
                delete from mbus.%I as l
                where l.id > $1 and l.id <= $2 and l.txid <> all ($3) and l.txid <> pg_current_xact_id() and l.id <> all ($4)
                returning 1
            )
            select count(*) from trimmed
            $query$, 'log$' || known.qname)
        into trimmed using begun, low, late, kept;
        execute format($query$
            delete from mbus.receipt as r
            where r.queue = $1 and r.id > $2 and r.id <= $3 and r.txid <> pg_current_xact_id()
              and not exists (select from mbus.%I as l where l.id = r.id offset 0)
            $query$, 'log$' || known.qname)
        using known.id, begun, low;
    end if;
    insert into mbus.position (consumer, part, version, done)
    select -known.id, 0, coalesce(max(p.version), 0) + 1, low from mbus.position as p where p.consumer = -known.id and p.part = 0;
    delete from mbus.position as p
    where p.consumer = -known.id and p.part = 0 and p.version < (
        select max(x.version) from mbus.position as x where x.consumer = -known.id and x.part = 0);
    return trimmed;
end
$$;

-- Trim a queue, with a probability of 1 divided by the number of its consumers, so that each does its share.
create function mbus.trim_sometimes(known mbus.queue, received integer) returns void
language plpgsql as $$
begin
    if random() * (select count(*) from mbus.consumer as c where c.qname = known.qname) < 1 then
        perform mbus.trim(known, 2000 + 2 * received);
    end if;
end
$$;

-- The id up to which a message can be gone although no receipt shows it. A consumer without a selector takes every message, so it
-- must have passed the message. Above this id, only a message with a receipt, or a message that was put back, can be gone.
create function mbus.passed_upto(known mbus.queue) returns bigint
language sql stable as $$
    select coalesce(min(p.done) filter (where c.selector is null), max(p.done), 0)
    from mbus.consumer as c
    cross join lateral (select coalesce(max(x.done), 0) as done from mbus.position as x where x.consumer = c.id) as p
    where c.qname = known.qname
$$;

-- The next ids, in order, of messages that can be gone. Messages that no consumer has received cost nothing here, however many
-- wait.
create function mbus.to_sweep(known mbus.queue, above bigint, upto bigint, most integer) returns bigint[]
language plpgsql stable
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
    ids bigint[];
begin
    execute format($query$
        select array(
            select c.id
            from (
                (select l.id from mbus.%1$I as l where l.id > $1 and l.id <= $2 order by l.id limit $3)
                union
                (select distinct r.id from mbus.receipt as r where r.queue = $4 and r.id > greatest($1, $2) order by r.id limit $3)
                union
                (select l.id from mbus.%1$I as l where l.not_for is not null and l.id > greatest($1, $2) order by l.id limit $3)
            ) as c
            order by c.id
            limit $3)
        $query$, 'log$' || known.qname)
    into ids using above, upto, most, known.id;
    return ids;
end
$$;

-- The ids of messages that have expired and that no consumer's feed has claimed.
create function mbus.expired(known mbus.queue, most integer) returns bigint[]
language plpgsql stable
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
    ids bigint[];
begin
    execute format($query$
        select array(
            select l.id from mbus.%I as l
            where l.expires < localtimestamp::timestamptz
              and not exists (
                  select from mbus.consumer as c join mbus.apart as x on x.consumer = c.id and x.id = l.id
                  where c.qname = $2 and x.batch is not null)
            order by l.expires
            limit $1)
        $query$, 'log$' || known.qname)
    into ids using most, known.qname;
    return ids;
end
$$;

-- Delete those of some messages that are gone or expired; with clear, also those that no selector matches. Returns how many were
-- deleted.
create function mbus.sweep_ids(known mbus.queue, ids bigint[], clear boolean) returns bigint
language plpgsql
set enable_seqscan = off
set jit = off
as $$
declare
    consumers integer[] := array(select c.id from mbus.consumer as c where c.qname = known.qname);
begin
    if ids = '{}' then
        return 0;
    end if;
    execute format($query$
        select coalesce(array_agg(a.id), '{}') from mbus.%I as a
        where a.id = any ($4)
          and (a.gone or a.expires < localtimestamp or $1 and a.wanted = '{}')
          and a.txid <> pg_current_xact_id()
          and not exists (select from mbus.receipt as r where r.queue = $2 and r.id = a.id and r.txid = pg_current_xact_id() offset 0)
          and not exists (select from mbus.apart as x where x.consumer = any ($3) and x.id = a.id and x.batch is not null offset 0)
        $query$, 'all$' || known.qname)
    into ids using clear, known.id, consumers, ids;
    -- Skip locked rows: messages that a consumer is deleting, or received before they expired, are deleted another time.
    execute format($query$
        select array(
            select l.id from unnest($1) as i(id)
            cross join lateral (select x.id from mbus.%I as x where x.id = i.id offset 0 for update skip locked) as l)
        $query$, 'log$' || known.qname)
    into ids using ids;
    delete from mbus.apart as a
    where a.ctid = any (array(
        select x.place from unnest(consumers) as c(id) cross join unnest(ids) as i(id)
        cross join lateral (
            select y.ctid as place from mbus.apart as y where y.consumer = c.id and y.id = i.id offset 0 for update skip locked
        ) as x));
    ids := array(
        select i from unnest(ids) as i
        where not exists (select from mbus.apart as a where a.consumer = any (consumers) and a.id = i offset 0));
    execute format($query$
        delete from mbus.%1$I as l
        where l.ctid = any (array(
            select x.place from unnest($1) as i(id)
            cross join lateral (select y.ctid as place from mbus.%1$I as y where y.id = i.id offset 0) as x))
        $query$, 'log$' || known.qname)
    using ids;
    delete from mbus.receipt as r
    where r.ctid = any (array(
        select x.place from unnest(ids) as i(id)
        cross join lateral (select y.ctid as place from mbus.receipt as y where y.queue = known.id and y.id = i.id offset 0) as x));
    perform mbus.wake_up(consumers, ids);
    return cardinality(ids);
end
$$;

-- Delete every message that is gone or expired; with clear, also those that no selector matches. Returns how many were deleted.
create function mbus.sweep(known mbus.queue, clear boolean) returns bigint
language plpgsql as $$
declare
    upto bigint := case when clear then 9223372036854775807 else mbus.passed_upto(known) end;
    ids bigint[] := array[0];
    swept bigint := mbus.sweep_ids(known, mbus.expired(known, null), clear);
begin
    loop
        ids := mbus.to_sweep(known, ids[cardinality(ids)], upto, 10000);
        exit when ids = '{}';
        swept := swept + mbus.sweep_ids(known, ids, clear);
    end loop;
    return swept;
end
$$;

-- Delete some messages that all consumers have received, or that are gone or expired. A call takes a fraction of a second,
-- however many messages wait. Returns how many were deleted. If there are many, call it again in another transaction. Each call
-- begins behind the messages of the last call.
create function mbus.sweep_some(known mbus.queue) returns bigint
language plpgsql as $$
declare
    -- Each consumer is checked for each message: 1,000 messages of 20 consumers take about 0.3 seconds.
    most constant integer := greatest(
        50, 30000 / (10 + (select count(*) from mbus.consumer as c where c.qname = known.qname)));
    -- Part 0 of this position is how far trimming has come; part 1 how far sweeping has come.
    at mbus.position;
    ids bigint[];
    deleted bigint := mbus.trim(known, 20000);
begin
    if not pg_try_advisory_xact_lock(hashtextextended('mbus trim', known.id)) then
        return deleted;
    end if;
    deleted := deleted + mbus.sweep_ids(known, mbus.expired(known, most), false);
    select p.* into at from mbus.position as p where p.consumer = -known.id and p.part = 1 order by p.version desc limit 1;
    ids := mbus.to_sweep(known, coalesce(at.done, 0), mbus.passed_upto(known), most);
    deleted := deleted + mbus.sweep_ids(known, ids, false);
    insert into mbus.position (consumer, part, version, done)
    values (-known.id, 1, coalesce(at.version, 0) + 1, case when cardinality(ids) < most then 0 else ids[most] end);
    delete from mbus.position as p where p.consumer = -known.id and p.part = 1 and p.version <= at.version;
    return deleted;
end
$$;

-- Create the function clear_queue_<queue>.
create function mbus.make_clear_function(known mbus.queue) returns void
language plpgsql as $$
begin
    perform mbus.place_asking(known.is_roles_security_model, 'clear_queue_' || known.qname, '', 'void', 'language plpgsql security definer',
        format($body$
declare
    known mbus.queue := mbus.queue_named(%1$L);
begin
    %2$s
    while mbus.trim(known, 100000) > 0 loop
    end loop;
    perform mbus.sweep(known, true);
end
$body$, known.qname, case when known.is_roles_security_model
            then format('if not mbus.is_admin(caller) and not mbus.has_role(caller, ''admin'', %1$L) then perform mbus.deny(caller, ''admin'', %1$L); end if;', known.qname)
            else '' end),
        format(
            'Delete messages from queue %s that have expired, that no selector matches, or that all consumers have received.',
            known.qname));
end
$$;
