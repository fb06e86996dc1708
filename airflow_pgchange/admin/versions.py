"""What this package has of SQL, and which version of it a database holds."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from airflow_pgchange.errors import SchemaVersionMismatch
from airflow_pgchange.feeds.queries import rows


@dataclass(frozen=True)
class System:
    """One folder of ``sql/`` and the schema that it makes; ``version`` is the one that this package needs, ``needs`` are
    the folders of those without which it does nothing."""

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
"""In the order in which they are installed: a later one may need an earlier one."""

STAGING = "pgchange_staging"
"""The schema that the core makes beside its own: consumers create in it, and in no other."""

SEALED = "_sealed"
"""The end of a sealed schema's name. A system keeps the functions that are told their caller there."""


@dataclass(frozen=True)
class Installed:
    """What a database holds of one system. ``intact`` is false where it was loaded from other files than this package's,
    and None where that is not known, as after psql. ``left_out``: why it was not installed; its version is 0 then."""

    system: str
    version: int
    needed: int
    intact: bool | None
    left_out: str | None = None


def sql_folder() -> Path:
    """Where the SQL files are: inside an installed package, or at the top of a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "sql"
    return inside if inside.is_dir() else package.parent / "sql"


def scripts(system: System) -> list[Path]:
    """The files that make a system, in reading order."""
    return sorted((sql_folder() / system.folder).glob("[0-9]*.sql"))


def checksum(system: System) -> str:
    """SHA-256 over the files of a system."""
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in scripts(system))).hexdigest()


def present(connection: psycopg.Connection[Any]) -> list[str]:
    """The systems that this database holds, by their folders; whoever asks.

    A schema is ours by a constraint that nothing else is called like, and that no dump leaves out: its name, and those of
    its tables, may be anybody's.
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
    """Whether schema ``STAGING`` is the core's; None where it is not there. In it are tables of consumers alone, so no
    constraint can tell: it is by its owner, and by its comment. Where the core is here, people may have written another,
    and a restore may have left all comments out."""
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
    """The sealed schema of a system, where it is there and ours: by its comment, and by its owner."""
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
    """What this database holds, in the order of ``SYSTEMS``; nothing for a system that is not there."""
    found = []
    held = present(connection)
    for system in SYSTEMS:
        if system.folder not in held:
            continue
        for version, known in _newest(connection, system):
            intact = None if known is None else known == checksum(system)
            found.append(Installed(system.folder, version, system.version, intact))
    return found


def demand_version(connection: psycopg.Connection[Any], system: System) -> None:
    """Raise SchemaVersionMismatch where a system is not as this package makes it."""
    found, known = next(iter(_newest(connection, system)), (0, None))
    if found == 0:
        raise SchemaVersionMismatch(
            f"schema {system.schema} came without its data, as from `pg_dump --schema-only`: run `airflow-pgchange "
            "uninstall`, then install; or restore the data with it"
        )
    if found != system.version:
        raise SchemaVersionMismatch(
            f"schema {system.schema} is at version {found}, this package needs {system.version}: "
            + ("run `airflow-pgchange upgrade`" if found < system.version else "install the newer package")
        )
    if known is not None and known != checksum(system):
        raise SchemaVersionMismatch(
            f"schema {system.schema} is at version {found}, but was made from other files than this package's: install "
            "the package that made it; or run `airflow-pgchange uninstall`, by which what waits is lost, then install"
        )


def version(connection: psycopg.Connection[Any], system: System) -> int:
    """The version that was installed last; 0 where the schema came without its data."""
    return next((number for number, _ in _newest(connection, system)), 0)


def _newest(connection: psycopg.Connection[Any], system: System) -> list[tuple[Any, ...]]:
    """The version that was installed last, with its checksum; none where the schema came without its data."""
    query = sql.SQL("select version, checksum from {} order by version desc, installed_at desc limit 1")
    return rows(connection, query.format(sql.Identifier(system.schema, "installed")))


def note_checksum(connection: psycopg.Connection[Any], system: System) -> None:
    """Note from which files the version that is there was made."""
    query = sql.SQL("update {0} set checksum = {1} where version = (select max(version) from {0})")
    connection.execute(query.format(sql.Identifier(system.schema, "installed"), checksum(system)))
