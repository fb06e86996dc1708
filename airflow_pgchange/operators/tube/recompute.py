"""The operator that keeps a report of several tables up to date."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.key_columns import KeyNames
from airflow_pgchange.feeds.transaction import ConsumerTransaction
from airflow_pgchange.operators.feed import FeedOperator
from airflow_pgchange.operators.tube.attach import SqlFromFile
from airflow_pgchange.operators.tube.control_pods import tube_feed
from airflow_pgchange.tubes import recompute
from airflow_pgchange.tubes.reports import check_query
from airflow_pgchange.utils.arguments import Check, FeedLike, checks, columns, text

if TYPE_CHECKING:
    from airflow.sdk import Context


def _report_query(name: str, value: Any) -> str:
    query = text(name, value)
    if not query.endswith(".sql") and "%(" not in query:
        check_query(name, query)
    return query


class TubeRecomputeOperator(SqlFromFile, FeedOperator):
    """Keeps a report up to date: a table with a row for each id of a tube, computed by a query of the tube's tables.

    For each batch of touched ids it replaces their rows in the table by the rows that the query returns. An id without
    a row is deleted. Attach all tables of the report to the tube under one shard, each with the column that holds the
    id of the report. Put a TubeGarbageCollectOperator after this task, with the table as its ``downstream``. It carries
    out backfills, and lets the report be recomputed after a truncate.

    Guarantee: exactly once, because the rows and the progress are one transaction. If the tube is in another database
    (``source_conn_id``), the query runs there. A crash can then repeat a batch, which does no harm. The report is right
    however many transactions write its tables meanwhile: a change that the query does not see is in a later batch. The
    query runs with the rights of the connection's role, so only people with these rights should write it. Raises the
    errors of ``airflow_pgchange.tubes.recompute``.

    The further arguments are those of FeedOperator.

    :param feed: the worker's feed, a TubeFeed, or its JSON (templated)
    :param query: a query, or a ``*.sql`` file with it. It names the touched ids as ``%(ids)s``, and writes any other
        percent sign as ``%%``. It returns at most one row for each of these ids (templated)
    :param into: the table of the report, as ``schema.table``. The columns of the query are written to its columns of the
        same names (templated)
    :param key: the column of the ids, in the query and in the table, which needs a unique index on it. For ids of
        several columns it is the list of them. The query names each as an array, such as ``%(tenant)s`` (templated)
    :param evolve: the table first gets new columns of the query, in a transaction of its own; its role must own the table
    """

    arguments: ClassVar[dict[str, Check]] = {
        **FeedOperator.arguments,
        **checks(feed=tube_feed, query=_report_query, into=text, key=columns),
    }
    template_fields: Sequence[str] = tuple(arguments)
    template_fields_renderers: ClassVar[dict[str, str]] = {
        **FeedOperator.template_fields_renderers,
        "query": "sql",
    }
    sql_field = "query"

    def __init__(
        self, *, feed: FeedLike, query: str, into: str, key: KeyNames, evolve: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(feed=feed, **kwargs)
        self.query = query
        self.into = into
        self.key: Any = key
        self.evolve = evolve

    def process_batch(self, transaction: ConsumerTransaction, batch: Batch, context: Context) -> None:
        recompute(transaction, self.query, self.into, self.key, evolve=self.evolve)
