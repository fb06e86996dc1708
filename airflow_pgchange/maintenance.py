"""What a database with our schemas needs from time to time, and what a person should look at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import psycopg
from psycopg import sql

from airflow_pgchange import queues, schema, tubes
from airflow_pgchange.feeds import consumers
from airflow_pgchange.feeds.calls import call
from airflow_pgchange.feeds.errors import (
    ConsumerBusy,
    InvalidArgument,
    PgChangeError,
    ServerUnavailable,
    translated,
)

MANY_ATTEMPTS = 3
MANY_POLLS = 100
"""After so many, what is still published is left to the next time."""

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
    keep: str | None = None,
    keep_sagas: str | None = None,
) -> Report:
    """Look after one database: whichever of our systems it holds, each step in a transaction of its own.

    Partitions: ``ahead`` of ``width`` transactions each. ``keep``: trim history that is older than this
    PostgreSQL interval and that every consumer has processed; None trims nothing. ``keep_sagas``: forget sagas that
    ended longer ago; None forgets none. No step waits long for a lock: what is busy is postponed to the next time, and
    said.
    """
    report = Report()
    with translated():
        held = {state.system: state for state in schema.installed(connection)}
    for state in held.values():
        if state.version != state.needed:
            report.attention.append(
                f"schema {state.system} is at version {state.version}, this package needs {state.needed}"
                ": airflow pgchange upgrade"
            )
        if state.intact is False:
            report.attention.append(
                f"schema {state.system} was installed from other files than this package's, under the same version"
            )
    if "revision" in held:
        report.add(report.done, lambda: _lines(connection, "revision.maintain_partitions", width, ahead))
        report.add(report.done, lambda: _lines(connection, "revision.refresh_tracking"))
        report.add(report.attention, lambda: _tracking(connection))
    if "pubsub" in held:
        if keep is not None:
            report.add(report.done, lambda: consumers.trim(connection, keep))
        report.add(report.attention, lambda: _consumers(connection))
    if "tube" in held:
        _mend_tubes(connection, report)
        report.add(report.attention, lambda: _tubes(connection))
    if "pgmb" in held:
        _keep_log(report, connection)
    if "mbus" in held:
        report.add(report.done, lambda: queues.look_after(connection))
        if keep_sagas is not None:
            report.add(report.done, lambda: queues.forget_sagas(connection, keep_sagas))
        report.add(report.attention, lambda: queues.troubles(connection))
    if "dead_letters" in held:
        report.add(report.attention, lambda: _letters(connection))
    if "staging" in held:
        report.add(report.done, lambda: _lines(connection, "pgchange_staging.drop_leftovers"))
    return report


def _keep_log(report: Report, connection: psycopg.Connection[Any]) -> None:
    report.add(report.done, lambda: _dispatched(connection))
    for step in ("make_partitions", "trim_partitions", "drop_emptied"):
        for table in ("pgmb.dispatched", "pgmb.events"):
            report.add(report.done, partial(_lines, connection, f"pgmb.{step}", table))
    for step in ("expire_subscriptions", "trim_published", "refresh"):
        report.add(report.done, partial(_lines, connection, f"pgmb.{step}"))
    report.add(report.attention, lambda: _events(connection))


def _lines(connection: psycopg.Connection[Any], function: str, *arguments: Any) -> list[str]:
    query = sql.SQL("select line::text from {} as line").format(call(function, *arguments))
    return [row[0] for row in connection.execute(query).fetchall()]


def _tracking(connection: psycopg.Connection[Any]) -> list[str]:
    rows = connection.execute(
        "select tbl::text, untriggered::text[], disabled::text[], key_renamed, faults "
        "from revision.tracking()"
    ).fetchall()
    lines = []
    for table, untriggered, disabled, key_renamed, faults in rows:
        if untriggered:
            lines.append(
                f"{table}: not captured on {', '.join(untriggered)}; "
                "as its owner: select revision.refresh_tracking()"
            )
        if disabled:
            lines.append(f"{table}: the capture is disabled on {', '.join(disabled)}")
        if key_renamed:
            lines.append(f"{table}: its key column was renamed: track it again under the new name")
        if faults:
            lines.append(
                f"{table}: {faults} commits could not be placed, see revision.fault; "
                f"when mended: select revision.replay_faults('{table}')"
            )
    return lines


def _consumers(connection: psycopg.Connection[Any]) -> list[str]:
    lines = []
    for consumer in consumers.status(connection):
        name = f"{consumer.consumer_id}/{consumer.branch_id}"
        if consumer.ready is None and consumer.held_back_by:
            lines.append(f"{name}: {consumer.held_back_by}")
        if consumer.waiting and consumer.held_back_by:
            lines.append(
                f"{name}: {consumer.waiting} changes wait for an older transaction: {consumer.held_back_by}"
            )
        if (consumer.attempt or 0) >= MANY_ATTEMPTS and not consumer.at_work:
            lines.append(
                f"{name}: batch {consumer.batch_id} has failed {consumer.attempt} times; "
                f"airflow pgchange skip {name} gives it up"
            )
    return lines


def _letters(connection: psycopg.Connection[Any]) -> list[str]:
    rows = connection.execute(
        "select consumer, count(*), min(given_up_at)::timestamptz(0) from dead_letter.letter "
        "where not on_its_way group by consumer order by consumer"
    ).fetchall()
    return [
        f"{consumer}: {count} dead letters since {since}: airflow pgchange letters list --consumer {consumer}"
        for consumer, count, since in rows
    ]


def _mend_tubes(connection: psycopg.Connection[Any], report: Report) -> None:
    """Each table in a transaction of its own: it waits for no table while it holds another."""
    found: list[tuple[str, int, str]] = []
    query = "select tube, tbl::oid, name from tube.to_mend()"
    report.add(found, lambda: connection.execute(query).fetchall())
    for tube, table, name in found:
        try:
            with translated():
                connection.execute("select tube.mend(%s, %s::oid)", [tube, table])
            report.done.append(f"{name}: its capture for tube {tube} was mended")
        except ServerUnavailable:
            raise
        except ConsumerBusy:
            report.done.append(f"{name}: postponed, it is being written")
        except (PgChangeError, psycopg.Error) as error:
            report.attention.append(
                f"{name}: its capture for tube {tube} cannot be mended: {str(error).strip()}"
            )


def _tubes(connection: psycopg.Connection[Any]) -> list[str]:
    lines = []
    rows = connection.execute(
        "select tube, tbl::text, untriggered::text[], disabled::text[], stale, predicate_waits, faults "
        "from tube.attachments()"
    ).fetchall()
    for tube, table, untriggered, disabled, stale, predicate_waits, faults in rows:
        if untriggered or stale:
            where = f" on {', '.join(untriggered)}" if untriggered else ""
            lines.append(f"{table}: not captured for tube {tube}{where}; as its owner: select tube.refresh()")
        if disabled:
            lines.append(f"{table}: the capture for tube {tube} is disabled on {', '.join(disabled)}")
        if predicate_waits:
            lines.append(
                f"{table}: tube {tube} has another predicate than its owner agreed to; as its owner: "
                f"select tube.tube_table_ensure_attached('{tube}', '{table}')"
            )
        if faults:
            lines.append(
                f"{table}: {faults} statements whose ids tube {tube} could not tell or judge, see tube.fault; "
                f"when mended: select tube.clear_faults('{tube}')"
            )
    rows = connection.execute(
        "select f.tube, count(*), max(f.message) from tube.fault as f where f.message like 'control pod %' group by 1"
    ).fetchall()
    for tube, count, message in rows:
        lines.append(
            f"tube {tube}: {count} control pods were given up, such as: {message}; "
            f"when mended: select tube.clear_faults('{tube}')"
        )
    for worker in tubes.status(connection):
        if (worker.attempt or 0) >= MANY_ATTEMPTS and not worker.at_work:
            lines.append(
                f"{worker.feed.name}: batch {worker.batch_id} has failed {worker.attempt} times; "
                f"airflow pgchange skip {worker.feed.name} gives it up"
            )
    return lines


def _dispatched(connection: psycopg.Connection[Any]) -> list[str]:
    """Dispatch the events that wait."""
    total = 0
    for _ in range(MANY_POLLS):
        row = connection.execute("select events, more from pgmb.dispatch()").fetchone()
        total += row[0] if row else 0
        if row is None or not row[1]:
            break
    return [f"dispatched {total} events"] if total else []


def _events(connection: psycopg.Connection[Any]) -> list[str]:
    lines = []
    for partition, reason in connection.execute(
        "select partition::text, reason from pgmb.overdue()"
    ).fetchall():
        lines.append(f"{partition} is old and kept: {reason}; who holds what: select * from pgmb.holders()")
    rows = connection.execute(
        "select tbl::text, untriggered::text[], disabled::text[], stale, faults from pgmb.pushing()"
    ).fetchall()
    for table, untriggered, disabled, stale, faults in rows:
        if untriggered or stale:
            where = f" on {', '.join(untriggered)}" if untriggered else ""
            lines.append(
                f"{table}: its mutations are not published{where}; as its owner: select pgmb.refresh()"
            )
        if disabled:
            lines.append(f"{table}: publishing its mutations is disabled on {', '.join(disabled)}")
        if faults:
            lines.append(
                f"{table}: {faults} rows could not be made an event, see pgmb.push_fault; "
                f"when mended: select pgmb.replay_push_faults('{table}')"
            )
    groups = connection.execute(
        "select group_id, faults, at_work, batch_id, attempt from pgmb.status(1) "
        "where faults > 0 or attempt >= %s",
        [MANY_ATTEMPTS],
    ).fetchall()
    for group, faults, at_work, batch, attempt in groups:
        if faults:
            lines.append(
                f"group {group}: its conditions failed for {faults} events, see pgmb.fault; "
                f"when mended: select pgmb.replay_faults('{group}')"
            )
        if (attempt or 0) >= MANY_ATTEMPTS and not at_work:
            lines.append(
                f"group {group}: batch {batch} has failed {attempt} times; "
                f"select pgmb.skip_batch('{group}', '<reason>') gives it up"
            )
    for restored, astray in connection.execute("select restored, astray from pgmb.dispatching()").fetchall():
        if restored is not None:
            lines.append(f"events: {restored}")
        if astray:
            lines.append(
                f"events: {astray} polls found messages or retries for a subscription that is gone; "
                "select * from pgmb.fault where group_id is null"
            )
    return lines
