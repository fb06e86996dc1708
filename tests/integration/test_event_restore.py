"""Event logs that were dumped, restored, upgraded or removed."""

from __future__ import annotations

import subprocess

import psycopg
import pytest

from airflow_pgchange import schema
from airflow_pgchange.feeds import ConsumerTransaction, EventFeed
from tests.events import drain, poll, poll_all, publish, publish_at, read, subscribe
from tests.tubes import one


@pytest.fixture
def restored(db, own_cluster, connect):
    """A function that dumps ``db`` and restores it into another cluster; a connection to it."""
    opened = []

    def restore():
        dump = subprocess.run(
            [own_cluster.binaries / "pg_dump", "-d", db, "--no-owner"], check=True, capture_output=True
        ).stdout
        subprocess.run(
            [
                own_cluster.binaries / "psql",
                "-X",
                "-q",
                "-v",
                "ON_ERROR_STOP=1",
                "-d",
                own_cluster.conninfo(),
            ],
            input=b"create role pgmb_reader;\n" + dump,
            check=True,
            capture_output=True,
        )
        opened.append(psycopg.connect(own_cluster.conninfo(), autocommit=True))
        return opened[0]

    yield restore
    for connection in opened:
        connection.close()


def use_up(connection, transactions):
    for _ in range(transactions):
        connection.execute("select pg_current_xact_id()")


def test_a_restored_log_goes_on_where_it_was_and_loses_nothing(connect, restored, own_cluster):
    connection = connect()
    subscribe(connection)
    publish(connection, "read")
    drain(connection)
    unread = publish(connection, "unread")
    poll_all(connection)
    late = publish(connection, "undispatched", "too")
    use_up(connection, 300)
    there = restored()
    fresh = publish(there, "published there")
    found = drain(there)
    assert poll(there) == 0
    found += drain(there)
    assert found == unread + late + fresh
    assert "stamped anew" in one(there, "select restored from pgmb.dispatching()")


def test_a_restored_log_delivers_what_was_scheduled(connect, restored):
    connection = connect()
    subscribe(connection)
    event = publish_at(connection, "clock_timestamp() + interval '1 second'")
    use_up(connection, 300)
    there = restored()
    poll(there)
    there.execute("select pg_sleep_until(pgmb.extract_date_from_event_id(%s) + interval '10 ms')", [event])
    assert drain(there) == [event]


def test_a_restored_group_works_on_under_its_feed(connect, restored, own_cluster, db):
    connection = connect()
    subscribe(connection)
    ids = publish(connection, "a", "b")
    with ConsumerTransaction(EventFeed("g"), db) as consumer:
        consumer.claim(1)
        consumer.ack()
    restored()
    found = []
    for _ in range(3):
        with ConsumerTransaction(EventFeed("g"), own_cluster.conninfo()) as consumer:
            if consumer.claim(10):
                found += [change.id for change in consumer.changes()]
                consumer.ack()
    assert found == ids[1:]


def test_uninstalling_takes_the_log_and_nothing_else(bare_db, connect_to):
    connection = connect_to(bare_db)
    schema.install(connection)
    connection.execute("create table public.item (id bigint primary key, word text)")
    connection.execute("select pgmb.push_table_mutations('public.item')")
    before = one(connection, "select count(*) from pg_class where relnamespace = 'tube'::regnamespace")
    assert schema.uninstall(connection, ["pgmb"]) == ["pgmb"]
    connection.execute("insert into public.item values (1, 'still')")
    assert one(connection, "select count(*) from pg_trigger where tgrelid = 'public.item'::regclass") == 0
    assert (
        one(connection, "select count(*) from pg_class where relnamespace = 'tube'::regnamespace") == before
    )
    assert one(connection, "select count(*) from pg_namespace where nspname = 'pgmb'") == 0
    schema.install(connection)


@pytest.mark.parametrize(
    "theirs",
    [
        "create view public.mine as select topic from pgmb.events",
        "create table public.mine (id pgmb.event_id)",
        "create table public.mine (id text default pgmb.create_event_id_default())",
        "create function public.mine(id pgmb.event_id) returns text as 'select id::text' language sql",
        "create table public.mine (g varchar references pgmb.subscription_groups)",
    ],
)
def test_uninstalling_refuses_to_take_what_others_built_on_it(bare_db, connect_to, theirs):
    connection = connect_to(bare_db)
    schema.install(connection)
    connection.execute(theirs)
    with pytest.raises(psycopg.Error, match="mine") as refused:
        connection.execute((schema.sql_folder() / "pgmb" / "uninstall" / "uninstall.sql").read_bytes())
    assert refused.value.sqlstate == "PC008"
    assert one(connection, "select count(*) from pgmb.events") == 0


def test_a_standby_that_is_promoted_loses_nothing_that_it_had(own_cluster, own_database, connect_to):
    connection = connect_to(own_database)
    subscribe(connection)
    read_before = publish(connection, "a")
    assert drain(connection) == read_before
    ids = publish(connection, "b", "c")
    standby = own_cluster.standby()
    try:
        standby.wait_for_replay(own_cluster)
        own_cluster.stop("immediate")
        standby.promote()
        there = connect_to(standby.conninfo())
        assert drain(there) == ids
        assert read(there) == []
    finally:
        standby.remove()
