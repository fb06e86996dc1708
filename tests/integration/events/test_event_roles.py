"""The rights of roles on the event log, tried as the roles themselves."""

from __future__ import annotations

import psycopg
import pytest

from airflow_pgchange.feeds import ConsumerTransaction, EventFeed
from tests.events import TOPICAL, lag, poll_all, publish, publish_at, read, subscribe
from tests.tubes import one

DENIED = psycopg.errors.InsufficientPrivilege


@pytest.fixture
def admin(connect):
    return connect()


@pytest.fixture
def session(admin, role, connect_to):
    """A session of a role with one grant, or none."""

    def open_one(grant=None):
        who = role("user")
        if grant:
            admin.execute(f"select pgmb.grant_{grant}(%s::regrole)", [who.name])
        return connect_to(who.conninfo)

    return open_one


@pytest.mark.parametrize(
    "statement",
    [
        "select * from pgmb.events",
        "insert into pgmb.events (topic, payload) values ('t', '{}')",
        "select pgmb.poll_for_events()",
        "select pgmb.read_next_events('g', chunk_size => 1)",
        "insert into pgmb.subscriptions (group_id) values ('g')",
        "select pgmb.grant_consumer(current_user::text::regrole)",
    ],
)
def test_a_role_without_a_grant_may_do_nothing(session, statement):
    with pytest.raises(DENIED):
        session().execute(statement)


@pytest.mark.parametrize(
    "grant",
    ["writer", "subscriber", "conditions", "consumer", "dispatcher", "maintainer", "owner", "admin"],
)
def test_a_grant_to_nobody_is_refused(admin, grant):
    with pytest.raises(psycopg.Error, match="null is not a role") as refused:
        admin.execute(f"select pgmb.grant_{grant}(null)")
    assert refused.value.sqlstate == "PC008"


def test_a_publisher_publishes_now_and_later_and_no_more(session, admin):
    subscribe(admin)
    connection = session("writer")
    ids = publish(connection, "a")
    publish_at(connection, "now() + interval '1 hour'")
    poll_all(admin)
    assert [row["id"] for row in read(admin)] == ids
    for statement in (
        "select payload from pgmb.events",
        "insert into pgmb.published (addressed, ids) values (false, '{}')",
        "insert into pgmb.events_default (topic, payload) values ('t', '{}')",
        "delete from pgmb.events",
        "select pgmb.poll_for_events()",
    ):
        with pytest.raises(DENIED):
            connection.execute(statement)


def test_a_subscriber_uses_conditions_that_are_known_and_adds_none(session, admin):
    connection = session("subscriber")
    subscribe(connection, "g", TOPICAL, {"topic": "a"})
    with pytest.raises(DENIED, match=r"owner of schema pgmb"):
        subscribe(connection, "g", "e.topic = 'mine'")
    admin.execute("insert into pgmb.condition (conditions_sql) values ('e.topic = ''mine''')")
    subscribe(connection, "g", "e.topic = 'mine'")
    for statement in (
        "update pgmb.subscriptions set conditions_sql = 'pg_reload_conf()'",
        "select pgmb.prepare_poll_for_events_fn('{true}')",
        "insert into pgmb.condition (conditions_sql) values ('true')",
        "update pgmb.subscriptions set condition_id = 1",
    ):
        with pytest.raises(DENIED):
            connection.execute(statement)


def test_a_role_that_may_add_conditions_adds_them(session):
    connection = session("conditions")
    subscribe(connection, "g", "e.topic = 'mine'")
    connection.execute("select pgmb.prepare_poll_for_events_fn('{e.topic = ''x''}')")


def test_a_consumer_works_by_feed_and_by_hand(session, admin):
    subscribe(admin)
    ids = publish(admin, "a", "b")
    connection = session("consumer")
    conninfo = connection.info.dsn
    assert lag(connection)["ready"] == 2
    with ConsumerTransaction(EventFeed("g"), conninfo) as consumer:
        consumer.claim(1)
        assert [change.id for change in consumer.changes()] == ids[:1]
        consumer.ack()
    rows = read(connection, peek=False)
    assert [row["id"] for row in rows] == ids[1:]
    connection.execute("select pgmb.set_group_cursor('g', %s, true)", [rows[-1]["next_cursor"]])
    for statement in (
        "update pgmb.subscription_groups set last_read_event_id = null",
        "delete from pgchange.claim",
        "select pgmb.drop_consumer('g')",
        "insert into pgmb.events (topic, payload) values ('t', '{}')",
    ):
        with pytest.raises(DENIED):
            connection.execute(statement)


def test_a_consumer_of_a_group_with_several_subscriptions_reads_it(session, admin):
    subscribe(admin)
    subscribe(admin, "g", TOPICAL, {"topic": "a"})
    ids = publish(admin, "a", "b")
    connection = session("consumer")
    with ConsumerTransaction(EventFeed("g"), connection.info.dsn) as consumer:
        consumer.claim(10)
        assert [change.id for change in consumer.changes()] == ids
        consumer.ack()


def test_the_role_of_readers_may_read(admin, session):
    subscribe(admin)
    ids = publish(admin, "a")
    poll_all(admin)
    connection = session()
    admin.execute(f"grant pgmb_reader to {connection.info.user}")
    assert [row["id"] for row in read(connection)] == ids
    assert one(connection, "select count(*) from pgmb.subscription_events") == 1


def test_a_keeper_skips_moves_and_drops(session, admin):
    subscribe(admin)
    publish(admin, "a")
    connection = session("admin")
    with (
        pytest.raises(ZeroDivisionError),
        ConsumerTransaction(EventFeed("g"), connection.info.dsn) as consumer,
    ):
        consumer.claim(1)
        raise ZeroDivisionError
    connection.execute("select pgmb.skip_batch('g', 'no use')")
    connection.execute("select * from pgmb.status(), pgmb.dispatching()")
    connection.execute("select pgmb.replay_faults()")
    connection.execute("select pgmb.move_consumer('g', pgmb.point_of())")
    assert one(connection, "select count(*) from pgmb.unread_events") == 0
    connection.execute("select pgmb.maintain_events_table()")
    connection.execute("select pgmb.drop_consumer('g')")


def test_a_condition_cannot_be_planted_by_a_name_in_a_temporary_schema(session, admin):
    subscribe(admin)
    publish(admin, "a")
    connection = session("consumer")
    connection.execute("create temporary table dispatcher (version bigint)")
    connection.execute("create temporary table published (txid xid8)")
    assert one(connection, "select pgmb.poll_for_events()") == 1


def test_a_dispatcher_dispatches_and_looks_and_reads_nothing(session, admin):
    subscribe(admin)
    publish(admin, "a")
    connection = session("dispatcher")
    assert poll_all(connection) == 1
    assert one(connection, "select ready from pgmb.status()") == 1
    for statement in ("select * from pgmb.events", "select * from pgmb.read_next_events('g', peek => true)"):
        with pytest.raises(DENIED):
            connection.execute(statement)
