"""Steps of maintenance in SQL: functions that return lines, and that are called until no work is left."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import sql

from airflow_pgchange.feeds.queries import call, rows

MANY_STEPS = 100
"""Maximum number of transactions of one step. The rest is left to the next run of maintenance."""

LEFT = "left "
"""The beginning of a line which reports that the step has work left for another transaction."""
AGAIN = (LEFT, "kept ", "postponed ")
"""The beginnings of lines that the next transaction of the same step reports again."""


def lines_of(connection: psycopg.Connection[Any], function: str, *arguments: Any) -> list[str]:
    """Call a function in SQL and return its lines."""
    query = sql.SQL("select line::text from {} as line").format(call(function, *arguments))
    return [line for (line,) in rows(connection, query)]


def all_lines(connection: psycopg.Connection[Any], function: str, *arguments: Any) -> list[str]:
    """Call a function, each time in its own transaction, until it reports no work left. Return its lines."""
    report: list[str] = []
    for _ in range(MANY_STEPS):
        lines = lines_of(connection, function, *arguments)
        report = [line for line in report if not line.startswith(AGAIN)] + lines
        if not any(line.startswith(LEFT) for line in lines):
            break
    return report
