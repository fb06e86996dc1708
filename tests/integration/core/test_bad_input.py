"""Invalid input: each error contains advice, and nothing is lost."""

from __future__ import annotations

import threading

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from airflow_pgchange.admin import consumers, dead_letters, manual_operations
from airflow_pgchange.admin.maintenance import maintain
from airflow_pgchange.errors import (
    InvalidArgument,
    PermissionDenied,
    PgChangeError,
    SchemaMissing,
    SchemaVersionMismatch,
    ServerUnavailable,
    UnknownBranch,
    UnknownConsumer,
)
from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction
from airflow_pgchange.feeds.connections import connect as open_connection
from airflow_pgchange.feeds.connections import connect_async
from airflow_pgchange.feeds.consumer_state import lag, position
from airflow_pgchange.feeds.error_translation import translated
from airflow_pgchange.feeds.queries import ask, select
from tests.commits import FEED, commits, drain
from tests.conftest import database
from tests.waiting import sleeps, until

NOBODY = CommitFeed("nobody", 0)
NOWHERE = CommitFeed("nobody", 4711)
DEAD = "host=127.0.0.1 port=1 dbname=x user=x connect_timeout=2"


@pytest.fixture(scope="module")
def unchanged(shared):
    """A connection to a database with a tracked table and no changes. Refused calls leave it as it is."""
    shared.execute("create table ledger (id bigint primary key)")
    shared.execute("select revision.track('ledger')")
    yield shared
    for table in ("pubsub.watermark", "pgchange.claim", "pgchange.letter", "revision.commit_queue"):
        assert shared.execute(f"select count(*) from {table}").fetchone() == (0,), table


@pytest.fixture(scope="module")
def bare(cluster):
    """A connection to an empty database."""
    for made in database(cluster, "template1"):
        with open_connection(made) as connection:
            yield connection


def run(connection, call):
    with translated():
        connection.execute(call)


def raised(connection, call):
    with pytest.raises(PgChangeError) as told:
        run(connection, call)
    return told.value


@pytest.mark.parametrize(
    ("tool", "says"),
    [
        (lambda c: manual_operations.move_consumer(c, c, NOBODY, "beginning"), "airflow-pgchange status"),
        (lambda c: manual_operations.drop_consumer(c, c, NOBODY), "lists them"),
        (lambda c: manual_operations.repair_consumer(c, c, NOBODY), "lists them"),
        (lambda c: manual_operations.skip_batch(c, c, NOBODY, "why not"), "airflow-pgchange status"),
        (lambda c: position(c, NOBODY), "airflow-pgchange status"),
    ],
)
def test_an_unknown_consumer_is_told_where_the_names_are(unchanged, tool, says):
    with pytest.raises(UnknownConsumer, match="commits:nobody/0") as told:
        tool(unchanged)
    assert says in str(told.value)


@pytest.mark.parametrize(
    "call",
    [
        "select pubsub.skip_batch('nobody', 0, 'why')",
        "select * from pubsub.poll('nobody', 0)",
        "select pubsub.move_consumer('nobody', 0, pubsub.point(0))",
        "select pubsub.drop_consumer('nobody', 0)",
    ],
)
def test_an_unknown_consumer_is_told_by_hand_too(unchanged, call):
    told = raised(unchanged, call)
    assert isinstance(told, UnknownConsumer)
    assert "commits:nobody/0" in str(told)


@pytest.mark.parametrize(
    "call",
    [
        "select pubsub.claim('x', 0, '{}', -5)",
        "select pubsub.claim('x', 0, '{}', 0)",
        "select pubsub.lag(0, '{}', -1, false)",
        "select pubsub.lag(0, '{}', null, false)",
        "select revision.maintain_partitions(0)",
        "select revision.maintain_partitions(100, -1)",
        "select revision.add_partition(7, 7)",
        "select revision.add_partition(-7, 7)",
        "select pubsub.trim_commit_queue('-1 day')",
        "select pubsub.trim_commit_queue(null)",
        "call revision.enqueue_existing('ledger', 0)",
    ],
)
def test_numbers_that_make_no_sense_are_refused(unchanged, call):
    assert isinstance(raised(unchanged, call), InvalidArgument)


@pytest.mark.parametrize("text", ["\udcff", "\0"])
@pytest.mark.parametrize(
    "tool",
    [
        lambda c, text: manual_operations.drop_consumer(c, c, CommitFeed(text, 0)),
        lambda c, text: dead_letters.letters(c, consumer=text),
        lambda c, text: ask(c, select("pgchange.check_reason", text)),
    ],
)
def test_a_text_that_postgresql_cannot_hold_is_refused(unchanged, tool, text):
    with pytest.raises(InvalidArgument):
        tool(unchanged, text)


def test_a_negative_limit_loses_nothing(db, connect):
    expected = commits(connect(), 2)
    with pytest.raises(InvalidArgument, match="at least 1"), ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(-1)
    assert drain(db) == expected


@pytest.mark.parametrize(
    "tool",
    [
        lambda c: lag(c, c, NOWHERE),
        lambda c: manual_operations.move_consumer(c, c, NOWHERE, "now"),
        lambda c: run(c, "select pubsub.lock_watermark('x', 4711)"),
        lambda c: run(c, "select pubsub.point(4711)"),
        lambda c: run(c, "select pubsub.claim('x', 4711, '{}', 1)"),
        lambda c: run(c, "select pubsub.passed(4711, '{}', '{}')"),
        lambda c: run(c, """select pubsub.passed(4711, '{}', '{"snapshot": "1:1:"}')"""),
    ],
)
def test_a_branch_that_does_not_exist_is_told_where_the_branches_are(unchanged, tool):
    with pytest.raises(UnknownBranch, match=r"no branch 4711.*revision\.branch"):
        tool(unchanged)


def test_a_consumer_of_a_branch_that_does_not_exist_leaves_nothing_behind(db, connect):
    connection = connect()
    assert isinstance(raised(connection, "select pubsub.lock_watermark('x', 4711)"), UnknownBranch)
    assert connection.execute("select count(*) from pubsub.watermark").fetchone() == (0,)


@pytest.mark.parametrize("reason", ["", "   ", None])
def test_a_batch_is_not_skipped_without_a_reason(db, connect, reason):
    connection = connect()
    expected = commits(connection)
    with pytest.raises(PgChangeError), ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(1)
    with pytest.raises(InvalidArgument, match="why"):
        manual_operations.skip_batch(connection, connection, FEED, reason)
    assert connection.execute("select count(*) from pgchange.letter").fetchone() == (0,)
    assert drain(db) == expected


@pytest.mark.parametrize("point", [None, "{}", '{"txid": 5}'])
def test_a_point_that_is_none_is_refused(db, connect, point):
    connection = connect()
    expected = commits(connection)
    connection.execute("select pubsub.lock_watermark('test', 0)")
    with pytest.raises(InvalidArgument, match=r"pubsub\.point"), translated():
        connection.execute("select pubsub.move_consumer('test', 0, %s)", [point])
    assert drain(db) == expected


@pytest.mark.parametrize(
    "tool",
    [
        lambda c: lag(c, c, FEED),
        lambda c: position(c, FEED),
        consumers.status,
        lambda c: manual_operations.skip_batch(c, c, FEED, "why"),
        lambda c: manual_operations.move_consumer(c, c, FEED, "now"),
        lambda c: manual_operations.trim_commit_queue(c, "1 day"),
    ],
)
def test_a_database_without_our_schemas_is_told_what_to_run(bare, tool):
    with pytest.raises(SchemaMissing, match="airflow-pgchange install"):
        tool(bare)


@pytest.mark.parametrize("version", [0, 99])
def test_another_version_of_the_schema_is_told_and_loses_nothing(db, connect, version):
    connection = connect()
    expected = commits(connection)
    drain(db)
    expected = commits(connection)
    connection.execute("update pubsub.installed set version = %s", [version])
    with pytest.raises(SchemaVersionMismatch, match="airflow-pgchange upgrade"):
        drain(db)
    assert any("airflow-pgchange upgrade" in line for line in maintain(connection).attention)
    connection.execute("update pubsub.installed set version = 1")
    assert drain(db) == expected


@pytest.mark.parametrize(
    "tool",
    [
        lambda c: lag(c, c, FEED),
        lambda c: position(c, FEED),
        consumers.status,
        lambda c: manual_operations.move_consumer(c, c, FEED, "now"),
        lambda c: manual_operations.trim_commit_queue(c, "1 day"),
    ],
)
def test_a_role_without_rights_is_told_who_gives_them(role, connect_to, tool):
    with pytest.raises(PermissionDenied, match=r"grant_consumer|grant_admin"):
        tool(connect_to(role("nobody").conninfo))


def test_a_consumer_may_not_do_what_a_keeper_may(connect, role, connect_to):
    connection, consumer = connect(), role("consumer")
    connection.execute("select pubsub.grant_consumer(%s::regrole)", [consumer.name])
    commits(connection)
    drain(consumer.conninfo)
    his = connect_to(consumer.conninfo)
    with pytest.raises(PermissionDenied):
        manual_operations.move_consumer(his, his, FEED, "beginning")
    connection.execute("select pubsub.grant_admin(%s::regrole)", [consumer.name])
    manual_operations.move_consumer(his, his, FEED, "beginning")
    assert len(drain(consumer.conninfo)) == 1


def test_a_dead_server_is_told(db):
    with pytest.raises(ServerUnavailable, match="check host, port"):
        open_connection(DEAD)
    with pytest.raises(ServerUnavailable, match="check host, port"), ConsumerTransaction(FEED, DEAD):
        pass
    with pytest.raises(ServerUnavailable, match="check host, port"), ConsumerTransaction(FEED, db, DEAD):
        pass


async def test_a_dead_server_is_told_to_the_event_loop():
    with pytest.raises(ServerUnavailable, match="check host, port"):
        await connect_async(DEAD)


def test_a_server_that_ends_the_connection_is_told_and_nothing_is_lost(db, connect):
    connection = connect()
    expected = commits(connection)
    with pytest.raises(PgChangeError), ConsumerTransaction(FEED, db) as consumer:
        connection.execute("select pg_terminate_backend(%s, 10000)", [consumer.connection.info.backend_pid])
        consumer.claim(1)
    assert drain(db) == expected


def test_a_standby_alone_cannot_take_a_claim(own_database, own_cluster, connect_to):
    expected = commits(connect_to(own_database))
    standby = own_cluster.standby()
    try:
        standby.wait_for_replay(own_cluster)
        with pytest.raises(ServerUnavailable), ConsumerTransaction(FEED, own_database, standby.conninfo()):
            pass
        assert drain(own_database) == expected
    finally:
        standby.remove()


@pytest.fixture
def read_only_db(db, connect):
    """A database whose sessions are read-only by default."""
    connection = connect()
    name = sql.Identifier(connection.info.dbname)
    connection.execute(sql.SQL("alter database {} set default_transaction_read_only = on").format(name))
    return db


def test_a_database_that_is_read_only_by_default_is_told_as_that(read_only_db):
    with (
        pytest.raises(ServerUnavailable, match="read-only: connect .* default_transaction_read_only is on"),
        ConsumerTransaction(FEED, read_only_db),
    ):
        pass


def test_a_write_in_a_session_that_is_read_only_is_told_what_makes_it_so(read_only_db, connect_to):
    connection = connect_to(read_only_db)
    with pytest.raises(
        ServerUnavailable, match="read-only transaction: connect .* default_transaction_read_only is on"
    ):
        run(connection, "select pubsub.register('test', 0)")


def test_a_query_that_a_standby_cancels_has_its_own_error(own_database, own_cluster, connect_to):
    """Takes seconds: a standby is made."""
    primary = connect_to(own_database)
    primary.execute("create table plane as select 1 as id")
    standby = own_cluster.standby({"max_standby_streaming_delay": "0"})
    try:
        standby.wait_for_replay(own_cluster)
        reader, watcher = (
            connect_to(standby.conninfo(conninfo_to_dict(own_database)["dbname"])) for _ in range(2)
        )

        def drop():
            until(watcher, sleeps())
            primary.execute("drop table plane")

        dropper = threading.Thread(target=drop)
        dropper.start()
        with (
            pytest.raises(ServerUnavailable, match=r"conflict with recovery: .* hot_standby_feedback"),
            translated(),
        ):
            reader.execute("select pg_sleep(30) from plane")
        dropper.join()
    finally:
        standby.remove()


def test_a_conflict_of_serializable_transactions_stays_what_it_is(connect):
    with pytest.raises(psycopg.errors.SerializationFailure), translated():
        connect().execute("do $$ begin raise serialization_failure; end $$")


def test_an_error_of_the_user_is_not_translated(connect):
    with pytest.raises(psycopg.errors.DivisionByZero), translated():
        connect().execute("select 1 / 0")
