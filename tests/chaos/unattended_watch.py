"""Samples of a database under load, and which promises of unattended maintenance they break."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg

from tests.chaos.unattended import ASLEEP, MAINTENANCE, WAIT, WRITER, Load

SAMPLE = """
select
    (select count(*) from revision.commit_queue_default) + (select count(*) from pgmb.events_default)
        + (select count(*) from pgmb.dispatched_default),
    (select count(*) from pg_inherits
     where inhparent in ('revision.commit_queue'::regclass, 'pgmb.events'::regclass, 'pgmb.dispatched'::regclass)),
    (select sum(pg_total_relation_size(c.oid)) from pg_class as c join pg_namespace as n on n.oid = c.relnamespace
     where c.relkind = 'r' and n.nspname in ('revision', 'pubsub', 'tube', 'pgmb', 'mbus', 'pgchange')),
    array(select pid from pg_stat_activity where backend_type = 'client backend' and pid <> pg_backend_pid())
"""
FINDINGS = "select coalesce(consumer, '') || ': ' || told from pgchange.health()"
OLDEST = """
select extract(epoch from greatest(
    now() - (select min(q.created_at) from revision.commit_queue as q),
    now() - (select pgmb.extract_date_from_event_id(min(e.id)) from pgmb.events as e)))
"""
LONGEST = 6.0
"""Seconds of a transaction of maintenance: it waits for a moment in which nobody uses a table for up to 4."""
STUBBORN = 3, 60
"""The number of runs in a row, and their seconds, that may not all postpone the same work. A single run may meet a
reader of many rows."""
GROWTH = 24 * 1024
"""Kilobytes by which memory and disk may grow between the middle and the end."""
WARM = 0.4
"""The share of a campaign after which memory is compared. Until then sessions fill their caches."""


@dataclass(frozen=True)
class Sample:
    at: float
    in_default: int
    partitions: int
    kilobytes: int
    sessions: int
    """Kilobytes of the private memory of the largest session."""
    command: int
    """Kilobytes of the private memory of the command."""


@dataclass
class Watch:
    """Takes a sample each second, and asks for the findings at every fifth."""

    db: str
    command: Callable[[], int | None]
    """Return the pid of the command, or None."""
    samples: list[Sample] = field(default_factory=list)
    findings: list[tuple[float, str]] = field(default_factory=list)
    """Each with the seconds since the beginning."""
    errors: list[BaseException] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[None]:
        stopping = threading.Event()
        thread = threading.Thread(target=self._run, args=(stopping,))
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join()

    def _run(self, stopping: threading.Event) -> None:
        began, number = time.monotonic(), 0
        try:
            with psycopg.connect(self.db, autocommit=True, application_name="watch") as connection:
                while not stopping.wait(max(0.0, began + number - time.monotonic())):
                    at = time.monotonic() - began
                    self.samples.append(self._sample(connection, at))
                    if number % 5 == 0:
                        self.findings += [(at, line) for (line,) in connection.execute(FINDINGS).fetchall()]
                    number += 1
        except psycopg.Error as error:
            self.errors.append(error)

    def _sample(self, connection: psycopg.Connection[Any], at: float) -> Sample:
        row = connection.execute(SAMPLE).fetchone()
        assert row is not None
        in_default, partitions, size, pids = row
        command = self.command()
        return Sample(
            at,
            in_default,
            partitions,
            int(size) // 1024,
            max(map(private, pids), default=0),
            0 if command is None else private(command),
        )


def private(pid: int) -> int:
    """Return the kilobytes of a process that no other shares; 0 if it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    return int(found[1]) if found else 0


def slowest(log: Path, session: str) -> tuple[float, str]:
    """Return the seconds and the text of the slowest statement of some sessions that the server logged."""
    found = re.findall(rf"{session}: LOG: +duration: ([\d.]+) ms +(.*)", log.read_text(errors="replace"))
    return max(((float(ms) / 1000, text) for ms, text in found), default=(0.0, ""))


def most_partitions(load: Load) -> int:
    """How many partitions the three tables may have: those ahead, of the history, emptied ones, and two runs' worth."""
    runs = 2 * load.every + load.retention
    queue = load.ahead + 16 + 8 + 3 + runs / load.partition
    log = (max(3 * load.every, load.ahead * load.partition) + runs) / load.partition + 8 + 3
    return int(queue + 2 * log) + 3


def broken(watch: Watch, load: Load, told: str, log: Path) -> list[str]:
    """The promises of maintenance that the samples, the command's log and the server's log break."""
    late = [s for s in watch.samples if s.at > WARM * watch.samples[-1].at]
    early = [s.kilobytes for s in watch.samples[: len(watch.samples) // 2]]
    middle = late[: len(late) // 3]
    longest, statement = slowest(log, MAINTENANCE)
    wait, write = slowest(log, WRITER)
    found = {
        "the watch failed": watch.errors,
        "rows in default partitions": [s.in_default for s in watch.samples if s.in_default][-3:],
        "findings": sorted(
            {line for at, line in watch.findings if ASLEEP not in line and at > 2 * load.every}
        ),
        "postponed again and again": stubborn(told, load),
        "errors of maintenance": re.findall(r".* ERROR .*", told),
        "no maintenance": [] if "maintained in" in told else [told[-200:] or "nothing logged"],
        "a long transaction of maintenance": [longest, statement] if longest > LONGEST else [],
        "a long wait of a writer": [wait, write] if wait > WAIT else [],
        "memory of sessions": _grown(
            [s.sessions for s in middle], [s.sessions for s in late[-len(middle) :]]
        ),
        "memory of the command": _grown(
            [s.command for s in middle], [s.command for s in late[-len(middle) :]]
        ),
        "disk": _grown(early, [watch.samples[-1].kilobytes]),
        "partitions": [s.partitions for s in watch.samples[-3:] if s.partitions > most_partitions(load)],
    }
    return [f"{name}: {what}" for name, what in found.items() if what]


def stubborn(told: str, load: Load) -> list[str]:
    """Return the work that too many runs in a row postponed (see ``STUBBORN``)."""
    runs = [
        set(re.findall(r"postponed [^;]+", line)) for line in told.splitlines() if "maintained in" in line
    ]
    most = int(max(STUBBORN[0], STUBBORN[1] / load.every))
    in_a_row = [set.intersection(*runs[n : n + most]) for n in range(len(runs) - most + 1)]
    return sorted(set().union(*in_a_row))


def _grown(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """Return both kilobytes if those after are more than those before by ``GROWTH``."""
    return [max(before), max(after)] if max(after) > max(before) + GROWTH else []


def figures(watch: Watch, told: str, log: Path) -> Iterator[str]:
    """Lines of figures, for the output of a campaign."""
    each, last = watch.samples, watch.samples[-1]
    pause = max((after.at - before.at for before, after in pairwise(each)), default=0.0)
    yield f"{len(each)} samples, the longest pause between two {pause:.1f} s"
    yield f"{told.count('maintained in')} runs, {told.count('postponed')} times postponed"
    yield f"rows in default partitions: at most {max(s.in_default for s in each)}"
    yield f"partitions: at most {max(s.partitions for s in each)}, at the end {last.partitions}"
    yield f"kB of our schemas: at most {max(s.kilobytes for s in each)}, at the end {last.kilobytes}"
    yield f"kB of the largest session: at most {max(s.sessions for s in each)}, at the end {last.sessions}"
    yield f"kB of the command: at most {max(s.command for s in each)}, at the end {last.command}"
    yield "slowest statement of maintenance: {:.3f} s, {}".format(*slowest(log, MAINTENANCE))
    yield "longest wait of a writer, if above the limit: {:.3f} s, {}".format(*slowest(log, WRITER))
