"""What a saga is: steps, the order between them, and what undoes each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from graphlib import CycleError, TopologicalSorter
from typing import Any

import psycopg

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds.checks import MOMENT, Seconds, patience, seconds
from airflow_pgchange.feeds.errors import translated
from airflow_pgchange.feeds.queries import ask, select
from airflow_pgchange.messages.queues import Texts, as_hstore

DAY = timedelta(days=1)
QUEUE_NAME = re.compile(r"[a-z_0-9]{1,32}")


@dataclass(frozen=True)
class Step:
    """One transaction of a saga: a message in the queue ``queue_name``, received once those of the steps ``after`` were.

    ``compensation`` is the queue of what undoes it. A step without one must say that it is ``lasting``: nothing undoes
    it when the saga is rolled back.
    """

    name: str
    queue_name: str
    compensation: str | None = None
    after: tuple[str, ...] = ()
    lasting: bool = False


@dataclass(frozen=True)
class Saga:
    """Steps that are all done in their order, or undone as far as they were done.

    The queue ``bungs`` holds the message behind which the compensations wait: nobody may consume from it.
    ``end`` gets a message when all steps are done, ``rolled_back`` when all are undone; default: ``<name>_end`` and
    ``<name>_rolled_back``. It is rolled back where its steps are not all done within ``timeout``; None: however long they
    take.
    Raises InvalidArgument for steps that wait for each other, or for one that nothing undoes.
    """

    name: str
    steps: tuple[Step, ...]
    bungs: str = "bungs"
    end: str = ""
    rolled_back: str = ""
    timeout: Seconds | None = DAY

    def __post_init__(self) -> None:
        object.__setattr__(self, "end", self.end or f"{self.name}_end")
        object.__setattr__(self, "rolled_back", self.rolled_back or f"{self.name}_rolled_back")
        if self.timeout is not None:
            seconds(f"saga {self.name}: timeout", self.timeout, least=MOMENT)
        names = [step.name for step in self.steps]
        if not names or len(set(names)) < len(names):
            raise InvalidArgument(
                f"saga {self.name}: it needs steps, each with a name of its own, not {names}"
            )
        for step in self.steps:
            self._check(step, names)
        for queue in self.queues:
            if not QUEUE_NAME.fullmatch(queue):
                raise InvalidArgument(
                    f"saga {self.name}: {queue!r} is not a name of a queue: at most 32 of a-z, _ and 0-9"
                )
        if self.bungs in (*self._of_steps, self.end, self.rolled_back):
            raise InvalidArgument(
                f"saga {self.name}: nobody may consume from {self.bungs}, so no step and no end can be there"
            )
        self.in_order()

    def _check(self, step: Step, names: list[str]) -> None:
        if unknown := set(step.after) - set(names):
            raise InvalidArgument(
                f"saga {self.name}: step {step.name} is after {', '.join(sorted(unknown))}, which is not a step of it"
            )
        if step.compensation is None and not step.lasting:
            raise InvalidArgument(
                f"saga {self.name}: nothing undoes step {step.name}: name the queue of its compensation, "
                "or say lasting=True"
            )
        if step.compensation is not None and step.lasting:
            raise InvalidArgument(
                f"saga {self.name}: step {step.name} has a compensation, so it cannot be lasting"
            )

    @property
    def queues(self) -> tuple[str, ...]:
        """Every queue that it posts to, once: that of the bungs first."""
        return tuple(dict.fromkeys([self.bungs, *self._of_steps, self.end, self.rolled_back]))

    @property
    def worked(self) -> tuple[str, ...]:
        """The queues that somebody consumes from: all but that of the bungs."""
        return tuple(queue for queue in self.queues if queue != self.bungs)

    @property
    def _of_steps(self) -> list[str]:
        return [queue for step in self.steps for queue in (step.queue_name, step.compensation) if queue]

    def in_order(self) -> list[Step]:
        """The steps, each behind those that it comes after."""
        known = {step.name: step for step in self.steps}
        sorter = TopologicalSorter({step.name: step.after for step in self.steps})
        try:
            return [known[name] for name in sorter.static_order()]
        except CycleError as error:
            waiting = " -> ".join(reversed(error.args[1]))
            raise InvalidArgument(
                f"saga {self.name}: its steps wait for each other: {waiting}: take one of them out of `after`"
            ) from error

    def description(self) -> dict[str, Any]:
        """What ``mbus.start_saga`` takes."""
        steps = [
            {
                "name": step.name,
                "queue": step.queue_name,
                "compensation": step.compensation,
                "after": list(step.after),
            }
            for step in self.in_order()
        ]
        return {
            "name": self.name,
            "bungs": self.bungs,
            "end": self.end,
            "rolled_back": self.rolled_back,
            "within": patience("timeout", self.timeout),
            "steps": steps,
        }


def create_saga_queues(connection: psycopg.Connection[Any], saga: Saga) -> None:
    """Make the queues that a saga needs and that are not there yet."""
    query = (
        "select mbus.create_queue(q, 16) from unnest(%s::text[]) as q "
        "where q not in (select qname from mbus.list())"
    )
    with translated():
        connection.execute(query, [list(saga.queues)])


def start_saga(connection: psycopg.Connection[Any], saga: Saga, data: Texts) -> int:
    """Post the messages of a saga, all in one transaction or none, each with ``data``; returns the saga's number.

    It has begun when the transaction of ``connection`` is committed: together with whatever else that writes.
    """
    return int(ask(connection, select("mbus.start_saga", saga.description(), as_hstore(data))))
