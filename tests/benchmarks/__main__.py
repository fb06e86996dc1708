"""Run the benchmarks for `make bench`: ``python -m tests.benchmarks [NAME ...]``.

Figures are medians, and ratios compare measurements that take turns in one run. The exit code is 1 if a figure misses
its goal. If a run measures all figures of a picture of ``docs/performance.md``, it records them in
``docs/images/performance.json`` and draws the picture anew. The server is the system's PostgreSQL. ``SERVER=18``
chooses a server of that major version with contrib.
"""

from __future__ import annotations

import importlib
import os
import sys

import psycopg

from airflow_pgchange.admin import schema
from demo.postgres import Cluster
from tests.benchmarks.measure import Report
from tests.pictures.performance import record
from tests.suite.clusters import ON_DEMAND, SERVERS

DURABLE = {"fsync": "on", "full_page_writes": "on"}
"""Commits are durable, as on a server in production."""

BENCHMARKS = (
    "capture",
    "sizes",
    "queue",
    "watch",
    "wake",
    "spark",
    "spark_start",
    "merge",
    "mirror",
    "lake",
    "tubes",
    "tube_reads",
    "events",
    "event_upkeep",
    "queues",
    "singles",
    "one",
    "detached",
    "burst",
    "topology",
    "year",
    "page",
    "runs",
    "many",
    "tables",
    "idle",
)


def main(names: list[str]) -> int:
    report, server = Report(), {**SERVERS, **ON_DEMAND}[os.environ.get("SERVER", "system")]()
    for name in names or BENCHMARKS:
        report.benchmark = name
        module = importlib.import_module(f"tests.benchmarks.{name}")
        cluster = Cluster.create(server, {**DURABLE, "autovacuum": "off", "max_wal_size": "16GB"})
        try:
            with psycopg.connect(cluster.conninfo(), autocommit=True) as connection:
                schema.install(connection)
                version = connection.info.server_version // 10000
            module.run(cluster.conninfo(), report)
        finally:
            cluster.remove()
    record(report.figures, f"{os.cpu_count()} cores, PostgreSQL {version}")
    return 0 if report.met else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
