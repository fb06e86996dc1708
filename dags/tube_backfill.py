"""Touches every row of tables that are attached to a tube, so that its workers replay them all.

Trigger it and fill in the form. A backfill that was stopped goes on where it was; ``select * from tube.backfills()``
shows how far it is, and ``tube.backfill_pause`` and ``tube.backfill_resume`` hold it and let it go on.
"""

from typing import Any

from airflow.sdk import Param, dag, task

from airflow_pgchange import tubes
from airflow_pgchange.feeds.errors import InvalidArgument
from airflow_pgchange.hooks.pgchange import PgChangeHook
from airflow_pgchange.operators.tube import TubeBackfillOperator


@dag(
    schedule=None,
    tags=["pgchange"],
    doc_md=__doc__,
    params={
        "database": Param(
            "airline", type="string", minLength=1, title="Database", description="A connection id"
        ),
        "tube": Param(type="string", minLength=1, maxLength=57, title="Tube"),
        "tables": Param(
            None,
            type=["null", "array"],
            items={"type": "string", "pattern": r'^("([^"]|"")+"|[^".][^.]*)\.("([^"]|"")+"|[^".][^.]*)$'},
            title="Tables",
            description="As schema.table; double quotes around a name that holds a dot. Empty: all that touch the tube",
        ),
        "order_column": Param(
            "id",
            type="string",
            minLength=1,
            maxLength=63,
            title="Order",
            description="The column in whose order rows are touched; an index on it and the id makes it quick",
        ),
        "chunk_size": Param(
            50_000,
            type="integer",
            minimum=1,
            maximum=1_000_000,
            title="Chunk",
            description="Rows a transaction, of a backfill that is begun",
        ),
        "pause": Param(
            0.0,
            type="number",
            minimum=0,
            maximum=3600,
            title="Pause",
            description="Seconds between two chunks",
        ),
    },
)
def tube_backfill() -> None:
    @task
    def tables(params: dict[str, Any] | None = None) -> list[list[str]]:
        given = params or {}
        with PgChangeHook(given["database"]).get_conn(primary=True) as connection:
            found = given["tables"] or tubes.attached(connection, given["tube"])
        if not found:
            raise InvalidArgument(f"no table touches tube {given['tube']}: attach one first")
        # A list each: in a text a comma would part names.
        return [[table] for table in found]

    TubeBackfillOperator.partial(
        task_id="backfill",
        tube="{{ params.tube }}",
        order_col="{{ params.order_column }}",
        chunk_size="{{ params.chunk_size }}",
        pause="{{ params.pause }}",
        postgres_conn_id="{{ params.database }}",
        map_index_template="{{ task.tables[0] }}",
    ).expand(tables=tables())


tube_backfill()
