"""Databases that were copied or renamed: which consumers continue there, and which get an error."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.types.json import Jsonb

from airflow_pgchange.admin import manual_operations
from airflow_pgchange.errors import SourceLostTail, SourceRestored
from airflow_pgchange.feeds import CommitFeed, EventFeed, QueueFeed, TopologyFeed
from tests import dumps
from tests.batches import drained, taken
from tests.commits import commits, narrow_partitions, use_up_transactions
from tests.conftest import database
from tests.events import publish, subscribe
from tests.queues import make, post
from tests.suite.clusters import TEMPLATE
from tests.topology import make_catalogue

HERE, ELSEWHERE = CommitFeed("here", 0), CommitFeed("elsewhere", 0)


@pytest.fixture
def source(db, other_db):
    """A database with commits and two consumers. The results of the first are in the same database, those of the second
    in another."""
    with psycopg.connect(db, autocommit=True) as connection:
        commits(connection, 5)
        drained(HERE, db)
        drained(ELSEWHERE, other_db, db)
        commits(connection, 3)
    return db


def told(server, statement, **databases):
    """Execute a statement with placeholders for the names of databases.

    Each database is given by its connection string.
    """
    names = {key: sql.Identifier(conninfo_to_dict(one)["dbname"]) for key, one in databases.items()}
    with psycopg.connect(make_conninfo(server, dbname="postgres"), autocommit=True) as connection:
        connection.execute(sql.SQL(statement).format(**names))


@pytest.fixture
def copy(source, bare_db):
    """Copy ``source``, as a template, into a new database."""
    told(source, "drop database {copy}", copy=bare_db)
    told(source, "create database {copy} template {source}", copy=bare_db, source=source)
    return bare_db


def refused(feed, results, source):
    with pytest.raises(SourceRestored, match="another database than this source"):
        drained(feed, results, source)


def test_all_consumers_go_on_in_a_database_that_was_renamed(source, other_db, bare_db):
    told(source, "drop database {name}", name=bare_db)
    told(source, "alter database {source} rename to {name}", source=source, name=bare_db)
    assert len(drained(HERE, bare_db)) == 3
    assert len(drained(ELSEWHERE, other_db, bare_db)) == 3


def test_no_vacuum_makes_a_database_look_restored(source):
    with psycopg.connect(source, autocommit=True) as connection:
        connection.execute("vacuum (freeze, full) revision.origin")
        connection.execute("vacuum (freeze) revision.origin")
    assert len(drained(HERE, source)) == 3


def test_no_rewritten_table_makes_a_database_look_restored(source, connect_to):
    connection = connect_to(source)
    connection.execute("create table ledger (id bigint primary key); insert into ledger values (10), (20)")
    connection.execute("select revision.track('ledger')")
    names = ["public.ledger"] + [
        f"{name}.origin"
        for (name,) in connection.execute(
            "select relnamespace::regnamespace::text from pg_class where relname = 'origin' and relkind = 'r'"
        ).fetchall()
    ]
    for name in names:
        connection.execute(f"alter table {name} set unlogged")
        connection.execute(f"alter table {name} set logged")
    for name in set(names) - {"public.ledger", "pgchange.origin"}:
        schema = name.removesuffix(".origin")
        assert connection.execute(f"select {schema}.is_native()").fetchone() == (True,)
    connection.execute("call revision.enqueue_existing('ledger')")
    branch = connection.execute("select branch_id from revision.tracked").fetchone()[0]
    assert [change.id for change in drained(CommitFeed("here", branch), source)] == [10, 20]
    assert len(drained(HERE, source)) == 3


def test_a_copy_from_a_template_is_another_place_for_consumers_elsewhere_alone(
    source, copy, other_db, connect_to
):
    commits(connect_to(copy), 2)
    assert len(drained(HERE, copy)) == 5
    refused(ELSEWHERE, other_db, copy)
    assert len(drained(ELSEWHERE, other_db, source)) == 3
    refused(ELSEWHERE, other_db, copy)


def test_a_consumer_elsewhere_is_repaired_to_go_on_in_a_copy(source, copy, other_db, connect_to):
    assert (
        manual_operations.repair_consumer(connect_to(other_db), connect_to(copy), ELSEWHERE) == "exactly once"
    )
    assert len(drained(ELSEWHERE, other_db, copy)) == 3
    refused(ELSEWHERE, other_db, source)


def test_a_consumer_is_moved_to_another_database_by_a_point_of_it(copy, other_db, connect_to):
    manual_operations.move_consumer(connect_to(other_db), connect_to(copy), ELSEWHERE, "now")
    commits(connect_to(copy), 2)
    assert len(drained(ELSEWHERE, other_db, copy)) == 2


@pytest.mark.parametrize("to", ["beginning", "the past"])
def test_trimming_keeps_commits_to_which_a_consumer_elsewhere_was_moved_back(
    source, other_db, connect_to, to
):
    results, connection = connect_to(other_db), connect_to(source)
    narrow_partitions(connection)
    before = datetime.now(UTC)
    commits(connection, 2)
    drained(ELSEWHERE, other_db, source)
    drained(HERE, source)
    use_up_transactions(connection, 120)
    manual_operations.move_consumer(
        results, connection, ELSEWHERE, "beginning" if to == "beginning" else before
    )
    connection.execute("select pubsub.trim_commit_queue('0 s')")
    assert len(drained(ELSEWHERE, other_db, source)) == 2
    # The source learns of the last ack from the next claim.
    commits(connection, 1)
    drained(ELSEWHERE, other_db, source)
    assert "trimmed" in str(connection.execute("select pubsub.trim_commit_queue('0 s')").fetchall())


def change_catalogue(connection, n):
    for number in range(n):
        connection.execute("select topology.add_replicaset(%s, uuid => %s)", [f"r{number}", f"u{number}"])


WRITE = {
    "commit": commits,
    "event": lambda connection, n: publish(connection, *["t"] * n),
    "topology": change_catalogue,
}


@pytest.mark.parametrize(
    ("feed", "deed"),
    [
        (ELSEWHERE, "dropped"),
        (ELSEWHERE, "moved back"),
        (TopologyFeed("elsewhere"), "dropped"),
        (TopologyFeed("elsewhere"), "moved back"),
        (EventFeed("elsewhere"), "moved back"),
    ],
    ids=lambda value: getattr(value, "kind", value),
)
def test_no_repair_puts_a_consumer_ahead_of_where_it_was(db, other_db, connect_to, feed, deed):
    results, source = connect_to(other_db), connect_to(db)
    subscribe(source, "elsewhere")
    WRITE[feed.kind](source, 8)
    drained(feed, other_db, db)
    kept = {
        table: source.execute(f"select to_jsonb(t) from {table} as t").fetchall()
        for table in ("pgchange.claim",)
    }
    if deed == "moved back":
        manual_operations.move_consumer(results, source, feed, "beginning")
    else:
        manual_operations.drop_consumer(results, source, feed)
    for _ in range(3):
        assert len(taken(feed, other_db, db, 1)) == 1
    # Keep the latest commits away, as after the promotion of a standby that had not received them.
    for table, rows in kept.items():
        source.execute(f"delete from {table}")
        for (row,) in rows:
            source.execute(
                f"insert into {table} select (jsonb_populate_record(null::{table}, %s)).*", [Jsonb(row)]
            )
    with pytest.raises(SourceLostTail):
        taken(feed, other_db, db, 1)
    assert manual_operations.repair_consumer(results, source, feed) == "at least once"
    assert len(drained(feed, other_db, db)) >= 5


def test_no_move_takes_the_numbers_of_a_consumer_to_their_end(source, connect_to):
    connection = connect_to(source)
    for version in (2**63 - 1, 2**40):
        at = Jsonb({"version": version, "snapshot": "1:1:"})
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="cannot be at batch"):
            connection.execute("select pubsub.note_move('here', 0, %s, pubsub.point(0))", [at])
    assert len(drained(HERE, source)) == 3


def test_a_watermark_that_came_without_its_commits_is_refused(source, other_db, connect_to):
    rows = connect_to(source).execute("select to_jsonb(w) - 'txid' from pubsub.watermark as w").fetchall()
    replica = connect_to(other_db)
    replica.execute("select pgchange.note_origin('revision.origin')")
    for (row,) in rows:
        replica.execute("delete from pubsub.watermark where consumer_id = %s", [row["consumer_id"]])
        columns = sql.SQL(", ").join(map(sql.Identifier, row))
        replica.execute(
            sql.SQL(
                "insert into pubsub.watermark ({0}) select {0} from jsonb_populate_record(null::pubsub.watermark, {1})"
            ).format(columns, sql.Literal(Jsonb(row)))
        )
    refused(HERE, other_db, None)


def loaded(db, bare_db, cluster):
    dumps.load(cluster, bare_db, dumps.dump(cluster, db))
    return bare_db


@pytest.fixture(scope="module")
def restored(cluster):
    """A catalogue and a log that were restored in their own cluster.

    Yields the restored database, the database with the results of other consumers, and the changes that were published
    after these consumers had read.
    """
    templates = (TEMPLATE, TEMPLATE, "template1")
    with ExitStack() as made:
        origin, elsewhere, bare = (
            made.enter_context(contextmanager(database)(cluster, template)) for template in templates
        )
        connection = made.enter_context(psycopg.connect(origin, autocommit=True))
        make_catalogue(connection)
        for group in ("here", "elsewhere"):
            subscribe(connection, group)
        publish(connection, "a")
        for feed in (TopologyFeed, EventFeed):
            drained(feed("here"), origin)
            drained(feed("elsewhere"), elsewhere, origin)
        later = publish(connection, "b")
        yield loaded(origin, bare, cluster), elsewhere, later


def test_a_catalogue_that_was_restored_in_the_cluster_of_its_origin_is_told_from_it(restored, connect_to):
    there, other_db, _ = restored
    for feed, results in ((TopologyFeed("here"), there), (TopologyFeed("elsewhere"), other_db)):
        refused(feed, results, there)
        assert (
            manual_operations.repair_consumer(connect_to(results), connect_to(there), feed) == "exactly once"
        )
        assert drained(feed, results, there) == []


def test_a_log_that_was_restored_in_the_cluster_of_its_origin_is_told_from_it(restored, connect_to):
    there, other_db, later = restored
    # The first query gives waiting events ids of this log, and the next query dispatches them.
    assert drained(EventFeed("here"), there) == []
    assert [change.id for change in drained(EventFeed("here"), there)] == later
    refused(EventFeed("elsewhere"), other_db, there)
    manual_operations.repair_consumer(connect_to(other_db), connect_to(there), EventFeed("elsewhere"))
    assert [change.id for change in drained(EventFeed("elsewhere"), other_db, there)] == later


@pytest.mark.hstore
def test_queues_that_were_restored_in_the_cluster_of_their_origin_are_told_from_them(
    db, bare_db, cluster, connect_to
):
    connection = connect_to(db)
    make(connection, parts=1)
    post(connection, 1)
    there = loaded(db, bare_db, cluster)
    with pytest.raises(SourceRestored, match="restored from a dump"):
        drained(QueueFeed("q"), there)
    connect_to(there).execute("select mbus.rebase_after_restore()")
    assert len(drained(QueueFeed("q"), there)) == 1
