"""A standby among the servers of a connection string is used only for queries whose answer may lag."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import psycopg
import pytest
from psycopg import sql

from airflow_pgchange.cli import common
from airflow_pgchange.events.group import held_group
from airflow_pgchange.events.sender import Sender
from airflow_pgchange.events.stream_log import StreamLog
from airflow_pgchange.feeds import (
    Batch,
    CommitFeed,
    ConsumerTransaction,
    TubeFeed,
    connections,
    error_text,
    transaction,
)
from airflow_pgchange.feeds.connections import both
from airflow_pgchange.feeds.feed import Feed
from airflow_pgchange.plugins import query_threads
from airflow_pgchange.topology.catalogue import Catalogue
from airflow_pgchange.tubes import Control, TableDownstream, copies, work_off

SERVERS = "host=standby,primary dbname=air"
COMMITS, TUBE = CommitFeed("audit", 0), TubeFeed("q")
BATCH = Batch.from_json(
    {"feed": "commits:audit/0", "id": "1", "version": 1, "attempt": 1, "count": 1, "slices": [], "bounds": {}}
)


class Connected(Exception):
    """Records the servers that were requested."""


@pytest.mark.parametrize(
    "work",
    [
        lambda: Sender(SERVERS).with_ids([]),
        lambda: held_group(SERVERS, "g", 0, bool).__enter__(),
        lambda: asyncio.run(StreamLog(SERVERS, "g").connect()),
        lambda: asyncio.run(Catalogue(SERVERS).connect()),
        lambda: work_off(TUBE, SERVERS, lambda control: None),
        lambda: error_text.note(COMMITS, SERVERS, BATCH, "why", hide=str, of_batch=False),
        lambda: common.database(Namespace(postgres_conn_id=None, dsn=SERVERS)),
        lambda: query_threads.opened(SERVERS),
    ],
    ids=[
        "publishing",
        "handling events",
        "streaming events",
        "relaying a catalogue",
        "working control pods off",
        "noting a failure",
        "the command line",
        "the page",
    ],
)
def test_a_server_that_takes_writes_is_asked_for(
    work: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(conninfo: str, **_: Any) -> None:
        raise Connected(conninfo)

    async def connect_async(conninfo: str, **_: Any) -> None:
        raise Connected(conninfo)

    monkeypatch.setattr(psycopg.Connection, "connect", connect)
    monkeypatch.setattr(psycopg.AsyncConnection, "connect", connect_async)
    with pytest.raises(Connected, match="target_session_attrs=read-write"):
        work()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Records the databases to which connections are opened, and whether a connection must be to the primary."""
    servers: list[tuple[str, bool]] = []

    def note(conninfo: str, *, primary: bool = False) -> MagicMock:
        servers.append((conninfo, primary))
        return MagicMock()

    for module in (connections, transaction):
        monkeypatch.setattr(module, "connect", note)
    return servers


@pytest.mark.parametrize(
    ("feed", "on_standby", "primaries"),
    [
        (COMMITS, False, ["results"]),
        (COMMITS, True, ["changes", "results"]),
        (TUBE, False, ["changes", "results"]),
    ],
    ids=["progress with the results", "changes from a standby", "progress with the changes"],
)
def test_a_consumer_reads_changes_on_any_server_and_does_all_else_on_primaries(
    feed: Feed, on_standby: bool, primaries: list[str], opened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(_: object, query: sql.Composable) -> bool:
        return on_standby or "pg_is_in_recovery" not in query.as_string(None)

    def ask_each(connection: object, *queries: sql.Composable) -> list[bool]:
        return [ask(connection, query) for query in queries]

    for name in ("keep_open", "lasting", "begun", "cancel"):
        monkeypatch.setattr(transaction, name, MagicMock())
    monkeypatch.setattr(transaction, "ask", ask)
    monkeypatch.setattr(transaction, "ask_each", ask_each)
    with ConsumerTransaction(feed, "results", "changes"):
        pass
    assert opened == [("changes", False), *((name, True) for name in primaries)]


@pytest.mark.parametrize("primary", [True, False])
def test_of_two_databases_that_of_the_results_is_on_its_primary_in_any_case(
    primary: bool, opened: list[Any]
) -> None:
    with both("results", "changes", primary=primary):
        assert opened == [("results", True), ("changes", primary)]


def test_the_rows_of_a_copy_are_read_on_the_primary(
    opened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A standby may lack rows that were just written to the copy."""

    def ask(*_: object) -> None:
        raise Connected

    monkeypatch.setattr(copies, "ask", ask)
    with pytest.raises(Connected):
        next(TableDownstream("results", "changes", TUBE, "t")(Control(1, 0, "truncate", "item")))
    assert opened == [("results", True), ("changes", True)]
