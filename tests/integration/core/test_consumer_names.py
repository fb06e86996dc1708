"""A consumer's name identifies that consumer alone, whatever its kind and the characters in its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from airflow_pgchange.admin import consumers, dead_letters, manual_operations
from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds import (
    CommitFeed,
    ConsumerTransaction,
    EventFeed,
    Feed,
    QueueFeed,
    TopologyFeed,
    TubeFeed,
)
from airflow_pgchange.feeds.queries import ask
from tests import tubes
from tests.commits import Failed
from tests.hard_names import HARD

Connection = psycopg.Connection[Any]
COMMIT = CommitFeed("tube:q", 1)
WORKER = TubeFeed("q", 1, 2)

pytestmark = pytest.mark.usefixtures("few_sessions")


def fail(db: str, feed: Feed) -> None:
    with pytest.raises(Failed), ConsumerTransaction(feed, db) as consumer:
        assert consumer.claim(10) is not None
        raise Failed


def named(connection: Connection, kind: str) -> str:
    """Return the name of the only consumer of a kind in status; for a tube, of its last worker."""
    *_, row = [row for row in consumers.status(connection) if row["kind"] == kind]
    return str(row["consumer"])


def in_work(connection: Connection) -> set[str]:
    """Return the kinds of the consumers that have a batch in work."""
    return {row["kind"] for row in consumers.status(connection) if row["batch_id"] is not None}


def skip(connection: Connection, name: str) -> None:
    manual_operations.skip_batch(connection, connection, consumers.named(name)(connection), "no use")


@pytest.fixture
def alike(db: str, connection: Connection) -> Connection:
    """A commit consumer with the name of a worker of a tube, and that worker. Each has a batch that has failed."""
    connection.execute("insert into revision.branch (id, type) values (1, 'stable')")
    connection.execute("insert into revision.commit (branch_id) values (1)")
    tubes.make(connection, "q", 2)
    connection.execute("create table item (id bigint primary key)")
    tubes.attach(connection, shard=1)
    connection.execute("insert into item values (1)")
    for feed in (COMMIT, WORKER):
        fail(db, feed)
    return connection


@pytest.mark.parametrize(("kind", "other"), [("commit", "tube"), ("tube", "commit")])
def test_a_batch_is_skipped_of_the_consumer_whose_name_is_given_and_of_no_other(
    alike: Connection, kind: str, other: str
) -> None:
    skip(alike, named(alike, kind))
    assert in_work(alike) == {other}


@pytest.mark.parametrize(("kind", "other"), [("commit", "tube"), ("tube", "commit")])
def test_letters_are_chosen_by_the_name_of_one_consumer(alike: Connection, kind: str, other: str) -> None:
    names = {each: named(alike, each) for each in (kind, other)}
    for name in names.values():
        skip(alike, name)
    assert [letter.kind for letter in dead_letters.letters(alike, consumer=names[kind])] == [kind]
    assert len(dead_letters.redrive(alike, consumer=names[kind])) == 1
    waiting = [letter.kind for letter in dead_letters.letters(alike) if not letter.on_its_way]
    assert waiting == [other]
    dead_letters.drop_letters(alike, consumer=names[kind])
    assert [letter.kind for letter in dead_letters.letters(alike)] == [other]


def test_attempts_on_batches_are_told_of_one_consumer(alike: Connection) -> None:
    query = "select distinct kind from pgchange.batches(%s)"
    for kind in ("commit", "tube"):
        assert alike.execute(query, [named(alike, kind)]).fetchall() == [(kind,)]


@pytest.mark.parametrize("name", ["topology:w", "events:g", "tube:q", "commits:c", "queue:q"])
def test_a_consumer_of_commits_is_dropped_by_the_name_that_status_shows(
    connection: Connection, name: str
) -> None:
    ask(connection, CommitFeed(name, 0).register())
    feed = consumers.movable(named(connection, "commit"))
    manual_operations.drop_consumer(connection, connection, feed)
    assert consumers.status(connection) == []


OF: dict[str, tuple[Callable[[str], Feed], str]] = {
    "commit": (lambda name: CommitFeed(name, 7), "pubsub.name_of(%s, 7)"),
    "event": (EventFeed, "pgmb.name_of(%s)"),
    "tube": (lambda name: TubeFeed(name, 3, 4), "tube.name_of(%s, 3)"),
    "queue": (lambda name: QueueFeed(name, "reader"), "mbus.name_of(%s, 'reader')"),
    "topology": (TopologyFeed, "topology.name_of(%s)"),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.hstore if kind == "queue" else ()) for kind in OF]
)
def test_sql_and_python_call_every_consumer_the_same(shared: Connection, kind: str) -> None:
    make, call = OF[kind]
    for name in HARD:
        try:
            feed = make(name)
        except InvalidArgument:
            continue
        assert shared.execute(f"select {call}", [name]).fetchone() == (feed.name,)  # type: ignore[attr-defined]


def test_no_other_kind_may_call_its_consumers_as_one_does_already(connection: Connection) -> None:
    for called in ("tube:%s", "%s", "commits:%s"):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="prefix"), connection.transaction():
            connection.execute("create schema other")
            connection.execute(
                "select pgchange.keep_origin('other'), pgchange.offer('other', 'other', 'reader text', %s, '{position}')",
                [called],
            )


def test_the_numbers_of_two_kinds_batches_are_counted_apart(connection: Connection) -> None:
    query = "select pgchange.next_version(%s, 'twin', 0)"
    assert [connection.execute(query, [kind]).fetchone() for kind in ("one", "two")] == [(1,), (1,)]


def test_watchers_of_two_kinds_are_kept_apart(connection: Connection) -> None:
    told = [{"feed": "twin", "kind": kind, "ready": n} for n, kind in enumerate(("commit", "tubes"))]
    connection.execute("select pgchange.note_watchers(%s)", [json.dumps(told)])
    watched = connection.execute("select kind, ready from pgchange.watchers() order by kind").fetchall()
    assert watched == [("commit", 0), ("tubes", 1)]
