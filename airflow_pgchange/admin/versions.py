"""The SQL systems of this package, and the versions of them that a database has installed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from airflow_pgchange.errors import SchemaVersionMismatch
from airflow_pgchange.feeds import grants
from airflow_pgchange.feeds.queries import rows

sql_folder = grants.sql_folder


@dataclass(frozen=True)
class System:
    """A folder of ``sql/`` and the schema that it creates.

    ``version`` is the version that this package needs. ``needs`` are the folders of the systems that it depends on.
    """

    folder: str
    schema: str
    version: int
    needs: tuple[str, ...] = ("core",)


SYSTEMS: tuple[System, ...] = (
    System("core", "pgchange", 1, needs=()),
    System("revision", "revision", 1),
    System("pubsub", "pubsub", 1, needs=("core", "revision")),
    System("tube", "tube", 1),
    System("pgmb", "pgmb", 1),
    System("mbus", "mbus", 1),
    System("topology", "topology", 1),
)
"""All systems in the order of installation: each comes after the systems that it depends on."""

STAGING = "pgchange_staging"
"""The second schema of the core. It is the only schema of ours in which consumers may create tables."""

SEALED = "_sealed"
"""The suffix of a sealed schema's name. A system keeps functions there that get the calling role as an argument."""


@dataclass(frozen=True)
class Installed:
    """The state of one system in a database.

    ``intact``: whether it was installed from the files of this package; None if unknown, as after an installation with
    psql. ``left_out``: the reason if it was not installed; its version is then 0.
    """

    system: str
    version: int
    needed: int
    intact: bool | None
    left_out: str | None = None


def scripts(system: System) -> list[Path]:
    """Return the files that install a system, in order."""
    return sorted((sql_folder() / system.folder).glob("[0-9]*.sql"))


def checksum(system: System) -> str:
    """Return the SHA-256 of the files of a system."""
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in scripts(system))).hexdigest()


def present(connection: psycopg.Connection[Any]) -> list[str]:
    """Return the folders of the systems that this database has. Every role may call this.

    A schema is ours if its table ``installed`` has a constraint with a unique name, which every dump contains. The
    names of schemas and tables are no proof, because other software may use them.
    """
    query = """
        select n.nspname::text
        from pg_catalog.pg_class as c
        join pg_catalog.pg_namespace as n on n.oid = c.relnamespace
        join pg_catalog.pg_constraint as m on m.conrelid = c.oid
        where c.relname = 'installed' and c.relkind = 'r' and m.conname = n.nspname || '_of_airflow_pgchange'
    """
    schemas = {name for (name,) in rows(connection, query)}
    return [system.folder for system in SYSTEMS if system.schema in schemas]


def holds_staging(connection: psycopg.Connection[Any]) -> bool | None:
    """Return whether schema ``STAGING`` belongs to the core; None if it does not exist.

    It contains only tables of consumers, so no constraint identifies it. We check its owner and its comment. If the
    core is installed, any comment is enough, and none is needed if a restore left out all comments.
    """
    query = """
        select (o.rolsuper or o.oid = coalesce(h.nspowner, current_user::regrole))
            and case when c.oid is null then told.comment like 'pgchange: %'
                     else told.comment <> '' or pg_catalog.obj_description(c.oid, 'pg_class') is null end
        from pg_catalog.pg_namespace as n
        cross join lateral coalesce(pg_catalog.obj_description(n.oid, 'pg_namespace'), '') as told(comment)
        join pg_catalog.pg_roles as o on o.oid = n.nspowner
        left join pg_catalog.pg_namespace as h on h.nspname = 'pgchange'
        left join pg_catalog.pg_class as c on c.relnamespace = h.oid and c.relname = 'installed'
        where n.nspname = 'pgchange_staging'
    """
    return next((ours for (ours,) in rows(connection, query)), None)


def sealed(connection: psycopg.Connection[Any], system: System) -> list[str]:
    """Return the sealed schema of a system, if it exists and is ours, which its owner and its comment show."""
    query = """
        select n.nspname::text
        from pg_catalog.pg_namespace as n
        join pg_catalog.pg_roles as o on o.oid = n.nspowner
        left join pg_catalog.pg_namespace as h on h.nspname = %s
        where n.nspname = %s and (o.rolsuper or o.oid = coalesce(h.nspowner, current_user::regrole))
          and (h.oid is not null or pg_catalog.obj_description(n.oid, 'pg_namespace') like 'pgchange: %%')
    """
    return [name for (name,) in rows(connection, query, [system.schema, system.schema + SEALED])]


def installed(connection: psycopg.Connection[Any]) -> list[Installed]:
    """Return the state of all systems in this database, in the order of ``SYSTEMS``. Missing systems are left out."""
    states = []
    folders = present(connection)
    for system in SYSTEMS:
        if system.folder not in folders:
            continue
        for version, stored in _newest(connection, system):
            intact = None if stored is None else stored == checksum(system)
            states.append(Installed(system.folder, version, system.version, intact))
    return states


def demand_version(connection: psycopg.Connection[Any], system: System) -> None:
    """Raise SchemaVersionMismatch if a system's version or its files differ from this package's."""
    installed_version, stored = next(iter(_newest(connection, system)), (0, None))
    if installed_version == 0:
        raise SchemaVersionMismatch(
            f"schema {system.schema} came without its data, as from `pg_dump --schema-only`: run `airflow-pgchange "
            "uninstall`, then install; or restore the data with it"
        )
    if installed_version != system.version:
        is_older = installed_version < system.version
        raise SchemaVersionMismatch(
            f"schema {system.schema} is at version {installed_version}, this package needs {system.version}: "
            + ("run `airflow-pgchange upgrade`" if is_older else "install the newer package")
        )
    if stored is not None and stored != checksum(system):
        raise SchemaVersionMismatch(
            f"schema {system.schema} is at version {installed_version}, but was made from other files than this "
            "package's. Install the package that made it; or run `airflow-pgchange uninstall`, which deletes waiting "
            "changes, then install"
        )


def version(connection: psycopg.Connection[Any], system: System) -> int:
    """Return the version that was installed last; 0 if a dump restored the schema without its data."""
    return next((number for number, _ in _newest(connection, system)), 0)


def _newest(connection: psycopg.Connection[Any], system: System) -> list[tuple[Any, ...]]:
    """Return the version that was installed last, with its checksum; no row if the schema has no data."""
    query = sql.SQL("select version, checksum from {} order by version desc, installed_at desc limit 1")
    return rows(connection, query.format(sql.Identifier(system.schema, "installed")))


def note_checksum(connection: psycopg.Connection[Any], system: System) -> None:
    """Store the checksum of this package's files with the installed version."""
    query = sql.SQL("update {0} set checksum = {1} where version = (select max(version) from {0})")
    connection.execute(query.format(sql.Identifier(system.schema, "installed"), checksum(system)))
