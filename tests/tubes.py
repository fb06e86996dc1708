"""Short functions to inspect tubes and to process their pods by SQL, for the tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import psycopg

Connection = psycopg.Connection[Any]


def one(connection: Connection, query: str, *parameters: Any) -> Any:
    row = connection.execute(query, parameters or None).fetchone()
    return None if row is None else row[0]


def make(
    connection: Connection,
    tube: str = "q",
    workers: int | None = None,
    predicate: str | None = None,
    key: Sequence[str] | None = None,
) -> None:
    connection.execute(
        "select tube.tube_ensure_exists(%s, %s, %s, %s::text[]::regtype[])",
        [tube, workers, predicate, None if key is None else list(key)],
    )


def attach(
    connection: Connection, table: str = "item", tube: str = "q", shard: int | None = 0, **options: Any
) -> None:
    connection.execute(
        "select tube.tube_table_ensure_attached(%s, %s, %s, %s::name[], %s::name[])",
        [tube, table, shard, options.get("key"), options.get("group_by")],
    )


def detach(connection: Connection, table: str | None = "item", tube: str | None = "q") -> None:
    connection.execute("select tube.tube_table_ensure_detached(%s, %s)", [tube, table])


def pods(connection: Connection, tube: str = "q") -> list[tuple[str, int, list[int]]]:
    """Return (op, shard, ids) of each pod with ids, in the order of seq."""
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
        worker,
        json.dumps(position),
        limit,
        workers,
    )


def changes(connection: Connection, batch: dict[str, Any], worker: int = 0, tube: str = "q") -> list[int]:
    """Read a batch slice by slice, and return its ids in order."""
    found = []
    for part in batch["slices"]:
        rows = connection.execute(
            f"select id from tube.{'key_changes' if 'key' in batch['bounds'] else 'changes'}(%s, %s, %s, %s, %s)",
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
    """Claim the next batch, ack it, and return its ids. Return an empty list if nothing is ready."""
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


ITEMS_IN_ORDER = "select id from item order by day, id"


def ids_in_order(connection: Connection, tube: str = "q") -> list[int]:
    """Return the ids in the pods of backfills, in the order of the pods."""
    rows = connection.execute(
        f"select i from {tube}, unnest(ids) with ordinality as u(i, n) where op = 'B' order by seq, n"
    )
    return [row[0] for row in rows]


def steps(connection: Connection, table: str = "item", order_col: str = "day", fetch: int = 20000) -> str:
    """Run a whole backfill by its three steps."""
    step1 = one(connection, "select tube.tube_backfill_step1()")
    connection.execute("select tube.tube_backfill_step2()")
    connection.execute(
        "select tube.tube_backfill_step3(%s, 'q', %s, %s, null, %s)",
        [step1, table, order_col, fetch],
    )
    return str(step1)


def begin(
    connection: Connection,
    table: str = "item",
    order_col: str | None = "day",
    chunk_size: int = 100,
    tube: str = "q",
) -> int:
    return one(
        connection, "select tube.backfill_begin(%s, %s, %s, null, %s)", tube, table, order_col, chunk_size
    )


def chunk(connection: Connection, number: int) -> tuple[Any, ...]:
    """Run the next chunk of a backfill. Return (touched, looked_at, total, finished, state)."""
    row = connection.execute(
        "select touched, looked_at, total, finished, state from tube.backfill_chunk(%s)", [number]
    )
    return tuple(row.fetchone() or ())


def run(connection: Connection, number: int) -> None:
    """Run the chunks of a backfill until it is finished."""
    for _ in range(1000):
        if chunk(connection, number)[3]:
            return
    raise AssertionError("the backfill does not end")


def make_items(connection: Connection) -> None:
    """Create a table of 1,000 rows that is attached to tube q. The column ``day`` of a tenth of the rows is null."""
    connection.execute("create table item (id bigint primary key, day date, kind text not null default 'a')")
    connection.execute("create index on item (day, id)")
    connection.execute(
        "insert into item select g, case when g % 10 > 0 then date '2024-01-01' + (g * 7919) % 50 end "
        "from generate_series(1, 1000) as g"
    )
    make(connection)
    attach(connection)


def touch(
    connection: Connection, *ids: int, shard: int = 0, op: str = "T", tube: str = "q", payload: Any = None
) -> None:
    connection.execute(
        "select tube.touch(%s, %s, %s, %s, %s)", [tube, shard, list(ids), op, payload and json.dumps(payload)]
    )
