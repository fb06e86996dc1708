"""The outputs of a batch: the targets of its rows, logged, and noted in a setting of the transaction that writes them.

An ack in the same transaction stores the setting with the batch, for pages.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from airflow_pgchange.feeds import transaction_settings

SETTING = "pgchange.outputs"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Output:
    """``rows`` of a batch in a table.

    A table of a lake has a ``location``, and ``version`` is the snapshot with these rows.
    """

    target: str
    rows: int
    version: str | None = None
    location: str | None = None

    def __str__(self) -> str:
        version = "" if self.version is None else f", version {self.version}"
        return f"{self.target}: {self.rows:,} rows written{version}"


def note(connection: psycopg.Connection[Any], outputs: Sequence[Output]) -> None:
    """Log outputs of the transaction, and add them to those that were noted before."""
    for output in outputs:
        log.info("%s", output)
    _note(connection, outputs)


def carry(connection: psycopg.Connection[Any], keeper: psycopg.Connection[Any]) -> None:
    """Note the outputs of one transaction also in the transaction that holds the progress."""
    _note(keeper, noted(connection))


def _note(connection: psycopg.Connection[Any], outputs: Sequence[Output]) -> None:
    if outputs:
        added = Jsonb([asdict(output) for output in outputs])
        transaction_settings.change(
            connection, SETTING, "coalesce({last}::jsonb, '[]') || {added}", added=added
        )


def noted(connection: psycopg.Connection[Any]) -> tuple[Output, ...]:
    """Return the outputs that were noted in the transaction."""
    return tuple(
        Output(**output) for output in json.loads(transaction_settings.value_of(connection, SETTING) or "[]")
    )
