"""Dumps of databases, and what is restored from them, by pg_dump and psql."""

from __future__ import annotations

import subprocess

from demo.postgres import Cluster

NEWER = b"SET transaction_timeout = 0;\n"
"""From version 17 on pg_dump writes this line for older servers, too, which refuse it."""

ANYWAY = ("-v", "ON_ERROR_STOP=0")
"""Options of psql with which it goes on after an error, as where some objects exist already."""


def dump(cluster: Cluster, database: str, *options: str) -> bytes:
    """Return the dump of a database, which its connection string names, as a script."""
    command = [cluster.program("pg_dump"), *options, "-d", database]
    return subprocess.run(command, check=True, capture_output=True).stdout.replace(NEWER, b"")


def load(cluster: Cluster, database: str, script: bytes | str, *options: str) -> None:
    """Run a script in a database, up to its first error. Raises CalledProcessError for that."""
    command = [cluster.program("psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", *options, "-d", database]
    text = script.encode() if isinstance(script, str) else script
    subprocess.run(command, input=text, check=True, capture_output=True)
