"""Catalogues for the tests, and what they hold."""

from __future__ import annotations

from typing import Any

import psycopg


def make_catalogue(connection: psycopg.Connection[Any]) -> None:
    """Two replicasets of one tier, each with two instances, the first the master; r1 has buckets 0 to 2999."""
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
