"""The options of the data source: which data of a batch to read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Literal, get_args

import psycopg
from psycopg import errors

from airflow_pgchange.errors import InvalidArgument, PermissionDenied
from airflow_pgchange.feeds.grants import identifier
from airflow_pgchange.feeds.key_columns import KeyNames, names_of
from airflow_pgchange.feeds.refused_statements import refused_statement
from airflow_pgchange.feeds.table_names import table_identifier
from airflow_pgchange.results.attached_tables import Attached

CHANGE = "pgchange_id"
Which = Literal["there", "gone", "every"]
PATIENCE = 120.0
"""Seconds that a reader waits for the end of a failover."""


@dataclass(frozen=True)
class Rule:
    """How a cluster spreads the rows of a table over buckets.

    ``bucket`` is an SQL expression over a row. Its value is a whole number that never changes for the row. ``tier`` is
    the name of a tier in the catalogue. If the owner of a range of buckets cannot be read, it is tried for ``timeout``
    seconds.
    """

    bucket: str
    tier: str = "default"
    timeout: float = PATIENCE


@dataclass(frozen=True)
class ReadOptions:
    """The data of a batch to read: its changes, or, with ``table`` and ``key``, the rows of a table that they name.

    - ``which``: ``there``: the rows that exist. ``gone``: the ids of changes whose row is gone, in the column ``id``.
      ``every``: for each change its id as ``pgchange_id`` and its row, which is null if it is gone.
    - ``typed``: add the columns of the ids to the changes, as ``every`` has them: ``pgchange_key_1`` and so on. An id
      that is a number has none.
    - ``shard``: only the changes of this shard.
    - ``tube``: rows for which the predicate of this tube is false count as gone.
    - ``rule``: the table's rows are spread over a cluster.
    """

    table: str | None = None
    key: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None
    which: Which = "there"
    shard: int | None = None
    tube: str | None = None
    rule: Rule | None = None
    typed: bool = False

    def __post_init__(self) -> None:
        if (self.table is None) != (self.key is None):
            raise InvalidArgument(
                "table and key go together: the table, and the columns that hold the changes' ids"
            )
        if self.which not in get_args(Which):
            raise InvalidArgument(f"which is one of {', '.join(get_args(Which))}, not {self.which!r}")
        if self.table is None and (self.columns is not None or self.which != "there"):
            raise InvalidArgument("`columns` and `which` need a table: add the options table and key")
        if self.rule is not None and (self.table is None or self.which != "there" or self.tube is not None):
            raise InvalidArgument(
                "bucket selects existing rows of a table: name the table with table and key, and leave out which and tube"
            )

    def options(self) -> dict[str, str]:
        """Return the options of the data source. They appear in plans, so they hold no secrets."""
        options = {
            "table": self.table,
            "key": self.key[0] if self.key is not None and len(self.key) == 1 else None,
            "keys": json.dumps(self.key) if self.key is not None and len(self.key) > 1 else None,
            "columns": None if self.columns is None else json.dumps(self.columns),
            "which": None if self.which == "there" else self.which,
            "shard": None if self.shard is None else str(self.shard),
            "tube": self.tube,
            "typed": "true" if self.typed else None,
            **({} if self.rule is None else {name: str(value) for name, value in asdict(self.rule).items()}),
        }
        return {name: value for name, value in options.items() if value is not None}

    @classmethod
    def of(
        cls,
        table: str | Attached,
        key: KeyNames | None,
        shard: int | None,
        *,
        columns: Sequence[str] | None = None,
        which: Which = "there",
    ) -> ReadOptions:
        """Return the data to read of a table. An attached table has its key, shard and predicate."""
        chosen = None if columns is None else tuple(columns)
        if isinstance(table, str):
            return cls(table, None if key is None else names_of(key), chosen, which, shard)
        return cls(
            table.table,
            table.key if key is None else names_of(key),
            chosen,
            which,
            table.shard if shard is None else shard,
            table.tube if table.predicate is not None else None,
        )

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> ReadOptions:
        columns, shard, bucket = (options.get(name) for name in ("columns", "shard", "bucket"))
        key, keys = options.get("key"), options.get("keys")
        tier, timeout = options.get("tier", Rule.tier), float(options.get("timeout", PATIENCE))
        return cls(
            table=options.get("table"),
            key=(key,) if key is not None else tuple(json.loads(keys)) if keys is not None else None,
            columns=None if columns is None else tuple(json.loads(columns)),
            which=options.get("which", "there"),  # type: ignore[arg-type]
            shard=None if shard is None else int(shard),
            tube=options.get("tube"),
            rule=None if bucket is None else Rule(bucket, tier, timeout),
            typed="typed" in options,
        )


@contextmanager
def explained(read_options: ReadOptions) -> Iterator[None]:
    """Raise InvalidArgument or PermissionDenied, with advice, for an error of PostgreSQL about the named table."""
    try:
        yield
    except (errors.UndefinedTable, errors.UndefinedColumn, errors.UndefinedFunction) as error:
        raise InvalidArgument(
            f"{error.diag.message_primary}: correct the table, its key or the columns"
        ) from error
    except PermissionDenied as error:
        if read_options.table is None:
            raise
        whose = "source's" if read_options.rule is None else "instances'"
        refused = refused_statement(error.__cause__) if isinstance(error.__cause__, psycopg.Error) else None
        role = identifier(refused.role) if refused else "this role"
        table = table_identifier(read_options.table).as_string(None)
        schema = f"grant usage on schema {table.rpartition('.')[0]} to {role}; " if "." in table else ""
        raise PermissionDenied(
            f"{role}, the role of the {whose} connection, may not read {read_options.table}:\n"
            f"let its owner run: {schema}grant select on {table} to {role}"
        ) from error


def not_unique(table: str, key: Sequence[str]) -> str:
    """Return the text of the error for a change that names several rows."""
    shown = ", ".join(f'"{name}"' for name in key)
    several = "column that holds" if len(key) == 1 else "columns that hold"
    return (
        f"{shown} is not unique in {table}, so a change would name several rows: "
        f"give the {several} the changes' ids, or join with changes() in Spark"
    )
