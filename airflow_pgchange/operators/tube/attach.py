"""Operators that attach tables to a tube, or touch ids: mark them as changed, without a change of their rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseOperator

from airflow_pgchange import tubes
from airflow_pgchange.feeds.connections import read_committed
from airflow_pgchange.feeds.key_columns import KeyNames
from airflow_pgchange.feeds.table_names import table_parts
from airflow_pgchange.hooks.pgchange import PgChangeHook
from airflow_pgchange.utils.arguments import CheckedArguments, Number, checks, columns, maybe, names, whole

if TYPE_CHECKING:
    from airflow.sdk import Context
    from jinja2 import Environment


class SqlFromFile:
    """A base for operators with a field for SQL, or for the name of a ``*.sql`` file.

    Airflow's ``template_ext`` would apply to all fields, so it would open a table called ``audit.sql`` as a file.
    """

    sql_field: ClassVar[str]

    def _do_render_template_fields(
        self,
        parent: Any,
        template_fields: Iterable[str],
        context: Context,
        jinja_env: Environment,
        seen_oids: set[int],
    ) -> None:
        sql = getattr(self, self.sql_field)
        if jinja_env.loader is not None and isinstance(sql, str) and sql.endswith(".sql"):
            setattr(self, self.sql_field, jinja_env.loader.get_source(jinja_env, sql)[0])
        super()._do_render_template_fields(parent, template_fields, context, jinja_env, seen_oids)  # type: ignore[misc]


class TubeAttachOperator(CheckedArguments, SqlFromFile, BaseOperator):
    """Creates a tube if it does not exist, and attaches tables to it, all or none.

    A new tube has ids of the same types as the first table. A table with ids of other types is refused.

    Guarantee: exactly once, in one transaction. Repeating it changes nothing.

    :param tube: the name of the tube (templated)
    :param tables: the tables, as ``schema.table`` (templated)
    :param shard: the shard of the tables; default: the number at the end of each table's schema (templated)
    :param key: the column with unique values, or the list of such columns; default: the primary key (templated)
    :param group_by: instead of ``key``, the column or columns whose values several rows share, such as the order of an
        order line (templated)
    :param workers: how many workers share the tube; default: 1 for a new tube, no change for another (templated)
    :param predicate: an SQL expression over a row, or a ``*.sql`` file with it. Rows for which it is false are not
        touched. It runs with the rights of each table's owner. Default: the predicate that the tube has (templated)
    :param postgres_conn_id: the database of the tables; the role must be their owner
    """

    arguments = checks(
        "tube",
        "tables",
        "shard",
        "workers",
        "predicate",
        "postgres_conn_id",
        key=maybe(columns),
        group_by=maybe(columns),
    )
    template_fields: Sequence[str] = tuple(arguments)
    template_fields_renderers: ClassVar[dict[str, str]] = {"predicate": "sql"}
    sql_field = "predicate"

    def __init__(
        self,
        *,
        tube: str,
        tables: Sequence[str] | str,
        shard: Number | None = None,
        key: KeyNames | None = None,
        group_by: KeyNames | None = None,
        workers: Number | None = None,
        predicate: str | None = None,
        postgres_conn_id: str = PgChangeHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.tube = tube
        self.tables: Any = tables
        self.shard: Any = shard
        self.key: Any = key
        self.group_by: Any = group_by
        self.workers: Any = workers
        self.predicate = predicate
        self.postgres_conn_id = postgres_conn_id

    def execute(self, context: Context) -> None:
        with PgChangeHook(self.postgres_conn_id).get_conn(primary=True) as connection:
            with read_committed(connection):
                types = tubes.key_types(connection, self.tube, self.tables[0], self.group_by or self.key)
                tubes.ensure(connection, self.tube, self.workers, self.predicate, types)
                # Tables that are attached already come first. A change of their shard waits for workers, and no other
                # table must be locked against writes meanwhile. The order is fixed, so that two runs cannot deadlock.
                attached = [table_parts(table) for table in tubes.attached(connection, self.tube)]
                for table in sorted(self.tables, key=partial(_turn, attached)):
                    tubes.attach(
                        connection, self.tube, table, shard=self.shard, key=self.key, group_by=self.group_by
                    )
            self.log.info("tube %s: attached %s", self.tube, ", ".join(self.tables))


class TubeTouchOperator(CheckedArguments, SqlFromFile, BaseOperator):
    """Touches the ids that a query returns, such as all flights of a carrier that was renamed.

    Guarantee: at least once. A retry touches the ids again, which does no harm. The query runs with the rights of the
    connection's role, so only people with these rights should write it. Raises the errors of
    ``airflow_pgchange.tubes.touch``, and InvalidArgument without a shard.

    :param tube: the tube, or several tubes as a list or separated by commas (templated)
    :param query: a query whose first column is the ids, or a ``*.sql`` file with it (templated)
    :param shard: the shard of the ids (templated)
    :param op: I, U, D, T, or B for a backfill's lower priority (templated)
    :param postgres_conn_id: the database of the tube
    """

    arguments = checks("query", "op", "postgres_conn_id", tube=names, shard=whole)
    template_fields: Sequence[str] = tuple(arguments)
    template_fields_renderers: ClassVar[dict[str, str]] = {"query": "sql"}
    sql_field = "query"

    def __init__(
        self,
        *,
        tube: Sequence[str] | str,
        query: str,
        shard: Number,
        op: str = "T",
        postgres_conn_id: str = PgChangeHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.tube: Any = tube
        self.query = query
        self.shard: Any = shard
        self.op = op
        self.postgres_conn_id = postgres_conn_id

    def execute(self, context: Context) -> None:
        with PgChangeHook(self.postgres_conn_id).get_conn(primary=True) as connection:
            tubes.touch(connection, self.tube, self.query, self.shard, self.op)


def _turn(attached: Sequence[tuple[str, ...]], table: str) -> tuple[bool, tuple[str, ...]]:
    """Sort key: attached tables first, then by name and schema. The schema may be missing."""
    parts = table_parts(table)
    return not any(each[-len(parts) :] == parts for each in attached), parts[::-1]
