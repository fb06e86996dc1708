"""Keys of the tables behind tubes. Each is computed from the number ``id`` by which the harness knows the row."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from uuid import UUID

from airflow_pgchange.feeds.keys import Key

NUMBERS = range(10_000)
"""All numbers that rows can have."""


def _uuid(number: int) -> str:
    """Return a uuid whose order is not that of the numbers."""
    return str(UUID(hashlib.md5(str(number).encode(), usedforsecurity=False).hexdigest()))


@dataclass(frozen=True)
class Shape:
    """A key.

    ``columns`` declares it after the other columns of a table, and ``key`` returns a worker's key for a row's number.
    """

    types: tuple[str, ...]
    columns: str
    key: Callable[[int], Key]


SHAPES = {
    "bigint": Shape(("bigint",), "primary key (id))", int),
    "uuid": Shape(("uuid",), "key uuid generated always as (md5(id::text)::uuid) stored primary key)", _uuid),
    "text": Shape(
        ("text",),
        "key text generated always as ('é, {' || id % 7 || '} ' || id) stored primary key)",
        lambda number: f"é, {{{number % 7}}} {number}",
    ),
    "pair": Shape(
        ("uuid", "bigint"),
        "tenant uuid generated always as (md5((id % 5)::text)::uuid) stored, primary key (tenant, id)) "
        "partition by hash (id)",
        lambda number: (_uuid(number % 5), number),
    ),
}
"""The keys by name. The key ``pair`` belongs to a partitioned table: a new number moves a row to another partition."""


@cache
def numbers(shape: str) -> dict[Key, int]:
    """Return the number of each key."""
    return {SHAPES[shape].key(number): number for number in NUMBERS}


def parts(shape: str, table: str) -> str:
    """Return the statements that create the partitions of a table."""
    if shape != "pair":
        return ""
    return "".join(
        f"create table {table}_{n} partition of {table} for values with (modulus 2, remainder {n});"
        for n in range(2)
    )
