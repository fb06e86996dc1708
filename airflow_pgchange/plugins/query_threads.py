"""Query databases for the page. Each query is sent at most once a second, for any number of users.

Each ``QueryThread`` has its own thread and connections, so that an unresponsive database does not delay users of
others. The thread sends its queries in turn, and only a few queries may wait.
"""

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
"""Seconds for which an answer serves all requests."""
REST = 1.0
"""An answer also serves for at least this many times as long as its query took, so that a slow database gets pauses."""
PAUSE = 5.0
"""Seconds until a failed query is sent again."""
PATIENCE = 0.8
"""Seconds after the start of a query for which requests wait for its answer. Then they get the previous answer."""
LATE = 5.0
"""Seconds after the start of a query from which on the previous answer counts as late."""
WAITING = 20
"""Maximum number of queries that wait for one database. More are refused, and the page repeats its request soon."""
CROWDED = "too many queries wait for this database: look again in some seconds"
SETTLED = 30.0
"""Seconds for which an Airflow connection is reused without reading it again. It is also read again after a failure."""
REACH = {"connect_timeout": 3, "tcp_user_timeout": 5000}
LIMITS = {"statement_timeout": "10s", "lock_timeout": "1s", "idle_session_timeout": "60s"}
"""The settings of each session. The server closes a session that is idle because no user looks any more."""

Connection = psycopg.Connection[Any]
T = TypeVar("T")


@dataclass(frozen=True)
class CachedAnswer(Generic[T]):
    """The latest answer of a database, with its state.

    ``failure`` is the reason why the last query failed, for users who may read the connection. ``late``: the running
    query takes long. ``age``: seconds since the answer, or None if there never was an answer.
    """

    answer: T | None = None
    failure: str | None = None
    late: bool = False
    age: float | None = None


NO_ANSWER = "the database does not answer"


def failure_of(cached: CachedAnswer[Any]) -> str | None:
    """Return the reason why a database did not answer. None if it answers in time."""
    return cached.failure or (NO_ANSWER if cached.late else None)


@dataclass
class QueryThread:
    """The kept connections to one or two databases. A thread sends their queries in turn, and ends when none waits."""

    conninfos: Callable[[], Sequence[str]]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _turns: deque[Callable[[], None]] = field(default_factory=deque)
    _queue: threading.Lock = field(default_factory=threading.Lock)
    _worker: threading.Thread | None = None
    _open: list[Connection] = field(default_factory=list)
    _resolved: Sequence[str] = ()
    _resolved_until: float = 0.0

    def take_turn(self, turn: Callable[[], None]) -> bool:
        """Queue ``turn`` for the thread. Return False, without queuing it, if too many wait."""
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
                log.warning("a query of the page failed", exc_info=True)

    def ask(self, question: Callable[[Sequence[Connection]], T]) -> T:
        """Call ``question`` with the connections, once no other call is running."""
        with self._lock:
            return self._try_twice(question)

    def _try_twice(self, question: Callable[[Sequence[Connection]], T]) -> T:
        """Retry over new connections if the kept connections fail. The Airflow connection is read again, because it may
        have been edited."""
        self._resolve()
        if self._open:
            try:
                return question(self._open)
            except (ServerUnavailable, psycopg.OperationalError):
                self._resolved_until = 0.0
                self._resolve()
                self._close()
        try:
            for conninfo in self._resolved:
                self._open.append(opened(conninfo, **LIMITS))
            return question(self._open)
        except Exception as error:
            self._resolved_until = 0.0
            self._close()
            raise ServerUnavailable(self.without_secrets(str(error))) from error

    def without_secrets(self, text: str) -> str:
        """Return a text without the passwords of the thread's connections."""
        return without_secrets(text, self._resolved)

    def _resolve(self) -> None:
        if time.monotonic() < self._resolved_until:
            return
        conninfos = self.conninfos()
        if conninfos != self._resolved:
            self._close()
        self._resolved, self._resolved_until = conninfos, time.monotonic() + SETTLED

    def _close(self) -> None:
        for connection in self._open:
            connection.close()
        self._open = []


@dataclass
class CachedQuery(Generic[T]):
    """A query that is repeated while users look, with its latest answer.

    ``afterwards`` is called with each answer, once the requests that wait for it have it.
    """

    thread: QueryThread
    question: Callable[[Sequence[Connection]], T]
    afterwards: Callable[[T, Sequence[Connection]], None] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _sent_at: float = 0.0
    _answered: threading.Event | None = None
    _latest_answer: T | None = None
    _answered_at: float | None = None
    _failure: str | None = None
    _until: float = 0.0

    @property
    def asking(self) -> bool:
        """Whether the query is running or queued."""
        return self._answered is not None

    def ask(self) -> bool:
        """Queue the query, unless its answer is fresh or it is queued already. Return False if too many wait."""
        with self._lock:
            now = time.monotonic()
            if self._answered is not None or now < self._until:
                return True
            answered = threading.Event()
            # This raises if no thread can be started. Then the query does not count as queued.
            if not self.thread.take_turn(partial(self._answer, now, answered)):
                self._failure = CROWDED
                return False
            self._sent_at, self._answered = now, answered
            return True

    def latest(self) -> CachedAnswer[T]:
        """Return the latest answer. Wait shortly for a running query, unless the previous query failed."""
        with self._lock:
            answered, failed_before = self._answered, self._failure is not None
            rest = self._sent_at + PATIENCE - time.monotonic()
        if answered is not None and rest > 0 and not failed_before:
            answered.wait(rest)
        with self._lock:
            age = None if self._answered_at is None else time.monotonic() - self._answered_at
            late = self._answered is not None and time.monotonic() - self._sent_at >= LATE
            return CachedAnswer(self._latest_answer, self._failure, late, age)

    def _answer(self, sent_at: float, answered: threading.Event) -> None:
        answer, failure = None, None
        try:
            answer = self.thread.ask(self.question)
        except AirflowNotFoundException as error:
            failure = f"{error}: create the connection, or name another connection in the DAG"
        except (PgChangeError, psycopg.Error) as error:
            failure = self.thread.without_secrets(str(error).strip()) or type(error).__name__
        except Exception as error:
            log.warning("a query of the page failed", exc_info=True)
            failure = type(error).__name__
        with self._lock:
            now = time.monotonic()
            if failure is None:
                self._latest_answer, self._answered_at = answer, now
            self._failure = failure
            self._until = now + max(FRESH if failure is None else PAUSE, REST * (now - sent_at))
            self._answered = None
        answered.set()
        if self.afterwards is not None and answer is not None:
            try:
                self.thread.ask(partial(self.afterwards, answer))
            except (ServerUnavailable, AirflowNotFoundException):
                log.warning("could not record the samples of a database for the page", exc_info=True)


def opened(conninfo: str, **settings: str) -> Connection:
    """Open a connection to a server that accepts writes, with short timeouts (``REACH``)."""
    connection = connect(make_conninfo(conninfo, **REACH), primary=True)
    keep_open(connection, **settings)
    return connection
