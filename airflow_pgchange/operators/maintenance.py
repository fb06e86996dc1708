"""Housekeeping in the databases of feeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator

from airflow_pgchange.admin.maintenance import maintain
from airflow_pgchange.errors import PgChangeError
from airflow_pgchange.feeds.checks import Seconds
from airflow_pgchange.hooks.pgchange import PgChangeHook
from airflow_pgchange.utils.arguments import CheckedArguments, Number, checks

if TYPE_CHECKING:
    from airflow.sdk import Context


class MaintenanceOperator(CheckedArguments, BaseOperator):
    """Looks after a database with our schemas: run it every few minutes, for results and sources alike.

    It makes partitions ahead, puts the capture on partitions that users attached, drops what killed jobs left
    in staging, dispatches events, lets go of those that are old and read, and logs what a person should look
    at: consumers that are held back and by whom, batches that fail again and again, tables that are not wholly
    captured. It never moves a consumer: results stay exactly once, or at least once, as the operators that
    write them say.

    :param postgres_conn_id: the database; with a role that has the grants of the maintenance DAG (docs/roles.md)
    :param width: transactions a partition (templated)
    :param ahead: partitions ahead of today's (templated)
    :param retention: trim history that is older, such as than ``30 days``, once every consumer has processed it;
        default: nothing is trimmed (templated)
    :param saga_retention: forget sagas that ended longer ago; default: none is forgotten (templated)
    """

    arguments = checks("postgres_conn_id", "width", "ahead", "retention", "saga_retention")
    template_fields: Sequence[str] = tuple(arguments)

    def __init__(
        self,
        *,
        postgres_conn_id: str = PgChangeHook.default_conn_name,
        width: Number = 1_000_000,
        ahead: Number = 2,
        retention: Seconds | None = None,
        saga_retention: Seconds | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.postgres_conn_id = postgres_conn_id
        self.width: Any = width
        self.ahead: Any = ahead
        self.retention = retention
        self.saga_retention = saga_retention

    def execute(self, context: Context) -> dict[str, Any]:
        """Returns ``{done: [lines], attention: [lines]}``; fails after the last step if any of them failed."""
        with PgChangeHook(self.postgres_conn_id).get_conn(primary=True) as connection:
            report = maintain(
                connection,
                width=self.width,
                ahead=self.ahead,
                retention=self.retention,
                saga_retention=self.saga_retention,
            )
        for line in report.done:
            self.log.info("%s", line)
        for line in report.attention:
            self.log.warning("%s", line)
        if report.failed:
            raise PgChangeError("; ".join(report.failed))
        if not (report.done or report.attention):
            self.log.info("nothing to do, and nothing that a person should look at")
        return {"done": report.done, "attention": report.attention}
