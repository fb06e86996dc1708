"""Tubes: letting tables touch them, and touching ids."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseOperator

from airflow_pgchange import tubes
from airflow_pgchange.arguments import names, whole
from airflow_pgchange.feeds.connect import read_committed
from airflow_pgchange.feeds.errors import InvalidArgument
from airflow_pgchange.feeds.tables import table_parts
from airflow_pgchange.hooks.pgchange import PgChangeHook

if TYPE_CHECKING:
    from airflow.sdk import Context


class TubeAttachOperator(BaseOperator):
    """Makes a tube if it is not there, and lets tables touch it, all of them or none.

    Guarantee: exactly once, in one transaction; doing it again changes nothing.

    :param tube: its name (templated)
    :param tables: the tables, as ``schema.table`` (templated)
    :param shard: their shard; default: the number at the end of each one's schema (templated)
    :param id_column: the column that holds their ids
    :param workers: how many workers share the tube; default: 1, or what it has
    :param predicate: SQL over a row that says whether touching it counts; default: what the tube has. It runs with
        the rights of the owner of each table (templated)
    :param postgres_conn_id: the database of the tables, as their owner
    """

    template_fields: Sequence[str] = ("tube", "tables", "shard", "predicate", "postgres_conn_id")

    def __init__(
        self,
        *,
        tube: str,
        tables: Sequence[str] | str,
        shard: int | str | None = None,
        id_column: str | None = None,
        workers: int | None = None,
        predicate: str | None = None,
        postgres_conn_id: str = PgChangeHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.tube = tube
        self.tables = tables
        self.shard = shard
        self.id_column = id_column
        self.workers = workers
        self.predicate = predicate
        self.postgres_conn_id = postgres_conn_id

    def execute(self, context: Context) -> None:
        tables, shard = names("tables", self.tables), whole("shard", self.shard)
        workers = whole("workers", self.workers)
        with PgChangeHook(self.postgres_conn_id).get_conn(primary=True) as connection:
            with read_committed(connection):
                tubes.ensure(connection, self.tube, workers, self.predicate)
                # One that gets another shard waits for workers: before the others are kept from being written. Else in
                # one order, so that two runs with the same tables wait for each other and not in a circle.
                known = [table_parts(table) for table in tubes.attached(connection, self.tube)]
                for table in sorted(tables, key=partial(_turn, known)):
                    tubes.attach(connection, self.tube, table, shard=shard, id_column=self.id_column)
            self.log.info("%s: touched by %s", self.tube, ", ".join(tables))


class TubeTouchOperator(BaseOperator):
    """Touches the ids that a query returns: a fan-out, such as all flights of a carrier that was renamed.

    Guarantee: at least once. A run that is tried again touches again, which does no harm. The query is SQL that runs with
    the rights of the connection: let only its owner write it. Raises what ``airflow_pgchange.tubes.touch`` does, and
    InvalidArgument without a shard.

    :param tube: the tube, or several, in a list or with commas between (templated)
    :param query: a query whose first column is the ids (templated)
    :param shard: the shard that the ids are of (templated)
    :param op: I, U, D, T, or B for a backfill's lower priority
    :param postgres_conn_id: the database of the tube
    """

    template_fields: Sequence[str] = ("tube", "query", "shard", "postgres_conn_id")
    template_fields_renderers: ClassVar[dict[str, str]] = {"query": "sql"}

    def __init__(
        self,
        *,
        tube: Sequence[str] | str,
        query: str,
        shard: int | str,
        op: str = "T",
        postgres_conn_id: str = PgChangeHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.tube = tube
        self.query = query
        self.shard = shard
        self.op = op
        self.postgres_conn_id = postgres_conn_id

    def execute(self, context: Context) -> None:
        shard, named = whole("shard", self.shard), names("tube", self.tube)
        if shard is None:
            raise InvalidArgument("say which shard the ids are of: the one that their table is attached with")
        with PgChangeHook(self.postgres_conn_id).get_conn(primary=True) as connection:
            tubes.touch(connection, named, self.query, shard, self.op)


def _turn(known: Sequence[tuple[str, ...]], table: str) -> tuple[bool, tuple[str, ...]]:
    """When a table's turn comes: behind those that are attached, by name and then by schema, which may be left out."""
    parts = table_parts(table)
    return not any(each[-len(parts) :] == parts for each in known), parts[::-1]
