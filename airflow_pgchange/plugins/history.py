"""The history of consumers: samples of the last hour, and attempts on batches of the last day."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from urllib.parse import unquote

import psycopg
from psycopg.types.json import Jsonb

from airflow_pgchange.errors import PgChangeError, ServerUnavailable
from airflow_pgchange.feeds.queries import ask, records, select
from airflow_pgchange.plugins import datamodels

ATTEMPTS = 500
"""Maximum number of attempts shown for a consumer: the latest."""
SAMPLED_EVERY = 5.0
"""Seconds after which the status of a database is recorded there, and its trends are read again."""
REST = 20.0
"""After reading trends, the pause is this many times as long as the read took, so that reads take at most 5 % of the
time."""
DAY = timedelta(days=1)
SAMPLED = ("kind", "consumer", "ready", "ready_exact", "waiting", "oldest_seconds")

Connections = Sequence[psycopg.Connection[Any]]
Row = dict[str, Any]


@dataclass(frozen=True)
class Trend:
    """The trend of a consumer: the latest rates in changes a second, and the ready changes at intervals of two minutes.

    ``ready`` covers the last hour. None: the value is not known.
    """

    rate_in: float | None = None
    rate_out: float | None = None
    ready: list[int | None] = field(default_factory=list)


Trends = Mapping[tuple[str, str], Trend]


@dataclass
class LastHour:
    """Records samples of a database's status at intervals, and reads the trends of the last hour.

    ``left_out``: the reason why trends are missing, such as a missing right.
    """

    trends: Trends = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    _note_at: float = float("-inf")
    _look_at: float = float("-inf")

    def goes_on(self, connection: psycopg.Connection[Any], rows: Iterable[Row]) -> None:
        """Record the rows of status, and read the trends of the last hour, if either is due."""
        self.left_out = []
        try:
            if time.monotonic() >= self._note_at:
                self._note_at = time.monotonic() + SAMPLED_EVERY
                samples = [{name: row[name] for name in SAMPLED} for row in rows if row["ready"] is not None]
                ask(connection, select("pgchange.note_samples", Jsonb(samples)))
            if time.monotonic() >= self._look_at:
                began = time.monotonic()
                self.trends = trends(connection)
                self._look_at = began + max(SAMPLED_EVERY, REST * (time.monotonic() - began))
        except ServerUnavailable:
            raise
        except (PgChangeError, psycopg.Error) as error:
            self.left_out = [f"the last hour is left out: {error}"]


def trends(connection: psycopg.Connection[Any]) -> Trends:
    """Return the trend of each consumer in the last hour, from the samples that this role has recorded."""
    trend_rows = records(connection, "select * from pgchange.trends()")
    return {(row.pop("kind"), row.pop("consumer")): Trend(**row) for row in trend_rows}


def history(kind: str, consumer: str, connections: Connections) -> datamodels.History:
    """Return the history of a consumer from the database of the results, and from that of the changes if it differs."""
    samples = records(connections[0], "select * from pgchange.samples(%s, %s)", [kind, consumer])
    attempts: dict[tuple[Any, int], Row] = {}
    for connection in connections:
        query = "select * from pgchange.batches(%s, %s) where noted_at > now() - %s"
        for row in records(connection, query, [consumer, ATTEMPTS, DAY]):
            if row["kind"] == kind:
                attempt = attempts.setdefault((row["batch_id"], row["attempt"]), row)
                # Each database records only its own part of an attempt, so merge the rows.
                attempt.update({name: value for name, value in row.items() if attempt[name] is None})
    latest = sorted(attempts.values(), key=lambda row: row["noted_at"], reverse=True)
    return datamodels.History(
        samples=[datamodels.Sample(**row) for row in samples],
        attempts=[_attempt(row) for row in latest[:ATTEMPTS]],
        failure=None,
    )


def _attempt(row: Row) -> datamodels.Attempt:
    converted = {
        "batch": str(row["batch_id"]),
        "changes": row["count"],
        "seconds": _seconds(row["seconds"]),
        "outputs": _outputs(row["outputs"]),
        "run": _run(row["run"]),
    }
    names = datamodels.Attempt.model_fields.keys() - converted.keys()
    return datamodels.Attempt(**converted, **{name: row[name] for name in names})


def _run(text: str | None) -> datamodels.Run | None:
    """Return the try of a task that a worker has recorded. None if the text is missing or names no try."""
    names = datamodels.Run.model_fields.keys()
    parts = [unquote(part) for part in (text or "").split("/")]
    if len(parts) != len(names):
        return None
    with suppress(ValueError):
        return datamodels.Run.model_validate(dict(zip(names, parts, strict=True)))
    return None


def _outputs(recorded: Any) -> list[datamodels.Output]:
    """Return the targets of a batch. A worker can record any JSON, so invalid elements are left out."""
    outputs = []
    for each in recorded if isinstance(recorded, list) else []:
        with suppress(ValueError):
            outputs.append(datamodels.Output.model_validate(each))
    return outputs


def _seconds(recorded: Any) -> dict[str, float]:
    """Return the seconds of each phase. A worker can record any JSON, so invalid values are left out."""
    if not isinstance(recorded, Mapping):
        return {}
    return {phase: float(each) for phase, each in recorded.items() if _is_span(each)}


def _is_span(value: Any) -> bool:
    # A JSON number may be too large for a float, and True is an int in Python.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
