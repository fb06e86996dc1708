"""What a database with our schemas needs from time to time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, LiteralString, TypeVar

import psycopg
from psycopg import sql

from airflow_pgchange.admin import by_hand, health, versions
from airflow_pgchange.errors import ConsumerBusy, InvalidArgument, PgChangeError, ServerUnavailable
from airflow_pgchange.events.dispatch import dispatch
from airflow_pgchange.feeds.checks import Seconds, span
from airflow_pgchange.feeds.connections import kept_open
from airflow_pgchange.feeds.errors import translated
from airflow_pgchange.feeds.queries import ask, call, rows
from airflow_pgchange.messages import queues

MANY_STEPS = 100
"""After so many of one kind, what is still to be dispatched or placed is left to the next time."""

LEFT = "left "
AGAIN = (LEFT, "kept ", "postponed ")
"""How a line begins that says that more is left for another transaction, and lines that are said again in that one."""

PLACED = 10_000
"""Scheduled events that are placed in one transaction."""

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
"""What finds a system's captures that are to be mended, each with a table's name, what it is and the arguments of what
mends it, which is beside it."""

Line = TypeVar("Line")


@dataclass
class Report:
    """``done``: what was changed, or postponed. ``attention``: what only a person can change. ``failed``: why a step
    could not be done."""

    done: list[str] = field(default_factory=list)
    attention: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def add(self, lines: list[Line], step: Callable[[], list[Line]]) -> None:
        """Add what a step says to ``lines``; where one fails the others go on."""
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
    saga_retention: Seconds | None = None,
    letter_retention: Seconds | None = None,
) -> Report:
    """Look after one database: whichever of our systems it holds, each step in a transaction of its own.

    Partitions: ``ahead`` of ``width`` transactions each. ``retention``: trim history that is older than that
    and that every consumer has processed; None trims nothing. ``saga_retention``: forget sagas that
    ended longer ago; None forgets none. ``letter_retention``: drop the dead letters that were given up longer ago, that
    are not on their way, and that the role may drop; None drops none. No step waits long for a lock: what is busy is
    postponed to the next time, and said.
    """
    report = Report()
    with kept_open(connection):
        with translated():
            held = {state.system: state for state in versions.installed(connection)}
        for state in held.values():
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
            retention=retention,
            saga_retention=saga_retention,
            letter_retention=letter_retention,
        ):
            if system in held:
                report.add(report.done, step)
        for system, (find, mend) in CAPTURES.items():
            if system in held:
                _mend(report, connection, find, mend)
        if "core" in held:
            report.add(
                report.attention, lambda: list(map(str, health.findings(connection, report.failed.append)))
            )
        return report


def _steps(
    connection: psycopg.Connection[Any],
    width: int,
    ahead: int,
    *,
    retention: Seconds | None,
    saga_retention: Seconds | None,
    letter_retention: Seconds | None,
) -> Iterator[tuple[str, Callable[[], list[str]]]]:
    """What is done, in order, each with the system that it is about."""
    yield "revision", partial(_lines, connection, "revision.maintain_partitions", width, ahead)
    yield "revision", partial(_lines, connection, "revision.recapture")
    if retention is not None:
        yield "pubsub", partial(by_hand.trim_commit_queue, connection, retention)
    yield "pgmb", partial(_dispatched, connection)
    yield "pgmb", partial(_placed, connection)
    # Trimming gives back the room of a default partition, which is read before the next one is made.
    for step in ("trim_partitions", "make_partitions", "drop_emptied"):
        for table in ("pgmb.dispatched", "pgmb.events"):
            yield "pgmb", partial(_all_lines, connection, f"pgmb.{step}", table)
    for step in ("expire_subscriptions", "forget_faults", "forget_dropped", "trim_published"):
        yield "pgmb", partial(_lines, connection, f"pgmb.{step}")
    yield "mbus", partial(queues.look_after, connection)
    yield "mbus", partial(queues.roll_back_overdue, connection)
    if saga_retention is not None:
        yield "mbus", partial(queues.forget_sagas, connection, saga_retention)
    if letter_retention is not None:
        kept_for = span("letter_retention", letter_retention)
        yield "core", partial(_all_lines, connection, "pgchange.expire_letters", kept_for)
    for step in ("trim_batches", "trim_watchers", "drop_leftovers"):
        yield "core", partial(_all_lines, connection, f"pgchange.{step}")


def _lines(connection: psycopg.Connection[Any], function: str, *arguments: Any) -> list[str]:
    query = sql.SQL("select line::text from {} as line").format(call(function, *arguments))
    return [line for (line,) in rows(connection, query)]


def _all_lines(connection: psycopg.Connection[Any], function: str, *arguments: Any) -> list[str]:
    """Call it, each time in a transaction of its own, until it leaves nothing to the next time."""
    said: list[str] = []
    for _ in range(MANY_STEPS):
        lines = _lines(connection, function, *arguments)
        said = [line for line in said if not line.startswith(AGAIN)] + lines
        if not any(line.startswith(LEFT) for line in lines):
            break
    return said


def _mend(
    report: Report, connection: psycopg.Connection[Any], find: LiteralString, mend: LiteralString
) -> None:
    """Each table in a transaction of its own: it waits for no table while it holds another."""
    found: list[tuple[str, str, list[str]]] = []
    report.add(found, lambda: rows(connection, find))
    for name, capture, arguments in found:
        try:
            with translated():
                connection.execute(mend, arguments)
            report.done.append(f"{name}: {capture} was mended")
        except ServerUnavailable:
            raise
        except ConsumerBusy:
            report.done.append(f"{name}: postponed, it is being written")
        except (PgChangeError, psycopg.Error) as error:
            report.attention.append(f"{name}: {capture} cannot be mended: {str(error).strip()}")


def _dispatched(connection: psycopg.Connection[Any]) -> list[str]:
    """Dispatch the events that wait."""
    total = 0
    for _ in range(MANY_STEPS):
        done = dispatch(connection)
        total += done.events
        if not done.more:
            break
    return [f"dispatched {total} events"] if total else []


def _placed(connection: psycopg.Connection[Any]) -> list[str]:
    """Bring scheduled events to where they belong, so many in a transaction that nobody notices."""
    total = 0
    for _ in range(MANY_STEPS):
        query = "select pgmb.place_scheduled(most => %s)"
        placed = ask(connection, query, [PLACED])
        total += placed
        if placed < PLACED:
            break
    return [f"placed {total} scheduled events"] if total else []
