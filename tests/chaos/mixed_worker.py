"""A process of the campaign over all feeds: a writer, a consumer, a relay of the topology, or a client of that relay."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from airflow_pgchange.errors import ConsumerBusy
from airflow_pgchange.topology import Topology, TopologyClient, service
from tests.chaos import mixed_writers
from tests.chaos.event_worker import PAUSE, through_faults
from tests.chaos.mixed_consumers import at_work
from tests.chaos.mixed_place import Notes, Place
from tests.chaos.steps import OF_A_BATCH, OF_A_WRITER, Order, follow_batches


@dataclass(frozen=True)
class Member:
    """A process of the campaign.

    ``kind`` is the kind of writer or consumer, and ``number`` tells processes of a kind apart.
    """

    role: str
    kind: str
    number: int
    place: Place
    relay: str = ""
    began: float = 0.0
    parent: int = field(default_factory=os.getpid)

    @property
    def name(self) -> str:
        return f"{self.role} {self.kind} {self.number}"

    @property
    def order(self) -> Order:
        return Order(Path(self.place.folder) / f"{self.name}.order")

    @property
    def steps(self) -> tuple[str, ...]:
        """The steps at which a process can be killed."""
        without_batches = {
            "handlers": ("called", "noted"),
            "singles": ("received",),
            "batches": ("received",),
        }
        extra = {"messages": ("received",), "sagas": ("worked",)}
        if self.role == "writer":
            return OF_A_WRITER
        if self.role != "consumer":
            return ()
        return without_batches.get(self.kind) or (*OF_A_BATCH, *extra.get(self.kind, ()))

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "tests.chaos.mixed_worker", json.dumps(asdict(self))]

    @property
    def sign(self) -> Path:
        """The file that a process creates when it has begun."""
        return Path(self.place.folder) / f"{self.name}.begun"

    def run(self, stopped: Callable[[], bool]) -> None:
        self.sign.touch()
        {"writer": self.write, "consumer": self.consume, "helper": self.consume, "client": self.follow}.get(
            self.role, self.serve
        )(stopped)

    def write(self, stopped: Callable[[], bool]) -> None:
        mixed_writers.run(
            self.place.source, self.kind, self.began, self.place.chance, self.order.obey, stopped
        )

    def consume(self, stopped: Callable[[], bool]) -> None:
        follow_batches(self.order.obey)

        def work() -> None:
            with at_work(self.kind, self.place, self.order.obey) as consumer:
                while not stopped():
                    if not consumer.round():
                        time.sleep(5 * PAUSE)

        through_faults(work, stopped, (*mixed_writers.LOCKED_OUT, ConsumerBusy))

    def follow(self, stopped: Callable[[], bool]) -> None:
        """Record each snapshot and each event after it.

        At the end, record the state of the cluster that results from them.
        """
        client, notes = (
            TopologyClient(self.relay, Topology(gather_interval=0.1)),
            Notes.of(self.place, "client"),
        )

        def told(news: list[Any]) -> None:
            if not news:
                notes.write(snapshot=[client.topology.at.term, client.topology.at.index])
            for event in news:
                notes.write(event=[event.raft.term, event.raft.index])

        def stop() -> None:
            while not stopped():
                time.sleep(PAUSE)
            client.stop()

        threading.Thread(target=stop, daemon=True).start()
        client.follow(told)
        client.topology.rebuild()
        notes.write(picture=picture(client.topology))
        client.close()

    def serve(self, stopped: Callable[[], bool]) -> None:
        service.run(self.place.source, self.relay, users=None, trust=True)


def picture(topology: Topology) -> Any:
    """Return the state of a client as JSON."""
    known = {
        "instances": {uuid: asdict(one) for uuid, one in sorted(topology.instances.items())},
        "replicasets": {uuid: one.master for uuid, one in sorted(topology.replicasets.items())},
        "owners": [topology.owner("default", bucket) for bucket in range(0, 3000, mixed_writers.RANGE)],
    }
    return json.loads(json.dumps(known))


def _end_with(parent: int) -> None:
    """End this process when its parent has ended."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _member(text: str) -> Member:
    given = json.loads(text)
    return Member(**{**given, "place": Place(**given["place"])})


def main() -> None:
    asked: list[bool] = []
    member = _member(sys.argv[1])
    if member.role != "helper":
        # Helpers do not wait for the end of their work, because the drain completes it.
        signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    logging.basicConfig(level=logging.ERROR)
    threading.Thread(target=_end_with, args=[member.parent], daemon=True).start()
    member.run(lambda: bool(asked))


if __name__ == "__main__":
    main()
