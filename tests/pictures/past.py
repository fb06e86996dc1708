"""The last hour of every consumer, written into the database as if the page had been open all the time."""

from __future__ import annotations

from typing import Any

import psycopg

SAMPLES = """
insert into pgchange.sample (sampled_by, kind, consumer, at, ready, ready_exact, waiting, oldest_seconds, number)
select current_user, s.kind, s.consumer, now() - make_interval(secs => ago), x.ready, x.ready <= 1000,
       case when is_stuck and ago < stuck then round(s.waiting * (1 - ago / stuck)) else 0 end,
       case when is_stuck and ago < stuck then stuck - ago
            when ago < ramp then ramp - ago
            when x.ready > 0 then since end,
       row_number() over ()
from pgchange.status() as s
cross join generate_series(%(every)s, 3600, %(every)s) as g(ago)
-- Its batches, by the name of the consumer: how often, and when the last one was.
cross join lateral (select 80 + abs(hashtext(s.consumer)) %% 60 as period) as p
cross join lateral (select (3600 - ago + abs(hashtext(s.kind || s.consumer)) %% 97) %% period as since) as b
cross join lateral (
    select s.error is not null or s.held_back_by is not null as is_stuck, 840.0 as stuck,
           greatest(least(s.ready, 900), 60) as most, greatest(s.oldest_seconds, 20) as ramp
) as m
cross join lateral (
    select case
        when is_stuck and ago < stuck then round(s.ready * (1 - ago / stuck))
        when ago < ramp then round(s.ready * (1 - ago / ramp))
        else round(most * (0.3 + 0.25 * sin(ago / 500.0)) * since / period)
    end::bigint as ready
) as x
where s.ready is not null
"""
BATCHES = """
insert into pgchange.batch (
    kind, consumer, batch_id, attempt, count, claimed_at, acked_at, seconds, number, noted_at, outputs, run)
select s.kind, s.consumer, gen_random_uuid(), 1, x.count, x.began, x.began + make_interval(secs => x.took + 0.3),
       jsonb_build_object(
           'claim', round((0.02 + x.part * 0.05)::numeric, 2), 'process', round((x.took * 0.8)::numeric, 2),
           'merge', round((x.took * 0.2)::numeric, 2)), 0, x.began,
       jsonb_build_array(jsonb_build_object(
           'target', 'lake.flights.movement', 'rows', x.count, 'location', 's3://airline/flights/movement',
           'version', (4000000000000000000 + abs(hashtext(s.consumer || n)::bigint) * 104729)::text)),
       %(run)s || '/asset__' || to_char(x.began at time zone 'UTC', 'YYYY-MM-DD"T"HH24"%%3A"MI"%%3A"SS')
           || '%%2B00%%3A00/keep/-1/1'
from pgchange.status() as s
cross join generate_series(1, 40) as n
cross join lateral (select abs(hashtext(s.consumer || n)) %% 100 / 100.0 as part) as p
cross join lateral (
    -- Before the one that is at work now.
    select 40 + round(part * 260) as count, s.claimed_at - make_interval(secs => n * 85 - 40 + part * 30) as began,
           0.8 + part * 3 as took, part
) as x
where s.consumer = %(consumer)s
"""


def write(connection: psycopg.Connection[Any]) -> None:
    """Replace the samples of every consumer, and the batches of a consumer."""
    connection.execute("truncate pgchange.sample")
    connection.execute(SAMPLES, {"every": 5})
    connection.execute(BATCHES, {"consumer": "commits:movement_audit/0", "run": "movement_audit"})
