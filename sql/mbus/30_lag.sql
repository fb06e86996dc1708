-- The lag of a consumer, read without claiming.

-- Whether a message with a delay or predecessors can be received now.
create function mbus.can_be_had(s mbus.picked) returns boolean
language sql stable as $$
    select s.ok and coalesce(s.due <= clock_timestamp(), true) and (s.after is null or mbus.obstacle(s.after::text[]) is null)
$$;

-- The messages that a consumer would reach first, at most upto + 1: those that it can receive and those that have to wait.
-- delayed: how many of the latter have a delay; the others wait for another message. highest: the last of them.
create function mbus.ahead_in_log(
    known mbus.queue, c integer, upto integer, out ready bigint[], out waiting bigint[], out delayed integer, out more boolean,
    out highest bigint
)
language plpgsql as $$
declare
    seen mbus.seen := mbus.look_ahead(known, c, 9223372036854775807, upto + 1);
begin
    select coalesce(array_agg(s.id), '{}'), count(*) filter (where s.due > clock_timestamp()) into waiting, delayed
    from unnest(seen.special) as s
    where not mbus.can_be_had(s)
       -- Such a message would be set apart by a claim, too, behind a message apart with the same key.
       or s.key is not null and exists (select from mbus.apart as a where a.consumer = c and a.key = s.key and not a.failed);
    ready := array(select abs(i) from unnest(seen.ids) as i where abs(i) <> all (waiting));
    more := cardinality(seen.ids) > upto;
    highest := (select max(abs(i)) from unnest(seen.ids) as i);
end
$$;

-- The approximate number of messages of the log behind an id that are for a consumer. It counts them in samples of 64 ids each,
-- at equal distances. The selector may match few messages, or only messages of a certain time.
create function mbus.estimate_behind(known mbus.queue, c integer, id bigint, samples integer) returns bigint
language plpgsql as $$
declare
    horizon constant bigint := coalesce(pg_sequence_last_value(known.seq), 0);
    many constant bigint := greatest(1, least(samples, (horizon - id) / 64));
    distance constant bigint := (horizon - id) / many;
    size constant integer := least(distance, 64);
    gone constant int8multirange := mbus.gone(known, c, id);
    stands mbus.standing := mbus.stand(c, known.consumers_cnt, known.parts);
    matching bigint := 0;
    matching_in_sample integer;
begin
    if horizon <= id then
        return 0;
    end if;
    -- Leave late messages out, because they are before the id.
    stands.late_xids := '{}';
    for n in 0..many - 1 loop
        stands.low := id + n * distance;
        execute format('select cardinality((mbus.%I($1, $2, $3, $4)).ids)', 'look$' || c) into matching_in_sample
        using stands, stands.low + size, gone, size;
        matching := matching + matching_in_sample;
    end loop;
    return (horizon - id) * matching / (many * size);
end
$$;

-- The messages apart of a consumer, at most upto and one of each kind: those that it can receive and those that have to wait.
-- delayed: how many of the latter have a delay.
create function mbus.ahead_apart(
    known mbus.queue, c integer, upto integer, out ready bigint[], out waiting bigint[], out delayed integer
)
language plpgsql as $$
declare
    free bigint[] := mbus.set_free(c, known.parts, upto + 1, true);
begin
    ready := array(
        select a.id from mbus.apart as a
        where a.consumer = c and a.wait_consumer is null and not a.failed and a.due = '-infinity'
          and coalesce(a.expires > clock_timestamp(), true)
        order by a.id limit upto + 1)
        || array(
            select a.id from mbus.apart_at(c, free) as x cross join lateral (select (x.message).*) as a
            where a.batch is null and not a.failed and coalesce(a.expires > clock_timestamp(), true)
              and (a.wait_consumer is not null or a.due > '-infinity')
              and (a.after is null or mbus.obstacle(a.after::text[]) is null)
              and (a.key is null or not exists (select from mbus.line_before(c, a.key, a.id))));
    select coalesce(array_agg(w.id), '{}'), count(*) filter (where w.is_delayed) into waiting, delayed
    from (
        (select a.id, true as is_delayed from mbus.apart as a
         where a.consumer = c and a.wait_consumer is null and not a.failed and a.due > '-infinity' and a.due < 'infinity'
         order by a.due limit upto + 1)
        union all
        (select a.id, false from mbus.apart as a where a.consumer = c and a.wait_consumer is not null
         order by a.wait_consumer, a.wait_part, a.wait_id limit upto + 1)
    ) as w
    where w.id <> all (ready);
end
$$;

-- The result of mbus.lag() for a consumer, with the number of waiting messages that have a delay. The others wait for another
-- message.
create function mbus.lag_of(c mbus.consumer, upto integer) returns jsonb
language plpgsql volatile
set enable_seqscan = off
set enable_bitmapscan = off
set enable_mergejoin = off
set enable_hashjoin = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
    known mbus.queue := mbus.queue_named(c.qname);
    log record;
    apart record;
    left_over record;
    ready bigint;
    waiting bigint;
    ages timestamptz[];
begin
    if coalesce(upto < 0, true) then
        raise invalid_parameter_value using message =
            'the lag cannot be computed: upto must not be negative or null; give the number up to which messages are counted';
    end if;
    -- Read a few more messages than requested, because some of the first may have to wait.
    log := mbus.ahead_in_log(known, c.id, least(greatest(upto, 1000), 1000000));
    apart := mbus.ahead_apart(known, c.id, upto);
    select coalesce(sum(b.count), 0) as counted, min((b.batch ->> 'oldest')::timestamptz) as oldest into left_over
    from mbus.pending(c.qname, c, null) as b;
    ready := cardinality(log.ready) + cardinality(apart.ready) + left_over.counted;
    waiting := cardinality(log.waiting) + cardinality(apart.waiting);
    -- Not all messages were looked at, so count at least one message as ready. Behind those that wait, others may be ready. A
    -- claim finds them, because it sets aside those that wait.
    if log.more then
        ready := greatest(1, upto + 1, ready + mbus.estimate_behind(known, c.id, log.highest, least(upto, 16)));
    end if;
    execute format('select array[(select min(l.added) from mbus.%1$I as l where l.id = any ($1)), '
        '(select min(l.added) from mbus.%1$I as l where l.id = any ($2))]', 'log$' || c.qname)
    into ages using (log.ready || apart.ready), (log.waiting || apart.waiting);
    ages[1] := least(ages[1], left_over.oldest);
    return jsonb_build_object(
        'ready', ready, 'ready_exact', not log.more and cardinality(apart.ready) <= upto,
        'ready_age', extract(epoch from clock_timestamp() - ages[1]),
        'waiting', waiting, 'waiting_exact', not log.more and cardinality(apart.waiting) <= upto,
        'delayed', log.delayed + apart.delayed,
        'waiting_age', extract(epoch from clock_timestamp() - ages[2]),
        'faults', (select count(*) from (
            select from mbus.fault as f where f.qname = c.qname and f.consumer = c.name limit 1000) as x));
end
$$;

create function mbus_sealed.lag(caller pgchange.caller, qname text, cname text, upto integer) returns jsonb
language plpgsql volatile security definer as $$
begin
    return mbus.lag_of(mbus.feed_consumer(caller, qname, cname), upto) - 'delayed';
end
$$;
comment on function mbus_sealed.lag(pgchange.caller, text, text, integer) is
    'How many messages a claim of this consumer would find now, and how many wait for their time or for another message. Batches '
    'at work count as neither.';

create function mbus_sealed.point(caller pgchange.caller, qname text) returns jsonb
language plpgsql stable security definer as $$
declare
    known mbus.queue := mbus.queue_named(qname);
begin
    perform mbus.demand(caller, 'consume', qname);
    return jsonb_build_object(
        'snapshot', pg_current_snapshot(), 'upto', coalesce(pg_sequence_last_value(known.seq), 0));
end
$$;
comment on function mbus_sealed.point(pgchange.caller, text) is
    'A point to wait for: all messages that are in a queue now.';

create function mbus_sealed.passed(caller pgchange.caller, qname text, cname text, goal jsonb) returns jsonb
language plpgsql volatile security definer
set enable_seqscan = off
set jit = off
as $$
declare
    c mbus.consumer := mbus.feed_consumer(caller, qname, cname);
    known mbus.queue := mbus.queue_named(qname);
    upto bigint := goal ->> 'upto';
    seen mbus.seen;
    found_one boolean;
begin
    seen := mbus.look_ahead(known, c.id, upto, 1000);
    execute format(
        'select cardinality($1) = 1000 or exists (select from mbus.%1$I as l where l.id = any ($1) and l.id <= $4 and pg_visible_in_snapshot(l.txid, $2)) '
        'or exists (select from mbus.apart as a cross join lateral (select x.* from mbus.%1$I as x where x.id = a.id offset 0) as l '
        'where a.consumer = $3 and a.id <= $4 and not a.failed and pg_visible_in_snapshot(l.txid, $2) '
        'and (a.batch is not null or coalesce(l.expires > clock_timestamp(), true)))', 'log$' || qname)
    into found_one using array(select abs(i) from unnest(seen.ids) as i), (goal ->> 'snapshot')::pg_snapshot, c.id, upto;
    return jsonb_build_object('goal', goal, 'passed', not found_one);
end
$$;
comment on function mbus_sealed.passed(pgchange.caller, text, text, jsonb) is
    'Whether a consumer has received all messages of a goal that mbus.point() returned.';
