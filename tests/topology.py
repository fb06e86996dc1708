"""Catalogues for the tests, the events in their logs, and the output of psql for a relay's catalogue."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import psycopg

ORDER = ["replicaset"] * 2 + ["instance"] * 4 + ["bucket"]
"""The kinds of the events in a snapshot of this catalogue, in their order."""


def make_catalogue(connection: psycopg.Connection[Any]) -> None:
    """Create replicasets r1 and r2 of one tier, each with two instances.

    The first instance of each is the master. r1 owns buckets 0 to 2999.
    """
    for name in ("r1", "r2"):
        connection.execute("select topology.add_replicaset(%s, uuid => %s)", [name, f"uuid-{name}"])
        for number in (1, 2):
            one = f"{name}-i{number}"
            connection.execute(
                "select topology.add_instance(%s, %s, %s, uuid => %s)",
                [one, name, f"127.0.0.1:{name[1]}{number}", f"uuid-{one}"],
            )
        connection.execute("select topology.set_master(%s, %s)", [name, f"{name}-i1"])
    connection.execute("select topology.assign_buckets('default', 0, 2999, 'r1')")


def psql(url, *queries, **environment):
    commands = [word for query in queries for word in ("-c", query)]
    return subprocess.run(
        ["psql", "-X", url, *commands],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
        timeout=60,
    )


def notices(output):
    return [
        json.loads(line.removeprefix("NOTICE:  "))
        for line in output.splitlines()
        if line.startswith("NOTICE:")
    ]


def kinds(events):
    return [event["map"] for event in events]


def since(connection: psycopg.Connection[Any], index: int = 0) -> list[dict[str, Any]]:
    rows = connection.execute(
        "select event::text from topology.log where index > %s order by term, index", [index]
    )
    return [json.loads(row[0]) for row in rows]


def last(connection: psycopg.Connection[Any]) -> int:
    row = connection.execute("select coalesce(max(index), 0) from topology.log").fetchone()
    assert row is not None
    return int(row[0])


def told(connection: psycopg.Connection[Any], query: str, *parameters: Any) -> list[dict[str, Any]]:
    """Execute a statement, and return its events without the fields that every event has."""
    before = last(connection)
    connection.execute(query, parameters or None)
    return [
        {key: value for key, value in event.items() if key not in ("timestamp", "raft")}
        for event in since(connection, before)
    ]
