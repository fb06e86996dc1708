"""Another DAG waits for the consumer: a daily report over everything that was committed when it began.

Needs the connection ``airline``, and the DAG ``flight_delays``, whose results it reads.
"""

from airflow.sdk import dag, task

from airflow_pgchange import CommitFeed, ConsumerSensor, PgChangeHook

MOVEMENTS = CommitFeed(consumer_id="route_delay", branch_id=0)


@dag(schedule="@daily", tags=["pgchange"], doc_md=__doc__)
def delay_report() -> None:
    up_to_date = ConsumerSensor(
        task_id="up_to_date", feed=MOVEMENTS, postgres_conn_id="airline", deferrable=True, timeout=3600
    )

    @task
    def worst_routes() -> list[str]:
        with PgChangeHook("airline").get_conn() as connection:
            rows = connection.execute(
                "select carrier, origin, dest, round(arrival_delay::numeric / arrivals) from route_delay "
                "where arrivals > 0 order by 4 desc, 1, 2, 3 limit 10"
            )
            return [
                f"{carrier} {origin}-{dest}: {minutes} minutes late"
                for carrier, origin, dest, minutes in rows
            ]

    up_to_date >> worst_routes()


delay_report_dag = delay_report()
