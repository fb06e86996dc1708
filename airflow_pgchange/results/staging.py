"""The results of a batch before their merge: staging tables, and the manifest that lists them."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import psycopg
from psycopg import sql

from airflow_pgchange.errors import MergeRefused
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.error_translation import translated
from airflow_pgchange.feeds.schemas import our_schema
from airflow_pgchange.lake.staged_files import StagedFiles
from airflow_pgchange.results.merge_modes import Behaviour, Mode

SCHEMA = "pgchange_staging"
ATTEMPT = "pgchange_attempt"
"""A column of every staging table: the attempt of the Spark task that wrote the row. Only the rows of the attempts in
``Staged.winners`` are merged."""
TOUCHED = "pgchange_touched"
"""A column of every staging table. A mirror writes true for an id of the batch that has no row. It writes false for a
row that is known to have an id of the batch, and null for any other row. Other modes write null."""
ROOM = 1600 - 2
"""How many columns a staging table can have besides these two."""
RESERVED = "pgchange_"

our_schema(SCHEMA)


@dataclass(frozen=True)
class Copied:
    """The table of the source whose rows were staged unchanged, and the columns that were copied. The target's columns
    have the same names."""

    schema: str
    name: str
    columns: tuple[str, ...]


@dataclass(frozen=True)
class Staged:
    """Results of one attempt on a batch, for one target.

    ``columns`` are the names and PostgreSQL types of the staged columns. ``winners`` are the attempts of Spark tasks
    whose rows are merged, each with its number of rows. ``copied`` is the table from which the rows come, or None if
    the application computed them.
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
        """How many staged rows the merge uses, including those that hold only an id of the batch."""
        return sum(count for _, count in self.winners)

    @property
    def behaviour(self) -> Behaviour:
        """The behaviour of the mode in which these rows are merged."""
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


Result: TypeAlias = Staged | StagedFiles
"""The rows that an attempt on a batch has staged for a target."""


def result_of(entry: Mapping[str, Any]) -> Result:
    """Return the result that an entry of a manifest describes."""
    return StagedFiles.from_json(entry) if "lake" in entry else Staged.from_json(entry)


def _copied(data: Mapping[str, Any] | None) -> Copied | None:
    return None if data is None else Copied(**{**data, "columns": tuple(data["columns"])})


def prefix(batch: Batch) -> str:
    """The beginning of the names of the staging tables of an attempt on a batch."""
    return f"b{hashlib.sha256(batch.id.encode()).hexdigest()[:16]}_{batch.attempt}_"


def create(
    connection: psycopg.Connection[Any], batch: Batch, target: str, columns: Sequence[tuple[str, str]]
) -> str:
    """Create the staging table of this attempt for one target, and return its name.

    The name and the comment contain the batch and the attempt. Raises SchemaMissing, PermissionDenied.
    """
    name = prefix(batch) + secrets.token_hex(4)
    table = sql.Identifier(SCHEMA, name)
    definitions = sql.SQL(", ").join(
        sql.SQL("{} {}").format(sql.Identifier(column), sql.SQL(kind))
        for column, kind in [(ATTEMPT, "bigint"), (TOUCHED, "boolean"), *columns]
    )
    with translated(), connection.transaction():
        row = connection.execute("select pg_catalog.clock_timestamp()::text").fetchone()
        description = {
            "batch_id": batch.id,
            "version": batch.version,
            "attempt": batch.attempt,
            "target": target,
            "made_at": row[0] if row else None,
        }
        connection.execute(sql.SQL("create unlogged table {} ({})").format(table, definitions))
        comment = sql.Literal(f"pgchange {json.dumps(description)}")
        connection.execute(sql.SQL("comment on table {} is {}").format(table, comment))
    return name


def write_manifest(path: Path, manifest: Sequence[Result]) -> None:
    """Write the manifest. A crash leaves the whole file or none."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps([asdict(staged) for staged in manifest]))
    part.replace(path)


def read_manifest(path: Path) -> tuple[Result, ...]:
    """Return the manifest that an application wrote. Raises MergeRefused if there is none because the application
    failed."""
    try:
        return tuple(result_of(entry) for entry in json.loads(path.read_text()))
    except FileNotFoundError as error:
        raise MergeRefused(
            "the application ended without a manifest of its results. Its `with batch_job()` block must be entered, "
            "and must end without an error; a loop over batch_jobs() must not be left by a break. Nothing was "
            "written, and the batch is tried again"
        ) from error
