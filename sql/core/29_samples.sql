-- Samples of the lag of every consumer in the last hour, about every five seconds while the page is open. For the page only; no
-- consumer depends on them.

create table pgchange.sample (
    sampled_by name default current_user,
    kind text,
    consumer text,
    at timestamptz,
    ready bigint,
    ready_exact boolean,
    waiting bigint,
    oldest_seconds double precision,
    number bigint not null,
    primary key (sampled_by, kind, consumer, at)
);
comment on table pgchange.sample is
    'The rows of pgchange.status() in the last hour, by the role that read them. number counts the rows of a role, so that '
    'trimming finds the old rows without reading the others.';

create index sample_at on pgchange.sample (at);
create index sample_number on pgchange.sample (sampled_by, number);

create function pgchange_sealed.note_samples(caller pgchange.caller, seen jsonb) returns bigint
language plpgsql security definer as $$
declare
    noted_at timestamptz;
    -- An hour of over a thousand consumers. The limit keeps a role that samples invented consumers from filling the disk.
    most constant bigint := 1000000;
    newest bigint;
    noted bigint;
begin
    perform pgchange.check_face(caller, 'pgchange.note_samples(jsonb)');
    -- If several sessions of a role sample at the same time, only one stores its sample.
    if not pg_try_advisory_xact_lock(hashtextextended('pgchange.note_samples ' || caller, 0)) then
        return 0;
    end if;
    -- Read the clock and the last number under the lock. Otherwise a session that waited before the lock would store the same
    -- seconds as the session that had it before.
    noted_at := clock_timestamp();
    newest := coalesce((select s.number from pgchange.sample as s where s.sampled_by = caller order by s.number desc limit 1), 0);
    insert into pgchange.sample (sampled_by, kind, consumer, at, ready, ready_exact, waiting, oldest_seconds, number)
    select caller, n.kind, n.consumer, noted_at, n.ready, n.ready_exact, n.waiting, n.oldest_seconds, newest + row_number() over ()
    from (
        -- Cut the names to a length that fits into the index, and a sample to the size of a page.
        select distinct on (left(x.kind, 100), left(x.consumer, 600))
            left(x.kind, 100) as kind, left(x.consumer, 600) as consumer, x.ready, x.ready_exact, x.waiting, x.oldest_seconds
        from jsonb_to_recordset(seen) as x(
            kind text, consumer text, ready bigint, ready_exact boolean, waiting bigint, oldest_seconds double precision)
        where x.kind is not null and x.consumer is not null
        order by left(x.kind, 100), left(x.consumer, 600)
        limit 5000
    ) as n
    where not exists (
        select from pgchange.sample as s
        where (s.sampled_by, s.kind, s.consumer) = (caller, n.kind, n.consumer)
          and s.at > noted_at - interval '4.5 seconds' and s.at <= noted_at);
    get diagnostics noted = row_count;
    delete from pgchange.sample as s
    where s.ctid = any (array(
        select o.ctid from pgchange.sample as o where o.at < noted_at - interval '1 hour' for update skip locked));
    delete from pgchange.sample as s where s.sampled_by = caller and s.number <= newest + noted - most;
    return noted;
end
$$;
comment on function pgchange_sealed.note_samples(pgchange.caller, jsonb) is
    'Store samples that the caller has just read from pgchange.status(): [{kind, consumer, ready, ready_exact, waiting, '
    'oldest_seconds}, ...]. Consumers sampled within the last seconds are left out. Deletes samples older than an hour, and all '
    'but the latest million of the caller. Returns how many were stored.';

create function pgchange_sealed.samples(caller pgchange.caller, of_kind text, of_consumer text) returns setof pgchange.sample
language sql stable security definer as $$
    select s.* from pgchange.sample as s
    where s.sampled_by = caller and s.kind = of_kind and s.consumer = left(of_consumer, 600) and s.at > now() - interval '1 hour'
    order by s.at
$$;
comment on function pgchange_sealed.samples(pgchange.caller, text, text) is
    'The lag of a consumer in the last hour, the oldest sample first, as far as the caller has stored samples.';

create function pgchange_sealed.trends(caller pgchange.caller, lately interval default '5 minutes')
returns table (kind text, consumer text, rate_in double precision, rate_out double precision, ready bigint[])
language sql stable security definer
set jit = off
as $$
    with kept as materialized (
        select array(select r.kind from pgchange.registered as r where pgchange.keeps(caller, r.kind)) as kinds
    ), known as materialized (
        select distinct s.kind, s.consumer from pgchange.sample as s
        where s.sampled_by = caller and s.at > now() - interval '1 minute'
    ), seen as materialized (
        select k.kind, k.consumer, a.at as since, z.at as upto,
               nullif(extract(epoch from z.at - a.at), 0)::double precision as seconds,
               case when a.ready_exact and z.ready_exact then z.ready + z.waiting - a.ready - a.waiting end as more
        from known as k
        cross join lateral (
            select s.* from pgchange.sample as s
            where (s.sampled_by, s.kind, s.consumer) = (caller, k.kind, k.consumer) and s.at > now() - lately
            order by s.at limit 1
        ) as a
        cross join lateral (
            select s.* from pgchange.sample as s
            where (s.sampled_by, s.kind, s.consumer) = (caller, k.kind, k.consumer)
            order by s.at desc limit 1
        ) as z
    ), flown as materialized (
        -- Select by the time of the claim: a batch that took longer than an hour says nothing about these minutes.
        select s.kind, s.consumer, sum(b.count) as changes
        from seen as s
        join pgchange.batch as b on (b.kind, b.consumer) = (s.kind, s.consumer) and b.acked_at > s.since and b.acked_at <= s.upto
        where b.noted_at > now() - interval '1 hour'
        group by s.kind, s.consumer
    ), marked as materialized (
        -- Read all consumers of a time range together, because rows are stored in the order of time. Reading each consumer by
        -- itself would need random access.
        select m.number, s.kind, s.consumer, max(s.ready) as ready
        from generate_series(0, 29) as m(number)
        join pgchange.sample as s
            on s.sampled_by = caller
            and s.at > now() - make_interval(secs => 120 * m.number + 10) and s.at <= now() - make_interval(secs => 120 * m.number)
        group by m.number, s.kind, s.consumer
    ), drawn as materialized (
        select s.kind, s.consumer, array_agg(p.ready order by m.number desc) as ready
        from generate_series(0, 29) as m(number)
        cross join seen as s
        left join marked as p on (p.number, p.kind, p.consumer) = (m.number, s.kind, s.consumer)
        group by s.kind, s.consumer
    )
    select s.kind, s.consumer, case when s.more is not null and r.out is not null then greatest(r.out + s.more / s.seconds, 0) end, r.out, d.ready
    from seen as s
    cross join kept as k
    left join flown as f on (f.kind, f.consumer) = (s.kind, s.consumer)
    cross join lateral (
        select case when s.kind = any (k.kinds) then coalesce(f.changes, 0) / s.seconds end
    ) as r(out)
    left join drawn as d on (d.kind, d.consumer) = (s.kind, s.consumer)
$$;
comment on function pgchange_sealed.trends(pgchange.caller, interval) is
    'For each consumer that the caller has sampled: the changes per second that came and that were processed lately. Both are '
    'null if they are not known exactly, or if the caller does not administer all consumers of the feed. ready: the ready changes '
    'every two minutes of the last hour, the latest at the end; null if nobody sampled.';

select pgchange.show_sealed('pgchange');
