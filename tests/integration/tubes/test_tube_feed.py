"""The feed of a tube in the consumer transaction: the changes that a worker gets, and the progress that is kept."""

from __future__ import annotations

import threading

import pytest
from psycopg.conninfo import conninfo_to_dict

from airflow_pgchange.errors import BatchGivenUp, InvalidArgument, StaleClaim, UnknownConsumer
from airflow_pgchange.feeds import ConsumerTransaction, TubeFeed, end_position
from airflow_pgchange.feeds.consumer_state import lag
from airflow_pgchange.feeds.feed import Feed, partitions, shards
from airflow_pgchange.feeds.feed_kinds import from_json, from_uri, to_json, to_uri
from tests.batches import taken
from tests.tubes import attach, make, pods
from tests.waiting import locks, until, waits

FEED = TubeFeed("q")


def make_item(connection):
    """A tube and a table that touches it."""
    connection.execute("create table item (id bigint primary key, word text)")
    make(connection)
    attach(connection)


@pytest.fixture
def prepared_item():
    return make_item


def work(db, feed=FEED, limit=1000, source=None, write=None):
    """Process the next batch, and return its ids."""
    return [change.id for change in taken(feed, db, source, limit, write)]


def test_a_tube_feed_keeps_the_contract():
    feed = TubeFeed("q", 1, 3)
    assert isinstance(feed, Feed)
    assert from_json(to_json(feed)) == feed
    assert from_uri(to_uri(feed, "airline")) == (feed, "airline")


@pytest.mark.parametrize(
    "arguments", [("",), (7,), ("q", 1), ("q", -1, 2), ("q", 0, 0), ("q", 0, 1000), ("q", "0")]
)
def test_a_worker_that_cannot_be_is_refused(arguments):
    with pytest.raises(InvalidArgument):
        TubeFeed(*arguments)


def test_an_unknown_tube_is_named(db):
    with pytest.raises(UnknownConsumer, match="no tube nosuch"), ConsumerTransaction(TubeFeed("nosuch"), db):
        pass


def test_ids_come_once_a_batch_with_shard_and_payload(db, item):
    item.execute("insert into item select generate_series(1, 3)")
    item.execute("update item set word = 'x' where id = 2")
    item.execute("""select tube.touch('q', 0, '{9}', 'T', '{"why": "asked"}')""")
    with ConsumerTransaction(FEED, db) as consumer:
        assert consumer.claim(100).count == 4
        changes = list(consumer.changes())
        consumer.ack()
    assert [change.id for change in changes] == [1, 2, 3, 9]
    assert changes[3].data == {"shard": 0, "backfill": False, "payload": {"why": "asked"}}
    assert pods(item) == []


def test_results_and_the_end_of_the_pods_are_kept_together_or_not_at_all(db, item):
    item.execute("create table copied (id bigint)")
    item.execute("insert into item values (1), (2)")

    def write(connection):
        connection.execute("insert into copied select id from item")

    with pytest.raises(ZeroDivisionError), ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(100)
        consumer.ack(write)
        raise ZeroDivisionError
    assert item.execute("select count(*) from copied").fetchone() == (0,)
    assert work(db, write=write) == [1, 2]
    assert item.execute("select count(*) from copied").fetchone() == (2,)
    assert work(db) == []


def test_results_elsewhere_are_kept_first_so_nothing_is_lost_between_the_two(db, other_db, item, connect_to):
    results = connect_to(other_db)
    results.execute("create table copied (id bigint)")
    item.execute("insert into item values (1), (2)")

    def write(connection):
        assert connection.info.dbname == results.info.dbname
        connection.execute("insert into copied values (1), (2)")

    with (
        pytest.raises(Exception, match="terminat|closed|lost"),
        ConsumerTransaction(FEED, other_db, db) as consumer,
    ):
        consumer.claim(100)
        consumer.ack(write)
        item.execute("select pg_terminate_backend(%s)", [consumer._keeper.info.backend_pid])
    assert results.execute("select count(*) from copied").fetchone() == (2,)
    assert work(other_db, source=db, write=write) == [1, 2]
    assert results.execute("select count(*) from copied").fetchone() == (4,)
    assert work(other_db, source=db) == []


def test_while_a_batch_is_in_work_neither_database_sees_an_open_snapshot(db, other_db, item, connect_to):
    item.execute("insert into item values (1)")
    with ConsumerTransaction(FEED, other_db, db) as consumer:
        consumer.claim(100)
        list(consumer.changes())
        consumer.ping()
        held = item.execute(
            "select count(*) from pg_stat_activity where application_name = 'airflow_pgchange' "
            "and state = 'idle in transaction' and (backend_xid is not null or backend_xmin is not null) "
            "and datname = any (%s)",
            [[item.info.dbname, conninfo_to_dict(other_db)["dbname"]]],
        ).fetchone()
        assert held == (0,)
        consumer.ack()


def test_a_retry_is_the_same_batch_whatever_was_touched_meanwhile(db, item):
    item.execute("insert into item values (1), (2)")
    with pytest.raises(ZeroDivisionError), ConsumerTransaction(FEED, db) as consumer:
        first = consumer.claim(100)
        raise ZeroDivisionError
    item.execute("insert into item values (3)")
    with ConsumerTransaction(FEED, db) as consumer:
        again = consumer.claim(100)
        assert (again.id, again.attempt) == (first.id, 2)
        assert [change.id for change in consumer.changes()] == [1, 2]
        consumer.ack()
    assert work(db) == [3]


def test_a_batch_that_failed_as_often_as_it_may_is_refused_and_can_be_skipped(db, item):
    item.execute("insert into item values (1)")
    with pytest.raises(ZeroDivisionError), ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(100)
        raise ZeroDivisionError
    with (
        pytest.raises(BatchGivenUp, match="airflow-pgchange skip tube:q/0"),
        ConsumerTransaction(FEED, db) as consumer,
    ):
        consumer.claim(100, max_attempts=1)
    item.execute("select tube.skip_batch('q', 0, 'cannot be parsed')")
    assert work(db) == []


def test_a_worker_that_is_at_work_is_busy_for_others_and_its_neighbours_are_not(db, item):
    make(item, workers=2)
    with ConsumerTransaction(TubeFeed("q", 0, 2), db) as first:
        assert not first.busy
        with ConsumerTransaction(TubeFeed("q", 0, 2), db) as second:
            assert second.busy
        with ConsumerTransaction(TubeFeed("q", 1, 2), db) as third:
            assert not third.busy


def test_a_session_that_found_a_worker_busy_does_not_block_a_change_of_their_number(db, item):
    with ConsumerTransaction(FEED, db), ConsumerTransaction(FEED, db) as second:
        assert second.busy
        assert [lock.kind for lock in locks(item)].count("advisory") == 2


def test_a_worker_of_a_number_that_changed_is_told(db, item):
    make(item, workers=2)
    with pytest.raises(StaleClaim, match="shared by 2 workers"), ConsumerTransaction(FEED, db):
        pass


def test_a_worker_that_waited_while_the_number_changed_is_told_so(db, item, connect):
    make(item, workers=2)
    feed, waiting, told = TubeFeed("q", 1, 2), threading.Event(), []

    def wait():
        with (
            pytest.raises(StaleClaim) as error,
            ConsumerTransaction(
                feed, db, busy_timeout=None, stopped=lambda: waiting.set() or False
            ) as second,
        ):
            second.claim(1)
        told.append(str(error.value))

    threads = [
        threading.Thread(target=wait),
        threading.Thread(target=make, args=[connect()], kwargs={"workers": 1}),
    ]
    with ConsumerTransaction(feed, db):
        threads[0].start()
        assert waiting.wait(60)
        threads[1].start()
        until(item, waits(kind="advisory"))
    for thread in threads:
        thread.join()
    assert "shared by 1 workers now" in told[0]


def test_the_lag_is_what_a_claim_would_give(db, item):
    assert lag(item, item, FEED, 100).ready == 0
    item.execute("insert into item select generate_series(1, 30)")
    assert lag(item, item, FEED, 100).ready == 30
    work(db, limit=1000)
    assert lag(item, item, FEED, 100).ready == 0


def test_a_point_is_passed_when_all_that_was_touched_before_it_is_done(db, item):
    item.execute("insert into item values (1)")
    point = end_position.point(item, FEED)
    item.execute("insert into item values (2)")
    assert not end_position.has_passed(item, item, FEED, point)[0]
    assert work(db, limit=1) == [1]
    assert end_position.has_passed(item, item, FEED, point)[0]


def test_a_batch_is_read_shard_by_shard(db, connect):
    connection = connect()
    make(connection)
    for shard in (1, 2):
        connection.execute(
            f"create schema sh{shard:04}; create table sh{shard:04}.item (id bigint primary key)"
        )
        attach(connection, f"sh{shard:04}.item", shard=None)
        connection.execute(f"insert into sh{shard:04}.item select generate_series(1, {shard})")
    with ConsumerTransaction(FEED, db) as consumer:
        batch = consumer.claim(100)
        assert shards(FEED, batch) == [1, 2]
        counts = [sum(part.count for part in partitions(FEED, batch, 4, shard)) for shard in (1, 2, 3)]
        assert counts == [1, 2, 0]
        consumer.ack()
