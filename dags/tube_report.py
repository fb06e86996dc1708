"""Keeps a report of two tables up to date: the carrier of each flight, and the revenue of its tickets.

A change of ``flight`` or ``ticket`` touches the flight in the tube ``flight_sales``. The report's rows of touched
flights are computed again, and written in one transaction with the progress: exactly once.

Needs the connection ``airline``, or another connection that you name. Its database needs our schemas
(``airflow-pgchange install --postgres-conn-id airline``) and the tube, to which both tables are attached by their
flight.
"""

from airflow.sdk import DAG

from airflow_pgchange import TubeFeed, feed_asset
from airflow_pgchange.operators import TubeGarbageCollectOperator, TubeRecomputeOperator

SALES = TubeFeed("flight_sales")
QUERY = """
    select f.flight_id, f.carrier, count(t.ticket_id) as tickets, coalesce(sum(t.cents), 0) as cents
    from public.flight as f left join public.ticket as t using (flight_id)
    where f.flight_id = any(%(ids)s)
    group by f.flight_id
"""


def tube_report(dag_id: str = "tube_report", *, postgres_conn_id: str = "airline") -> DAG:
    with DAG(
        dag_id,
        schedule=[feed_asset(SALES, postgres_conn_id)],
        max_active_runs=1,
        tags=["pgchange"],
        doc_md=__doc__,
        auto_register=False,
    ) as made:
        recompute = TubeRecomputeOperator(
            task_id="recompute",
            feed=SALES,
            query=QUERY,
            into="public.flight_revenue",
            key="flight_id",
            postgres_conn_id=postgres_conn_id,
        )
        # Carry out scheduled backfills, and remove flights that are gone.
        collect = TubeGarbageCollectOperator(
            task_id="collect",
            feed=SALES,
            downstream="public.flight_revenue",
            key="flight_id",
            postgres_conn_id=postgres_conn_id,
        )
        recompute >> collect
    return made


tube_report_dag = tube_report()
