"""The operator that maintains the databases of feeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator

from airflow_pgchange.admin.maintenance import maintain
from airflow_pgchange.errors import PgChangeError
from airflow_pgchange.feeds.argument_checks import Bytes, Seconds
from airflow_pgchange.hooks.pgchange import PgChangeHook
from airflow_pgchange.utils.arguments import CheckedArguments, Number, checks

if TYPE_CHECKING:
    from airflow.sdk import Context


class MaintenanceOperator(CheckedArguments, BaseOperator):
    """Maintains a database with our schemas. Run it every few minutes, for each database of results or of changes.

    It creates partitions in advance, and captures partitions that users attached to captured tables. It drops staging
    tables that killed jobs have left. It dispatches events, and drops old events that all consumers have read.

    It also logs findings that need a person, such as batches that fail repeatedly and tables that are not completely
    captured. For a consumer that is held back it names the session that holds it back. It never moves a consumer, so
    the guarantees of the other operators hold.

    :param postgres_conn_id: the database; the role needs the grants of the maintenance DAG (docs/reference/roles.md)
    :param width: the number of transactions of a partition (templated)
    :param ahead: how many partitions are created ahead of the current one (templated)
    :param retention: trim history that is older than this, such as ``30 days``, if every consumer has processed it;
        default: no limit (templated)
    :param retention_bytes: keep the newest history of each feed up to this size, such as ``10 GB``, and unprocessed
        changes; default: no limit (templated)
    :param retention_count: keep this number of newest changes of each feed, and unprocessed changes; default: no limit
        (templated)
    :param saga_retention: delete sagas that ended longer ago than this; default: none is deleted (templated)
    :param letter_retention: drop dead letters that were given up longer ago than this, such as ``90 days``, and are not
        on their way. The role must have the right to drop them; default: none is dropped (templated)
    """

    arguments = checks(
        "postgres_conn_id",
        "width",
        "ahead",
        "retention",
        "retention_bytes",
        "retention_count",
        "saga_retention",
        "letter_retention",
    )
    template_fields: Sequence[str] = tuple(arguments)

    def __init__(
        self,
        *,
        postgres_conn_id: str = PgChangeHook.default_conn_name,
        width: Number = 1_000_000,
        ahead: Number = 2,
        retention: Seconds | None = None,
        retention_bytes: Bytes | None = None,
        retention_count: Number | None = None,
        saga_retention: Seconds | None = None,
        letter_retention: Seconds | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.postgres_conn_id = postgres_conn_id
        self.width: Any = width
        self.ahead: Any = ahead
        self.retention = retention
        self.retention_bytes = retention_bytes
        self.retention_count: Any = retention_count
        self.saga_retention = saga_retention
        self.letter_retention = letter_retention

    def execute(self, context: Context) -> dict[str, Any]:
        """Return ``{done: [lines], attention: [lines]}``. If a step fails, the others still run, and the task then
        fails."""
        with PgChangeHook(self.postgres_conn_id).get_conn(primary=True) as connection:
            report = maintain(
                connection,
                width=self.width,
                ahead=self.ahead,
                retention=self.retention,
                retention_bytes=self.retention_bytes,
                retention_count=self.retention_count,
                saga_retention=self.saga_retention,
                letter_retention=self.letter_retention,
            )
        for line in report.done:
            self.log.info("%s", line)
        for line in report.attention:
            self.log.warning("%s", line)
        if report.failed:
            raise PgChangeError("; ".join(report.failed))
        if not (report.done or report.attention):
            self.log.info("nothing to do, and no problems that need attention")
        return {"done": report.done, "attention": report.attention}
