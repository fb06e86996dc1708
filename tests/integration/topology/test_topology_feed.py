"""The feed of a catalogue's log under the consumer transaction."""

from __future__ import annotations

import psycopg
import pytest

from airflow_pgchange.admin import manual_operations
from airflow_pgchange.errors import HistoryTrimmed, InvalidArgument
from airflow_pgchange.feeds import ConsumerTransaction, TopologyFeed
from airflow_pgchange.feeds.connections import connect as connect_ours
from airflow_pgchange.feeds.consumer_state import lag
from airflow_pgchange.feeds.feed import Feed, partitions
from airflow_pgchange.feeds.feed_kinds import from_json, from_uri, to_json, to_uri
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
    with pytest.raises(InvalidArgument, match="consumer must be"):
        TopologyFeed(name)


def test_events_come_once_and_in_order(db, catalogue):
    changes = work(db)
    assert [change.data["map"] for change in changes] == ["replicaset", "instance", "instance"]
    assert [change.id for change in changes] == ["1/1", "1/2", "1/3"]
    catalogue.execute("select topology.set_master('r1', 'i1')")
    assert [change.data["current_master_uuid"] for change in work(db)] == ["ui1"]
    assert work(db) == []


def test_a_batch_reaches_into_the_next_term(db, catalogue):
    catalogue.execute("update topology.log set term = 2 where index = 3")
    assert [change.id for change in work(db)] == ["1/1", "1/2", "2/3"]


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


def test_the_lag_counts_what_is_behind(db, catalogue):
    with ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(2)
        list(consumer.changes())
        consumer.ack()
    found = lag(catalogue, catalogue, FEED, 10)
    assert (found.ready, found.ready_exact, found.waiting) == (1, True, 0)
    assert found.ready_age is not None
    catalogue.execute(
        "insert into topology.log (term, index, event, written_at) select term, index + n, event, written_at "
        "from topology.log cross join generate_series(1, 3000) as n where index = 3"
    )
    found = lag(catalogue, catalogue, FEED, 10)
    assert (found.ready, found.ready_exact) == (3001, False)


@pytest.mark.parametrize("upto", [-1, None])
def test_unread_events_are_counted_up_to_a_number(catalogue, upto):
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="upto must not be negative"):
        catalogue.execute("select topology.lag('{}', %s)", [upto])


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
    manual_operations.move_consumer(connect_to(other_db), catalogue, FEED, "beginning")
    assert catalogue.execute("select topology.trim_log('0')").fetchone() == (None,)
    assert work(other_db, source=db) == changes != []
