"""The cost of reading a worker's pods in SQL does not depend on the number of pods and workers."""

from __future__ import annotations

from functools import partial

import psycopg

from airflow_pgchange import tubes
from tests.benchmarks.measure import Report, cpu_of, section

PODS = (10_000, 1_000_000)
WORKERS = (1, 4, 64)
SHARDS = 128
LIMIT = 100
RUNS = 500
PAGE_COSTS = (1.1, 4)


def run(conninfo: str, report: Report) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        for pods in PODS:
            for workers in WORKERS:
                by_hand(connection, report, pods, workers)


def by_hand(connection: psycopg.Connection, report: Report, pods: int, workers: int) -> None:
    name = f"reads_{pods}_{workers}"
    tubes.ensure(connection, name, workers)
    connection.execute(
        f"insert into {name} (op, shard, ids) select case when g % 10 = 0 then 'B' else 'T' end, "
        f"g % {SHARDS}, array[g] from generate_series(1, {pods}) as g"
    )
    with section(f"{pods:,} pods, {workers} workers: {LIMIT} of one"):
        for cost in PAGE_COSTS:
            connection.execute(f"set random_page_cost = {cost}")
            query = connection.execute(
                "select tube.tube_pods_sql(%s, %s, %s)", [name, workers, workers - 1]
            ).fetchone()
            assert query is not None
            connection.execute(f"prepare pods as {query[0]} limit {LIMIT}")
            report.say(f"at random_page_cost {cost}, without sending", least(connection), "ms", most=0.2)
            read = partial(repeated, connection, "execute pods", RUNS)
            report.say("CPU of the backend, with sending", cpu_of(connection, read) / RUNS * 1000, "ms")
            connection.execute("deallocate pods")
    connection.execute("select tube.tube_ensure_absent(%s)", [name])


def repeated(connection: psycopg.Connection, query: str, times: int) -> None:
    for _ in range(times):
        connection.execute(query, prepare=False).fetchall()


def least(connection: psycopg.Connection) -> float:
    """Return the shortest run, because other work on the machine can only make a run longer."""
    told = "explain (analyze, timing off, format json) execute pods"
    runs = (connection.execute(told, prepare=False).fetchone() for _ in range(RUNS))
    return min(float(row[0][0]["Execution Time"]) for row in runs if row is not None)
