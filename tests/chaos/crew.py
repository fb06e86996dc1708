"""Processes of a campaign that are killed at their work, and replaced.

Each notes its batches in a table ``work``, whose columns ``process``, ``ended`` (a number of the sequence ``moment``) and
``how`` are those that are named here.
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

import psycopg

from tests.chaos.kills import ROOT, until
from tests.suite.processes import runs, state


@dataclass
class Crew:
    """Processes of one campaign: each is started anew when it was killed, and none may end by itself."""

    source: str
    folder: Path
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
        """SIGSTOP a process that was alive."""
        process = self.running[number]
        assert runs(process.pid), f"process {number} was gone before it was stopped: {self.told()}"
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: state(process.pid) == "T", "the process to stop")
        return process

    def freeze_at_work(self) -> subprocess.Popen[bytes]:
        """SIGSTOP a process in the middle of a batch."""
        with psycopg.connect(self.source, autocommit=True) as connection:
            for number in itertools.cycle(range(len(self.running))):
                process = self.freeze(number)
                query = "select from work where process = %s and ended is null"
                if connection.execute(query, [process.pid]).fetchone() is not None:
                    return process
                os.kill(process.pid, signal.SIGCONT)
        raise AssertionError("there is no process")

    def kill(self, number: int, *, only_at_work: bool = False) -> bool:
        """SIGKILL a process, and start another in its place. First it is stopped: so what it has in work ends, in the
        notes, while it still holds its lock. Whether it was killed."""
        process = self.freeze(number)
        with psycopg.connect(self.source, autocommit=True) as connection:
            at_work = connection.execute(
                "update work set ended = nextval('moment'), how = 'killed' where process = %s and ended is null",
                [process.pid],
            ).rowcount
        if only_at_work and not at_work:
            os.kill(process.pid, signal.SIGCONT)
            return False
        process.kill()
        assert process.wait() == -signal.SIGKILL
        assert not runs(process.pid)
        self.kills["at work" if at_work else "between batches"] += 1
        self.running[number] = self.start(self.commands[number])
        return True

    def stop(self) -> None:
        """Ask all to end, and expect that they were at work until now."""
        for process in self.running:
            assert process.poll() is None, self.told()
            process.terminate()
        for process in self.running:
            # One that has only just been started does not know yet what it is asked.
            assert process.wait() in (0, -signal.SIGTERM), self.told()


@contextmanager
def crew(source: str, folder: Path, commands: Sequence[list[str]] = ()) -> Iterator[Crew]:
    """The processes, started; none is left when the block ends."""
    made = Crew(source, folder)
    try:
        for command in commands:
            made.add(command)
        yield made
    finally:
        for process in made.running:
            process.kill()
            process.wait()
