"""Processes of a campaign that are killed while they work, and then replaced.

Consumers record their batches in the table ``work``. ``began`` and ``ended`` are numbers of the sequence ``moment``.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from tests.chaos.kills import ROOT, until
from tests.suite.processes import runs, state

WORK = """
create sequence if not exists moment;
create table if not exists work (
    n bigint generated always as identity primary key, process integer, feed text, workers integer,
    shards integer[], ids bigint[], seqs bigint[], tables jsonb,
    began bigint default nextval('moment'), ended bigint, how text
);
"""


@dataclass
class Crew:
    """The processes of one campaign.

    If a process is killed, another takes its place. No process may end by itself. ``ends`` is SQL for the moment at
    which the batch of a killed process ended.
    """

    source: str
    folder: Path
    ends: str = "nextval('moment')"
    commands: list[list[str]] = field(default_factory=list)
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)

    def start(self, command: list[str]) -> subprocess.Popen[bytes]:
        with (self.folder / "errors").open("ab") as log:
            return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def add(self, command: list[str]) -> None:
        self.commands.append(command)
        self.running.append(self.start(command))

    def told(self) -> str:
        return (self.folder / "errors").read_text()[-4000:]

    def freeze(self, number: int) -> subprocess.Popen[bytes]:
        """Stop a process that was alive, with SIGSTOP."""
        process = self.running[number]
        assert runs(process.pid), f"process {number} was gone before it was stopped: {self.told()}"
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: state(process.pid) == "T", "the process to stop")
        return process

    def freeze_at_work(self) -> subprocess.Popen[bytes]:
        """Stop a process in the middle of a batch, with SIGSTOP."""
        with psycopg.connect(self.source, autocommit=True) as connection:
            for number in itertools.cycle(range(len(self.running))):
                process = self.freeze(number)
                query = "select from work where process = %s and ended is null"
                if connection.execute(query, [process.pid]).fetchone() is not None:
                    return process
                os.kill(process.pid, signal.SIGCONT)
        raise AssertionError("there is no process")

    def kill(self, number: int, *, only_at_work: bool = False) -> bool:
        """Kill a process with SIGKILL, and start another in its place. Return whether it was still alive.

        The process is first stopped, so that the end of its batch is recorded while it still holds its lock.
        """
        process = self.freeze(number)
        with psycopg.connect(self.source, autocommit=True) as connection:
            at_work = end_work(connection, process.pid, "killed", self.ends)
        if only_at_work and not at_work:
            os.kill(process.pid, signal.SIGCONT)
            return False
        process.kill()
        assert process.wait() == -signal.SIGKILL
        assert not runs(process.pid)
        self.kills["at work" if at_work else "between batches"] += 1
        self.replace(number)
        return True

    def replace(self, number: int) -> None:
        """Start a process to replace a process that is gone."""
        self.running[number] = self.start(self.commands[number])

    def stop(self) -> None:
        """Ask all processes to end, and check that they were running until now."""
        for process in self.running:
            assert process.poll() is None, self.told()
            process.terminate()
        for process in self.running:
            # A process that has just started does not handle signals yet.
            assert process.wait() in (0, -signal.SIGTERM), self.told()


def end_work(
    connection: psycopg.Connection[Any], process: int, how: str, ends: str = "nextval('moment')"
) -> int:
    """Record how the batch of a process ended. Return the number of batches that the process had in work."""
    query = f"update work set ended = {ends}, how = %s where process = %s and ended is null"
    return connection.execute(query, [how, process]).rowcount


@contextmanager
def crew(
    source: str, folder: Path, commands: Sequence[list[str]] = (), ends: str = "nextval('moment')"
) -> Iterator[Crew]:
    """Start the processes, and stop all of them at the end of the block."""
    made = Crew(source, folder, ends)
    try:
        for command in commands:
            made.add(command)
        yield made
    finally:
        for process in made.running:
            process.kill()
            process.wait()
