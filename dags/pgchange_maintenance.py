"""Maintains every database that has our schemas, for all kinds of feeds.

It creates partitions in advance and drops old partitions, dispatches events, expires subscriptions and restores missing
triggers. It deletes old sagas, and old dead letters if you set their age. It logs findings that need a person, with the
command that fixes each.

Name the databases in ``pgchange_maintenance(databases=[...])``, in the form when you trigger it, or in the variable
``pgchange_databases`` (a JSON list of connection ids). The default is ``airline``.
"""

from collections.abc import Sequence
from typing import Any

from airflow.sdk import DAG, Param, Variable, task

from airflow_pgchange import MaintenanceOperator


def pgchange_maintenance(
    dag_id: str = "pgchange_maintenance",
    *,
    databases: Sequence[str] = (),
    schedule: str = "*/10 * * * *",
    retention: str | None = None,
    retention_bytes: str | None = None,
    retention_count: int | None = None,
    saga_retention: str | None = "30 days",
    letter_retention: str | None = None,
) -> DAG:
    with DAG(
        dag_id,
        schedule=schedule,
        max_active_runs=1,
        tags=["pgchange"],
        doc_md=__doc__,
        auto_register=False,
        params={
            "databases": Param(
                list(databases) or None,
                type=["null", "array"],
                items={"type": "string"},
                title="Databases",
                description="Connection ids, one per line. Empty: those in the variable pgchange_databases or, "
                "without it, airline",
            ),
            "retention": Param(
                retention,
                type=["null", "string"],
                title="History to keep",
                description="Such as 30 days; older history is deleted once every consumer has processed it. "
                "Empty: no limit",
            ),
            "retention_bytes": Param(
                retention_bytes,
                type=["null", "string"],
                title="Size of history to keep",
                description="Such as 10 GB for each feed, with its indexes; older history is deleted once every consumer "
                "has processed it. Empty: no limit",
            ),
            "retention_count": Param(
                retention_count,
                type=["null", "integer"],
                minimum=1,
                title="Number of changes to keep",
                description="Such as 1000000 for each feed; older history is deleted once every consumer has processed "
                "it. Empty: no limit",
            ),
            "saga_retention": Param(
                saga_retention,
                type=["null", "string"],
                title="Sagas to keep",
                description="Such as 30 days; sagas that ended longer ago are deleted. Empty: none is deleted",
            ),
            "letter_retention": Param(
                letter_retention,
                type=["null", "string"],
                title="Dead letters to keep",
                description="Such as 90 days; letters that were given up longer ago are dropped. Empty: none is dropped",
            ),
        },
    ) as made:

        @task(task_id="databases")
        def named(params: dict[str, Any] | None = None) -> list[str]:
            databases: list[str] | None = (params or {}).get("databases")
            return databases or Variable.get("pgchange_databases", default=["airline"], deserialize_json=True)

        MaintenanceOperator.partial(
            task_id="maintain",
            retention="{{ params.retention or '' }}",
            retention_bytes="{{ params.retention_bytes or '' }}",
            retention_count="{{ params.retention_count or '' }}",
            saga_retention="{{ params.saga_retention or '' }}",
            letter_retention="{{ params.letter_retention or '' }}",
            map_index_template="{{ task.postgres_conn_id }}",
        ).expand(postgres_conn_id=named())
    return made


pgchange_maintenance_dag = pgchange_maintenance()
