"""Housekeeping in every database that has our schemas, for all kinds of feeds.

It makes partitions ahead and drops old ones, dispatches events and expires subscriptions, puts missing triggers back,
forgets old sagas, and lists in its log what needs a person, with what to do.

Name the databases in the variable ``pgchange_databases`` (a JSON list of connection ids), or when you trigger it; without
either it is ``airline``.
"""

from typing import Any

from airflow.sdk import Param, Variable, dag, task

from airflow_pgchange import MaintenanceOperator


@dag(
    schedule="*/10 * * * *",
    max_active_runs=1,
    tags=["pgchange"],
    doc_md=__doc__,
    params={
        "databases": Param(
            None,
            type=["null", "array"],
            items={"type": "string"},
            title="Databases",
            description="Connection ids, one per line. Empty: those in the variable pgchange_databases or, "
            "without it, airline",
        ),
        "retention": Param(
            None,
            type=["null", "string"],
            title="History to keep",
            description="Such as 30 days; older commits go once every consumer has processed them. "
            "Empty: nothing is trimmed",
        ),
        "saga_retention": Param(
            "30 days",
            type=["null", "string"],
            title="Sagas to keep",
            description="Such as 30 days; sagas that ended longer ago are forgotten. Empty: none is forgotten",
        ),
    },
)
def pgchange_maintenance() -> None:
    @task
    def databases(params: dict[str, Any] | None = None) -> list[str]:
        given: list[str] | None = (params or {}).get("databases")
        return given or Variable.get("pgchange_databases", default=["airline"], deserialize_json=True)

    MaintenanceOperator.partial(
        task_id="maintain",
        retention="{{ params.retention or '' }}",
        saga_retention="{{ params.saga_retention or '' }}",
        map_index_template="{{ task.postgres_conn_id }}",
    ).expand(postgres_conn_id=databases())


pgchange_maintenance_dag = pgchange_maintenance()
