"""A tour is booked, or nothing of it: a room, then the flights there and back in parallel, then a transfer for each.

Trigger it by hand with the id of a tour. If something is booked up, all that was booked is cancelled. The DAG makes its
queues itself.

Needs the connection ``airline``, and tables: ``create table tour (id bigint primary key, state text not null)``,
``create table offer (what text primary key, free integer not null)``, and ``create table booking (tour_id bigint, what
text, primary key (tour_id, what))``.
"""

from typing import Any

import psycopg
from airflow.sdk import Param, chain, cross_downstream, dag, task

from airflow_pgchange.hooks.pgchange import PgChangeHook
from airflow_pgchange.operators.sagas import SagaHandlerOperator, StartSagaOperator
from airflow_pgchange.sagas import RollBack, Saga, Step, Work, create_queues

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
)


def book(work: Work, connection: Connection) -> RollBack | None:
    """What is written here is kept with the step, or not at all."""
    taken = "update offer set free = free - 1 where what = %s and free > 0 returning what"
    if connection.execute(taken, [work.step]).fetchone() is None:
        return RollBack(f"{work.step} is booked up")
    connection.execute("insert into booking values (%s, %s)", [work.data["tour_id"], work.step])
    return None


def cancel(work: Work, connection: Connection) -> None:
    """Also called for what was not booked: then there is nothing to give back."""
    booked = "delete from booking where (tour_id, what) = (%s, %s) returning what"
    if connection.execute(booked, [work.data["tour_id"], work.step]).fetchone() is not None:
        connection.execute("update offer set free = free + 1 where what = %s", [work.step])


def conclude(work: Work, connection: Connection) -> None:
    state = "booked" if work.kind == "end" else f"cancelled: {work.reason}"
    connection.execute("update tour set state = %s where id = %s", [state, work.data["tour_id"]])


@dag(
    schedule=None,
    params={"tour_id": Param(1, type="integer", minimum=1, title="Tour")},
    tags=["pgchange"],
    doc_md=__doc__,
)
def tour_booking() -> None:
    @task
    def make_queues() -> None:
        with PgChangeHook("airline").get_conn(primary=True) as connection:
            create_queues(connection, TOUR)

    def handler(name: str, queue: str, do: Any) -> SagaHandlerOperator:
        return SagaHandlerOperator(task_id=name, queue=queue, do=do, max_tries=5, postgres_conn_id="airline")

    start = StartSagaOperator(
        task_id="start", saga=TOUR, data={"tour_id": "{{ params.tour_id }}"}, postgres_conn_id="airline"
    )
    room = handler("room", "rooms", book)
    # Two tasks work off one queue at once: none gets what the other has.
    flights = [handler(f"flights_{n}", "flights", book) for n in (1, 2)]
    transfers = [handler(f"transfers_{n}", "transfers", book) for n in (1, 2)]
    booked = handler("booked", TOUR.end, conclude)
    cancels = [
        handler(f"cancel_{what}", f"cancel_{what}", cancel) for what in ("rooms", "flights", "transfers")
    ]
    cancelled = handler("cancelled", TOUR.rolled_back, conclude)

    chain(make_queues(), start, room, flights)
    cross_downstream(flights, transfers)
    chain(transfers, booked, cancels, cancelled)


tour_booking()
