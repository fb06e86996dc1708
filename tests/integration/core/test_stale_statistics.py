"""By statistics from when there was nothing, which a burst meets before the next ANALYZE, no plan reads all for each."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from airflow_pgchange.admin import dead_letters
from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction, EventFeed, QueueFeed, TubeFeed, by_hand
from airflow_pgchange.feeds.feed import Feed
from tests import commits, event_keeping, queues, tubes
from tests.batches import taken
from tests.waiting import until

Connection = psycopg.Connection[Any]

MANY = 1000
EACH = 40
"""Rows that may be read for each change; to read all for each is a thousand, or half of that."""


class Reads:
    """How many rows each deed read for a change."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.each: dict[str, float] = {}

    @contextlib.contextmanager
    def of(self, deed: str) -> Iterator[None]:
        forget(self.connection)
        before = self._so_far()
        yield
        self.each[deed] = (self._so_far() - before) / MANY

    def _so_far(self) -> int:
        # A session tells what it has read before it is gone.
        until(self.connection, "select count(*) = 1 from pg_stat_activity where datname = current_database()")
        self.connection.execute("select pg_stat_force_next_flush()")
        return int(
            tubes.one(
                self.connection,
                "select sum(seq_tup_read + coalesce(idx_tup_fetch, 0))::bigint from pg_stat_user_tables",
            )
        )


@pytest.fixture
def reads(connect: Callable[..., Connection]) -> Reads:
    return Reads(connect())


def forget(connection: Connection) -> None:
    """Have the planner take every table for nearly empty, whatever it holds."""
    connection.execute("""
        update pg_class as c set reltuples = 0, relpages = 10
        where c.relnamespace in (
            select n.oid from pg_namespace as n
            where n.nspname in ('pgchange', 'revision', 'pubsub', 'tube', 'pgmb', 'mbus', 'public'))
          and c.relkind in ('r', 'i', 't')
    """)


def give_up_and_send_again(reads: Reads, db: str, feed: Feed) -> None:
    with contextlib.suppress(ZeroDivisionError), ConsumerTransaction(feed, db) as consumer:
        assert consumer.claim(MANY)
        raise ZeroDivisionError
    with reads.of("give up"):
        by_hand.skip(reads.connection, reads.connection, feed, "bad")
    with reads.of("send again"):
        dead_letters.redrive(reads.connection, ids=[dead_letters.listed(reads.connection)[-1].id])
    with reads.of("take what is sent again"):
        assert len(taken(feed, db, limit=MANY)) == MANY


@pytest.mark.every_server
def test_of_commits(reads: Reads, db: str) -> None:
    feed = CommitFeed("test", 0)
    for _ in range(MANY // 20):
        commits.commits(reads.connection, 20)
    with reads.of("take"):
        assert len(taken(feed, db, limit=MANY)) == MANY
    commits.commits(reads.connection, MANY)
    give_up_and_send_again(reads, db, feed)
    assert max(reads.each.values()) < EACH, reads.each


@pytest.mark.every_server
def test_of_tubes(reads: Reads, db: str) -> None:
    connection, feed = reads.connection, TubeFeed("q", 0, 1)
    connection.execute("create table item (id bigint primary key, v integer default 0)")
    tubes.make(connection, workers=1)
    tubes.attach(connection)
    with reads.of("write"):
        for i in range(MANY // 20):
            connection.execute(
                "insert into item select generate_series(%s::integer * 20, %s * 20 + 19)", [i, i]
            )
    with reads.of("look"):
        tubes.lag(connection, upto=MANY)
    with reads.of("take"):
        assert len(taken(feed, db, limit=MANY)) == MANY
    connection.execute(f"""do $$ begin
        for n in 0..{MANY - 1} loop update item set v = -1 where id = n; end loop;
    end $$""")
    with reads.of("delete by hand"):
        deleted = tubes.one(connection, "select tube.tube_pods_delete('q', 1, 0, array(select seq from q))")
        assert deleted == MANY
    connection.execute("update item set v = v + 1")
    give_up_and_send_again(reads, db, feed)
    assert max(reads.each.values()) < EACH, reads.each


@pytest.mark.every_server
def test_of_events(reads: Reads, db: str) -> None:
    connection, feed = reads.connection, EventFeed("g")
    event_keeping.subscribe(connection)
    for n in range(MANY // 20):
        event_keeping.publish(connection, 20, topic=f"t{n}")
    with reads.of("dispatch"):
        event_keeping.dispatch(connection)
    with reads.of("take"):
        assert len(taken(feed, db, limit=MANY)) == MANY
    event_keeping.publish(connection, MANY, at="now() + interval '40 days'")
    with reads.of("set aside"):
        event_keeping.place(connection)
    event_keeping.maintain(connection, "40 days")
    with reads.of("bring back"):
        event_keeping.place(connection, "40 days")
    event_keeping.publish(connection, MANY, at="now() + interval '0.1 s'")
    time.sleep(0.2)
    with reads.of("dispatch what is due"):
        event_keeping.dispatch(connection)
    give_up_and_send_again(reads, db, feed)
    assert max(reads.each.values()) < EACH, reads.each


@pytest.mark.hstore
def test_of_queues(reads: Reads, db: str) -> None:
    connection = reads.connection
    queues.make(connection)
    queues.consumer(connection, "other", "data ? 'n'")
    post = "select mbus.post_q('n=>1', delayed_until => {}) from generate_series(1, %s)"
    connection.execute(post.format("null"), [MANY])
    receive = f"select mbus.consumen_q_by_default({MANY})"
    with reads.of("receive"):
        assert len(connection.execute(receive).fetchall()) == MANY
    with reads.of("take"):
        assert len(taken(QueueFeed("q", "other"), db, limit=MANY)) == MANY
    connection.execute(post.format("localtimestamp + interval '1 s'"), [MANY])
    with reads.of("put apart"):
        assert connection.execute(receive).fetchall() == []
    time.sleep(1.1)
    with reads.of("look at what is apart"):
        connection.execute("select * from pgchange.status(%s, 'queue')", [MANY])
    with reads.of("receive what was apart"):
        assert len(connection.execute(receive).fetchall()) == MANY
    give_up_and_send_again(reads, db, QueueFeed("q", "other"))
    with reads.of("sweep"):
        connection.execute("select mbus.sweep(mbus.queue_named('q'), true)")
    assert max(reads.each.values()) < EACH, reads.each
