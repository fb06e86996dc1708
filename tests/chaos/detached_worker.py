"""A process of the campaign of detached batches: a claimer, a job that reads a batch by its handle, or an acker.

Handles and what jobs have read are files, because Airflow and remote engines keep them outside of these databases. The
file of a process that was killed stays for another process.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import psycopg
from psycopg import errors

from airflow_pgchange import detached
from airflow_pgchange.detached import Handle
from airflow_pgchange.errors import BatchIncomplete, BatchNotFinished, ConsumerBusy, Leased, StaleClaim
from airflow_pgchange.feeds import ConsumerTransaction, Feed, reading
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.connections import connect
from airflow_pgchange.feeds.feed_kinds import from_json
from airflow_pgchange.feeds.queries import ask
from airflow_pgchange.results.manifests import keep
from tests.chaos.event_worker import PAUSE, through_faults
from tests.chaos.steps import OF_A_BATCH, Order, follow_batches
from tests.staging import stage

Connection = psycopg.Connection[Any]
LEASES = (0.3, 1.0, 3.0)
"""Lengths of leases in seconds. With the longest, most batches are acked in time."""
OVER = 0.2
"""The seconds for which a slow process waits after the end of its lease. In this time a claimer finds the batch."""
STEPS: Mapping[str, tuple[str, ...]] = {
    "claimer": ("claimed",),
    "job": ("read",),
    "acker": ("written", "acked", "committed"),
}
"""By role: the steps at which a process can be killed."""
READING = ("in time", "outlives", "renews", "fails")
ACKING = ("in time", "late", "slow", "twice")
"""The ways in which jobs and ackers work. Each process takes them in turn."""
NO_TOKEN = "acks without the token"
"""The planted fault."""
ANOTHER = "ack of another batch"
"""The note that the effect of the fault leaves."""


@dataclass(frozen=True)
class Member:
    """A process of the campaign. ``feed`` is the JSON of the feed. ``fault`` is empty, or ``NO_TOKEN``."""

    role: str
    number: int
    feed: Mapping[str, Any]
    source: str
    results: str
    folder: str
    seed: str
    fault: str = ""
    parent: int = field(default_factory=os.getpid)

    @property
    def name(self) -> str:
        return f"{self.role} {self.number}"

    @property
    def steps(self) -> tuple[str, ...]:
        return STEPS[self.role]

    @property
    def order(self) -> Order:
        return Order(Path(self.folder) / f"{self.name}.order")

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "tests.chaos.detached_worker", json.dumps(asdict(self))]


@dataclass(frozen=True)
class Files:
    """The files of the campaign: the handles, the changes that jobs have read, and a record of events."""

    folder: Path

    def put(self, kind: str, **given: Any) -> None:
        draft = self.folder / f"{time.time_ns()} {os.getpid()}.draft"
        draft.write_text(json.dumps(given))
        draft.rename(draft.with_suffix(f".{kind}"))

    def of(self, kind: str) -> list[Path]:
        """Return the files of a kind, oldest first."""
        return sorted(self.folder.glob(f"*.{kind}"))

    def note(self, what: str) -> None:
        """Record an event.

        Several processes write into this file. Each record is a single write, so lines do not mix.
        """
        with (self.folder / "noted").open("a") as file:
            file.write(f"{what}\n")

    def noted(self) -> Counter[str]:
        with suppress(FileNotFoundError):
            return Counter((self.folder / "noted").read_text().splitlines())
        return Counter()


class Worker:
    """A process of the campaign. It works in rounds of one batch, and each round returns whether it found work."""

    def __init__(self, member: Member, reached: Callable[[str], None] = lambda step: None) -> None:
        self.member, self.reached = member, reached
        self.feed = cast(Feed, from_json(member.feed))
        self.files = Files(Path(member.folder))
        self.chance = random.Random(f"{member.seed} {member.name} {os.getpid()}")
        self.reading, self.acking = itertools.cycle(READING), itertools.cycle(ACKING)

    @cached_property
    def places(self) -> tuple[str, str]:
        return self.member.results, self.member.source

    @property
    def rest(self) -> float:
        """Return the pause between two rounds without work.

        A claim queries the database; the other roles only look for files.
        """
        return self.chance.random() * 2 * OVER if self.member.role == "claimer" else PAUSE

    def round(self) -> bool:
        return {"claimer": self.claim, "job": self.read, "acker": self.ack}[self.member.role]()

    def claim(self) -> bool:
        lease, limit = self.chance.choice(LEASES), self.chance.choice([1, 7, 50])
        try:
            handle = detached.claim(
                self.feed, *self.places, lease=lease, owner=f"{self.member.name} {os.getpid()}", limit=limit
            )
        except Leased:
            self.files.note("claim refused, because the batch is leased")
            return False
        if handle is None:
            return False
        if handle.attempt > 1:
            self.files.note("claim of a batch whose lease ended")
        self.files.put("handle", handle=str(handle), ends=time.time() + lease)
        return True

    def read(self) -> bool:
        """Read a batch slowly. If the job was in time, its handle stays, so that a second job reads the batch."""
        if (found := self._picked("handle")) is None:
            return False
        path, given = found
        handle, way = Handle.from_text(given["handle"]), next(self.reading)
        begun = path.with_suffix(".begun")
        if begun.exists():
            self.files.note("second job on a batch")
        begun.touch()
        try:
            with detached.renewed(handle, self.member.source) if way == "renews" else nullcontext():
                batch = detached.batch_of(handle, *self.places)
                ids = self._ids_of(batch)
                self.reached("read")
                if way in ("renews", "outlives"):
                    self._sleep_over(time.time() + handle.lease)
                    self.files.note(f"job that {way} its lease")
                staged = self.chance.random() < 0.5
                if staged:
                    self._stage(batch, ids)
        except (StaleClaim, BatchIncomplete):
            # The batch has ended, or another attempt has begun. In a queue or a tube its changes no longer exist.
            self.files.note("job that came too late")
            path.unlink(missing_ok=True)
            return True
        if way == "fails":
            if detached.release(handle, *self.places, error="it broke"):
                self.files.note("release of a batch whose job failed")
            path.unlink(missing_ok=True)
            return True
        ends = time.time() + handle.lease if way == "renews" else given["ends"]
        self.files.put("read", handle=str(handle), ids=None if staged else ids, ends=ends)
        if way != "in time":
            path.unlink(missing_ok=True)
        return True

    def ack(self) -> bool:
        """Ack a batch in one of four ways: in time, after the lease, so slowly that the lease ends meanwhile, or
        twice."""
        if (found := self._picked("read")) is None:
            return False
        path, given = found
        handle, way = Handle.from_text(given["handle"]), next(self.acking)
        if way == "late":
            self._sleep_over(given["ends"])
            self.files.note("lease that ended between read and ack")
        late = time.time() > given["ends"]
        try:
            is_first = self.finish(handle, given["ids"], given["ends"] if way == "slow" else None)
            self.files.note(("late ack" if late else "ack") if is_first else "ack of what was acked before")
            if way == "twice":
                assert not self.finish(handle, given["ids"]) or self.member.fault
                self.files.note("second ack, which writes nothing")
        except StaleClaim:
            self.files.note("late ack that was refused" if late else "ack that was refused")
        except BatchNotFinished:
            self.files.note("ack without staged results")
            detached.release(handle, *self.places)
        path.unlink(missing_ok=True)
        return True

    def finish(self, handle: Handle, ids: list[str] | None, over: float | None = None) -> bool:
        """Ack the batch, but not before the time ``over``.

        The results are the ids, or the job's staged results if ids is None.
        """

        def write(connection: Connection) -> None:
            if ids is not None:
                connection.cursor().executemany(
                    "insert into public.result (id) values (%s)", [[one] for one in ids]
                )
            if over is not None:
                self._sleep_over(over)
                self.files.note("lease that ended in the merge")

        if self.member.fault == NO_TOKEN:
            return self._finish_without_token(handle, write)
        return detached.ack(handle, *self.places, write, staged=ids is None)

    def _finish_without_token(self, handle: Handle, write: Callable[[Connection], None]) -> bool:
        """Ack the batch that is claimed now, even if the results are of another attempt or of another batch."""
        with ConsumerTransaction(self.feed, *self.places, busy_timeout=60) as transaction:
            batch = ask(transaction._claims, self.feed.in_work(transaction._read_position()))
            if batch is None:
                raise StaleClaim("no batch is claimed")
            if batch["id"] != handle.batch_id:
                self.files.note(ANOTHER)
            transaction.resume(batch)
            transaction.ack(write)
        return True

    def _picked(self, kind: str) -> tuple[Path, dict[str, Any]] | None:
        """Pick the last file, or sometimes any file. The file stays, so that another process can pick it, too."""
        with suppress(FileNotFoundError):
            if paths := self.files.of(kind):
                path = paths[-1] if self.chance.random() < 0.8 else self.chance.choice(paths)
                return path, json.loads(path.read_text())
        return None

    def _ids_of(self, batch: Batch) -> list[str]:
        with connect(self.member.source) as connection:
            return [str(change.id) for change in reading.changes(connection, self.feed, batch)]

    def _stage(self, batch: Batch, ids: list[str]) -> None:
        with connect(self.member.results) as connection:
            rows = [(one,) for one in ids]
            keep(
                connection,
                batch,
                [stage(connection, "public.result", [], "append", {"id": "text"}, rows, batch=batch)],
            )

    def _sleep_over(self, end: float) -> None:
        time.sleep(max(0.0, end - time.time()) + OVER)


def _member(text: str) -> Member:
    return Member(**json.loads(text))


def main() -> None:
    asked: list[bool] = []
    member = _member(sys.argv[1])
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    follow_batches(member.order.obey, [step for step in member.steps if step in OF_A_BATCH])
    worker = Worker(member, member.order.obey)

    def stopped() -> bool:
        return bool(asked) or os.getppid() != member.parent

    def work() -> None:
        while not stopped():
            if not worker.round():
                time.sleep(worker.rest)

    through_faults(work, stopped, (errors.DeadlockDetected, errors.LockNotAvailable, ConsumerBusy))


if __name__ == "__main__":
    main()
