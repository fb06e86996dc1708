"""Maintenance of an Iceberg table: expire old snapshots, and remove files that no snapshot names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias

import psycopg
from pyiceberg.table import Table

from airflow_pgchange.errors import Refused
from airflow_pgchange.lake.file_names import Attempt
from airflow_pgchange.lake.iceberg import metadata_pointer, remote_catalog
from airflow_pgchange.lake.iceberg.orphans import latest_version, orphans
from airflow_pgchange.lake.maintenance import Leftover
from airflow_pgchange.lake.tables import Iceberg, RemoteIceberg

Catalogued: TypeAlias = Iceberg | RemoteIceberg


@contextmanager
def opened(connection: psycopg.Connection[Any], lake: Catalogued, *, locked: bool = False) -> Iterator[Table]:
    """Yield the table at its current snapshot. ``locked`` is for a commit by PostgreSQL."""
    if isinstance(lake, Iceberg):
        yield metadata_pointer.opened(connection, lake, locked=locked)
    else:
        with remote_catalog.opened(lake) as table:
            yield table


def expire(
    connection: psycopg.Connection[Any], lake: Catalogued, retention: timedelta, *, dry_run: bool = False
) -> int:
    """Let PyIceberg expire old snapshots, and return how many. Snapshots of branches and tags are kept."""
    before = (datetime.now(UTC) - retention).timestamp() * 1000
    with connection.transaction(), opened(connection, lake, locked=True) as table:
        named = {ref.snapshot_id for ref in table.metadata.refs.values()}
        old = [
            snapshot.snapshot_id
            for snapshot in table.metadata.snapshots
            if snapshot.timestamp_ms < before and snapshot.snapshot_id not in named
        ]
        if old and not dry_run:
            table.maintenance.expire_snapshots().by_ids(old).commit()
    return len(old)


def remove_orphans(
    connection: psycopg.Connection[Any], lake: Catalogued, older_than: timedelta, *, dry_run: bool = False
) -> tuple[Leftover, ...]:
    """Remove files of attempts that are older than ``older_than`` and that no snapshot of the table names.

    Raises Refused if another catalog commits to the same table.
    """
    with opened(connection, lake) as table:
        latest = latest_version(table)
    # Open the table again, because other attempts may have committed meanwhile.
    with opened(connection, lake) as table:
        _check_alone(lake, table, latest)
        return _removed(table, older_than, dry_run=dry_run)


def _check_alone(lake: Catalogued, table: Table, latest: int) -> None:
    current = metadata_pointer.version_of(table.metadata_location)
    # A commit that was rolled back leaves a metadata file of the next version.
    if latest > current + 1:
        raise Refused(
            f"{lake}: no file was removed: the table is at version {current} here, and its folder has a metadata file of "
            f"version {latest}. So another catalog commits to it, such as that of a database of which this is a copy. "
            "If there is none, because this database was restored, let `remove_orphan_files` of Spark remove the files"
        )


def _removed(table: Table, older_than: timedelta, *, dry_run: bool) -> tuple[Leftover, ...]:
    files: Counter[Attempt | None] = Counter()
    size: Counter[Attempt | None] = Counter()
    for orphan in orphans(table, older_than):
        files[orphan.attempt] += 1
        size[orphan.attempt] += orphan.bytes
        if not dry_run:
            orphan.remove()
    return tuple(
        Leftover(
            None if attempt is None else attempt.batch,
            None if attempt is None else attempt.number,
            count,
            size[attempt],
        )
        for attempt, count in files.items()
    )
