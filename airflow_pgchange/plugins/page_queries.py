"""The queries that the page sends to databases, and the cache of their answers."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import psycopg

from airflow_pgchange.admin import consumers, health
from airflow_pgchange.admin.new_consumers import with_new
from airflow_pgchange.errors import PgChangeError, ServerUnavailable
from airflow_pgchange.feeds.queries import records
from airflow_pgchange.hooks.pgchange import PgChangeHook
from airflow_pgchange.plugins.databases import Key, Naming, Place
from airflow_pgchange.plugins.history import SAMPLED_EVERY, LastHour, Trends
from airflow_pgchange.plugins.query_threads import CachedAnswer, CachedQuery, QueryThread

log = logging.getLogger(__name__)

LOOKED_LATELY = 3600.0
"""Seconds for which a database is sampled after a user has last looked at it."""
OTHERS = 200
"""Maximum number of cached answers to queries other than status."""

Connections = Sequence[psycopg.Connection[Any]]
Row = dict[str, Any]
T = TypeVar("T")


@dataclass
class DatabaseState:
    """The state of a database: ``status()``, ``health()``, ``watchers()`` and the trends of the last hour.

    ``left_out`` has a line for each part that is missing, with the reason.
    """

    rows: list[Row]
    findings: list[health.Finding]
    watchers: list[Row]
    trends: Trends
    left_out: list[str]


EMPTY_STATE = DatabaseState([], [], [], {}, [])


@dataclass
class Status:
    """The query for the state of a place.

    ``consumers`` are the consumers of the place that DAGs name. If the changes are in another database, only these are
    shown. ``requested_at`` is the time of the last request.
    """

    consumers: Mapping[Key, Naming] = field(default_factory=dict)
    requested_at: float = float("-inf")
    _last_hour: LastHour = field(default_factory=LastHour)

    def __call__(self, connections: Connections) -> DatabaseState:
        results, *source = connections
        left_out: list[str] = []
        rows = consumers.status(results, source[0] if source else None, left_out.append)
        if source:
            rows = [row for row in rows if (row["kind"], row["consumer"]) in self.consumers]
        findings: list[health.Finding] = []
        watchers: list[Row] = []
        try:
            if not source:
                findings = health.findings(results, left_out.append, rows)
                watchers = records(results, "select * from pgchange.watchers()")
            rows = health.explained(results, connections[-1], rows)
        except ServerUnavailable:
            raise
        except (psycopg.errors.QueryCanceled, PgChangeError) as error:
            left_out.append(f"findings and watchers are left out: {error}")
        rows = with_new(results, connections[-1], rows, self.consumers)
        left_out += self._last_hour.left_out
        return DatabaseState(rows, findings, watchers, self._last_hour.trends, left_out)

    def note(self, state: DatabaseState, connections: Connections) -> None:
        """Record samples of an answer. Called after the waiting requests have the answer, so that they do not wait."""
        self._last_hour.goes_on(connections[0], [row for row in state.rows if row["registered"]])


@dataclass
class QueryCache:
    """The cache of the page: the status of each place, and the answers to other recent queries.

    The status of a place has its own thread, so that other queries never delay it.
    """

    statuses: dict[Place, tuple[Status, CachedQuery[DatabaseState]]] = field(default_factory=dict)
    others: OrderedDict[tuple[Any, ...], CachedQuery[Any]] = field(default_factory=OrderedDict)
    threads: dict[Place, QueryThread] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _sampler: threading.Thread | None = None

    def status(self, place: Place, consumers: Mapping[Key, Naming]) -> CachedQuery[DatabaseState]:
        with self._lock:
            if place not in self.statuses:
                status = Status()
                self.statuses[place] = (
                    status,
                    CachedQuery(QueryThread(partial(conninfos, place)), status, status.note),
                )
            status, query = self.statuses[place]
            status.consumers, status.requested_at = consumers, time.monotonic()
            if self._sampler is None or not self._sampler.is_alive():
                sampler = threading.Thread(target=self._sample, daemon=True)
                sampler.start()
                self._sampler = sampler
        return query

    def _sample(self) -> None:
        """Sample each database that a user looked at in the last hour. End when there is none."""
        while True:
            time.sleep(SAMPLED_EVERY)
            with self._lock:
                since = time.monotonic() - LOOKED_LATELY
                lately = [query for status, query in self.statuses.values() if status.requested_at > since]
                if not lately:
                    self._sampler = None
                    return
            for query in lately:
                try:
                    query.ask()
                except Exception:
                    log.warning("could not take a sample of a database for the page", exc_info=True)

    def answer(self, place: Place, question: Callable[..., T], *arguments: Any) -> CachedAnswer[T]:
        """Return the answer of a place to a query other than status. The least recently used answers are dropped."""
        with self._lock:
            key = (place, question, arguments)
            query = self.others.pop(key, None)
            if query is None:
                thread = self.threads.setdefault(place, QueryThread(partial(conninfos, place)))
                query = CachedQuery(thread, partial(question, *arguments))
            self.others[key] = query
            while len(self.others) > OTHERS:
                self.others.popitem(last=False)
        is_asked, cached = query.ask(), query.latest()
        if not is_asked and cached.answer is None:
            self.forget(place, question, *arguments)
        return cached

    def forget(self, place: Place, question: Callable[..., Any], *arguments: Any) -> None:
        """Drop a query from the cache, because its object does not exist."""
        with self._lock:
            self.others.pop((place, question, arguments), None)


def conninfos(place: Place) -> list[str]:
    """Return libpq connection strings for the databases of a place."""
    return [PgChangeHook(connection).conninfo() for connection in place.connections]
