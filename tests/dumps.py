"""Dump databases and restore the dumps, with pg_dump and psql."""

from __future__ import annotations

import subprocess

from demo.postgres import Cluster

NEWER = b"SET transaction_timeout = 0;\n"
"""Since version 17 pg_dump writes this line into every dump, but older servers refuse it."""

ANYWAY = ("-v", "ON_ERROR_STOP=0")
"""Options with which psql continues after an error, for example if some objects exist already."""


def dump(cluster: Cluster, database: str, *options: str) -> bytes:
    """Dump the database of a connection string, and return the dump as a script."""
    command = [cluster.program("pg_dump"), *options, "-d", database]
    return subprocess.run(command, check=True, capture_output=True).stdout.replace(NEWER, b"")


def load(cluster: Cluster, database: str, script: bytes | str, *options: str) -> None:
    """Run a script in a database. Raises CalledProcessError at the first error."""
    command = [cluster.program("psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", *options, "-d", database]
    text = script.encode() if isinstance(script, str) else script
    subprocess.run(command, input=text, check=True, capture_output=True)
