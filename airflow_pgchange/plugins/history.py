"""What databases remember of consumers: samples of the last hour, and attempts on batches of the last day."""

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
"""So many, the latest, are shown of a consumer."""
SAMPLED_EVERY = 5.0
"""Seconds after which what a database says is noted there, and what became of it looked at."""
REST = 20.0
"""That takes at most so small a part of the time."""
DAY = timedelta(days=1)
SAMPLED = ("kind", "consumer", "ready", "ready_exact", "waiting", "oldest_seconds")

Connections = Sequence[psycopg.Connection[Any]]
Row = dict[str, Any]


@dataclass(frozen=True)
class Trend:
    """Changes a second, lately, and what was ready every two minutes of the last hour; None where that is not known."""

    rate_in: float | None = None
    rate_out: float | None = None
    ready: list[int | None] = field(default_factory=list)


Trends = Mapping[tuple[str, str], Trend]


@dataclass
class LastHour:
    """The samples of a database: what status says is noted, and what became of that is looked at, now and then.
    ``left_out``: what the role may not."""

    trends: Trends = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    _note_at: float = float("-inf")
    _look_at: float = float("-inf")

    def goes_on(self, connection: psycopg.Connection[Any], rows: Iterable[Row]) -> None:
        """Note what status has just said, and look at how that was in the last hour."""
        self.left_out = []
        try:
            if time.monotonic() >= self._note_at:
                self._note_at = time.monotonic() + SAMPLED_EVERY
                seen = [{name: row[name] for name in SAMPLED} for row in rows if row["ready"] is not None]
                ask(connection, select("pgchange.note_samples", Jsonb(seen)))
            if time.monotonic() >= self._look_at:
                began = time.monotonic()
                self.trends = trends(connection)
                self._look_at = began + max(SAMPLED_EVERY, REST * (time.monotonic() - began))
        except ServerUnavailable:
            raise
        except (PgChangeError, psycopg.Error) as error:
            self.left_out = [f"the last hour is left out: {error}"]


def trends(connection: psycopg.Connection[Any]) -> Trends:
    """How each consumer was in the last hour, as far as this role has noted it."""
    found = records(connection, "select * from pgchange.trends()")
    return {(row.pop("kind"), row.pop("consumer")): Trend(**row) for row in found}


def history(kind: str, consumer: str, connections: Connections) -> datamodels.History:
    """What the database of the results, and that of the changes where it is another, remember of a consumer."""
    samples = records(connections[0], "select * from pgchange.samples(%s, %s)", [kind, consumer])
    attempts: dict[tuple[Any, int], Row] = {}
    for connection in connections:
        query = "select * from pgchange.batches(%s, %s) where noted_at > now() - %s"
        for row in records(connection, query, [consumer, ATTEMPTS, DAY]):
            if row["kind"] == kind:
                known = attempts.setdefault((row["batch_id"], row["attempt"]), row)
                # Each database notes what happened there.
                known.update({name: value for name, value in row.items() if known[name] is None})
    latest = sorted(attempts.values(), key=lambda row: row["noted_at"], reverse=True)
    return datamodels.History(
        samples=[datamodels.Sample(**row) for row in samples],
        attempts=[_attempt(row) for row in latest[:ATTEMPTS]],
        trouble=None,
    )


def _attempt(row: Row) -> datamodels.Attempt:
    known = {
        "batch": str(row["batch_id"]),
        "changes": row["count"],
        "seconds": _seconds(row["seconds"]),
        "outputs": _outputs(row["outputs"]),
        "run": _run(row["run"]),
    }
    names = datamodels.Attempt.model_fields.keys() - known.keys()
    return datamodels.Attempt(**known, **{name: row[name] for name in names})


def _run(told: str | None) -> datamodels.Run | None:
    """The try of a task, where whoever worked has told of one."""
    names = datamodels.Run.model_fields.keys()
    parts = [unquote(part) for part in (told or "").split("/")]
    if len(parts) != len(names):
        return None
    with suppress(ValueError):
        return datamodels.Run.model_validate(dict(zip(names, parts, strict=True)))
    return None


def _outputs(noted: Any) -> list[datamodels.Output]:
    """The targets of a batch. A worker can note anything, so anything else is left out."""
    outputs = []
    for each in noted if isinstance(noted, list) else []:
        with suppress(ValueError):
            outputs.append(datamodels.Output.model_validate(each))
    return outputs


def _seconds(told: Any) -> dict[str, float]:
    """How long each phase took: whoever worked may have told anything."""
    if not isinstance(told, Mapping):
        return {}
    return {phase: float(each) for phase, each in told.items() if _is_span(each)}


def _is_span(told: Any) -> bool:
    # A number of JSON has no bound, a float has, and True is an int.
    return isinstance(told, int | float) and not isinstance(told, bool) and abs(told) <= sys.float_info.max
