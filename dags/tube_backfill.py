"""Replays whole tables that are attached to a tube, for example to fill a copy for the first time.

The backfill copies nothing itself: it marks every row as touched, after everything that is touched in the meantime. The
tube's workers (DAG ``tube_replay``) then read those rows and bring the copy up to date.

Trigger it and fill in the form. A backfill that was stopped continues where it was. Follow it in the log of the task,
or by ``select * from tube.backfills()``. ``tube.backfill_pause(id)``, ``tube.backfill_resume(id)`` and
``tube.backfill_cancel(id)`` control it. A table's next backfill is refused until the workers have replayed its last
backfill.

Needs the connection that you name in the form, or in ``tube_backfill(postgres_conn_id=...)``, to a database with a tube
and attached tables.
"""

from typing import Any

from airflow.sdk import DAG, Param, task

from airflow_pgchange import PgChangeHook, tubes
from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.operators import TubeBackfillOperator

NAME = r'("([^"]|"")+"|[^".\s][^.]*)'


def tube_backfill(dag_id: str = "tube_backfill", *, postgres_conn_id: str = "airline") -> DAG:
    with DAG(
        dag_id,
        schedule=None,
        tags=["pgchange"],
        doc_md=__doc__,
        auto_register=False,
        params={
            "database": Param(
                postgres_conn_id,
                type="string",
                pattern=r"\S",
                title="Connection",
                description="Airflow connection of the database that holds the tube and its tables",
            ),
            "tube": Param(
                type="string",
                pattern=r"\S",
                maxLength=57,
                title="Tube",
                description="Name of the tube, such as copies; select * from tube.tube_list() shows them",
            ),
            "tables": Param(
                None,
                type=["null", "array"],
                items={"type": "string", "pattern": rf"^\s*({NAME}\.{NAME})?\s*$"},
                title="Tables",
                description="One per line, as schema.table; double quotes around a name that contains a dot. "
                "Empty: every table that is attached to the tube",
            ),
            "order_column": Param(
                None,
                type=["null", "string"],
                maxLength=63,
                title="Order by",
                description="The column whose order the backfill follows; an index on (this column, id) makes it fast. "
                "Empty: the ids",
            ),
            "chunk_size": Param(
                50_000,
                type="integer",
                # The form replaces any smaller number by the minimum.
                minimum=100,
                maximum=1_000_000,
                title="Rows per chunk",
                description="Each chunk is a transaction. A backfill that continues keeps its first size",
            ),
            "pause": Param(
                0.0,
                type="number",
                minimum=0,
                maximum=3600,
                title="Pause (seconds)",
                description="Rest between two chunks",
            ),
        },
    ) as made:

        @task
        def tables(params: dict[str, Any] | None = None) -> list[list[str]]:
            values = params or {}
            names = [table.strip() for table in values["tables"] or [] if table.strip()]
            if not names:
                with PgChangeHook(values["database"]).get_conn(primary=True) as connection:
                    names = tubes.attached(connection, values["tube"])
            if not names:
                raise InvalidArgument(f"no table is attached to tube {values['tube']}: attach one first")
            # Pass each table as a list, because a comma in a text would separate names.
            return [[table] for table in names]

        TubeBackfillOperator.partial(
            task_id="backfill",
            tube="{{ params.tube }}",
            order_col="{{ params.order_column or '' }}",
            chunk_size="{{ params.chunk_size }}",
            pause="{{ params.pause }}",
            postgres_conn_id="{{ params.database }}",
            map_index_template="{{ task.tables[0] }}",
        ).expand(tables=tables())
    return made


tube_backfill_dag = tube_backfill()
