"""Periodic maintenance of a database with our schemas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, LiteralString, TypeVar

import psycopg

from airflow_pgchange.admin import health, manual_operations, versions
from airflow_pgchange.admin.steps import AGAIN, MANY_STEPS, all_lines, lines_of
from airflow_pgchange.errors import ConsumerBusy, InvalidArgument, PgChangeError, ServerUnavailable
from airflow_pgchange.events.dispatch import dispatch
from airflow_pgchange.feeds.argument_checks import Bytes, Seconds, span
from airflow_pgchange.feeds.connections import kept_open
from airflow_pgchange.feeds.error_translation import translated
from airflow_pgchange.feeds.queries import ask, rows
from airflow_pgchange.messages import queues

SHRINKING = 3
"""How often the default partition of the commit queue is vacuumed after its rows have moved."""

PLACED = 10_000
"""Maximum number of scheduled events that one transaction moves."""

EVENT_TABLES = ("pgmb.dispatched", "pgmb.events")

CAPTURES: Mapping[str, tuple[LiteralString, LiteralString]] = {
    "tube": (
        "select name, 'its capture for tube ' || tube, array[tube, tbl::oid::text] from tube.to_recapture()",
        "select tube.recapture(%s, %s::oid)",
    ),
    "pgmb": (
        "select name, 'the capture of its mutations', array[tbl::oid::text] from pgmb.to_recapture()",
        "select pgmb.recapture(%s::oid)",
    ),
}
"""For each system, a query for the triggers that need to be recreated, and the statement that recreates one of them.
The query returns the table's name, a description and the arguments of the statement."""

Line = TypeVar("Line")


@dataclass
class Report:
    """The result of maintenance.

    ``done``: changes made or postponed. ``attention``: problems that a person must fix. ``failed``: errors of steps.
    """

    done: list[str] = field(default_factory=list)
    attention: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def add(self, lines: list[Line], step: Callable[[], list[Line]]) -> None:
        """Run a step and append its report to ``lines``. If it fails, record the error, so that other steps still run."""
        try:
            with translated():
                lines.extend(step())
        except (InvalidArgument, ServerUnavailable):
            raise
        except (PgChangeError, psycopg.Error) as error:
            self.failed.append(str(error).strip())


def maintain(
    connection: psycopg.Connection[Any],
    *,
    width: int = 1_000_000,
    ahead: int = 2,
    retention: Seconds | None = None,
    retention_bytes: Bytes | None = None,
    retention_count: int | None = None,
    saga_retention: Seconds | None = None,
    letter_retention: Seconds | None = None,
) -> Report:
    """Maintain all of our systems in one database, each step in its own transaction.

    ``width`` and ``ahead``: create ``ahead`` future partitions of ``width`` transactions each. More are created
    if the cluster draws more transaction ids than that in ten times the time between two runs.

    ``retention``, ``retention_bytes`` and ``retention_count``: trim the history of the commit queue, the event log and
    the topology that is older. The latter two keep the newest bytes or changes of each feed. Only history goes that
    every consumer has processed. None trims nothing. The age of events is ``partition_retention_period`` of
    ``pgmb.config``.

    ``saga_retention``: delete sagas
    that ended longer ago; None deletes none. ``letter_retention``: drop dead letters that were given up longer ago, are
    not being sent again, and that the role may drop; None drops none.

    No step waits long for a lock. If an object is locked, its work is postponed to the next run, and reported.
    """
    report = Report()
    with kept_open(connection):
        with translated():
            installed = {state.system: state for state in versions.installed(connection)}
        for state in installed.values():
            if state.version != state.needed:
                report.attention.append(
                    f"schema {state.system} is at version {state.version}, this package needs {state.needed}"
                    ": airflow-pgchange upgrade"
                )
            if state.intact is False:
                report.attention.append(
                    f"schema {state.system} was installed from other files than this package's, under the same version"
                )
        for system, step in _steps(
            connection,
            width,
            ahead,
            limits=manual_operations.limits_of(retention, retention_bytes, retention_count),
            saga_retention=saga_retention,
            letter_retention=letter_retention,
        ):
            if system in installed:
                report.add(report.done, step)
        for system, (find, recreate) in CAPTURES.items():
            if system in installed:
                _recreate_captures(report, connection, find, recreate)
        if "core" in installed:
            report.add(
                report.attention, lambda: list(map(str, health.findings(connection, report.failed.append)))
            )
        return report


def trim(
    connection: psycopg.Connection[Any],
    *,
    retention: Seconds | None = None,
    retention_bytes: Bytes | None = None,
    retention_count: int | None = None,
) -> Report:
    """Trim the history of all feeds that every consumer has processed. The limits are those of ``maintain``."""
    limits = manual_operations.limits_of(retention, retention_bytes, retention_count)
    report = Report()
    with kept_open(connection):
        with translated():
            installed = {state.system for state in versions.installed(connection)}
        for system, step in _trimming(connection, limits):
            if system in installed:
                report.add(report.done, step)
    return report


def _steps(
    connection: psycopg.Connection[Any],
    width: int,
    ahead: int,
    *,
    limits: manual_operations.Limits,
    saga_retention: Seconds | None,
    letter_retention: Seconds | None,
) -> Iterator[tuple[str, Callable[[], list[str]]]]:
    """Yield the steps in order, each with its system."""
    yield "revision", partial(_partitioned, connection, width, ahead)
    yield "revision", partial(lines_of, connection, "revision.recapture")
    yield "pgmb", partial(_dispatched, connection)
    yield "pgmb", partial(_placed, connection)
    # Trim first: it shrinks the default partition, which PostgreSQL scans when the next partition is created.
    yield from _trimming(connection, limits)
    for step in ("make_partitions", "drop_emptied"):
        for table in EVENT_TABLES:
            yield "pgmb", partial(all_lines, connection, f"pgmb.{step}", table)
    for step in ("expire_subscriptions", "forget_faults", "forget_dropped", "trim_published"):
        yield "pgmb", partial(lines_of, connection, f"pgmb.{step}")
    yield "mbus", partial(queues.look_after, connection)
    yield "mbus", partial(queues.roll_back_overdue, connection)
    if saga_retention is not None:
        yield "mbus", partial(queues.forget_sagas, connection, saga_retention)
    if letter_retention is not None:
        kept_for = span("letter_retention", letter_retention)
        yield "core", partial(all_lines, connection, "pgchange.expire_letters", kept_for)
    for step in ("trim_batches", "trim_watchers", "drop_leftovers"):
        yield "core", partial(all_lines, connection, f"pgchange.{step}")


def _trimming(
    connection: psycopg.Connection[Any], limits: manual_operations.Limits
) -> Iterator[tuple[str, Callable[[], list[str]]]]:
    """Yield the steps that trim the history of each feed that keeps some."""
    if any(limit is not None for limit in limits):
        yield "pubsub", partial(all_lines, connection, "pubsub.trim_commit_queue", *limits)
        yield "topology", partial(_trimmed_topology, connection, limits)
    for table in EVENT_TABLES:
        yield "pgmb", partial(_trimmed_events, connection, table, limits)


def _trimmed_events(
    connection: psycopg.Connection[Any], table: str, limits: manual_operations.Limits
) -> list[str]:
    """Trim a table of the event log. The age of events is a setting of the log itself."""
    now = ask(connection, "select pg_catalog.now()")
    return all_lines(connection, "pgmb.trim_partitions", table, now, *limits[1:])


def _trimmed_topology(connection: psycopg.Connection[Any], limits: manual_operations.Limits) -> list[str]:
    """Trim the catalogue's log, if this role may. A role that maintains the other feeds needs only to read it."""
    may = "select pg_catalog.has_function_privilege('topology.trim_log(interval,bigint,bigint)', 'execute')"
    if not ask(connection, may):
        return ["kept the catalogue's log: this role may not trim it, see topology.grant_admin()"]
    return [line for line in lines_of(connection, "topology.trim_log", *limits) if line is not None]


def _partitioned(connection: psycopg.Connection[Any], width: int, ahead: int) -> list[str]:
    """Make partitions of the commit queue, and empty its default partition."""
    lines = all_lines(connection, "revision.maintain_partitions", width, ahead)
    if not any(line.startswith("moved ") for line in lines):
        return lines
    # The file shrinks once the rows that were written meanwhile have moved, too. A role without the right to vacuum
    # gets a warning, and autovacuum does it later.
    for _ in range(SHRINKING):
        connection.execute("vacuum (skip_locked) revision.commit_queue_default")
        lines = [line for line in lines if not line.startswith(AGAIN)]
        lines += all_lines(connection, "revision.maintain_partitions", width, ahead)
    return lines


def _recreate_captures(
    report: Report, connection: psycopg.Connection[Any], find: LiteralString, recreate: LiteralString
) -> None:
    """Recreate captures, each table in its own transaction, so that no lock is held while waiting for another table."""
    captures: list[tuple[str, str, list[str]]] = []
    report.add(captures, lambda: rows(connection, find))
    for name, capture, arguments in captures:
        try:
            with translated():
                connection.execute(recreate, arguments)
            report.done.append(f"{name}: {capture} was repaired")
        except ServerUnavailable:
            raise
        except ConsumerBusy:
            report.done.append(f"{name}: postponed, it is being written")
        except (PgChangeError, psycopg.Error) as error:
            report.attention.append(f"{name}: {capture} cannot be repaired: {str(error).strip()}")


def _dispatched(connection: psycopg.Connection[Any]) -> list[str]:
    """Dispatch waiting events."""
    total = 0
    for _ in range(MANY_STEPS):
        chunk = dispatch(connection)
        total += chunk.events
        if not chunk.more:
            break
    return [f"dispatched {total} events"] if total else []


def _placed(connection: psycopg.Connection[Any]) -> list[str]:
    """Move scheduled events to their partitions, at most ``PLACED`` in a transaction, to keep locks short."""
    total = 0
    for _ in range(MANY_STEPS):
        query = "select pgmb.place_scheduled(most => %s)"
        placed = ask(connection, query, [PLACED])
        total += placed
        if placed < PLACED:
            break
    return [f"placed {total} scheduled events"] if total else []
