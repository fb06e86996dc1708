"""The definition of a saga: its steps, their order, and the compensation of each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from graphlib import CycleError, TopologicalSorter
from typing import Any

import psycopg

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds.argument_checks import MOMENT, Seconds, patience, seconds
from airflow_pgchange.feeds.error_translation import translated
from airflow_pgchange.feeds.queries import ask, select
from airflow_pgchange.messages.queues import Texts, as_hstore

DAY = timedelta(days=1)
QUEUE_NAME = re.compile(r"[a-z_0-9]{1,32}")


@dataclass(frozen=True)
class Step:
    """One transaction of a saga. Its message is in the queue ``queue_name``.

    The message can be received once the messages of the steps ``after`` were received. ``compensation`` is the queue of
    the message that undoes the step. A step without a compensation must be ``lasting``: it stays when the saga is rolled
    back.
    """

    name: str
    queue_name: str
    compensation: str | None = None
    after: tuple[str, ...] = ()
    lasting: bool = False


@dataclass(frozen=True)
class Saga:
    """Steps that are either all done in their order, or undone as far as they were done.

    The compensations wait behind a message in the queue ``bungs``, from which nobody may consume. The queue ``end`` gets
    a message when all steps are done, by default ``<name>_end``. The queue ``rolled_back`` gets a message when all are
    undone, by default ``<name>_rolled_back``. A saga that is not done within ``timeout`` is rolled back; None sets no
    limit. Raises InvalidArgument if steps wait for each other, or if a step has no compensation and is not ``lasting``.
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
                    f"saga {self.name}: {queue!r} is not a valid name of a queue: use at most 32 characters a-z, 0-9 or _"
                )
        if self.bungs in (*self._of_steps, self.end, self.rolled_back):
            raise InvalidArgument(
                f"saga {self.name}: nobody may consume from {self.bungs}, so no step and no end can be there"
            )
        self.in_order()

    def _check(self, step: Step, names: list[str]) -> None:
        if unknown := set(step.after) - set(names):
            raise InvalidArgument(
                f"saga {self.name}: `after` of step {step.name} names {', '.join(sorted(unknown))}: name steps of this "
                "saga"
            )
        if step.compensation is None and not step.lasting:
            raise InvalidArgument(
                f"saga {self.name}: step {step.name} has no compensation: name the queue of its compensation, or set "
                "lasting=True if the step need not be undone"
            )
        if step.compensation is not None and step.lasting:
            raise InvalidArgument(
                f"saga {self.name}: step {step.name} has a compensation, so it cannot be lasting"
            )

    @property
    def queues(self) -> tuple[str, ...]:
        """Every queue that the saga posts to, without duplicates. The queue of the bungs is first."""
        return tuple(dict.fromkeys([self.bungs, *self._of_steps, self.end, self.rolled_back]))

    @property
    def worked(self) -> tuple[str, ...]:
        """The queues that handlers consume from: all but the queue of the bungs."""
        return tuple(queue for queue in self.queues if queue != self.bungs)

    @property
    def _of_steps(self) -> list[str]:
        return [queue for step in self.steps for queue in (step.queue_name, step.compensation) if queue]

    def in_order(self) -> list[Step]:
        """Return the steps in an order in which each follows the steps of its ``after``."""
        by_name = {step.name: step for step in self.steps}
        sorter = TopologicalSorter({step.name: step.after for step in self.steps})
        try:
            return [by_name[name] for name in sorter.static_order()]
        except CycleError as error:
            waiting = " -> ".join(reversed(error.args[1]))
            raise InvalidArgument(
                f"saga {self.name}: its steps wait for each other: {waiting}: remove one of them from `after`"
            ) from error

    def description(self) -> dict[str, Any]:
        """Return the argument of ``mbus.start_saga``."""
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
    """Create the queues that a saga needs, unless they exist."""
    query = (
        "select mbus.create_queue(q, 16) from unnest(%s::text[]) as q "
        "where q not in (select qname from mbus.list())"
    )
    with translated():
        connection.execute(query, [list(saga.queues)])


def start_saga(connection: psycopg.Connection[Any], saga: Saga, data: Texts) -> int:
    """Post the messages of a saga in the transaction of ``connection``, each with ``data``. Return the saga's number.

    The saga begins when that transaction commits, together with the transaction's other writes.
    """
    return int(ask(connection, select("mbus.start_saga", saga.description(), as_hstore(data))))
