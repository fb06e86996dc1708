"""Maintenance of a lake table: old snapshots, and files that failed attempts have left."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psycopg

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds.argument_checks import Seconds, seconds
from airflow_pgchange.lake.staged_files import LIFE
from airflow_pgchange.lake.tables import Iceberg, LakeTable, RemoteIceberg

LEAST = LIFE + timedelta(days=1)
"""The minimum age of a file that is removed. An attempt commits no file that is older than ``LIFE``. The further day is
for clocks that differ and for long commits."""


@dataclass(frozen=True)
class Leftover:
    """The files of one attempt that no snapshot of a table names, and their size. ``batch`` and ``attempt`` are None
    for the metadata files, which are counted together."""

    batch: str | None
    attempt: int | None
    files: int
    bytes: int


@dataclass(frozen=True)
class LakeReport:
    """The result of ``maintain``: the number of snapshots that have expired, and the files that were removed."""

    table: str
    expired: int
    leftovers: tuple[Leftover, ...]

    @property
    def files(self) -> int:
        return sum(leftover.files for leftover in self.leftovers)

    @property
    def bytes(self) -> int:
        return sum(leftover.bytes for leftover in self.leftovers)


def maintain(
    connection: psycopg.Connection[Any],
    lake: LakeTable,
    *,
    older_than: Seconds = LEAST,
    snapshot_retention: Seconds | None = None,
    dry_run: bool = False,
) -> LakeReport:
    """Remove the files that failed attempts have left in a table, and let old snapshots expire.

    ``connection`` is a connection to the database of the results, in autocommit mode. Files are removed if an attempt
    on a batch wrote them more than ``older_than`` ago (at least 3 days) and no snapshot names them. No attempt can
    commit them any more. Files of other writers stay. With ``snapshot_retention`` (at least 3 days), PyIceberg first
    expires older snapshots. ``dry_run`` only reports.

    Raises Refused if another catalog commits to the same table. Raises InvalidArgument for another format.
    """
    if not isinstance(lake, Iceberg | RemoteIceberg):
        raise InvalidArgument(f"{lake}: only Iceberg tables are maintained here: run VACUUM on a Delta table")
    from airflow_pgchange.lake.iceberg import maintenance  # noqa: PLC0415

    age = timedelta(seconds=seconds("older_than", older_than, least=LEAST))
    retention = (
        None if snapshot_retention is None else seconds("snapshot_retention", snapshot_retention, least=LEAST)
    )
    expired = (
        0
        if retention is None
        else maintenance.expire(connection, lake, timedelta(seconds=retention), dry_run=dry_run)
    )
    return LakeReport(str(lake), expired, maintenance.remove_orphans(connection, lake, age, dry_run=dry_run))
