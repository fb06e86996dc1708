"""Results of a batch on their way: staging tables, and the manifest that says what is in them."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from airflow_pgchange.errors import MergeRefused
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.errors import translated
from airflow_pgchange.feeds.schemas import our_schema
from airflow_pgchange.results.modes import Behaviour, Mode

SCHEMA = "pgchange_staging"
ATTEMPT = "pgchange_attempt"
"""Column of every staging table: the task attempt that wrote the row, so that only winners are merged."""
TOUCHED = "pgchange_touched"
"""Column of every staging table: of a mirror true for an id of the batch alone, in the key; false for a row that stands
under one; and null for any other row."""
ROOM = 1600 - 2
"""Columns that a table can have, without those two."""
RESERVED = "pgchange_"

our_schema(
    SCHEMA,
    grants="`pgchange.grant_consumer('<role>')`, or the grant of a feed, is for who stages results",
)


@dataclass(frozen=True)
class Copied:
    """The table at the source whose rows were staged as they are, and their columns, which the target has by the same
    names."""

    schema: str
    name: str
    columns: tuple[str, ...]


@dataclass(frozen=True)
class Staged:
    """Results of one attempt on a batch, for one target.

    ``columns`` are names and PostgreSQL types as they were staged; ``winners`` are the task attempts whose
    rows count, each with its number of rows. ``copied``: what they are, where it is known; None where only the
    application knows.
    """

    target: str
    key: tuple[str, ...]
    mode: Mode
    table: str
    columns: tuple[tuple[str, str], ...]
    winners: tuple[tuple[int, int], ...]
    batch_id: str
    attempt: int
    copied: Copied | None = None

    @property
    def rows(self) -> int:
        """How many rows count, with those that only name an id."""
        return sum(count for _, count in self.winners)

    @property
    def behaviour(self) -> Behaviour:
        """What the merge of these rows does."""
        return self.mode.behaviour

    @property
    def identifier(self) -> sql.Identifier:
        return sql.Identifier(SCHEMA, self.table)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Staged:
        return cls(
            **{
                **data,
                "key": tuple(data["key"]),
                "mode": Mode(data["mode"]),
                "columns": tuple((name, kind) for name, kind in data["columns"]),
                "winners": tuple((attempt, count) for attempt, count in data["winners"]),
                "copied": _copied(data.get("copied")),
            }
        )


def _copied(data: Mapping[str, Any] | None) -> Copied | None:
    return None if data is None else Copied(**{**data, "columns": tuple(data["columns"])})


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
            "entered, and left without an error; a loop over batch_jobs() must not be left by a break. Nothing was "
            "written; the batch is tried again"
        ) from error
