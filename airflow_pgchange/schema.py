"""Installing, upgrading and removing the SQL that the feeds live in."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from airflow_pgchange.feeds.errors import (
    InvalidArgument,
    PermissionDenied,
    Refused,
    SchemaVersionMismatch,
    translated,
)
from airflow_pgchange.feeds.extensions import EXTENSIONS, advice, is_missing
from airflow_pgchange.feeds.queries import ask, rows
from airflow_pgchange.strangers import strangers


@dataclass(frozen=True)
class System:
    """One folder of ``sql/`` and the schema that it makes; ``version`` is the one that this package needs, ``needs`` are
    the folders of those without which it does nothing."""

    folder: str
    schema: str
    version: int
    needs: tuple[str, ...] = ()


SYSTEMS: tuple[System, ...] = (
    System("core", "pgchange", 1),
    System("dead_letters", "dead_letter", 1, needs=("core",)),
    System("revision", "revision", 1, needs=("core",)),
    System("pubsub", "pubsub", 1, needs=("core", "dead_letters", "revision")),
    System("staging", "pgchange_staging", 1, needs=("core",)),
    System("tube", "tube", 1, needs=("core", "dead_letters")),
    System("pgmb", "pgmb", 1, needs=("core", "dead_letters")),
    System("mbus", "mbus", 1, needs=("core", "dead_letters")),
    System("topology", "topology", 1, needs=("core", "dead_letters")),
)
"""In the order in which they are installed: a later one may need an earlier one."""


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
    inside = Path(__file__).parent / "sql"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "sql"


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


def available(connection: psycopg.Connection[Any], system: System) -> bool:
    """Whether the server has the extension that a system needs."""
    return _lacking(connection, system) is None


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
        held = present(connection)
        chosen = _with_needs(systems, without)
        for system in chosen:
            if system.folder in held:
                _demand_version(connection, system)
        missing = [system for system in chosen if system.folder not in held]
        left_out = _left_out(connection, missing, refuse=systems is not None)
        made = [system for system in missing if system.folder not in {state.system for state in left_out}]
        _refuse_foreign(connection, made)
        _refuse_gone(made, held)
        for system in made:
            for path in scripts(system):
                connection.execute(path.read_bytes(), prepare=False)
            _note(connection, system)
        return installed(connection) + left_out


def _with_needs(systems: Sequence[str] | None, without: Sequence[str]) -> list[System]:
    """What is to be there, in the order in which it is made: others are needed by what is behind them."""
    left_out = _chosen(without)
    wanted: list[System] = []
    for system in reversed(SYSTEMS):
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
    there = {name for (name,) in rows(connection, query, [[system.schema for system in systems]])}
    foreign = [system for system in systems if system.schema in there]
    if foreign:
        names = ", ".join(system.schema for system in foreign)
        options = " ".join(f"--without {system.folder}" for system in foreign)
        raise Refused(
            f"schema {names} is there and is not ours: install into another database, drop or rename that schema, or "
            f"leave ours out: `airflow pgchange install {options}`; nothing was changed"
        )


def _refuse_gone(systems: Sequence[System], held: Sequence[str]) -> None:
    """Refuse to make anew what a system that is here has lost, with all that it knew of it."""
    for system in systems:
        bereft = [other.folder for other in SYSTEMS if other.folder in held and system.folder in other.needs]
        if bereft:
            options = " ".join(f"--system {folder}" for folder in bereft)
            raise Refused(
                f"schema {system.schema} is gone, and what {', '.join(bereft)} kept there with it: restore the database "
                f"from a backup, or begin anew: `airflow pgchange uninstall {options}`, then install; nothing was changed"
            )


def upgrade(connection: psycopg.Connection[Any]) -> list[Installed]:
    """Bring every installed system to the version of this package, a numbered file and a transaction at a time.

    Raises SchemaVersionMismatch where the database is ahead of the package.
    """
    with _as_owner():
        for system in SYSTEMS:
            while _upgraded_by_one(connection, system):
                pass
        return installed(connection)


def _upgraded_by_one(connection: psycopg.Connection[Any], system: System) -> bool:
    with connection.transaction():
        _lock(connection)
        if not _present(connection, system):
            return False
        found = _version(connection, system)
        if found == 0 or found >= system.version:
            _demand_version(connection, system)
            return False
        paths = list((sql_folder() / system.folder / "upgrade").glob(f"{found + 1:04}_*.sql"))
        if len(paths) != 1:
            raise SchemaVersionMismatch(
                f"this package has no upgrade of schema {system.schema} from version {found}: install the package "
                f"whose version {found + 1} of it is"
            )
        connection.execute(paths[0].read_bytes(), prepare=False)
        reached = _version(connection, system)
        if reached != found + 1:
            raise SchemaVersionMismatch(
                f"{paths[0].name} left schema {system.schema} at version {reached}, not {found + 1}: install a package "
                "whose upgrade is whole; nothing was changed"
            )
        _note(connection, system)
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
        held = present(connection)
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
    staying = [system for system in SYSTEMS if system.folder in held and system.folder not in gone]
    for system in staying:
        needed = [name for name in system.needs if name in gone]
        if needed:
            raise InvalidArgument(
                f"{system.folder} needs {', '.join(needed)}: remove {system.folder} first, or all at once"
            )


def _take_out(connection: psycopg.Connection[Any], system: System) -> None:
    """First what is ours elsewhere: whatever uses the schema then is somebody else's."""
    try:
        for path in sorted((sql_folder() / system.folder / "uninstall").glob("*.sql")):
            connection.execute(path.read_bytes(), prepare=False)
    except psycopg.errors.DependentObjectsStillExist as error:
        raise _used(system, [error.diag.message_detail or str(error)]) from error
    theirs = strangers(connection, system.schema)
    if theirs:
        raise _used(system, theirs)
    if "dead_letters" in present(connection):
        connection.execute("delete from dead_letter.kind where schema = %s", [system.schema])
    if system.schema != "pgchange" and "core" in present(connection):
        connection.execute("select pgchange.unregister(%s)", [system.schema])
    connection.execute(sql.SQL("drop schema {} cascade").format(sql.Identifier(system.schema)))


def _sweep_up(connection: psycopg.Connection[Any], system: System) -> None:
    """Take off users' tables what a schema has left there that was dropped by hand."""
    if not ask(connection, "select pg_catalog.to_regnamespace(%s) is not null", [system.schema]):
        for path in sorted((sql_folder() / system.folder / "left_over").glob("*.sql")):
            connection.execute(path.read_bytes(), prepare=False)


def _used(system: System, theirs: Sequence[str]) -> Refused:
    return Refused(
        f"schema {system.schema} is used by others: {', '.join(theirs)}: removing {system.folder} would remove these "
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
        if isinstance(error.__cause__, psycopg.Error) and error.__cause__.diag.message_hint:
            raise
        reason = error.__cause__.diag.message_primary if isinstance(error.__cause__, psycopg.Error) else error
        raise PermissionDenied(
            f"{reason}: the schemas are installed, upgraded and removed by their owner, "
            "a role that may create schemas in this database (`grant create on database`)"
        ) from error


def _chosen(systems: Sequence[str] | None) -> list[System]:
    known = {system.folder: system for system in SYSTEMS}
    for name in systems or ():
        if name not in known:
            raise InvalidArgument(f"there is no system {name!r}: choose from {', '.join(known)}")
    return [system for system in SYSTEMS if systems is None or system.folder in systems]


def _present(connection: psycopg.Connection[Any], system: System) -> bool:
    return system.folder in present(connection)


def _demand_version(connection: psycopg.Connection[Any], system: System) -> None:
    found, known = next(iter(_newest(connection, system)), (0, None))
    if found == 0:
        raise SchemaVersionMismatch(
            f"schema {system.schema} came without its data, as from `pg_dump --schema-only`: run `airflow pgchange "
            "uninstall`, then install; or restore the data with it"
        )
    if found != system.version:
        raise SchemaVersionMismatch(
            f"schema {system.schema} is at version {found}, this package needs {system.version}: "
            + ("run `airflow pgchange upgrade`" if found < system.version else "install the newer package")
        )
    if known is not None and known != checksum(system):
        raise SchemaVersionMismatch(
            f"schema {system.schema} is at version {found}, but was made from other files than this package's: install "
            "the package that made it; or run `airflow pgchange uninstall`, by which what waits is lost, then install"
        )


def _version(connection: psycopg.Connection[Any], system: System) -> int:
    return next((version for version, _ in _newest(connection, system)), 0)


def _newest(connection: psycopg.Connection[Any], system: System) -> list[tuple[Any, ...]]:
    """The version that was installed last, with its checksum; none where the schema came without its data."""
    query = sql.SQL("select version, checksum from {} order by version desc, installed_at desc limit 1")
    return rows(connection, query.format(sql.Identifier(system.schema, "installed")))


def _note(connection: psycopg.Connection[Any], system: System) -> None:
    query = sql.SQL("update {0} set checksum = {1} where version = (select max(version) from {0})")
    connection.execute(query.format(sql.Identifier(system.schema, "installed"), checksum(system)))


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
