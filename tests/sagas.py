"""The saga that the tests of sagas share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg

from airflow_pgchange.feeds import QueueFeed
from airflow_pgchange.feeds.draining import Plan, drain
from airflow_pgchange.messages import Saga, Step, Work, create_saga_queues, handle_saga
from airflow_pgchange.messages.saga_handling import Do
from tests.batches import connections_reused
from tests.queues import one

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
"""The queues from which handlers consume."""


def prepare(connection: psycopg.Connection[Any]) -> None:
    """Create the queues of the saga, and a table in which handlers record their work."""
    create_saga_queues(connection, TOUR)
    connection.execute(
        "create table act (n bigint generated always as identity, saga bigint, kind text, step text)"
    )


def note(work: Work, connection: psycopg.Connection[Any]) -> None:
    connection.execute(
        "insert into act (saga, kind, step) values (%s, %s, %s)", [work.saga, work.kind, work.step]
    )


def run(db: str, do: Do = note, queue_names: Sequence[str] = WORKED, **options: Any) -> list[str]:
    """Handle messages until no queue has any. Return the outcomes in order."""
    answers: list[str] = []

    def process(transaction, batch):
        (change,) = transaction.changes()
        transaction.ack(lambda kept: answers.append(handle_saga(kept, change, do, **options)))

    plans = {queue: Plan(QueueFeed(queue), db, limit=1) for queue in queue_names}
    with psycopg.connect(db, autocommit=True) as watch, connections_reused():
        while sum(drain(plan, process).batches for queue, plan in plans.items() if ready(watch, queue)):
            pass
    return answers


def ready(connection: psycopg.Connection[Any], queue: str) -> bool:
    """Whether any message can be received. This query costs much less than opening a consumer's connection."""
    return bool(one(connection, "select mbus.lag(%s, 'default', 1) ->> 'ready' <> '0'", queue))


def acts(connection: psycopg.Connection[Any], kind: str = "step") -> list[str]:
    rows = connection.execute("select step from act where kind = %s order by n", [kind]).fetchall()
    return [row[0] for row in rows]


def state(connection: psycopg.Connection[Any]) -> dict[str, Any]:
    """Return the only saga."""
    names = ("state", "done", "to_do", "undone", "to_undo", "stuck")
    (row,) = connection.execute(f"select {', '.join(names)} from mbus.sagas").fetchall()
    return dict(zip(names, row, strict=True))


def failure(connection: psycopg.Connection[Any], iid: str) -> str:
    """Return the error because of which a message is tried again."""
    return str(one(connection, "select error from mbus.saga_message where iid = %s", iid))


def due(connection: psycopg.Connection[Any], queue: str) -> None:
    """Make all steps due that are waiting for their next attempt."""
    connection.execute(f'update mbus."log${queue}" set delayed_until = now() where delayed_until is not null')
    connection.execute("update mbus.apart set due = now() where due > now() and batch is null")


Act = tuple[str, str | None]


def in_order(steps: Sequence[str | None]) -> bool:
    """Whether each step was done after the steps that it depends on."""
    place = {step: n for n, step in enumerate(steps)}
    return all(
        before in place and place[before] < place[step.name]
        for step in TOUR.steps
        if step.name in place
        for before in step.after
    )


def is_right(state: str, acts: Sequence[Act], refused: str | None) -> bool:
    """Whether a saga did all of its steps, or compensated all of them because a step was refused.

    Each must be done once, in a valid order.
    """
    kinds = [kind for kind, _ in acts]
    steps = [step for kind, step in acts if kind == "step"]
    undone = [step for kind, step in acts if kind == "compensation"]
    if not in_order(steps) or len(set(steps)) < len(steps) or refused in steps:
        return False
    if refused is None:
        return state == "complete" and set(steps) == STEPS and kinds == ["step"] * 5 + ["end"]
    ended = ["step"] * len(steps) + ["compensation"] * 5 + ["rolled back"]
    return state == "rolled back" and set(undone) == STEPS and kinds == ended


def refused_step(saga: int) -> str | None:
    """Return the step that the handlers refuse for this saga.

    Of six consecutive sagas, five have another step each, and the sixth has None.
    """
    return dict(enumerate(sorted(STEPS))).get(saga % 6)
