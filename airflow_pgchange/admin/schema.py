"""Install and remove the SQL schemas of the feeds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import sql

from airflow_pgchange.admin import original_systems, versions
from airflow_pgchange.admin.dependent_objects import strangers
from airflow_pgchange.admin.versions import SEALED, STAGING, Installed, System
from airflow_pgchange.errors import InvalidArgument, PermissionDenied, Refused
from airflow_pgchange.feeds.error_translation import translated
from airflow_pgchange.feeds.extensions import EXTENSIONS, advice, is_missing
from airflow_pgchange.feeds.grants import identifier
from airflow_pgchange.feeds.queries import ask, rows
from airflow_pgchange.feeds.refused_statements import refusal_kept
from airflow_pgchange.feeds.watched_connection import role_of


def install(
    connection: psycopg.Connection[Any], systems: Sequence[str] | None = None, *, without: Sequence[str] = ()
) -> list[Installed]:
    """Install the missing systems, all or none. Idempotent. Return the state of all systems.

    ``systems`` and ``without`` name folders of ``sql/`` to install, with their dependencies, and to leave out. If
    ``systems`` is None, all are installed. Systems for which the server lacks an extension are then left out, and
    returned with the reason.

    Raises InvalidArgument if a system to leave out is a dependency, and SchemaVersionMismatch if another version is
    installed. Raises Refused if the server lacks an extension for a system in ``systems``, or if an installed
    system needs a dropped schema. Also if another program has a schema of the same name.
    """
    with as_owner(connection), connection.transaction():
        lock(connection)
        present = versions.present(connection)
        chosen = _with_needs(systems, without)
        for system in chosen:
            if system.folder in present:
                versions.demand_version(connection, system)
        missing = [system for system in chosen if system.folder not in present]
        left_out = _left_out(connection, missing, refuse=systems is not None)
        new = [system for system in missing if system.folder not in {state.system for state in left_out}]
        _refuse_foreign(connection, new)
        _refuse_gone(new, present)
        original_systems.refuse_left_over(connection, new)
        original_systems.refuse_roles(connection, new)
        for system in new:
            for path in versions.scripts(system):
                connection.execute(path.read_bytes(), prepare=False)
            versions.note_checksum(connection, system)
        if "core" in present and versions.holds_staging(connection) is None:
            connection.execute("select pgchange.make_staging()")
        return versions.installed(connection) + left_out


def _with_needs(systems: Sequence[str] | None, without: Sequence[str]) -> list[System]:
    """Return the chosen systems with their dependencies, in the order of installation."""
    left_out = _chosen(without)
    with_needs: list[System] = []
    for system in reversed(versions.SYSTEMS):
        needed_by = [other.folder for other in with_needs if system.folder in other.needs]
        if system in left_out:
            if needed_by:
                raise InvalidArgument(
                    f"{system.folder} cannot be left out, because {needed_by[-1]} needs it: leave out both, or neither"
                )
        elif needed_by or system in _chosen(systems):
            with_needs.append(system)
    return with_needs[::-1]


def _left_out(
    connection: psycopg.Connection[Any], missing: Sequence[System], *, refuse: bool
) -> list[Installed]:
    reasons = {
        system: reason for system in missing if (reason := _missing_extension(connection, system)) is not None
    }
    if reasons and refuse:
        raise Refused("; ".join(f"{system.folder}: {reason}" for system, reason in reasons.items()))
    return [Installed(system.folder, 0, system.version, None, reason) for system, reason in reasons.items()]


def _missing_extension(connection: psycopg.Connection[Any], system: System) -> str | None:
    """Return advice about the extension that the server lacks for a system; None if it lacks none."""
    extension = EXTENSIONS.get(system.schema)
    if extension is None or not ask(connection, is_missing(extension)):
        return None
    return advice(extension)


def _refuse_foreign(connection: psycopg.Connection[Any], systems: Sequence[System]) -> None:
    """Raise Refused if a foreign schema has the name of one of ours. Our schemas cannot have other names."""
    query = "select nspname::text from pg_catalog.pg_namespace where nspname = any (%s)"
    ours = {name for system in systems for name in (system.schema, system.schema + SEALED)}
    taken = {name for (name,) in rows(connection, query, [list(ours)])}
    taken -= {name for system in systems for name in versions.sealed(connection, system)}
    foreign = [system for system in systems if taken & {system.schema, system.schema + SEALED}]
    if foreign:
        raise original_systems.foreign(connection, foreign, sorted(taken))
    if versions.holds_staging(connection) is False:
        raise Refused(
            f"schema {STAGING} is there and is not ours: install into another database, or drop or rename that schema; "
            "nothing was changed"
        )


def _refuse_gone(systems: Sequence[System], present: Sequence[str]) -> None:
    """Raise Refused if an installed system depends on a schema that was dropped, because its data there is lost."""
    for system in systems:
        dependents = [
            other.folder
            for other in versions.SYSTEMS
            if other.folder in present and system.folder in other.needs
        ]
        if dependents:
            options = " ".join(f"--system {folder}" for folder in dependents)
            raise Refused(
                f"schema {system.schema} is gone, and with it data of {', '.join(dependents)}. Restore the database from "
                f"a backup, or begin anew: `airflow-pgchange uninstall {options}`, then install; nothing was changed"
            )


def uninstall(connection: psycopg.Connection[Any], systems: Sequence[str] | None = None) -> list[str]:
    """Remove systems with their triggers on users' tables, all or none, in the reverse order of installation.

    Returns the removed systems. If a schema was dropped by hand, its remaining triggers on users' tables are removed too.
    Users' tables do not change. Queues, watermarks and waiting changes are lost.

    Raises InvalidArgument if a remaining system depends on a removed one. Raises Refused if a schema contains objects of
    others, or if objects of others depend on it.
    """
    removed = []
    with as_owner(connection), connection.transaction():
        lock(connection)
        present = versions.present(connection)
        chosen = _chosen(systems)
        _refuse_needed([system for system in chosen if system.folder in present], present)
        for system in reversed(chosen):
            if system.folder in present:
                _remove(connection, system)
                removed.append(system.folder)
            else:
                _clean_up(connection, system)
    return removed


def _refuse_needed(systems: Sequence[System], present: Sequence[str]) -> None:
    """Raise InvalidArgument if a remaining system depends on a system to remove."""
    gone = {system.folder for system in systems}
    staying = [
        system for system in versions.SYSTEMS if system.folder in present and system.folder not in gone
    ]
    for system in staying:
        needed = [name for name in system.needs if name in gone]
        if needed:
            raise InvalidArgument(
                f"{system.folder} needs {', '.join(needed)}: remove {system.folder} first, or all at once"
            )


def _remove(connection: psycopg.Connection[Any], system: System) -> None:
    """Remove a system: first its objects outside its schemas, so that any object that still uses them is foreign."""
    try:
        for path in sorted((versions.sql_folder() / system.folder / "uninstall").glob("*.sql")):
            connection.execute(path.read_bytes(), prepare=False)
    except psycopg.errors.DependentObjectsStillExist as error:
        raise _used(system.schema, system, [error.diag.message_detail or str(error)]) from error
    if system.needs and "core" in versions.present(connection):
        connection.execute("select pgchange.unregister(%s)", [system.schema])
    _drop(connection, system, [system.schema, *_beside(connection, system)])


def _clean_up(connection: psycopg.Connection[Any], system: System) -> None:
    """If a schema was dropped by hand, remove its triggers from users' tables, and drop the schemas beside it."""
    if not ask(connection, "select pg_catalog.to_regnamespace(%s) is not null", [system.schema]):
        for path in sorted((versions.sql_folder() / system.folder / "dropped_by_hand").glob("*.sql")):
            connection.execute(path.read_bytes(), prepare=False)
        _drop(connection, system, _beside(connection, system))


def _beside(connection: psycopg.Connection[Any], system: System) -> list[str]:
    """Return the schemas that a system has besides its own: its sealed schema, and for the core the staging schema."""
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
def as_owner(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """Translate the driver's errors. PermissionDenied gets the advice to run as the owner of the schemas."""
    try:
        with translated(), refusal_kept(connection, ""):
            yield
    except PermissionDenied as error:
        cause = error.__cause__
        reason = cause.diag.message_primary if isinstance(cause, psycopg.Error) else str(error)
        has_advice = isinstance(cause, psycopg.Error) and cause.diag.message_hint
        if has_advice or "for function pg_" in (reason or ""):
            raise
        database, role = identifier(connection.info.dbname), identifier(role_of(connection))
        raise PermissionDenied(
            f"{reason}, role {role}:\nthe schemas are installed, upgraded and removed by their owner: connect as it. For "
            f"new schemas, let the owner of the database run: grant create on database {database} to {role}"
        ) from error


def _chosen(systems: Sequence[str] | None) -> list[System]:
    folders = [system.folder for system in versions.SYSTEMS]
    for name in systems or ():
        if name not in folders:
            raise InvalidArgument(f"there is no system {name!r}: choose from {', '.join(folders)}")
    return [system for system in versions.SYSTEMS if systems is None or system.folder in systems]


def lock(connection: psycopg.Connection[Any]) -> None:
    """Wait for other sessions that install or remove schemas, and make their changes visible to this transaction."""
    try:
        connection.execute("set transaction isolation level read committed")
    except psycopg.errors.ActiveSqlTransaction as error:
        raise Refused(
            "the isolation level of this transaction hides schemas that other sessions install: commit it first, or "
            "begin it as read committed"
        ) from error
    connection.execute(
        "select pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended('pgchange install', 0))"
    )
