"""Maintenance of a database in a loop: one process beside Airflow, or without it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

import psycopg

from airflow_pgchange.admin.maintenance import Report, maintain
from airflow_pgchange.errors import InvalidArgument, PgChangeError
from airflow_pgchange.feeds.argument_checks import Seconds, seconds
from airflow_pgchange.feeds.connections import connect
from airflow_pgchange.feeds.queries import ask

log = logging.getLogger(__name__)

SHORTEST = timedelta(seconds=1)
LONGEST_REST = 600
"""Longest pause in seconds between runs after errors, unless ``every`` is longer. The maintenance DAG runs as often."""


def maintain_every(conninfo: str, every: Seconds, **options: Any) -> None:
    """Maintain a database, a run ``every`` so often, until this raises KeyboardInterrupt, as on SIGINT.

    ``options`` are those of ``maintain``. Log a line for each run. After an error the next run is twice as far away, up
    to ten minutes. Of several processes that maintain the same database one works, and the others wait for their turn.
    Raises InvalidArgument.
    """
    period = seconds("every", every, least=SHORTEST)
    rest = period
    while True:
        began = monotonic()
        try:
            maintain_once(conninfo, **options)
            rest = period
        except InvalidArgument:
            raise
        except (PgChangeError, psycopg.Error) as error:
            rest = min(rest * 2, max(period, LONGEST_REST))
            log.error(
                "maintenance failed, and is retried in %.0f s: %s: %s",
                rest,
                type(error).__name__,
                str(error).strip(),
            )
        sleep(max(0.0, began + rest - monotonic()))


def maintain_once(conninfo: str, **options: Any) -> None:
    """Maintain a database, unless another process does, and log a line. Raises PgChangeError if a step fails."""
    with _alone(conninfo) as alone:
        if not alone:
            log.info("maintenance skipped: another process maintains this database")
            return
        began = monotonic()
        with connect(conninfo, primary=True) as connection:
            report = maintain(connection, **options)
        log.info("maintained in %.1f s: %s", monotonic() - began, _line(report))
    if report.failed:
        raise PgChangeError("; ".join(report.failed))


@contextmanager
def _alone(conninfo: str) -> Iterator[bool]:
    """Hold the lock of the process that maintains a database, in a transaction: a pooler may share sessions.

    The transaction has neither an id nor a snapshot, so it holds back no vacuum.
    """
    with connect(conninfo, primary=True) as connection, connection.transaction():
        lock = "select pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtextextended('pgchange maintenance', 0))"
        yield ask(connection, lock)


def _line(report: Report) -> str:
    attention = f"{len(report.attention)} findings, see airflow-pgchange health" if report.attention else ""
    return "; ".join([*report.done, *([attention] if attention else [])]) or "nothing to do"
