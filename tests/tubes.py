"""Short ways to look at tubes and to work them by SQL, for the tests."""

from __future__ import annotations

import json
from typing import Any

import psycopg

Connection = psycopg.Connection[Any]


def one(connection: Connection, query: str, *parameters: Any) -> Any:
    row = connection.execute(query, parameters or None).fetchone()
    return None if row is None else row[0]


def make(
    connection: Connection, tube: str = "q", workers: int | None = None, predicate: str | None = None
) -> None:
    connection.execute("select tube.tube_ensure_exists(%s, %s, %s)", [tube, workers, predicate])


def attach(
    connection: Connection, table: str = "item", tube: str = "q", shard: int | None = 0, **options: Any
) -> None:
    connection.execute(
        "select tube.tube_table_ensure_attached(%s, %s, %s, %s)",
        [tube, table, shard, options.get("id_column")],
    )


def detach(connection: Connection, table: str | None = "item", tube: str | None = "q") -> None:
    connection.execute("select tube.tube_table_ensure_detached(%s, %s)", [tube, table])


def pods(connection: Connection, tube: str = "q") -> list[tuple[str, int, list[int]]]:
    """(op, shard, ids) of the pods with ids, in the order of seq."""
    rows = connection.execute(
        f"select op, shard, array(select unnest(ids) order by 1) from {tube} where ids <> '{{}}' order by seq"
    )
    return [(row[0], row[1], row[2]) for row in rows]


def touched(connection: Connection, tube: str = "q") -> list[int]:
    return sorted(each for _, _, ids in pods(connection, tube) for each in ids)


def controls(connection: Connection, tube: str = "q") -> list[tuple[str, int, dict[str, Any]]]:
    rows = connection.execute(f"select op, shard, payload from {tube} where ids = '{{}}' order by seq")
    return [tuple(row) for row in rows]


def faults(connection: Connection) -> list[tuple[int, str]]:
    return [tuple(row) for row in connection.execute("select ids, message from tube.fault order by id")]


def claim(
    connection: Connection, worker: int = 0, workers: int = 1, limit: int = 1000, tube: str = "q"
) -> dict[str, Any] | None:
    connection.execute("select tube.register(%s, %s, %s)", [tube, workers, worker])
    position = one(connection, "select tube.position(%s, %s)", tube, worker)
    return one(
        connection,
        "select tube.claim(%s, %s, %s, %s, %s)",
        tube,
        workers,
        worker,
        json.dumps(position),
        limit,
    )


def changes(connection: Connection, batch: dict[str, Any], worker: int = 0, tube: str = "q") -> list[int]:
    """The ids of a batch in order, read slice by slice."""
    found = []
    for part in batch["slices"]:
        rows = connection.execute(
            "select id from tube.changes(%s, %s, %s, %s, %s)",
            [tube, worker, json.dumps(batch["bounds"]), part["after"], part["upto"]],
        ).fetchall()
        assert len(rows) == part["count"]
        found += [row[0] for row in rows]
    return found


def ack(connection: Connection, batch: dict[str, Any], worker: int = 0, tube: str = "q") -> None:
    connection.execute("select tube.ack(%s, %s, %s)", [tube, worker, json.dumps(batch)])


def take(
    connection: Connection, worker: int = 0, workers: int = 1, limit: int = 1000, tube: str = "q"
) -> list[int]:
    """The ids of the next batch, acked; none where nothing is ready."""
    batch = claim(connection, worker, workers, limit, tube)
    if batch is None:
        return []
    found = changes(connection, batch, worker, tube)
    ack(connection, batch, worker, tube)
    return found


def drain(
    connection: Connection, worker: int = 0, workers: int = 1, limit: int = 1000, tube: str = "q"
) -> list[int]:
    found: list[int] = []
    while taken := take(connection, worker, workers, limit, tube):
        found += taken
    return found


def lag(
    connection: Connection, worker: int = 0, workers: int = 1, upto: int = 1000, tube: str = "q"
) -> dict[str, Any]:
    position = one(connection, "select tube.position(%s, %s)", tube, worker) or {}
    return one(
        connection, "select tube.lag(%s, %s, %s, %s, %s)", tube, workers, worker, json.dumps(position), upto
    )
