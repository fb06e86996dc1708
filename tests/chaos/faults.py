"""The faults of a campaign, drawn at random from a seed. Each fault is counted when it has happened."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psycopg
from psycopg import errors
from psycopg.conninfo import make_conninfo

from airflow_pgchange import tubes
from airflow_pgchange.errors import ConsumerBusy, PgChangeError
from demo.postgres import Cluster
from tests.chaos.crew import Crew, end_work
from tests.chaos.event_worker import cut_off
from tests.chaos.kills import PATIENCE
from tests.chaos.mirror_worker import TUBES
from tests.chaos.mixed_worker import Member
from tests.chaos.mixed_writers import commit_prepared
from tests.suite.processes import runs

NAME = "faults"
"""The application name of our own sessions, which are not terminated."""
WAITED = "session that waited in a lock storm"
STEP_WITHIN = 5.0
"""Seconds in which a process must reach the step at which it is to kill itself."""
LOCKS_WITHIN = "3s"
UNTOUCHED = ("work", "told")
"""Tables in which the campaign records events. No fault locks them."""
TABLES = """
select c.oid::regclass::text from pg_class as c join pg_namespace as n on n.oid = c.relnamespace
where c.relkind = 'r' and n.nspname in ('public', 'pgmb', 'mbus', 'tube', 'topology', 'revision', 'pubsub', 'pgchange')
    or c.relkind = 'r' and n.nspname like 'sh00%'
order by 1
"""


@dataclass
class Faults:
    """Faults of the processes of a campaign and of its server. Faults whose name is ``left_out`` never happen."""

    server: Cluster
    crews: Mapping[str, Crew]
    members: Mapping[str, Sequence[Member]]
    chance: random.Random
    left_out: Collection[str] = ()
    fired: Counter[str] = field(default_factory=Counter)
    threads: list[threading.Thread] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)

    @property
    def source(self) -> str:
        return make_conninfo(self.server.conninfo(), application_name=NAME)

    @property
    def kinds(self) -> Mapping[str, tuple[float, Callable[[], None]]]:
        """Return the faults by name, each with its weight in the draw."""
        return {name: fault for name, fault in self._all_kinds().items() if name not in self.left_out}

    def _all_kinds(self) -> Mapping[str, tuple[float, Callable[[], None]]]:
        roles = {member.role for member in self.everybody}
        steps = {step for member in self.everybody for step in member.steps}
        return {
            **{f"kill of a {role}": (6 / len(roles), partial(self.kill, role)) for role in sorted(roles)},
            **{
                f"kill at step {step}": (6 / len(steps), partial(self.kill_at, step))
                for step in sorted(steps)
            },
            "terminated session": (6, self.terminate),
            "lock storm": (4, self.lock_storm),
            WAITED: (0, self.lock_storm),
            "vacuum full": (4, self.vacuum_full),
            "number of workers changed": (2, self.change_workers),
            "immediate stop": (1, self.stop_server),
        }

    @property
    def everybody(self) -> list[Member]:
        return [member for members in self.members.values() for member in members]

    @property
    def missing(self) -> list[str]:
        """The kinds of faults that have not happened yet."""
        return [name for name in self.kinds if not self.fired[name]]

    def rage(self, seconds: float, pause: float) -> None:
        """Let random faults happen for this time, and then each kind that has not happened yet."""
        kinds, deadline = self.kinds, time.monotonic() + seconds
        weights = [weight for weight, _ in kinds.values()]
        while time.monotonic() < deadline:
            self.let_happen(self.chance.choices(list(kinds), weights)[0])
            time.sleep(self.chance.random() * pause)
        self.wait_for_threads()
        while self.missing and time.monotonic() < deadline + PATIENCE:
            self.let_happen(self.missing[0])
            self.wait_for_threads()

    def let_happen(self, kind: str) -> None:
        self.kinds[kind][1]()
        self.end_what_was_prepared()

    def wait_for_threads(self) -> None:
        for thread in self.threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a lock storm does not end"
        assert self.errors == []

    def drawn(self, able: Callable[[Member], bool]) -> tuple[Crew, int, Member]:
        """Choose a running process at random. Return its crew, its number in the crew, and its description."""
        found = [
            (self.crews[crew], number, member)
            for crew, members in self.members.items()
            for number, member in enumerate(members)
            if able(member)
        ]
        return self.chance.choice(found)

    def kill(self, role: str) -> None:
        """Kill a process with SIGKILL, at whatever step it is."""
        crew, number, _ = self.drawn(lambda member: member.role == role)
        crew.kill(number)
        self.fired[f"kill of a {role}"] += 1

    def kill_at(self, step: str) -> None:
        """Order a process to kill itself at a named step. Nothing happens if it does not reach the step."""
        crew, number, member = self.drawn(lambda member: step in member.steps)
        process = crew.running[number]
        member.order.give(step)
        deadline = time.monotonic() + STEP_WITHIN
        while runs(process.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        if runs(process.pid) and member.order.withdraw():
            return
        assert process.wait(STEP_WITHIN) == -signal.SIGKILL, crew.told()
        with psycopg.connect(self.source, autocommit=True) as connection:
            end_work(connection, process.pid, "killed", "began")
        crew.replace(number)
        self.fired[f"kill at step {step}"] += 1

    def stop_server(self) -> None:
        self.server.stop("immediate")
        time.sleep(self.chance.random() * 0.5)
        self.server.start()
        self.fired["immediate stop"] += 1

    def terminate(self) -> None:
        """Terminate some sessions of writers and consumers, in any of the databases."""
        with psycopg.connect(self.source, autocommit=True) as connection:
            sessions = connection.execute(
                "select pid, state from pg_stat_activity "
                "where backend_type = 'client backend' and application_name <> %s order by pid",
                [NAME],
            ).fetchall()
            for pid, state in self.chance.sample(sessions, min(len(sessions), self.chance.randint(1, 4))):
                if connection.execute("select pg_terminate_backend(%s)", [pid]).fetchone() == (True,):
                    self.fired[f"terminated session, {state}"] += 1
                    self.fired["terminated session"] += 1

    def lock_storm(self) -> None:
        """Let sessions lock some tables for a while."""
        tables = self.tables()
        for _ in range(self.chance.randint(1, 3)):
            locked = self.chance.sample(tables, self.chance.randint(1, 4))
            mode = self.chance.choice(
                ["access exclusive", "access exclusive", "share row exclusive", "share"]
            )
            self.in_thread(self._lock, locked, mode, self.chance.random())

    def _lock(self, tables: Sequence[str], mode: str, seconds: float) -> None:
        with self.patient() as connection, connection.transaction():
            connection.execute(f"lock table {', '.join(tables)} in {mode} mode")
            time.sleep(seconds)
            self.fired["lock storm"] += 1
            waited = connection.execute(
                "select count(*) from pg_locks where not granted and pg_backend_pid() = any (pg_blocking_pids(pid))"
            ).fetchone()
            self.fired[WAITED] += waited[0] if waited else 0

    def vacuum_full(self) -> None:
        self.in_thread(self._vacuum, self.chance.choice(self.tables()))

    def _vacuum(self, table: str) -> None:
        with self.patient() as connection:
            connection.execute(f"vacuum (full, analyze) {table}")
            self.fired["vacuum full"] += 1

    def change_workers(self) -> None:
        workers = self.chance.randint(1, 5)
        for tube in TUBES:
            with (
                suppress(ConsumerBusy, errors.DeadlockDetected),
                psycopg.connect(self.source, autocommit=True) as connection,
            ):
                tubes.ensure(connection, tube, workers)
                self.fired["number of workers changed"] += 1

    def end_what_was_prepared(self) -> None:
        """Commit the transactions that killed writers have prepared, as an operator would."""
        with psycopg.connect(self.source, autocommit=True) as connection:
            self.fired["orphaned prepared transaction"] += commit_prepared(connection)

    def tables(self) -> list[str]:
        with psycopg.connect(self.source, autocommit=True) as connection:
            return [name for (name,) in connection.execute(TABLES) if name not in UNTOUCHED]

    def patient(self) -> psycopg.Connection[Any]:
        """Yield a session that waits for locks, but only for a limited time."""
        return psycopg.connect(self.source, autocommit=True, options=f"-c lock_timeout={LOCKS_WITHIN}")

    def in_thread(self, fault: Callable[..., None], *arguments: Any) -> None:
        def run() -> None:
            try:
                fault(*arguments)
            except (errors.LockNotAvailable, errors.DeadlockDetected, errors.UndefinedTable):
                # The table may also be a partition of the event log that maintenance has dropped meanwhile.
                self.fired["lock that was not got"] += 1
            except psycopg.OperationalError as error:
                if not cut_off(error):
                    self.errors.append(error)
            except (psycopg.Error, PgChangeError) as error:
                self.errors.append(error)

        thread = threading.Thread(target=run)
        self.threads = [one for one in self.threads if one.is_alive()]
        self.threads.append(thread)
        thread.start()
