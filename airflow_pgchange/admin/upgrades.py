"""Upgrade installed schemas to the version of this package, by the numbered files in ``sql/<system>/upgrade``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import psycopg

from airflow_pgchange.admin import versions
from airflow_pgchange.admin.grants import grant_again, granted
from airflow_pgchange.admin.schema import as_owner, lock
from airflow_pgchange.admin.versions import Installed, System
from airflow_pgchange.errors import ConsumerBusy, SchemaVersionMismatch

PATIENCE = "10s"
"""The longest wait for a lock. Writers and consumers wait behind an upgrade that waits for a lock of theirs."""

log = logging.getLogger(__name__)


def upgrade(connection: psycopg.Connection[Any], say: Callable[[str], None] = log.info) -> list[Installed]:
    """Upgrade all installed systems to the version of this package, all or none. Idempotent. Return their states.

    ``say`` gets a line for each upgrade file. Roles get the rights of their grants anew, such as those of
    ``pubsub.grant_consumer``. ``lock_timeout`` limits each wait for a lock. If the session has none, it is ten seconds.

    Raises SchemaVersionMismatch if the database has a newer version than the package, or if the package has no upgrade
    from the installed version. Raises ConsumerBusy if others hold a lock for too long.
    """
    with as_owner(connection), connection.transaction():
        lock(connection)
        folders = versions.present(connection)
        systems = [system for system in versions.SYSTEMS if system.folder in folders]
        behind = [system for system in systems if _is_behind(connection, system)]
        if behind:
            _limit_waits(connection)
            grants = granted(connection)
            for system in behind:
                _upgrade_one(connection, system, say)
            grant_again(connection, grants)
        return versions.installed(connection)


def _is_behind(connection: psycopg.Connection[Any], system: System) -> bool:
    current = versions.version(connection, system)
    if current == 0 or current >= system.version:
        versions.demand_version(connection, system)
        return False
    return True


def _limit_waits(connection: psycopg.Connection[Any]) -> None:
    connection.execute(
        "select pg_catalog.set_config('lock_timeout', %s, true) "
        "where pg_catalog.current_setting('lock_timeout') operator(pg_catalog.=) '0'",
        [PATIENCE],
    )


def _upgrade_one(connection: psycopg.Connection[Any], system: System, say: Callable[[str], None]) -> None:
    for current in range(versions.version(connection, system), system.version):
        paths = list((versions.sql_folder() / system.folder / "upgrade").glob(f"{current + 1:04}_*.sql"))
        if len(paths) != 1:
            raise SchemaVersionMismatch(
                f"this package has no upgrade of schema {system.schema} from version {current}: install the package "
                f"whose version {current + 1} of it is; nothing was changed"
            )
        say(f"schema {system.schema}: version {current} to {current + 1}, {paths[0].name}")
        try:
            connection.execute(paths[0].read_bytes(), prepare=False)
        except psycopg.errors.LockNotAvailable as error:
            raise ConsumerBusy(
                f"{paths[0].name} waited too long for a lock in schema {system.schema}, so nothing was changed: pause "
                "the DAGs that consume, end long transactions, and upgrade again"
            ) from error
        reached = versions.version(connection, system)
        if reached != current + 1:
            raise SchemaVersionMismatch(
                f"{paths[0].name} left schema {system.schema} at version {reached}, not {current + 1}: install a package "
                "whose upgrade is whole; nothing was changed"
            )
    versions.note_checksum(connection, system)
