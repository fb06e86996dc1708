"""Releases that are kept in ``tests/releases``, each with its wheel and with dumps of databases that are full of work."""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from airflow_pgchange import __version__
from airflow_pgchange.admin import versions
from demo.postgres import Cluster, server_version
from tests import dumps
from tests.suite import clusters

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
DATABASE = "release"
"""The name of a filled database. The roles of its queues have it in their names, so it is restored under this name."""
FILLING = "filling.zip"
"""The code that fills a database. In an archive it is neither formatted nor checked with later code."""


@dataclass(frozen=True)
class Release:
    """A release, and the places where Python finds its package and its code that fills a database."""

    folder: Path
    path: tuple[Path, Path]

    def run(self, command: str, conninfo: str) -> None:
        """Run a command of ``filling`` beside the package of the release, in a process of its own."""
        path = os.pathsep.join(map(str, self.path))
        done = subprocess.run(
            [sys.executable, "-m", "filling", command, conninfo],
            env=os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
            check=False,
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise RuntimeError(done.stderr)

    def dumps(self, cluster: Cluster, with_hstore: bool) -> list[str]:
        """Return the names of the dumps that can be restored on a server."""
        newest = server_version(cluster.binaries)
        found = [path.name.removesuffix(".sql.xz") for path in sorted(self.folder.glob("*.sql.xz"))]
        return [
            name
            for name in found
            if int(name) <= newest and (with_hstore or b"hstore" not in self.script(name))
        ]

    def script(self, name: str) -> bytes:
        return lzma.decompress((self.folder / f"{name}.sql.xz").read_bytes())

    def roles(self, name: str) -> str:
        return (self.folder / f"{name}.roles.sql").read_text()


def names() -> list[str]:
    """Return the versions of the kept releases, the newest last."""
    found = [path.parent.name for path in FOLDER.glob("*/manifest.json")]
    return sorted(found, key=lambda name: [int(part) for part in name.split(".")])


def manifest(name: str) -> dict[str, Any]:
    return dict(json.loads((FOLDER / name / "manifest.json").read_text()))


def unpacked(name: str, into: Path) -> Release:
    """Unpack the wheel of a kept release."""
    (wheel,) = (FOLDER / name).glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(into)
    return Release(FOLDER / name, (into, FOLDER / name / FILLING))


def keep() -> list[Path]:
    """Keep the present state as a release: its wheel, its code that fills a database, dumps, and a manifest."""
    folder = FOLDER / __version__
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    with zipfile.ZipFile(folder / FILLING, "w") as archive:
        for path in sorted((FOLDER / "filling").glob("*.py")):
            archive.write(path, path.relative_to(FOLDER))
    release = unpacked(__version__, Path(os.environ["PGCHANGE_TEST_ROOM"]) / "package")
    servers = {}
    for server in clusters.SERVERS:
        cluster = clusters.new_cluster(server)
        try:
            servers |= write_dump(release, cluster)
        finally:
            cluster.remove()
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}
    written = {**described(__version__), "servers": servers, "files": files}
    (folder / "manifest.json").write_text(json.dumps(written, indent=2) + "\n")
    return sorted(folder.iterdir())


def described(version: str) -> dict[str, Any]:
    """Return what the manifest of a release says about its schemas."""
    return {
        "version": version,
        "schemas": {system.folder: system.version for system in versions.SYSTEMS},
        "checksums": {system.folder: versions.checksum(system) for system in versions.SYSTEMS},
    }


def write_dump(release: Release, cluster: Cluster) -> dict[str, str]:
    """Fill a database on a server, dump it and its roles into the folder of a release, and drop it.

    Return the version of the server by the name of the dump.
    """
    name = str(server_version(cluster.binaries))
    with psycopg.connect(cluster.conninfo("template1"), autocommit=True) as connection:
        connection.execute(sql.SQL("create database {} template template1").format(sql.Identifier(DATABASE)))
        try:
            release.run("populate", cluster.conninfo(DATABASE))
            script = _plain(dumps.dump(cluster, cluster.conninfo(DATABASE), "--no-owner"))
            roles = [cluster.program("pg_dumpall"), "--roles-only", "-d", cluster.conninfo("template1")]
            told = subprocess.run(roles, check=True, capture_output=True).stdout
        finally:
            connection.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(DATABASE)))
            drop_roles(connection)
        (release.folder / f"{name}.sql.xz").write_bytes(lzma.compress(script))
        lines = [line for line in _plain(told).decode().splitlines() if DATABASE in line]
        (release.folder / f"{name}.roles.sql").write_text("\n".join(lines) + "\n")
        return {name: connection.execute("show server_version").fetchone()[0]}  # type: ignore[index]


def drop_roles(connection: psycopg.Connection[object]) -> None:
    """Drop the roles of filled databases, which must have been dropped before."""
    query = "select rolname from pg_roles where rolname ~ %s"
    for (role,) in connection.execute(query, [f"^(mbus_)?{DATABASE}"]).fetchall():  # type: ignore[misc]
        connection.execute(sql.SQL("drop role {}").format(sql.Identifier(str(role))))


def _plain(script: bytes) -> bytes:
    """Leave out the lines with which newer versions of pg_dump protect psql. Older versions of psql refuse them."""
    lines = script.split(b"\n")
    return b"\n".join(line for line in lines if not line.startswith((b"\\restrict", b"\\unrestrict")))


def overdue(told: dict[str, Any]) -> list[str]:
    """Return a line for each system whose files have changed since a release, given its manifest, without an upgrade."""
    lines = []
    for system in versions.SYSTEMS:
        released = told["schemas"][system.folder]
        upgrades = [
            path.name[:4]
            for path in sorted((versions.sql_folder() / system.folder / "upgrade").glob("*.sql"))
        ]
        due = [f"{number:04}" for number in range(released + 1, system.version + 1)]
        if system.version == released and versions.checksum(system) != told["checksums"][system.folder]:
            lines.append(
                f"sql/{system.folder} differs from release {told['version']}: raise its version to {released + 1} in "
                f"versions.py and in its first file, and write sql/{system.folder}/upgrade/{released + 1:04}_*.sql"
            )
        elif missing := [number for number in due if number not in upgrades]:
            lines.append(
                f"sql/{system.folder}/upgrade lacks {', '.join(missing)}, since release {told['version']}"
            )
    return lines
