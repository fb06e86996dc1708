"""Moves by a person: to an existing point in the database that the consumer reads from then on."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.types.json import Jsonb

from airflow_pgchange.admin import manual_operations, schema
from airflow_pgchange.errors import InvalidArgument, SourceRestored
from airflow_pgchange.feeds import CommitFeed, EventFeed, TopologyFeed
from tests.batches import drained
from tests.commits import commits
from tests.events import publish, subscribe
from tests.topology import make_catalogue
from tests.tubes import one

COMMITS, EVENTS, TOPOLOGY = CommitFeed("moved", 0), EventFeed("moved"), TopologyFeed("moved")


@pytest.fixture
def source(connect):
    """A connection to a database with a change of each kind."""
    connection = connect()
    subscribe(connection, "moved")
    make_catalogue(connection)
    write(connection)
    return connection


def write(connection):
    commits(connection)
    publish(connection, "t")
    connection.execute("select topology.add_replicaset(n, uuid => n) from concat('', gen_random_uuid()) as n")


@pytest.fixture
def copy(db, bare_db, source):
    """Copy ``source`` in its present state, and return the connection string of the copy."""
    names = {"source": db, "copy": bare_db}
    names = {key: sql.Identifier(conninfo_to_dict(name)["dbname"]) for key, name in names.items()}

    def make():
        source.close()
        with psycopg.connect(make_conninfo(db, dbname="postgres"), autocommit=True) as server:
            server.execute(sql.SQL("drop database {copy}").format(**names))
            server.execute(sql.SQL("create database {copy} template {source}").format(**names))
        return bare_db

    return make


def test_a_consumer_that_was_moved_before_it_began_is_not_taken_for_one_of_a_copy(
    db, other_db, source, copy, connect_to
):
    results = connect_to(other_db)
    for feed in (COMMITS, EVENTS, TOPOLOGY):
        results.execute(feed.register())
        manual_operations.move_consumer(results, source, feed, "now")
    copied = copy()
    write(connect_to(copied))
    for feed in (COMMITS, EVENTS, TOPOLOGY):
        with pytest.raises(SourceRestored, match="another (database|catalogue) than this"):
            drained(feed, other_db, copied)


def test_a_consumer_is_moved_to_a_copy_by_a_point_of_it(db, other_db, source, copy, connect_to):
    for feed in (COMMITS, EVENTS, TOPOLOGY):
        drained(feed, other_db, db)
    copied = copy()
    there = connect_to(copied)
    for feed in (COMMITS, EVENTS, TOPOLOGY):
        manual_operations.move_consumer(connect_to(other_db), there, feed, "now")
    write(there)
    for feed in (COMMITS, EVENTS, TOPOLOGY):
        assert len(drained(feed, other_db, copied)) == 1
        with pytest.raises(SourceRestored):
            drained(feed, other_db, db)


def test_a_consumer_of_another_database_is_not_moved_to_the_beginning_of_this_one(
    db, other_db, bare_db, source, connect_to
):
    for feed in (COMMITS, EVENTS, TOPOLOGY):
        drained(feed, other_db, db)
    there = connect_to(bare_db)
    schema.install(there)
    subscribe(there, "moved")
    for feed in (COMMITS, EVENTS, TOPOLOGY):
        with pytest.raises(SourceRestored, match="moved to a point of another"):
            manual_operations.move_consumer(connect_to(other_db), there, feed, "beginning")


BEYOND = {
    "commits": ("pubsub.note_move('moved', 0, {at}, {point})", {"snapshot": "900000000:900000000:"}),
    "topology": ("topology.note_move('moved', {at}, {point})", {"term": 99, "index": 0}),
    "events": ("pgmb.note_move('moved', {at}, {point})", {"cursor": "pmf" + "0" * 21}),
}
OF = {"commits": (COMMITS, "revision"), "topology": (TOPOLOGY, "topology"), "events": (EVENTS, "pgmb")}


@pytest.mark.parametrize("kind", BEYOND)
def test_no_point_in_the_future_is_accepted(db, source, kind):
    """The function for people refuses such a point, and so does the function for a source in another database."""
    feed, origin = OF[kind]
    drained(feed, db)
    note, point = BEYOND[kind]
    here = one(source, f"select {origin}.here()")
    at, point = Jsonb(one(source, feed.position())), Jsonb(point | {"source": here})
    for move in (note.replace("note_move", "move_consumer").replace("{at}, ", ""), note):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="(is|lies) in the future"):
            source.execute(sql.SQL("select " + move).format(at=at, point=point))
            pytest.fail(f"{move} was done")
    write(source)
    assert len(drained(feed, db)) == 1


@pytest.mark.parametrize("kind", BEYOND)
def test_no_point_is_accepted_that_does_not_say_where_it_was_taken(db, source, kind):
    drained(OF[kind][0], db)
    note, _ = BEYOND[kind]
    point = {"commits": {"snapshot": "5:5:"}, "topology": {"term": 1, "index": 1}}.get(
        kind, {"cursor": "pm0"}
    )
    move = note.replace("note_move", "move_consumer").replace("{at}, ", "")
    for version in ("", ", 99"):
        moved = sql.SQL("select " + move[:-1] + version + ")").format(point=Jsonb(point))
        with pytest.raises(psycopg.DatabaseError, match="does not say where it was taken"):
            source.execute(moved)


@pytest.mark.parametrize("feed", [COMMITS, EVENTS], ids=lambda feed: feed.kind)
def test_no_time_in_the_future_is_accepted(db, source, feed):
    drained(feed, db)
    with pytest.raises(InvalidArgument, match="(is|lies) in the future"):
        manual_operations.move_consumer(source, source, feed, datetime.now(UTC) + timedelta(days=1))
    write(source)
    assert len(drained(feed, db)) == 1
