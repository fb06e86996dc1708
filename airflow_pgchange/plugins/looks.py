"""Looking at databases: each is asked at most once a second however many people look, by a thread and over connections of
its own, so that one that does not answer delays nobody who looks at others. However many questions are asked, one thread
asks those of a line, and few wait for it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import psycopg
from airflow.providers.common.compat.sdk import AirflowNotFoundException
from psycopg.conninfo import make_conninfo

from airflow_pgchange.errors import PgChangeError, ServerUnavailable
from airflow_pgchange.feeds.connections import connect, keep_open
from airflow_pgchange.feeds.error_text import without_secrets

log = logging.getLogger(__name__)

FRESH = 1.0
"""Seconds that an answer serves all who look."""
REST = 1.0
"""An answer serves that many times as long as it took, at least: a slow database is not asked without a pause."""
PAUSE = 5.0
"""Seconds until one that did not answer is asked again."""
PATIENCE = 0.8
"""Seconds from a question until nobody waits for its answer any longer."""
LATE = 5.0
"""Seconds from a question until the answer before is called old."""
WAITING = 20
"""So many questions wait for their turn on a line. One more is refused: whoever asks has it asked again in seconds."""
CROWDED = "too many questions wait for an answer of this database: look again in some seconds"
SETTLED = 30.0
"""Seconds that a connection of Airflow is used as it was read. After that, and once it fails, it is read again."""
REACH = {"connect_timeout": 3, "tcp_user_timeout": 5000}
LIMITS = {"statement_timeout": "10s", "lock_timeout": "1s", "idle_session_timeout": "60s"}
"""What nobody looks at any more the server closes."""

Connection = psycopg.Connection[Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Look(Generic[T]):
    """What a database said. ``trouble``: why it did not answer, for who may read its connection; ``late``: the latest
    question is open for long; ``age``: seconds since it answered, None where it never did."""

    said: T | None = None
    trouble: str | None = None
    late: bool = False
    age: float | None = None


NO_ANSWER = "the database does not answer"


def trouble_of(look: Look[Any]) -> str | None:
    """Why a database did not answer, or that it does not."""
    return look.trouble or (NO_ANSWER if look.late else None)


@dataclass
class Line:
    """The connections to one or two databases, kept, over which one thread asks one question after another. The thread
    ends when no question waits."""

    conninfos: Callable[[], Sequence[str]]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _turns: deque[Callable[[], None]] = field(default_factory=deque)
    _queue: threading.Lock = field(default_factory=threading.Lock)
    _worker: threading.Thread | None = None
    _open: list[Connection] = field(default_factory=list)
    _known: Sequence[str] = ()
    _known_until: float = 0.0

    def take_turn(self, turn: Callable[[], None]) -> bool:
        """Have ``turn`` called after those that wait; False, and not, if too many wait."""
        with self._queue:
            if len(self._turns) >= WAITING:
                return False
            if self._worker is None:
                worker = threading.Thread(target=self._work, daemon=True)
                worker.start()
                self._worker = worker
            self._turns.append(turn)
        return True

    def _work(self) -> None:
        while True:
            with self._queue:
                if not self._turns:
                    self._worker = None
                    return
                turn = self._turns.popleft()
            try:
                turn()
            except Exception:
                log.warning("a database could not be asked", exc_info=True)

    def ask(self, question: Callable[[Sequence[Connection]], T]) -> T:
        """Ask once no other question is open."""
        with self._lock:
            return self._tried_twice(question)

    def _tried_twice(self, question: Callable[[Sequence[Connection]], T]) -> T:
        """Ask again over new connections if the kept ones fail. Airflow's connection may have been edited then."""
        self._resolve()
        if self._open:
            try:
                return question(self._open)
            except (ServerUnavailable, psycopg.OperationalError):
                self._known_until = 0.0
                self._resolve()
                self._close()
        try:
            for conninfo in self._known:
                self._open.append(opened(conninfo, **LIMITS))
            return question(self._open)
        except Exception as error:
            self._known_until = 0.0
            self._close()
            raise ServerUnavailable(self.without_secrets(str(error))) from error

    def without_secrets(self, text: str) -> str:
        """A text without the passwords of the line's connections."""
        return without_secrets(text, self._known)

    def _resolve(self) -> None:
        if time.monotonic() < self._known_until:
            return
        conninfos = self.conninfos()
        if conninfos != self._known:
            self._close()
        self._known, self._known_until = conninfos, time.monotonic() + SETTLED

    def _close(self) -> None:
        for connection in self._open:
            connection.close()
        self._open = []


@dataclass
class Window(Generic[T]):
    """One question, asked again and again while somebody looks, and what is done with an answer that is out."""

    line: Line
    question: Callable[[Sequence[Connection]], T]
    afterwards: Callable[[T, Sequence[Connection]], None] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _asked: float = 0.0
    _answered: threading.Event | None = None
    _said: T | None = None
    _said_at: float | None = None
    _trouble: str | None = None
    _until: float = 0.0

    @property
    def asking(self) -> bool:
        """Whether a question is open."""
        return self._answered is not None

    def ask(self) -> bool:
        """Have the question asked, unless it just was or is. False where too many others wait for the same database."""
        with self._lock:
            now = time.monotonic()
            if self._answered is not None or now < self._until:
                return True
            answered = threading.Event()
            # Where no thread can be started this raises, and the question is not open.
            if not self.line.take_turn(partial(self._answer, now, answered)):
                self._trouble = CROWDED
                return False
            self._asked, self._answered = now, answered
            return True

    def look(self) -> Look[T]:
        """The latest answer. A new one is waited for, but not where there was trouble before."""
        with self._lock:
            answered, known_trouble = self._answered, self._trouble is not None
            rest = self._asked + PATIENCE - time.monotonic()
        if answered is not None and rest > 0 and not known_trouble:
            answered.wait(rest)
        with self._lock:
            age = None if self._said_at is None else time.monotonic() - self._said_at
            late = self._answered is not None and time.monotonic() - self._asked >= LATE
            return Look(self._said, self._trouble, late, age)

    def _answer(self, asked: float, answered: threading.Event) -> None:
        said, trouble = None, None
        try:
            said = self.line.ask(self.question)
        except AirflowNotFoundException as error:
            trouble = f"{error}: make it, or name another one in the DAG"
        except (PgChangeError, psycopg.Error) as error:
            trouble = self.line.without_secrets(str(error).strip()) or type(error).__name__
        except Exception as error:
            log.warning("a database could not be asked", exc_info=True)
            trouble = type(error).__name__
        with self._lock:
            now = time.monotonic()
            if trouble is None:
                self._said, self._said_at = said, now
            self._trouble = trouble
            self._until = now + max(FRESH if trouble is None else PAUSE, REST * (now - asked))
            self._answered = None
        answered.set()
        if self.afterwards is not None and said is not None:
            try:
                self.line.ask(partial(self.afterwards, said))
            except (ServerUnavailable, AirflowNotFoundException):
                log.warning("what follows an answer could not be done", exc_info=True)


def opened(conninfo: str, **settings: str) -> Connection:
    """A connection that is not waited for long, to a server that takes writes."""
    connection = connect(make_conninfo(conninfo, **REACH), primary=True)
    keep_open(connection, **settings)
    return connection
