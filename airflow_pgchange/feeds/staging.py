"""Results of a batch on their way: staging tables, and the manifest that says what is in them."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import psycopg
from psycopg import sql

from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.errors import InvalidArgument, MergeRefused, translated

SCHEMA = "pgchange_staging"
ATTEMPT = "pgchange_attempt"
"""Column of every staging table: the task attempt that wrote the row, so that only winners are merged."""
TOUCHED = "pgchange_touched"
"""Column of every staging table: true for a row that only names an id of the batch, in its key."""
ROOM = 1600 - 2
"""Columns that a table can have, without those two."""
RESERVED = "pgchange_"

Mode = Literal["add", "replace", "mirror", "append"]


@dataclass(frozen=True)
class Staged:
    """Results of one attempt on a batch, for one target.

    ``columns`` are names and PostgreSQL types as they were staged; ``winners`` are the task attempts whose
    rows count, each with its number of rows.
    """

    target: str
    key: tuple[str, ...]
    mode: Mode
    table: str
    columns: tuple[tuple[str, str], ...]
    winners: tuple[tuple[int, int], ...]
    batch_id: str
    attempt: int

    @property
    def identifier(self) -> sql.Identifier:
        return sql.Identifier(SCHEMA, self.table)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Staged:
        return cls(
            **{
                **data,
                "key": tuple(data["key"]),
                "columns": tuple((name, kind) for name, kind in data["columns"]),
                "winners": tuple((attempt, count) for attempt, count in data["winners"]),
            }
        )


def checked_mode(mode: str) -> Mode:
    """``mode`` if there is such a one; raises InvalidArgument."""
    if mode not in get_args(Mode):
        raise InvalidArgument(f"mode must be one of {', '.join(get_args(Mode))}, not {mode!r}")
    return mode  # type: ignore[return-value]


def create(
    connection: psycopg.Connection[Any], batch: Batch, target: str, columns: Sequence[tuple[str, str]]
) -> str:
    """Make the staging table of this attempt for one target and return its name.

    Its name and comment carry batch and attempt. Raises SchemaMissing, PermissionDenied.
    """
    digest = hashlib.sha256(batch.id.encode()).hexdigest()[:16]
    name = f"b{digest}_{batch.attempt}_{secrets.token_hex(4)}"
    table = sql.Identifier(SCHEMA, name)
    definitions = sql.SQL(", ").join(
        sql.SQL("{} {}").format(sql.Identifier(column), sql.SQL(kind))
        for column, kind in [(ATTEMPT, "bigint"), (TOUCHED, "boolean"), *columns]
    )
    with translated(), connection.transaction():
        row = connection.execute("select pg_catalog.clock_timestamp()::text").fetchone()
        told = {
            "batch_id": batch.id,
            "attempt": batch.attempt,
            "target": target,
            "made_at": row[0] if row else None,
        }
        connection.execute(sql.SQL("create unlogged table {} ({})").format(table, definitions))
        comment = sql.Literal(f"pgchange {json.dumps(told)}")
        connection.execute(sql.SQL("comment on table {} is {}").format(table, comment))
    return name


def write_manifest(path: Path, manifest: Sequence[Staged]) -> None:
    """Write the manifest, whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps([asdict(staged) for staged in manifest]))
    part.replace(path)


def read_manifest(path: Path) -> tuple[Staged, ...]:
    """What an application staged. Raises MergeRefused where it did not end well, so wrote no manifest."""
    try:
        return tuple(Staged.from_json(entry) for entry in json.loads(path.read_text()))
    except FileNotFoundError as error:
        raise MergeRefused(
            "the application ended without saying what it staged: its `with batch_job()` block must be "
            "entered, and left without an error. Nothing was written; the batch is tried again"
        ) from error
