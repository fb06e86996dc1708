"""Progress that a person set, and physical copies. A consumer recognises a source that is not, or no longer, the source
of its progress, whatever both have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from airflow_pgchange.admin import manual_operations
from airflow_pgchange.errors import SourceLostTail, SourceRestored
from airflow_pgchange.feeds import CommitFeed, EventFeed, TopologyFeed
from airflow_pgchange.feeds.feed import Movable
from tests import dumps
from tests.batches import drained
from tests.chaos.harness import next_xid

pytestmark = pytest.mark.release(
    "every run restores dumps and copies of clusters in test_copies.py and test_restored_parts.py, and moves consumers"
)
Connection = psycopg.Connection[Any]


@dataclass(frozen=True)
class Source:
    """A kind of feed whose consumers can be moved: one of its consumers, and the function that writes changes."""

    feed: Callable[[str], Movable]
    begin: Callable[[Connection, str], object]
    write: Callable[[Connection, int], object]
    goes_by_time: bool = True


def commits(connection: Connection, n: int) -> object:
    return connection.execute("insert into revision.commit select from generate_series(1, %s)", [n])


def events(connection: Connection, n: int) -> object:
    return connection.execute(
        "insert into pgmb.events (topic, payload) select 't', '{}' from generate_series(1, %s)", [n]
    )


def instances(connection: Connection, n: int) -> None:
    for _ in range(n):
        connection.execute(
            "select topology.add_replicaset(n, uuid => n) from concat('r', nextval('topology.event_index')) as n"
        )


def subscribe(connection: Connection, group: str) -> object:
    return connection.execute(
        "insert into pgmb.subscriptions (group_id, conditions_sql) values (%s, 'TRUE')", [group]
    )


SOURCES = {
    "commits": Source(lambda name: CommitFeed(name, 0), lambda *_: None, commits),
    "events": Source(EventFeed, subscribe, events),
    "topology": Source(TopologyFeed, lambda *_: None, instances, goes_by_time=False),
}


def to_now(results: Connection, source: Connection, feed: Movable) -> None:
    manual_operations.move_consumer(results, source, feed, "now")


def to_a_time(results: Connection, source: Connection, feed: Movable) -> None:
    manual_operations.move_consumer(results, source, feed, datetime.now(UTC))


def dropped_and_come_again(results: Connection, source: Connection, feed: Movable) -> None:
    manual_operations.drop_consumer(results, source, feed)
    if isinstance(feed, EventFeed):
        subscribe(source, feed.group)
        events(source, 1)
    drained(feed, results.info.dsn, source.info.dsn)


def repaired(results: Connection, source: Connection, feed: Movable) -> None:
    drained(feed, results.info.dsn, source.info.dsn)
    manual_operations.repair_consumer(results, source, feed)


BY_HAND = (to_now, to_a_time, dropped_and_come_again, repaired)


def at(conninfo: str) -> Connection:
    return psycopg.connect(conninfo, autocommit=True)


@pytest.mark.parametrize("kind", SOURCES)
def test_a_source_that_lost_what_was_done_by_hand_is_told_and_repaired(
    new_cluster, standby_of, other_db, kind
):
    """Takes seconds: a standby is made, left behind, and promoted."""
    source, primary = SOURCES[kind], new_cluster()
    standby = standby_of(primary)
    deeds = [deed for deed in BY_HAND if source.goes_by_time or deed is not to_a_time]
    feeds = {deed: source.feed(deed.__name__) for deed in deeds}
    with at(primary.conninfo()) as there, at(other_db) as results:
        for feed in feeds.values():
            source.begin(there, feed.name.removeprefix("events:"))
        source.write(there, 5)
        for feed in feeds.values():
            drained(feed, other_db, primary.conninfo())
        standby.wait_for_replay(primary)
        standby.stop()
        source.write(there, 12)
        for deed, feed in feeds.items():
            deed(results, there, feed)
    primary.kill()
    standby.start()
    standby.promote()
    with at(standby.conninfo()) as there, at(other_db) as results:
        source.write(there, 12)
        for feed in feeds.values():
            with pytest.raises(SourceLostTail, match="airflow-pgchange repair"):
                drained(feed, other_db, standby.conninfo())
            assert manual_operations.repair_consumer(results, there, feed) == "at least once"
            assert len(drained(feed, other_db, standby.conninfo())) >= 12


def test_a_crash_forgets_no_transaction_that_a_consumer_was_moved_behind(new_cluster, other_db):
    primary = new_cluster(wal_writer_delay="'10s'", synchronous_commit="off")
    feed = CommitFeed("moved", 0)
    with at(primary.conninfo()) as there:
        commits(there, 5)
    drained(feed, other_db, primary.conninfo())
    use_up_and_crash(primary)
    with at(primary.conninfo()) as there, at(other_db) as results:
        for _ in range(200):
            there.execute("begin; select pg_current_xact_id(); rollback")
        manual_operations.move_consumer(results, there, feed, "now")
        seen = next_xid(primary.conninfo())
        primary.kill()
    primary.start()
    assert next_xid(primary.conninfo()) >= seen
    with at(primary.conninfo()) as there:
        commits(there, 5)
    assert len(drained(feed, other_db, primary.conninfo())) == 5


def use_up_and_crash(primary) -> None:
    """Use up transaction ids and crash the server until the crash has lost some of these ids."""
    for _ in range(10):
        with at(primary.conninfo()) as there:
            for _ in range(200):
                there.execute("begin; select pg_current_xact_id(); rollback")
            seen = next_xid(primary.conninfo())
            primary.kill()
        primary.start()
        if next_xid(primary.conninfo()) < seen:
            return
    pytest.fail("no crash forgot a transaction id")


def restored_into(clone, dump: bytes) -> str:
    """Restore a dump into a database of a cluster, and return its connection string."""
    with at(clone.conninfo()) as there:
        there.execute("create database restored template template0")
    conninfo = clone.conninfo("restored")
    dumps.load(clone, conninfo, dump)
    return conninfo


def test_a_dump_that_is_restored_into_a_physical_copy_of_its_cluster_goes_on_exactly_once(
    new_cluster, other_db
):
    """Takes seconds: a base backup is taken, and a dump restored into it."""
    primary = new_cluster()
    here, elsewhere = CommitFeed("here", 0), CommitFeed("elsewhere", 0)
    with at(primary.conninfo()) as there:
        commits(there, 300)
        clone = primary.backup()
        try:
            there.execute(
                "do $$ begin for n in 1..5000 loop perform pg_current_xact_id(); commit; end loop; end $$"
            )
            commits(there, 10)
            for results, feed in ((primary.conninfo(), here), (other_db, elsewhere)):
                assert len(drained(feed, results, primary.conninfo())) == 310
            commits(there, 3)
            dump = dumps.dump(primary, primary.conninfo())
            clone.start()
            restored = restored_into(clone, dump)
            with at(restored) as copy, at(other_db) as results:
                assert next_xid(restored) < next_xid(primary.conninfo())
                commits(copy, 20)
                for database, feed in (
                    (restored, here),
                    (other_db, elsewhere),
                    (restored, CommitFeed("new", 0)),
                ):
                    with pytest.raises(SourceRestored, match="rebase_after_restore"):
                        drained(feed, database, restored)
                assert "rebased" in str(copy.execute("select pubsub.rebase_after_restore()").fetchone())
                assert len(drained(here, restored, restored)) == 23
                assert len(drained(CommitFeed("new", 0), restored, restored)) == 333
                with pytest.raises(SourceRestored, match="another database than this source"):
                    drained(elsewhere, other_db, restored)
                assert manual_operations.repair_consumer(results, copy, elsewhere) == "exactly once"
                assert len(drained(elsewhere, other_db, restored)) == 23
        finally:
            clone.remove()
