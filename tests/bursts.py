"""Run every operation on a burst of changes, for each feed, with fresh and with outdated statistics of the planner.

New tables have no statistics: PostgreSQL takes them for nearly empty until the next ANALYZE. A plan that is good for an
empty table may then read a whole table for each row. After an ANALYZE, a plan may run out of memory if a table has grown
since.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg

from airflow_pgchange.admin import dead_letters, manual_operations
from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction, EventFeed, QueueFeed, TubeFeed
from airflow_pgchange.feeds.feed import Feed
from tests import commits, event_keeping, queues, tubes
from tests.batches import drained

Connection = psycopg.Connection[Any]
Deed = tuple[str, Callable[[], object]]
"""The name of an operation, and the function that does it."""


def forget(connection: Connection) -> None:
    """Set the statistics of all tables so that the planner assumes that the tables are nearly empty."""
    connection.execute("""
        update pg_class as c set reltuples = 0, relpages = 10
        where c.relnamespace in (
            select n.oid from pg_namespace as n
            where n.nspname in ('pgchange', 'revision', 'pubsub', 'tube', 'pgmb', 'mbus', 'public'))
          and c.relkind in ('r', 'i', 't')
    """)


def learn(connection: Connection) -> None:
    """Give the planner correct statistics of all tables."""
    connection.execute("analyze")


def of_commits(connection: Connection, db: str, n: int) -> Iterator[Deed]:
    feed = CommitFeed("test", 0)
    for _ in range(n // 20):
        commits.commits(connection, 20)
    yield "take", lambda: _take(feed, db, n)
    commits.commits(connection, n)
    yield from _give_up_and_send_again(connection, db, feed, n)


def of_tubes(connection: Connection, db: str, n: int) -> Iterator[Deed]:
    feed = TubeFeed("q", 0, 1)
    connection.execute("create table item (id bigint primary key, v integer default 0)")
    tubes.make(connection, workers=1)
    tubes.attach(connection)
    yield "write", lambda: connection.execute("insert into item select generate_series(1, %s)", [n])
    yield "look", lambda: tubes.lag(connection, upto=n)
    yield "take", lambda: _take(feed, db, n)
    connection.execute(f"""do $$ begin
        for n in 1..{n} loop update item set v = -1 where id = n; end loop;
    end $$""")
    yield (
        "delete by hand",
        lambda: _count(connection, n, "select tube.tube_pods_delete('q', 1, 0, array(select seq from q))"),
    )
    connection.execute("update item set v = v + 1")
    yield from _give_up_and_send_again(connection, db, feed, n)


def of_events(connection: Connection, db: str, n: int) -> Iterator[Deed]:
    feed = EventFeed("g")
    event_keeping.subscribe(connection)
    for topic in range(n // 20):
        event_keeping.publish(connection, 20, topic=f"t{topic}")
    yield "dispatch", lambda: event_keeping.dispatch(connection)
    yield "take", lambda: _take(feed, db, n)
    event_keeping.publish(connection, n, at="now() + interval '40 days'")
    yield "set aside", lambda: event_keeping.place(connection)
    event_keeping.maintain(connection, "40 days")
    yield "bring back", lambda: event_keeping.place(connection, "40 days")
    event_keeping.publish(connection, n, at="now() + interval '0.5 s'")
    time.sleep(0.6)
    yield "dispatch what is due", lambda: event_keeping.dispatch(connection)
    yield from _give_up_and_send_again(connection, db, feed, n)


def of_queues(connection: Connection, db: str, n: int) -> Iterator[Deed]:
    queues.make(connection)
    queues.consumer(connection, "other", "data ? 'n'")
    post = "select mbus.post_q('n=>1', delayed_until => {}) from generate_series(1, %s)"
    receive = f"select count(*) from mbus.consumen_q_by_default({n})"
    connection.execute(post.format("null"), [n])
    yield "receive", lambda: _count(connection, n, receive)
    yield "take", lambda: _take(QueueFeed("q", "other"), db, n)
    connection.execute(post.format("localtimestamp + interval '1 hour'"), [n])
    yield "put apart", lambda: _count(connection, 0, receive)
    _make_due(connection, "q")
    yield "look at what is apart", lambda: connection.execute("select pgchange.status(%s, 'queue')", [n])
    yield "receive what was apart", lambda: _count(connection, n, receive)
    yield from _give_up_and_send_again(connection, db, QueueFeed("q", "other"), n)
    yield "sweep", lambda: connection.execute("select mbus.sweep(mbus.queue_named('q'), true)")


def of_queues_out_of_order(connection: Connection, db: str, n: int) -> Iterator[Deed]:
    """Post messages that each wait for another message, and messages of a transaction that commits late."""
    queues.make(connection, "q", "before")
    receive = f"select count(*) from mbus.consumen_q_by_default({n})"
    later = (
        "select array(select mbus.post_before('n=>1', delayed_until => localtimestamp + interval '1 hour') "
        "from generate_series(1, %s))"
    )
    firsts = tubes.one(connection, later % n)
    _count(connection, 0, receive.replace("_q_", "_before_"))
    behind = "select mbus.post('q', 'n=>1', hstore('consume_after', array[first]::text)) from unnest(%s::text[]) as first"
    connection.execute(behind, [firsts])
    yield "put behind others", lambda: _count(connection, 0, receive)
    peek = (
        f"select count(*) from generate_series(1, {n // 5}) as i where mbus.peek_q(nullif(i::text, i::text))"
    )
    yield "peek at them", lambda: _count(connection, n // 5, peek)
    one_by_one = f"do $$ begin for i in 1..{n} loop perform mbus.consume('before'); commit; end loop; end $$"
    _make_due(connection, "before")
    yield "receive the others", lambda: connection.execute(one_by_one)
    yield "receive what was behind", lambda: _count(connection, n, receive)
    with psycopg.connect(db) as late:
        queues.fill(late, range(n))
        queues.fill(connection, [1])
        _count(connection, 1, receive)
        late.commit()
    some = receive.replace(str(n), str(n // 10))
    yield "receive what came late", lambda: [_count(connection, n // 10, some) for _ in range(10)]


def _make_due(connection: Connection, queue: str) -> None:
    """Make a queue's delayed messages due."""
    connection.execute(f'update mbus."log${queue}" set delayed_until = clock_timestamp()')
    connection.execute("update mbus.apart set due = clock_timestamp() where wait_consumer is null")


def _give_up_and_send_again(connection: Connection, db: str, feed: Feed, n: int) -> Iterator[Deed]:
    known = {letter.id for letter in dead_letters.letters(connection)}
    with contextlib.suppress(ZeroDivisionError), ConsumerTransaction(feed, db) as consumer:
        assert consumer.claim(n)
        raise ZeroDivisionError
    yield "give up", lambda: manual_operations.skip_batch(connection, connection, feed, "bad")
    letters = [letter.id for letter in dead_letters.letters(connection) if letter.id not in known]
    yield "send again", lambda: dead_letters.redrive(connection, ids=letters)
    yield "take what is sent again", lambda: _take(feed, db, n)


def _take(feed: Feed, db: str, n: int) -> None:
    assert len(drained(feed, db, limit=n)) == n


def _count(connection: Connection, n: int, query: str) -> None:
    assert tubes.one(connection, query) == n
