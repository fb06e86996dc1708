"""Maintains Iceberg tables to which batches are written.

It removes the files that failed attempts have left. If you set an age, it lets older snapshots expire. A dry run only
reports.

Name the tables in ``pgchange_lake_maintenance(tables=["lake.sales.payment"])``, when you trigger it, or in the variable
``pgchange_lake_tables`` (a JSON list). Their catalog is in the database ``postgres_conn_id``, by default ``airline``.
"""

from collections.abc import Sequence
from typing import Any

from airflow.sdk import DAG, Param, Variable, task

from airflow_pgchange.operators import LakeMaintenanceOperator


def pgchange_lake_maintenance(
    dag_id: str = "pgchange_lake_maintenance",
    *,
    postgres_conn_id: str = "airline",
    tables: Sequence[str] = (),
    schedule: str = "@daily",
    older_than: str = "3 days",
    snapshot_retention: str | None = None,
) -> DAG:
    with DAG(
        dag_id,
        schedule=schedule,
        max_active_runs=1,
        tags=["pgchange"],
        doc_md=__doc__,
        auto_register=False,
        params={
            "tables": Param(
                list(tables) or None,
                type=["null", "array"],
                items={"type": "string"},
                title="Tables",
                description="Catalog, namespace and name, such as lake.sales.payment, one per line. Empty: those in the "
                "variable pgchange_lake_tables",
            ),
            "older_than": Param(
                older_than,
                type="string",
                title="Age of files",
                description="Such as 3 days, which is the least; older files that no snapshot names are removed",
            ),
            "snapshot_retention": Param(
                snapshot_retention,
                type=["null", "string"],
                title="Snapshots to keep",
                description="Such as 30 days; older snapshots expire. Empty: none expires",
            ),
            "dry_run": Param(
                False, type="boolean", title="Dry run", description="Only report what would be done"
            ),
        },
    ) as made:

        @task(task_id="tables")
        def named(params: dict[str, Any] | None = None) -> list[str]:
            tables: list[str] | None = (params or {}).get("tables")
            return tables or Variable.get("pgchange_lake_tables", default=[], deserialize_json=True)

        LakeMaintenanceOperator.partial(
            task_id="maintain",
            postgres_conn_id=postgres_conn_id,
            older_than="{{ params.older_than }}",
            snapshot_retention="{{ params.snapshot_retention or '' }}",
            dry_run="{{ params.dry_run }}",
            map_index_template="{{ task.table.table }}",
        ).expand(table=named())
    return made


pgchange_lake_maintenance_dag = pgchange_lake_maintenance()
