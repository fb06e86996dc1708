"""Makes a daily report from the results of another DAG's consumer, over everything that was committed when it began.

Needs the connection ``airline``, or another connection that you name, and the DAG ``flight_delays``, whose results it
reads.
"""

from airflow.sdk import DAG, task

from airflow_pgchange import CommitFeed, ConsumerSensor, PgChangeHook

MOVEMENTS = CommitFeed(consumer="route_delay", branch=0)


def delay_report(dag_id: str = "delay_report", *, postgres_conn_id: str = "airline") -> DAG:
    with DAG(dag_id, schedule="@daily", tags=["pgchange"], doc_md=__doc__, auto_register=False) as made:
        up_to_date = ConsumerSensor(
            task_id="up_to_date",
            feed=MOVEMENTS,
            postgres_conn_id=postgres_conn_id,
            deferrable=True,
            timeout=3600,
        )

        @task
        def worst_routes() -> list[str]:
            with PgChangeHook(postgres_conn_id).get_conn() as connection:
                rows = connection.execute(
                    "select carrier, origin, dest, round(arrival_delay::numeric / arrivals) from route_delay "
                    "where arrivals > 0 order by 4 desc, 1, 2, 3 limit 10"
                )
                return [
                    f"{carrier} {origin}-{dest}: {minutes} minutes late"
                    for carrier, origin, dest, minutes in rows
                ]

        up_to_date >> worst_routes()
    return made


delay_report_dag = delay_report()
