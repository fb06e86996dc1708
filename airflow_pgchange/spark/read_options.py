"""What to read of a batch, as options of the data source."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Literal, get_args

from psycopg import errors

from airflow_pgchange.errors import InvalidArgument, PermissionDenied
from airflow_pgchange.feeds.tables import table_identifier
from airflow_pgchange.results.attached import Attached

CHANGE = "pgchange_id"
Which = Literal["there", "gone", "every"]
PATIENCE = 120.0
"""Seconds for which a reader waits for a failover to end."""


@dataclass(frozen=True)
class Rule:
    """How a cluster spreads the rows of a table: ``bucket`` is an SQL expression over the row, a whole number, that never
    changes for it; ``tier`` is the catalogue's. A range whose owner cannot be read is tried for ``timeout`` seconds."""

    bucket: str
    tier: str = "default"
    timeout: float = PATIENCE


@dataclass(frozen=True)
class Wanted:
    """What to read of a batch: its changes, or with ``table`` and ``key`` the rows of a table that they name.

    ``which`` asks for the rows that are ``there``; or for the changes whose row is ``gone``: their ids, in the one column
    ``id``; or for ``every`` change with its row, which is null where it is gone, behind its id as ``pgchange_id``.
    ``shard`` asks for what the batch has of one shard. ``tube``: rows that its predicate does not hold for are not there.
    ``rule``: the table's rows are spread over a cluster.
    """

    table: str | None = None
    key: str | None = None
    columns: tuple[str, ...] | None = None
    which: Which = "there"
    shard: int | None = None
    tube: str | None = None
    rule: Rule | None = None

    def __post_init__(self) -> None:
        if (self.table is None) != (self.key is None):
            raise InvalidArgument(
                "table and key go together: the table, and the column that holds the changes' ids"
            )
        if self.which not in get_args(Which):
            raise InvalidArgument(f"which is one of {', '.join(get_args(Which))}, not {self.which!r}")
        if self.table is None and (self.columns is not None or self.which != "there"):
            raise InvalidArgument(
                "columns and which are about the rows of a table: name it with table and key"
            )
        if self.rule is not None and (self.table is None or self.which != "there" or self.tube is not None):
            raise InvalidArgument(
                "bucket is about the rows of a table that are there: name it with table and key, without which and tube"
            )

    def options(self) -> dict[str, str]:
        """As options of the data source; they show in plans, so there is nothing secret in them."""
        given = {
            "table": self.table,
            "key": self.key,
            "columns": None if self.columns is None else json.dumps(self.columns),
            "which": None if self.which == "there" else self.which,
            "shard": None if self.shard is None else str(self.shard),
            "tube": self.tube,
            **({} if self.rule is None else {name: str(value) for name, value in asdict(self.rule).items()}),
        }
        return {name: value for name, value in given.items() if value is not None}

    @classmethod
    def of(
        cls,
        table: str | Attached,
        key: str | None,
        shard: int | None,
        *,
        columns: Sequence[str] | None = None,
        which: Which = "there",
    ) -> Wanted:
        """Of an attached table the key, the shard and the predicate are known."""
        chosen = None if columns is None else tuple(columns)
        if isinstance(table, str):
            return cls(table, key, chosen, which, shard)
        return cls(
            table.table,
            key or table.id_column,
            chosen,
            which,
            table.shard if shard is None else shard,
            table.tube if table.predicate is not None else None,
        )

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> Wanted:
        columns, shard, bucket = (options.get(name) for name in ("columns", "shard", "bucket"))
        tier, timeout = options.get("tier", Rule.tier), float(options.get("timeout", PATIENCE))
        return cls(
            table=options.get("table"),
            key=options.get("key"),
            columns=None if columns is None else tuple(json.loads(columns)),
            which=options.get("which", "there"),  # type: ignore[arg-type]
            shard=None if shard is None else int(shard),
            tube=options.get("tube"),
            rule=None if bucket is None else Rule(bucket, tier, timeout),
        )


@contextmanager
def explained(wanted: Wanted) -> Iterator[None]:
    """What PostgreSQL says of a table that somebody named, with what to do."""
    try:
        yield
    except (errors.UndefinedTable, errors.UndefinedColumn, errors.UndefinedFunction) as error:
        raise InvalidArgument(
            f"{error.diag.message_primary}: correct the table, its key or the columns"
        ) from error
    except PermissionDenied as error:
        if wanted.table is None:
            raise
        whose = "source's" if wanted.rule is None else "instances'"
        raise PermissionDenied(
            f"the role of the {whose} connection may not read {wanted.table}: let its owner run "
            f"`grant select on {table_identifier(wanted.table).as_string(None)} to <role>`, and "
            "`grant usage` on its schema"
        ) from error


def not_unique(table: str, key: str) -> str:
    """What is wrong where a change names several rows."""
    return (
        f'"{key}" is not unique in {table}, so a change would name several rows: '
        "give the column that holds the changes' ids, or join with changes() in Spark"
    )
