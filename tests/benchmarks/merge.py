"""Merging a million staged rows by key against a plain ``insert ... on conflict`` of the same rows, into a table that has
half of them."""

from __future__ import annotations

import os
from collections.abc import Callable

import psycopg

from airflow_pgchange.feeds import CommitFeed
from airflow_pgchange.results import staging
from airflow_pgchange.results.merge import Staged, merge
from airflow_pgchange.results.merge_modes import Mode
from demo.flights import DDL
from tests.benchmarks.measure import Report, ratio, section, side_by_side, wall
from tests.benchmarks.spark import claimed

ROWS = int(os.environ.get("ROWS", "1000000"))
ROUNDS = 5
ATTEMPT = 7
COLUMNS = (("id", "bigint"), ("carrier", "text"), ("n", "bigint"), ("delay", "bigint"))
STAGE = f"""
insert into pgchange_staging.{{}}
select {ATTEMPT}, null, g, 'UA', g % 9, g % 60 from generate_series(1, {ROWS}) as g
"""
PLAIN = """
insert into public.target as t (id, carrier, n, delay) select id, carrier, n, delay from pgchange_staging.{}
on conflict (id) do update set carrier = excluded.carrier, n = excluded.n, delay = excluded.delay
"""


def run(conninfo: str, report: Report) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute(DDL)
        connection.execute(
            "create table public.target (id bigint primary key, carrier text, n bigint, delay bigint)"
        )
        tracked = connection.execute("select revision.track('public.movement')").fetchone()
        batch = claimed(conninfo, CommitFeed("merged", tracked[0] if tracked else 0))

        def filled() -> str:
            connection.execute("truncate public.target")
            connection.execute(
                "insert into public.target select g, 'AA', 0, 0 from generate_series(1, %s, 2) as g", [ROWS]
            )
            table = staging.create(connection, batch, "public.target", COLUMNS)
            connection.execute(STAGE.format(table))
            connection.execute("checkpoint")
            return table

        def timed(work: Callable[[str], None]) -> float:
            table = filled()
            with connection.transaction(force_rollback=True):
                return wall(lambda: work(table))

        def ours(table: str) -> None:
            winners = ((ATTEMPT, ROWS),)
            staged = Staged(
                "public.target", ("id",), Mode.REPLACE, table, COLUMNS, winners, batch.id, batch.attempt
            )
            merge(connection, batch, [staged])

        def plain(table: str) -> None:
            connection.execute(PLAIN.format(table))

        with section(f"{ROWS:,} staged rows into a table that has half of them"):
            figures = side_by_side(ROUNDS, lambda: timed(ours), lambda: timed(plain))
            for name, row in zip(("merge", "insert ... on conflict"), figures, strict=True):
                report.say(name, sorted(row)[ROUNDS // 2], "s")
            report.say("merge / insert ... on conflict", ratio(*figures), "x", most=1.15)
