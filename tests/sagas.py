"""The saga that the tests of sagas share."""

from __future__ import annotations

from typing import Any

import psycopg

from airflow_pgchange.sagas import Saga, Step, Work, create_queues

TOUR = Saga(
    "tour",
    (
        Step("room", "rooms", "cancel_rooms"),
        Step("there", "tickets", "cancel_tickets", after=("room",)),
        Step("back", "tickets", "cancel_tickets", after=("room",)),
        Step("transfer_to", "transfers", "cancel_transfers", after=("there",)),
        Step("transfer_from", "transfers", "cancel_transfers", after=("back",)),
    ),
)
STEPS = {step.name for step in TOUR.steps}
WORKED = [queue for queue in TOUR.queues if queue != TOUR.bungs]
"""The queues that somebody consumes from."""


def prepare(connection: psycopg.Connection[Any]) -> None:
    """Make the queues, and a table in which handlers note what they did."""
    create_queues(connection, TOUR)
    connection.execute(
        "create table act (n bigint generated always as identity, saga bigint, kind text, step text)"
    )


def note(work: Work, connection: psycopg.Connection[Any]) -> None:
    connection.execute(
        "insert into act (saga, kind, step) values (%s, %s, %s)", [work.saga, work.kind, work.step]
    )
