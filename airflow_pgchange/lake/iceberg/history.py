"""The history of an Iceberg table: the summary of each snapshot names the batch whose rows it added.

If the table and the progress are not one commit, another attempt on the batch may have committed already, or may still
be running. The history shows whether it has committed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg import sql
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot, Summary

from airflow_pgchange.errors import OutcomeUnknown, StaleClaim
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.queries import ask
from airflow_pgchange.lake.commit_numbers import next_number
from airflow_pgchange.lake.tables import LakeTable

CLOCKS = 300.0
"""Seconds by which the clocks of PostgreSQL and of the table's writers may differ."""
WRITTEN, MISSING = "written", "missing"
"""The values of the table's property ``pgchange.<id of the batch>``. A person sets it to resolve OutcomeUnknown."""


@dataclass(frozen=True)
class Write:
    """A write of a batch to a table. ``number`` counts the writes of a transaction to this table, from 1."""

    lake: LakeTable
    batch: Batch
    number: str
    transaction: str

    @classmethod
    def begun(cls, connection: psycopg.Connection[Any], lake: LakeTable, batch: Batch, table: Table) -> Write:
        transaction = ask(connection, sql.SQL("select pg_catalog.pg_current_xact_id()::text"))
        number = next_number(connection, str(table.metadata.table_uuid))
        return cls(lake, batch, str(number), transaction)

    @property
    def summary(self) -> dict[str, str]:
        """The properties of the snapshot's summary."""
        return {
            "pgchange.consumer": self.batch.feed,
            "pgchange.batch": self.batch.id,
            **({"pgchange.parts_of": " ".join(self.batch.parts_of)} if self.batch.parts_of else {}),
            "pgchange.write": self.number,
            "pgchange.attempt": str(self.batch.attempt),
            "pgchange.transaction": self.transaction,
        }

    def answers(self, table: Table) -> dict[str, str]:
        """Return the properties of the table by which a person has stated whether it has this batch."""
        names = [f"pgchange.{id}" for id in (self.batch.id, *self.batch.parts_of)]
        return {name: table.properties[name] for name in names if name in table.properties}


def has(table: Table, write: Write) -> bool:
    """Return whether the current version of the table has this write.

    If this batch is a part, a snapshot of the whole batch has its rows, too. Raises StaleClaim if the table has a part
    of this batch, because the batch was then split and this attempt is over. Raises OutcomeUnknown if the history does
    not reach back to the first claim of the batch.
    """
    ids = {write.batch.id, *write.batch.parts_of}
    past = list(_ancestors(table))
    for snapshot in past:
        summary = snapshot.summary
        if summary and summary["pgchange.batch"] in ids and summary["pgchange.write"] == write.number:
            return True
    answers = write.answers(table).values()
    if WRITTEN in answers:
        return True
    if MISSING not in answers:
        _check_whole(past, write)
        if not write.batch.atomic:
            _check_reaches(past, write)
    return False


def _ancestors(table: Table) -> Iterator[Snapshot]:
    """Yield the current snapshot, its parent, and so on, until a snapshot has expired."""
    # PyIceberg's ancestors_of() would search all snapshots for each parent.
    by_id = {snapshot.snapshot_id: snapshot for snapshot in table.metadata.snapshots}
    snapshot = table.current_snapshot()
    while snapshot is not None:
        yield snapshot
        parent = snapshot.parent_snapshot_id
        snapshot = None if parent is None else by_id.get(parent)


def _check_whole(past: Sequence[Snapshot], write: Write) -> None:
    """Raise StaleClaim if a part of the batch was written, which only happens once the batch was split."""
    parents = {id for snapshot in past if snapshot.summary for id in _parents(snapshot.summary)}
    if write.batch.id in parents:
        raise StaleClaim(
            f"{write.lake}: nothing was written: the table has a part of batch {write.batch.id}, so the batch was "
            f"split and this attempt is over. If the database was restored to a time before the split, delete the "
            f"rows of the part. Then set the table's property pgchange.{write.batch.id} to {MISSING}, and run the "
            f"task again"
        )


def _parents(summary: Summary) -> list[str]:
    return (summary["pgchange.parts_of"] or "").split()


def _check_reaches(past: Sequence[Snapshot], write: Write) -> None:
    """Raise OutcomeUnknown if snapshots that were made after the first claim of the batch may have expired."""
    # A snapshot without a parent need not be the first: PyIceberg deletes the names of parents that expire.
    if not past or past[-1].sequence_number == 1:
        return
    oldest, batch = past[-1].timestamp_ms / 1000, write.batch
    claimed = datetime.fromisoformat(batch.first_claimed_at).timestamp() if batch.first_claimed_at else 0.0
    if oldest + CLOCKS > claimed:
        raise OutcomeUnknown(
            f"{write.lake}: an earlier attempt may have written batch {batch.id}: its first attempt began at "
            f"{batch.first_claimed_at}, but the snapshots from before "
            f"{datetime.fromtimestamp(oldest).astimezone().isoformat()} have expired. Look for its rows in the table. "
            f"Then set the table's property "
            f"pgchange.{batch.id} to {WRITTEN} if they are there, else to {MISSING}, and run the task again. Keep "
            "snapshots for longer than a batch is tried"
        )
