"""What a person should look at, where a command of ours mends it; ``troubles()`` of each schema tells the rest."""

from __future__ import annotations

import shlex
from typing import Any

import psycopg

from airflow_pgchange.administration import Kind
from airflow_pgchange.feeds.queries import rows

MANY_ATTEMPTS = 3
"""Failed attempts from which a batch is named."""


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


def letters(connection: psycopg.Connection[Any]) -> list[str]:
    """Consumers that have dead letters."""
    query = (
        "select consumer, count(*), min(given_up_at)::timestamptz(0) from dead_letter.letter "
        "where not on_its_way group by consumer order by consumer"
    )
    return [
        f"{consumer}: {count} dead letters since {since}: "
        f"airflow pgchange letters list --consumer {shlex.quote(consumer)}"
        for consumer, count, since in rows(connection, query)
    ]
