"""The feed of a catalogue's log under the consumer transaction."""

from __future__ import annotations

import psycopg
import pytest

from airflow_pgchange.admin import by_hand
from airflow_pgchange.feeds import ConsumerTransaction, TopologyFeed, points
from airflow_pgchange.feeds.connect import connect as connect_ours
from airflow_pgchange.feeds.errors import (
    BatchGivenUp,
    HistoryTrimmed,
    InvalidArgument,
    SourceLostTail,
    StaleClaim,
)
from airflow_pgchange.feeds.feed import Feed, from_json, from_uri, partitions, to_json, to_uri
from airflow_pgchange.feeds.lag import lag
from tests.acks import only_the_claimed_version_is_acked
from tests.batches import taken

FEED = TopologyFeed("router")


@pytest.fixture
def catalogue(connect):
    connection = connect()
    connection.execute("select topology.add_replicaset('r1', uuid => 'ur1')")
    connection.execute("select topology.add_instance('i1', 'r1', 'h:1', uuid => 'ui1')")
    connection.execute("select topology.add_instance('i2', 'r1', 'h:2', uuid => 'ui2')")
    return connection


def work(db, limit=1000, write=None, source=None):
    return taken(FEED, db, source, limit, write)


def test_a_topology_feed_keeps_the_contract():
    assert isinstance(FEED, Feed)
    assert from_json(to_json(FEED)) == FEED
    assert from_uri(to_uri(FEED, "cluster")) == (FEED, "cluster")


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_consumer_has_a_name(name):
    with pytest.raises(InvalidArgument, match="consumer_id"):
        TopologyFeed(name)


def test_events_come_once_and_in_order(db, catalogue):
    changes = work(db)
    assert [change.data["map"] for change in changes] == ["replicaset", "instance", "instance"]
    assert [change.id for change in changes] == ["1/1", "1/2", "1/3"]
    catalogue.execute("select topology.set_master('r1', 'i1')")
    assert [change.data["current_master_uuid"] for change in work(db)] == ["ui1"]
    assert work(db) == []


@pytest.mark.parametrize("through", ["db", "pgbouncer"])
def test_times_are_read_in_whatever_style_the_database_shows_them(request, db, catalogue, through):
    name = catalogue.info.dbname
    catalogue.execute(f"alter database \"{name}\" set datestyle = 'German, DMY'")
    assert [change.created_at.tzinfo is None for change in work(request.getfixturevalue(through))] == [
        False
    ] * 3
    with connect_ours(db) as connection:
        assert connection.execute("select '1.2.2026'::date::text").fetchone() == ("2026-02-01",)


def test_a_limit_leaves_the_rest_for_the_next_batch(db, catalogue):
    assert [[change.id for change in work(db, limit=2)] for _ in range(3)] == [["1/1", "1/2"], ["1/3"], []]


def test_many_events_come_in_slices_that_are_the_batch(db, catalogue):
    catalogue.execute(
        "insert into topology._pico_bucket select 'default', g, g, 'copied', 'r1', 'r1' from generate_series(1, 25000) g"
    )
    with ConsumerTransaction(FEED, db) as consumer:
        batch = consumer.claim(100_000)
        assert [part.count for part in batch.slices] == [10_000, 10_000, 5_003]
        assert sum(1 for _ in consumer.changes()) == batch.count == 25_003
        assert len(partitions(FEED, batch, 2)) == 2
        consumer.ack()


def test_a_retry_is_the_same_batch_though_more_has_come(db, catalogue):
    with pytest.raises(RuntimeError), ConsumerTransaction(FEED, db) as consumer:
        first = consumer.claim(1000)
        raise RuntimeError
    catalogue.execute("select topology.set_master('r1', 'i1')")
    with ConsumerTransaction(FEED, db) as consumer:
        again = consumer.claim(1000)
        assert (again.id, again.count, again.attempt) == (first.id, 3, 2)
        consumer.ack()


def test_a_batch_that_failed_as_often_as_it_may_is_refused(db, catalogue):
    with pytest.raises(RuntimeError), ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(1000)
        raise RuntimeError
    with pytest.raises(BatchGivenUp, match="topology:router"), ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(1000, max_attempts=1)


def test_who_was_moved_meanwhile_keeps_nothing(db, catalogue):
    with pytest.raises(StaleClaim), ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(1000)
        catalogue.execute("update topology.consumer set index = 2")
        consumer.ack(lambda connection: connection.execute("create table kept ()"))
    assert catalogue.execute("select to_regclass('kept')").fetchone() == (None,)


def test_the_lag_counts_what_is_behind(db, catalogue):
    with ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(2)
        list(consumer.changes())
        consumer.ack()
    found = lag(catalogue, catalogue, FEED, 10)
    assert (found.ready, found.ready_exact, found.waiting) == (1, True, 0)
    assert found.ready_age is not None


@pytest.mark.parametrize("upto", [-1, None])
def test_what_is_behind_is_counted_up_to_a_number(catalogue, upto):
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="upto must not be negative"):
        catalogue.execute("select topology.lag('{}', %s)", [upto])


def test_a_point_is_passed_when_all_before_it_is_processed(db, catalogue):
    goal = points.point(catalogue, FEED)
    work(db, limit=2)
    assert not points.has_passed(catalogue, catalogue, FEED, goal)[0]
    work(db)
    assert points.has_passed(catalogue, catalogue, FEED, goal)[0]


def test_a_catalogue_that_lost_its_tail_is_refused(db, catalogue):
    work(db)
    catalogue.execute("delete from pgchange.claim")
    with pytest.raises(SourceLostTail, match="repair"), ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(1000)


def test_repair_goes_on_at_least_once(db, catalogue):
    work(db)
    catalogue.execute("delete from pgchange.claim")
    row = catalogue.execute("select topology.adopt_mark('router', topology.mark('router'))").fetchone()
    assert row == ("at least once",)
    assert len(work(db)) == 3


def test_results_may_be_in_another_database(db, catalogue, other_db):
    assert len(work(other_db, source=db)) == 3
    assert work(other_db, source=db) == []


def test_trimming_keeps_what_a_consumer_has_not_processed(db, catalogue):
    work(db, limit=2)
    catalogue.execute("update topology.log set written_at = now() - interval '1 day'")
    row = catalogue.execute("select topology.trim_log('1 hour')").fetchone()
    assert row == ("trimmed 2 events of the catalogue's log",)
    assert [change.id for change in work(db)] == ["1/3"]


def test_a_consumer_before_events_that_were_trimmed_is_told_what_helps(db, catalogue):
    work(db, limit=1)
    earlier = catalogue.execute("select version, term, index from topology.consumer").fetchone()
    work(db, limit=1)
    work(db, limit=1)
    catalogue.execute("select topology.trim_log('0')")
    catalogue.execute("update topology.consumer set (version, term, index) = (%s, %s, %s)", earlier)
    with pytest.raises(HistoryTrimmed, match="topology:router --to now, or drop it"):
        work(db)
    catalogue.execute("select topology.drop_consumer('router')")
    catalogue.execute("select topology.set_master('r1', 'i1')")
    assert [change.id for change in work(db)] == ["1/4"]


def test_the_beginning_of_a_trimmed_log_is_what_is_left_of_it(db, catalogue):
    work(db)
    catalogue.execute("select topology.trim_log('0')")
    catalogue.execute("select topology.move_consumer('router', null)")
    assert work(db) == []
    catalogue.execute("select topology.set_master('r1', 'i1')")
    assert [change.id for change in work(db)] == ["1/4"]


def test_trimming_keeps_what_a_consumer_elsewhere_was_moved_back_to(db, other_db, catalogue, connect_to):
    changes = work(other_db, source=db)
    by_hand.move_consumer(connect_to(other_db), catalogue, FEED, "beginning")
    assert catalogue.execute("select topology.trim_log('0')").fetchone() == (None,)
    assert work(other_db, source=db) == changes != []


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_batch_is_acked_as_the_version_that_was_claimed(db, other_db, catalogue, elsewhere):
    names = iter("abc")
    results, source = (other_db, db) if elsewhere else (db, None)

    def write():
        catalogue.execute("select topology.add_replicaset(%s)", [next(names)])

    only_the_claimed_version_is_acked(write, TopologyFeed("t"), results, source)
