"""Findings about all feeds that need attention, each with the command that fixes it."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, LiteralString

import psycopg
from psycopg.rows import class_row

from airflow_pgchange.errors import PermissionDenied, SchemaMissing
from airflow_pgchange.feeds.error_translation import translated
from airflow_pgchange.feeds.feed_kinds import kinds
from airflow_pgchange.feeds.queries import records, rows, warned

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finding:
    """A problem that needs attention.

    ``severity``: ``error`` if changes are blocked or lost, ``warning`` if that may happen. ``consumer``: the affected
    consumer, as ``status`` names it, or None. ``told``: the description. ``call``: the SQL or shell command that fixes
    the problem, with the role to run it; None if no single command does.
    """

    kind: str
    severity: str
    consumer: str | None
    told: str
    call: str | None

    def __str__(self) -> str:
        about = "" if self.consumer is None else f"{self.consumer}: "
        return about + self.told + ("" if self.call is None else f"; {self.call}")


STANDING = "array(select s from jsonb_populate_recordset(null::pgchange.consumer_status, %s) as s)"
HEALTH = f"select * from pgchange.health({STANDING})"
OF_CONSUMERS = f"select * from pgchange.consumers_health(standing => {STANDING})"
WATCHERS = "array(select w from jsonb_populate_recordset(null::pgchange.watcher, %s) as w)"
REASONS = f"select kind, consumer, why from pgchange.reasons({STANDING}, {WATCHERS})"

Row = dict[str, Any]


def findings(
    connection: psycopg.Connection[Any],
    warn: Callable[[str], None] = log.warning,
    standing: Sequence[Mapping[str, Any]] | None = None,
) -> list[Finding]:
    """Return the findings of ``pgchange.health()`` that this role may see. Call ``warn`` about checks that it may not
    run.

    ``standing``: the rows of ``status()``, if the caller has them already.
    """
    if standing is None:
        return _findings(connection, warn, "select * from pgchange.health()")
    return _findings(connection, warn, HEALTH, [_as_json(standing)])


def findings_of_both(
    results: psycopg.Connection[Any],
    source: psycopg.Connection[Any],
    warn: Callable[[str], None],
    standing: Sequence[Row],
) -> list[Finding]:
    """Return the findings of the database of the results, and those about consumers whose progress is in the source.

    The limits and the watchers of a consumer are stored with its progress.
    """
    by_place = defaultdict[bool, list[Row]](list)
    for row in standing:
        by_place[getattr(kinds().get(row["kind"]), "progress", None) == "source"].append(row)
    found = findings(results, warn, by_place[False])
    if by_place[True]:
        found += _findings(source, warn, OF_CONSUMERS, [_as_json(by_place[True])])
    return found


def _findings(
    connection: psycopg.Connection[Any],
    warn: Callable[[str], None],
    query: LiteralString,
    values: Sequence[Any] = (),
) -> list[Finding]:
    with translated(), warned(connection, warn), connection.cursor(row_factory=class_row(Finding)) as cursor:
        return cursor.execute(query, values or None).fetchall()


def explained(
    results: psycopg.Connection[Any], source: psycopg.Connection[Any], standing: Sequence[Row]
) -> list[Row]:
    """Return the rows of ``status()``, each with ``why``: why the consumer is behind.

    ``why`` is None if the consumer has no waiting changes, or if the role may not see the reasons. The observations of
    its watchers are read from ``results``, its unprocessed history from ``source``.
    """
    watchers: list[Row] = []
    with suppress(PermissionDenied, SchemaMissing):
        if results is not source:
            watchers = records(results, "select * from pgchange.watchers()")
    reasons: dict[tuple[str, str], str] = {}
    with suppress(PermissionDenied, SchemaMissing):
        arguments = [_as_json(standing), _as_json(watchers)]
        reasons = {(kind, consumer): reason for kind, consumer, reason in rows(source, REASONS, arguments)}
    return [row | {"why": reasons.get((row["kind"], row["consumer"]))} for row in standing]


def _as_json(standing: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps([dict(row) for row in standing], default=str)
