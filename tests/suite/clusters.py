"""Clusters for the tests. They are copied from a template that a run prepares once, which costs a tenth of initdb and
of our schemas."""

from __future__ import annotations

import fcntl
import functools
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psycopg

from airflow_pgchange.admin import schema
from demo.postgres import Cluster, embedded_binaries, system_binaries
from tests.suite import postgresql, room

SERVERS = {"system": system_binaries, "embedded": embedded_binaries}
"""The newest PostgreSQL of the operating system, which has contrib, and the PostgreSQL of a Python wheel, which has
no contrib."""
ON_DEMAND: Mapping[str, Callable[[], Path]] = {
    version: functools.partial(postgresql.binaries, version) for version in postgresql.VERSIONS
}
"""By major version: a PostgreSQL with contrib, for runs that ask for it."""
TEMPLATE = "pgchange_template"
"""The name of a database with all our schemas. Each cluster has it."""
SETTINGS = {
    "autovacuum": "off",
    "shared_buffers": "64MB",
    "max_wal_size": "512MB",
    "dynamic_shared_memory_type": "mmap",
    "jit": "off",
    "shared_preload_libraries": "plpgsql",
}
"""Settings of the clusters.

Without autovacuum, only tests use transaction ids and hold locks. A killed server leaves no shared memory outside of
its folder. Without these settings, the system's server would compile queries for a quarter of a second in each new
session. A session that calls a function in PL/pgSQL would load the language's library itself.
"""


def new_cluster(server: str, settings: Mapping[str, str] | None = None, family: int = 1) -> Cluster:
    """Create a cluster with initdb, install ``TEMPLATE`` in it, and start it. Clusters of one family have the same
    identity, clusters of different families do not. All databases of common tests are in family 0."""
    cluster = _copy(server, settings, family)
    cluster.start()
    return cluster


def _copy(server: str, settings: Mapping[str, str] | None, family: int) -> Cluster:
    prepared = _prepared(server, family)
    cluster = Cluster.in_new_folder(prepared.binaries)
    subprocess.run(["cp", "-a", prepared.data, cluster.folder], check=True)
    cluster.configure({**(settings or {}), "port": str(cluster.port)})
    return cluster


@functools.cache
def maintenance_connection(cluster: Cluster) -> psycopg.Connection[Any]:
    """A session in the database ``postgres`` that makes and drops the databases of all tests: it ends with its server.

    A session for each test would cost the server half as much as the copy of a database.
    """
    return psycopg.connect(cluster.conninfo(), autocommit=True)


def install(cluster: Cluster) -> None:
    """Drop the cluster's database ``postgres``, and give its name to ``TEMPLATE``, which has all our schemas."""
    with psycopg.connect(cluster.conninfo("template1"), autocommit=True) as connection:
        connection.execute("drop database postgres")
        connection.execute(f"alter database {TEMPLATE} rename to postgres")


@functools.cache
def _prepared(server: str, family: int) -> Cluster:
    """Return the cluster from which a family is copied. The first process of the run that needs it creates it."""
    binaries, folder = {**SERVERS, **ON_DEMAND}[server](), room.take() / f"prepared-{server}-{family}"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            made = Cluster.create(binaries, SETTINGS)
            _make_template(made)
            made.stop()
            made.folder.rename(folder)
            # The files of the wheel were copied, because the server's user may not be able to read them.
            (folder / "binaries").symlink_to(
                folder / made.binaries.relative_to(made.folder)
                if made.folder in made.binaries.parents
                else made.binaries
            )
    return Cluster((folder / "binaries").resolve(), folder, 0)


def _make_template(cluster: Cluster) -> None:
    with psycopg.connect(cluster.conninfo(), autocommit=True) as connection:
        connection.execute(f"create database {TEMPLATE}")
    with psycopg.connect(cluster.conninfo(TEMPLATE), autocommit=True) as connection:
        schema.install(connection)
        # Otherwise the first reader in each copy would set the hint bits of all new rows. Each copy would also have the
        # space of earlier versions of the catalogue's rows, a quarter of the template's bytes. Our tables keep their
        # files, because `is_native()` trusts a table that was rewritten more.
        connection.execute("vacuum (freeze, analyze)")
        (catalogue,) = connection.execute(
            "select string_agg(oid::regclass::text, ', ') from pg_class "
            "where relnamespace = 'pg_catalog'::regnamespace and relkind = 'r' and not relisshared"
        ).fetchone() or ("",)
        connection.execute(f"vacuum (full, freeze, analyze) {catalogue}")
