"""Installing, upgrading and removing the SQL that the feeds live in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import sql

from airflow_pgchange.admin import originals, versions
from airflow_pgchange.admin.foreign_objects import strangers
from airflow_pgchange.admin.versions import SEALED, STAGING, Installed, System
from airflow_pgchange.errors import InvalidArgument, PermissionDenied, Refused, SchemaVersionMismatch
from airflow_pgchange.feeds.errors import translated
from airflow_pgchange.feeds.extensions import EXTENSIONS, advice, is_missing
from airflow_pgchange.feeds.queries import ask, rows


def install(
    connection: psycopg.Connection[Any], systems: Sequence[str] | None = None, *, without: Sequence[str] = ()
) -> list[Installed]:
    """Install what is missing, all of it or, where anything fails, nothing; doing it twice does nothing.

    ``systems`` and ``without`` name folders of ``sql/``: these with what they need, and not those. None means all; what
    the server cannot hold of these is left out, and is among what is returned, with the reason. Raises InvalidArgument
    for what others need, SchemaVersionMismatch where another version is there, Refused where the server cannot hold
    what was named, where a schema has the name of one of ours and is not, or where one is gone that others here need.
    """
    with _as_owner(), connection.transaction():
        _lock(connection)
        held = versions.present(connection)
        chosen = _with_needs(systems, without)
        for system in chosen:
            if system.folder in held:
                versions.demand_version(connection, system)
        missing = [system for system in chosen if system.folder not in held]
        left_out = _left_out(connection, missing, refuse=systems is not None)
        made = [system for system in missing if system.folder not in {state.system for state in left_out}]
        _refuse_foreign(connection, made)
        _refuse_gone(made, held)
        originals.refuse_left_over(connection, made)
        originals.refuse_roles(connection, made)
        for system in made:
            for path in versions.scripts(system):
                connection.execute(path.read_bytes(), prepare=False)
            versions.note_checksum(connection, system)
        if "core" in held and versions.holds_staging(connection) is None:
            connection.execute("select pgchange.make_staging()")
        return versions.installed(connection) + left_out


def _with_needs(systems: Sequence[str] | None, without: Sequence[str]) -> list[System]:
    """What is to be there, in the order in which it is made: others are needed by what is behind them."""
    left_out = _chosen(without)
    wanted: list[System] = []
    for system in reversed(versions.SYSTEMS):
        needed_by = [other.folder for other in wanted if system.folder in other.needs]
        if system in left_out:
            if needed_by:
                raise InvalidArgument(f"{needed_by[-1]} needs {system.folder}: leave out both, or neither")
        elif needed_by or system in _chosen(systems):
            wanted.append(system)
    return wanted[::-1]


def _left_out(
    connection: psycopg.Connection[Any], missing: Sequence[System], *, refuse: bool
) -> list[Installed]:
    reasons = {system: why for system in missing if (why := _lacking(connection, system)) is not None}
    if reasons and refuse:
        raise Refused("; ".join(f"{system.folder}: {why}" for system, why in reasons.items()))
    return [Installed(system.folder, 0, system.version, None, why) for system, why in reasons.items()]


def _lacking(connection: psycopg.Connection[Any], system: System) -> str | None:
    """Why the server cannot hold a system; None where it can."""
    extension = EXTENSIONS.get(system.schema)
    if extension is None or not ask(connection, is_missing(extension)):
        return None
    return advice(extension)


def _refuse_foreign(connection: psycopg.Connection[Any], systems: Sequence[System]) -> None:
    """Refuse to make a schema where somebody else's has the name. It is what ours are called by, so ours has no other."""
    query = "select nspname::text from pg_catalog.pg_namespace where nspname = any (%s)"
    ours = {name for system in systems for name in (system.schema, system.schema + SEALED)}
    there = {name for (name,) in rows(connection, query, [list(ours)])}
    there -= {name for system in systems for name in versions.sealed(connection, system)}
    foreign = [system for system in systems if there & {system.schema, system.schema + SEALED}]
    if foreign:
        raise originals.foreign(connection, foreign, sorted(there))
    if versions.holds_staging(connection) is False:
        raise Refused(
            f"schema {STAGING} is there and is not ours: install into another database, or drop or rename that schema; "
            "nothing was changed"
        )


def _refuse_gone(systems: Sequence[System], held: Sequence[str]) -> None:
    """Refuse to make anew what a system that is here has lost, with all that it knew of it."""
    for system in systems:
        bereft = [
            other.folder
            for other in versions.SYSTEMS
            if other.folder in held and system.folder in other.needs
        ]
        if bereft:
            options = " ".join(f"--system {folder}" for folder in bereft)
            raise Refused(
                f"schema {system.schema} is gone, and what {', '.join(bereft)} kept there with it: restore the database "
                f"from a backup, or begin anew: `airflow-pgchange uninstall {options}`, then install; nothing was changed"
            )


def upgrade(connection: psycopg.Connection[Any]) -> list[Installed]:
    """Bring every installed system to the version of this package, a numbered file and a transaction at a time.

    Raises SchemaVersionMismatch where the database is ahead of the package.
    """
    with _as_owner():
        for system in versions.SYSTEMS:
            while _upgraded_by_one(connection, system):
                pass
        return versions.installed(connection)


def _upgraded_by_one(connection: psycopg.Connection[Any], system: System) -> bool:
    with connection.transaction():
        _lock(connection)
        if system.folder not in versions.present(connection):
            return False
        found = versions.version(connection, system)
        if found == 0 or found >= system.version:
            versions.demand_version(connection, system)
            return False
        paths = list((versions.sql_folder() / system.folder / "upgrade").glob(f"{found + 1:04}_*.sql"))
        if len(paths) != 1:
            raise SchemaVersionMismatch(
                f"this package has no upgrade of schema {system.schema} from version {found}: install the package "
                f"whose version {found + 1} of it is"
            )
        connection.execute(paths[0].read_bytes(), prepare=False)
        reached = versions.version(connection, system)
        if reached != found + 1:
            raise SchemaVersionMismatch(
                f"{paths[0].name} left schema {system.schema} at version {reached}, not {found + 1}: install a package "
                "whose upgrade is whole; nothing was changed"
            )
        versions.note_checksum(connection, system)
        return True


def uninstall(connection: psycopg.Connection[Any], systems: Sequence[str] | None = None) -> list[str]:
    """Remove systems, the last installed first, and the capture on users' tables, all or none; returns what was removed.

    Where a schema was dropped by hand, the capture that it left on users' tables is taken off as well. Users' tables
    stay as they are; queues, watermarks and what waits in them are gone. Raises InvalidArgument where a system that
    stays needs one that is to go, Refused where others have put something of theirs into a schema, or have built on
    what is in it.
    """
    removed = []
    with _as_owner(), connection.transaction():
        _lock(connection)
        held = versions.present(connection)
        chosen = _chosen(systems)
        _refuse_needed([system for system in chosen if system.folder in held], held)
        for system in reversed(chosen):
            if system.folder in held:
                _take_out(connection, system)
                removed.append(system.folder)
            else:
                _sweep_up(connection, system)
    return removed


def _refuse_needed(systems: Sequence[System], held: Sequence[str]) -> None:
    """Refuse to take out what a system needs that stays."""
    gone = {system.folder for system in systems}
    staying = [system for system in versions.SYSTEMS if system.folder in held and system.folder not in gone]
    for system in staying:
        needed = [name for name in system.needs if name in gone]
        if needed:
            raise InvalidArgument(
                f"{system.folder} needs {', '.join(needed)}: remove {system.folder} first, or all at once"
            )


def _take_out(connection: psycopg.Connection[Any], system: System) -> None:
    """First what is ours elsewhere: whatever uses the schema then is somebody else's."""
    try:
        for path in sorted((versions.sql_folder() / system.folder / "uninstall").glob("*.sql")):
            connection.execute(path.read_bytes(), prepare=False)
    except psycopg.errors.DependentObjectsStillExist as error:
        raise _used(system.schema, system, [error.diag.message_detail or str(error)]) from error
    if system.needs and "core" in versions.present(connection):
        connection.execute("select pgchange.unregister(%s)", [system.schema])
    _drop(connection, system, [system.schema, *_beside(connection, system)])


def _sweep_up(connection: psycopg.Connection[Any], system: System) -> None:
    """Take off users' tables what a schema has left there that was dropped by hand, and drop what it made beside it."""
    if not ask(connection, "select pg_catalog.to_regnamespace(%s) is not null", [system.schema]):
        for path in sorted((versions.sql_folder() / system.folder / "dropped_by_hand").glob("*.sql")):
            connection.execute(path.read_bytes(), prepare=False)
        _drop(connection, system, _beside(connection, system))


def _beside(connection: psycopg.Connection[Any], system: System) -> list[str]:
    """The schemas that a system made beside its own: its sealed schema, and the core's schema of what is staged."""
    staging = [STAGING] if system.folder == "core" and versions.holds_staging(connection) else []
    return versions.sealed(connection, system) + staging


def _drop(connection: psycopg.Connection[Any], system: System, schemas: Sequence[str]) -> None:
    for schema in schemas:
        theirs = strangers(connection, schema, schemas)
        if theirs:
            raise _used(schema, system, theirs)
    if schemas:
        names = sql.SQL(", ").join(sql.Identifier(schema) for schema in schemas)
        connection.execute(sql.SQL("drop schema {} cascade").format(names))


def _used(schema: str, system: System, theirs: Sequence[str]) -> Refused:
    return Refused(
        f"schema {schema} is used by others: {', '.join(theirs)}: removing {system.folder} would remove these "
        "too: drop or change them, or move what is in the schema out with `alter ... set schema`, first; "
        "nothing was changed"
    )


@contextmanager
def _as_owner() -> Iterator[None]:
    """The driver's errors as ours, with the advice that fits here."""
    try:
        with translated():
            yield
    except PermissionDenied as error:
        cause = error.__cause__
        reason = cause.diag.message_primary if isinstance(cause, psycopg.Error) else str(error)
        has_advice = isinstance(cause, psycopg.Error) and cause.diag.message_hint
        if has_advice or "for function pg_" in (reason or ""):
            raise
        raise PermissionDenied(
            f"{reason}: the schemas are installed, upgraded and removed by their owner, "
            "a role that may create schemas in this database (`grant create on database`)"
        ) from error


def _chosen(systems: Sequence[str] | None) -> list[System]:
    known = {system.folder: system for system in versions.SYSTEMS}
    for name in systems or ():
        if name not in known:
            raise InvalidArgument(f"there is no system {name!r}: choose from {', '.join(known)}")
    return [system for system in versions.SYSTEMS if systems is None or system.folder in systems]


def _lock(connection: psycopg.Connection[Any]) -> None:
    """Wait for others who install or remove, and see what they did."""
    try:
        connection.execute("set transaction isolation level read committed")
    except psycopg.errors.ActiveSqlTransaction as error:
        raise Refused(
            "this transaction would not see what others install meanwhile: commit it first, or begin it as read committed"
        ) from error
    connection.execute(
        "select pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended('pgchange install', 0))"
    )
