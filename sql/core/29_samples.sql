-- The last hour of every consumer, for pages: how far behind it was, about every five seconds while somebody looks. Nothing that
-- consumers do depends on it.

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
comment on table pgchange.sample is 'What pgchange.status() said in the last hour, by the role that it was said to. number counts a role''s, so that all but the last '
    'of them are found without a look at these.';

create index sample_at on pgchange.sample (at);
create index sample_number on pgchange.sample (sampled_by, number);

create function pgchange_sealed.note_samples(caller pgchange.caller, seen jsonb) returns bigint
language plpgsql security definer as $$
declare
    noted_at timestamptz;
    -- Those of an hour of over a thousand consumers: who makes up more of them fills no disk.
    most constant bigint := 1000000;
    newest bigint;
    noted bigint;
begin
    perform pgchange.check_face(caller, 'pgchange.note_samples(jsonb)');
    -- Of several who look at the same time one notes.
    if not pg_try_advisory_xact_lock(hashtextextended('pgchange.note_samples ' || caller, 0)) then
        return 0;
    end if;
    -- Read the clock and the last number under the lock: otherwise a session that waited before the lock would note the same seconds
    -- as the session that had it before.
    noted_at := clock_timestamp();
    newest := coalesce((select s.number from pgchange.sample as s where s.sampled_by = caller order by s.number desc limit 1), 0);
    insert into pgchange.sample (sampled_by, kind, consumer, at, ready, ready_exact, waiting, oldest_seconds, number)
    select caller, n.kind, n.consumer, noted_at, n.ready, n.ready_exact, n.waiting, n.oldest_seconds, newest + row_number() over ()
    from (
        -- One key is no longer than an index takes, and a look no larger than a page is.
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
    'Note what pgchange.status() has just said to the caller, [{kind, consumer, ready, ready_exact, waiting, oldest_seconds}, '
    '...], of consumers of whom nobody did in the last seconds; forgets what is older than an hour, and all but the latest million '
    'of the caller''s. Returns how many were noted.';

create function pgchange_sealed.samples(caller pgchange.caller, of_kind text, of_consumer text) returns setof pgchange.sample
language sql stable security definer as $$
    select s.* from pgchange.sample as s
    where s.sampled_by = caller and s.kind = of_kind and s.consumer = left(of_consumer, 600) and s.at > now() - interval '1 hour'
    order by s.at
$$;
comment on function pgchange_sealed.samples(pgchange.caller, text, text) is
    'How far behind a consumer was in the last hour, the oldest first, as far as the caller has noted it.';

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
        -- By when it was claimed: a batch that took longer than an hour tells nothing of these minutes.
        select s.kind, s.consumer, sum(b.count) as changes
        from seen as s
        join pgchange.batch as b on (b.kind, b.consumer) = (s.kind, s.consumer) and b.acked_at > s.since and b.acked_at <= s.upto
        where b.noted_at > now() - interval '1 hour'
        group by s.kind, s.consumer
    ), marked as materialized (
        -- By their time, as they lie in the table: of each consumer by itself they would be found one by one.
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
    'Of each consumer that the caller has noted: changes a second that came and that were processed lately, of the feeds that '
    'the caller looks after, null where that is not known exactly; and what was ready every two minutes of the last hour, the '
    'last one last, null where nobody looked.';

select pgchange.show_sealed('pgchange');
