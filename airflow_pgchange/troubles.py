"""What a person should look at in a database with our schemas: a line for each thing, with what to do."""

from __future__ import annotations

import shlex
from typing import Any

import psycopg

from airflow_pgchange.administration import Kind

MANY_ATTEMPTS = 3
"""Failed attempts from which a batch is named."""
LONG_WAIT = 300.0
"""Seconds after which an event that is not dispatched is worth a look at who dispatches."""


def tracking(connection: psycopg.Connection[Any]) -> list[str]:
    """Tables whose rows are not all captured, or whose commits could not be placed."""
    rows = connection.execute(
        "select tbl::text, quote_literal(tbl::text), untriggered::text[], disabled::text[], key_renamed, faults "
        "from revision.tracking()"
    ).fetchall()
    lines = []
    for table, quoted, untriggered, disabled, key_renamed, faults in rows:
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
                f"when mended, as its owner: select revision.replay_faults({quoted})"
            )
    return lines


def queue_partitions(connection: psycopg.Connection[Any]) -> list[str]:
    """Partitions of the commit queue that are made only when somebody says so."""
    found = connection.execute(
        "select reason from revision.crowded_default() as c(reason) where reason is not null"
    ).fetchall()
    return [f"revision.commit_queue needs partitions: {reason}" for (reason,) in found]


def consumers(connection: psycopg.Connection[Any], kind: Kind) -> list[str]:
    """Consumers of one kind that are held back, or whose batch fails again and again."""
    lines = []
    for row in kind.status(connection, None):
        name, held_back_by = row["consumer"], row.get("held_back_by")
        if held_back_by:
            waits = f"{row['waiting']} changes wait for an older transaction: " if row["waiting"] else ""
            lines.append(f"{name}: {waits}{held_back_by}")
        if (row["attempt"] or 0) >= MANY_ATTEMPTS and not row["at_work"]:
            lines.append(
                f"{name}: batch {row['batch_id']} has failed {row['attempt']} times; "
                f"airflow pgchange skip {shlex.quote(name)} gives it up"
            )
    return lines


def tubes(connection: psycopg.Connection[Any]) -> list[str]:
    """Tables that do not touch their tube as they should or were dropped, and control pods that were given up or
    fail."""
    lines = []
    rows = connection.execute(
        "select tube, quote_literal(tube), tbl::text, quote_literal(tbl::text), untriggered::text[], disabled::text[], "
        "stale, predicate_waits, faults, lost from tube.attachments()"
    ).fetchall()
    for (
        tube,
        quoted,
        table,
        quoted_table,
        untriggered,
        disabled,
        stale,
        predicate_waits,
        faults,
        lost,
    ) in rows:
        if untriggered or stale:
            where = f" on {', '.join(untriggered)}" if untriggered else ""
            lines.append(f"{table}: not captured for tube {tube}{where}; as its owner: select tube.refresh()")
        if disabled:
            lines.append(f"{table}: the capture for tube {tube} is disabled on {', '.join(disabled)}")
        if lost:
            lines.append(f"{table}: {lost}")
        if predicate_waits:
            lines.append(
                f"{table}: tube {tube} has another predicate than its owner agreed to; as its owner: "
                f"select tube.tube_table_ensure_attached({quoted}, {quoted_table})"
            )
        if faults:
            lines.append(
                f"{table}: {faults} statements whose ids tube {tube} could not tell, judge or keep, see tube.fault; "
                f"when mended: select tube.clear_faults({quoted})"
            )
    rows = connection.execute(
        "select tube, quote_literal(tube), quote_literal(tbl::oid::text) from tube.attachment "
        "where tube.schema_of(tbl) is null"
    ).fetchall()
    for tube, quoted, dropped in rows:
        lines.append(
            f"tube {tube}: a table that touched it was dropped; as the owner of its pods: "
            f"select tube.tube_table_ensure_detached({quoted}, {dropped})"
        )
    rows = connection.execute(
        "select f.tube, quote_literal(f.tube), count(*), max(f.message) from tube.fault as f "
        "where f.kind = 'control' group by 1"
    ).fetchall()
    for tube, quoted, count, message in rows:
        lines.append(
            f"tube {tube}: {count} control pods were given up, such as: {message}; "
            f"when mended: select tube.clear_faults({quoted})"
        )
    rows = connection.execute(
        "select t.name, t.pods::text, c.code, tube.code_hint(t) from tube.tube as t "
        "cross join lateral tube.code_on(t.pods) as c(code) where c.code is not null"
    ).fetchall()
    for tube, pods, code, hint in rows:
        lines.append(f"tube {tube}: its pods, {pods}, have {code}, and are read by nobody else: {hint}")
    rows = connection.execute(
        "select w.tube, w.worker, w.control_attempt from tube.worker as w join tube.tube as t on t.name = w.tube "
        "where w.control_attempt >= %s and case when has_table_privilege(t.pods, 'select') "
        "and tube.code_on(t.pods) is null then tube.has_controls(t, w.worker) else true end",
        [MANY_ATTEMPTS],
    ).fetchall()
    for tube, number, attempt in rows:
        lines.append(
            f"tube:{tube}/{number}: its control pods have failed {attempt} times; "
            "the log of the task that works them off says why"
        )
    return lines


def partitions(connection: psycopg.Connection[Any]) -> list[str]:
    """Partitions of the event log that stay although they are old, or that are made only when somebody says so."""
    overdue = connection.execute("select partition::text, reason from pgmb.overdue()").fetchall()
    crowded = connection.execute(
        "select t.name, c.reason from unnest(array['pgmb.dispatched', 'pgmb.events']) as t(name) "
        "cross join lateral pgmb.crowded_default(t.name::regclass) as c(reason) where c.reason is not null"
    ).fetchall()
    return [
        *(
            f"{part} is old and kept: {reason}; who holds what: select * from pgmb.holders()"
            for part, reason in overdue
        ),
        *(f"{table} needs partitions: {reason}" for table, reason in crowded),
    ]


def events(connection: psycopg.Connection[Any]) -> list[str]:
    """Tables whose mutations are not published, conditions that fail, a dispatch that does not end."""
    lines = []
    rows = connection.execute(
        "select tbl::text, quote_literal(tbl::text), untriggered::text[], disabled::text[], stale, faults "
        "from pgmb.pushing()"
    ).fetchall()
    for table, quoted, untriggered, disabled, stale, faults in rows:
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
                f"when mended, as its owner: select pgmb.replay_push_faults({quoted})"
            )
    groups = connection.execute(
        "select group_id, quote_literal(group_id), faults from pgmb.status(1) where faults > 0"
    ).fetchall()
    for group, quoted, faults in groups:
        lines.append(
            f"group {group}: its conditions failed for {faults} events, see pgmb.fault; "
            f"when mended: select pgmb.replay_faults({quoted})"
        )
    rows = connection.execute(
        "select restored, astray, at_work, oldest_seconds from pgmb.dispatching()"
    ).fetchall()
    for restored, astray, process, waits in rows:
        if restored is not None:
            lines.append(f"events: {restored}")
        if astray:
            lines.append(
                f"events: {astray} polls found messages or retries for a subscription that is gone; "
                "select * from pgmb.fault where group_id is null"
            )
        if process is not None and (waits or 0) > LONG_WAIT:
            lines.append(
                f"events: one has waited for {waits:.0f} s while process {process} dispatches; if a condition does "
                f"not end: select pg_cancel_backend({process}), whose error names it"
            )
    return lines


def letters(connection: psycopg.Connection[Any]) -> list[str]:
    """Consumers that have dead letters."""
    rows = connection.execute(
        "select consumer, count(*), min(given_up_at)::timestamptz(0) from dead_letter.letter "
        "where not on_its_way group by consumer order by consumer"
    ).fetchall()
    return [
        f"{consumer}: {count} dead letters since {since}: "
        f"airflow pgchange letters list --consumer {shlex.quote(consumer)}"
        for consumer, count, since in rows
    ]
