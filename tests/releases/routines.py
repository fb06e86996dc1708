"""The end of an upgrade file: the functions of a schema that differ from those of a new installation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from airflow_pgchange.admin import versions
from airflow_pgchange.admin.versions import SEALED, System
from demo.postgres import Cluster
from tests.releases.kept import Release
from tests.suite.clusters import TEMPLATE

Connection = psycopg.Connection[Any]
MARK = (
    "\n-- The functions that have changed. `python -m tests.releases write` writes them; do not edit them.\n"
)
QUERY = """
    select p.oid::regprocedure::text, pg_get_functiondef(p.oid),
           concat_ws(' ', p.prokind, pg_get_function_result(p.oid), p.proargnames, p.proargmodes, p.provariadic),
           format('comment on routine %%s is %%L;', p.oid::regprocedure, obj_description(p.oid, 'pg_proc')),
           exists (
               select from aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) as a where a.grantee = 0)
    from pg_proc as p
    where p.pronamespace::regnamespace::text = any (%s) and p.prokind in ('f', 'p')
    order by p.oid
"""


@dataclass(frozen=True)
class Routine:
    """A function. ``form`` is what `create or replace` cannot change. ``is_public``: whether every role may call it."""

    signature: str
    definition: str
    form: str
    comment: str
    is_public: bool

    def written(self) -> str:
        right = (
            "grant execute on routine {} to public;"
            if self.is_public
            else "revoke all on routine {} from public;"
        )
        return f"{self.definition.rstrip()};\n{self.comment}\n{right.format(self.signature)}\n"


def write(release: Release, folder: str, cluster: Cluster) -> Path:
    """Write the end of the newest upgrade file of a system, and return its path."""
    with psycopg.connect(cluster.conninfo(), autocommit=True) as connection:
        connection.execute("create database released")
    release.run("install", cluster.conninfo("released"))
    with (
        psycopg.connect(cluster.conninfo("released"), autocommit=True) as old,
        psycopg.connect(cluster.conninfo(TEMPLATE), autocommit=True) as new,
    ):
        for system in versions.SYSTEMS:
            paths = sorted((versions.sql_folder() / system.folder / "upgrade").glob("*.sql"))
            # Files of versions that the release has, too, are not due.
            for path in paths[versions.version(old, system) - 1 :]:
                by_hand = path.read_text().split(MARK)[0]
                is_written = system.folder == folder and path == paths[-1]
                old.execute(by_hand if is_written else path.read_text())  # type: ignore[call-overload]
                if is_written:
                    path.write_text(by_hand + script(old, new, system))
                    return path
    raise FileNotFoundError(f"sql/{folder}/upgrade has no file that is due")


def routines(connection: Connection, system: System) -> dict[str, Routine]:
    """Return the functions of a system by their signatures, in the order in which they were created."""
    with connection.transaction(force_rollback=True):
        connection.execute("set local search_path = ''")
        found = connection.execute(QUERY, [[system.schema, system.schema + SEALED]]).fetchall()
    return {row[0]: Routine(*row) for row in found}


def script(old: Connection, new: Connection, system: System) -> str:
    """Return the statements that turn the functions of an older schema into those of a new installation.

    Functions are created in the order of the new installation, in which each function uses only earlier functions.
    """
    before, after = routines(old, system), routines(new, system)
    gone = [name for name in before if name not in after or before[name].form != after[name].form]
    written = [routine.written() for name, routine in after.items() if before.get(name) != routine]
    if not gone and not written:
        return ""
    dropped = [f"drop routine {', '.join(gone)};\n"] if gone else []
    return "\n".join([MARK, *dropped, *written])
