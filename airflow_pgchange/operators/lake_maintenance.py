"""The operator that maintains a table of a lake."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator

from airflow_pgchange.feeds.argument_checks import Seconds
from airflow_pgchange.hooks.pgchange import PgChangeHook
from airflow_pgchange.lake.maintenance import LEAST, maintain
from airflow_pgchange.lake.tables import LakeTable, table_of
from airflow_pgchange.utils.arguments import CheckedArguments, checks, flag, lake_table

if TYPE_CHECKING:
    from airflow.sdk import Context

SHOWN = 100
"""The number of attempts that the log and the result name."""


class LakeMaintenanceOperator(CheckedArguments, BaseOperator):
    """Removes the files that attempts on batches have left in an Iceberg table, and lets old snapshots expire.

    A file is removed if an attempt wrote it more than ``older_than`` ago and no snapshot of the table names it. An
    attempt commits its files within two days or not at all, so such a file can no longer be committed. Files of other
    writers stay.

    :param table: an ``Iceberg`` table, or its catalog and name as a text, such as ``lake.sales.payment`` (templated)
    :param postgres_conn_id: the database of the results, which has the table's catalog (templated)
    :param older_than: the minimum age of a file that is removed, 3 days or more (templated)
    :param snapshot_retention: first let snapshots expire that are older than this, 3 days or more. Snapshots of
        branches and tags stay. Default: no snapshot expires (templated)
    :param dry_run: only report what would be done (templated)
    """

    arguments = checks("postgres_conn_id", "older_than", "snapshot_retention", table=lake_table, dry_run=flag)
    template_fields: Sequence[str] = tuple(arguments)

    def __init__(
        self,
        *,
        table: LakeTable | Mapping[str, Any] | str,
        postgres_conn_id: str = PgChangeHook.default_conn_name,
        older_than: Seconds | None = None,
        snapshot_retention: Seconds | None = None,
        dry_run: bool | str = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.table: Any = table
        self.postgres_conn_id = postgres_conn_id
        self.older_than = older_than
        self.snapshot_retention = snapshot_retention
        self.dry_run: Any = dry_run

    def execute(self, context: Context) -> dict[str, Any]:
        """Return the number of expired snapshots, and the number and size of the removed files. They are also counted for
        each attempt on a batch that left files behind."""
        with PgChangeHook(self.postgres_conn_id).get_conn(primary=True) as connection:
            report = maintain(
                connection,
                table_of(self.table),
                older_than=LEAST if self.older_than is None else self.older_than,
                snapshot_retention=self.snapshot_retention,
                dry_run=self.dry_run,
            )
        self.log.info(
            "%s: %s snapshots expired, %s files of %s bytes removed%s",
            report.table,
            f"{report.expired:,}",
            f"{report.files:,}",
            f"{report.bytes:,}",
            ", in a dry run: nothing was changed" if self.dry_run else "",
        )
        leftovers = sorted(report.leftovers, key=lambda leftover: -leftover.bytes)[:SHOWN]
        for leftover in leftovers:
            of = (
                "metadata"
                if leftover.batch is None
                else f"attempt {leftover.attempt} on batch {leftover.batch}"
            )
            self.log.info(
                "%s: leftovers of %s: %s files of %s bytes",
                report.table,
                of,
                f"{leftover.files:,}",
                f"{leftover.bytes:,}",
            )
        return {
            "table": report.table,
            "expired": report.expired,
            "files": report.files,
            "bytes": report.bytes,
            "leftovers": [asdict(leftover) for leftover in leftovers],
        }
