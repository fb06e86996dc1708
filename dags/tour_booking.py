"""Books a whole tour or nothing: a room, then the flights there and back in parallel, then a transfer for each flight.

Trigger ``tour_booking`` by hand with the id of a tour. It creates the queues, starts a saga and waits for its end. Its
run succeeds if everything is booked. It fails with the reason if everything was cancelled. ``tour_handlers`` carries
out the steps. It runs whenever a message of their queues is due, so a step that is retried later needs no further
trigger. A tour that is not booked within an hour is cancelled, at the latest by the maintenance DAG.

Needs the connection ``airline``, or another connection that you name for both DAGs, and tables: ``create table tour (id
bigint primary key, state text not null)``, ``create table offer (what text primary key, free integer not null)``, and
``create table booking (tour_id bigint, what text, primary key (tour_id, what))``.
"""

from datetime import timedelta
from typing import Any

import psycopg
from airflow.sdk import DAG, Param, chain, task

from airflow_pgchange import PgChangeHook
from airflow_pgchange.assets import saga_schedule
from airflow_pgchange.messages import RollBack, Saga, Step, TryAgain, Work, create_saga_queues
from airflow_pgchange.operators import SagaHandlerOperator, StartSagaOperator
from airflow_pgchange.sensors import SagaSensor

Connection = psycopg.Connection[Any]

TOUR = Saga(
    "tour",
    (
        Step("room", "rooms", "cancel_rooms"),
        Step("flight_there", "flights", "cancel_flights", after=("room",)),
        Step("flight_back", "flights", "cancel_flights", after=("room",)),
        Step("transfer_to_hotel", "transfers", "cancel_transfers", after=("flight_there",)),
        Step("transfer_from_hotel", "transfers", "cancel_transfers", after=("flight_back",)),
    ),
    timeout=timedelta(hours=1),
)


def book(work: Work, connection: Connection) -> TryAgain | RollBack | None:
    """Book an offer. The writes are committed together with the step, or not at all."""
    offer = "select free from offer where what = %s for update skip locked"
    row = connection.execute(offer, [work.step]).fetchone()
    if row is None:
        return TryAgain(f"{work.step} is in other hands", delay=timedelta(seconds=10))
    if row[0] == 0:
        return RollBack(f"{work.step} is booked up")
    connection.execute("update offer set free = free - 1 where what = %s", [work.step])
    connection.execute("insert into booking values (%s, %s)", [work.data["tour_id"], work.step])
    return None


def cancel(work: Work, connection: Connection) -> None:
    """Cancel a booking. It is also called if the step has booked nothing, and then changes nothing."""
    booked = "delete from booking where (tour_id, what) = (%s, %s) returning what"
    if connection.execute(booked, [work.data["tour_id"], work.step]).fetchone() is not None:
        connection.execute("update offer set free = free + 1 where what = %s", [work.step])


def conclude(work: Work, connection: Connection) -> None:
    state = "booked" if work.kind == "end" else f"cancelled: {work.reason}"
    connection.execute("update tour set state = %s where id = %s", [state, work.data["tour_id"]])


def tour_booking(dag_id: str = "tour_booking", *, postgres_conn_id: str = "airline") -> DAG:
    with DAG(
        dag_id,
        schedule=None,
        params={"tour_id": Param(1, type="integer", minimum=1, title="Tour")},
        tags=["pgchange"],
        doc_md=__doc__,
        auto_register=False,
    ) as made:

        @task
        def make_queues() -> None:
            with PgChangeHook(postgres_conn_id).get_conn(primary=True) as connection:
                create_saga_queues(connection, TOUR)

        start = StartSagaOperator(
            task_id="start",
            saga=TOUR,
            data={"tour_id": "{{ params.tour_id }}"},
            postgres_conn_id=postgres_conn_id,
        )
        booked = SagaSensor(task_id="booked", saga=start.output, postgres_conn_id=postgres_conn_id, retries=2)
        chain(make_queues(), start, booked)
    return made


def tour_handlers(dag_id: str = "tour_handlers", *, postgres_conn_id: str = "airline") -> DAG:
    def handler(queue: str, do: Any, name: str = "") -> None:
        SagaHandlerOperator(
            task_id=name or queue,
            queue_name=queue,
            do=do,
            max_attempts=5,
            postgres_conn_id=postgres_conn_id,
        )

    with DAG(
        dag_id,
        schedule=saga_schedule(TOUR, postgres_conn_id),
        catchup=False,
        tags=["pgchange"],
        doc_md=__doc__,
        auto_register=False,
    ) as made:
        handler("rooms", book)
        # Two tasks process each of these queues at the same time. No message goes to both.
        for n in (1, 2):
            handler("flights", book, f"flights_{n}")
            handler("transfers", book, f"transfers_{n}")
        for service in ("rooms", "flights", "transfers"):
            handler(f"cancel_{service}", cancel)
        handler(TOUR.end, conclude)
        handler(TOUR.rolled_back, conclude)
    return made


tour_booking_dag = tour_booking()
tour_handlers_dag = tour_handlers()
