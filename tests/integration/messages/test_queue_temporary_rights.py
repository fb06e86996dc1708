"""Temporary consumers receive only messages that their makers may receive, and only as long as they may."""

from __future__ import annotations

import psycopg
import pytest

from airflow_pgchange.errors import PgChangeError
from airflow_pgchange.feeds import QueueFeed
from tests.batches import taken
from tests.queues import consume, consumer, drain, make, one, post
from tests.suite.servers import one_of

pytestmark = pytest.mark.hstore

SELECTORS = {
    "wide": "t.properties->'kind' in ('a', 'b')",
    "narrow": "t.properties->'kind' = 'a'",
    "everything": None,
}


class Rights:
    """The rights of a role to consume from queue q, by EXECUTE or by roles."""

    def __init__(self, connection, role, roles):
        self.connection, self.role, self.roles = connection, role, roles

    def change(self, verb, name):
        to = "to" if verb == "grant" else "from"
        what = (
            f"mbus_{self.connection.info.dbname}_consume_q_by_{name}"
            if self.roles
            else f"execute on function mbus.consume_q_by_{name}(), mbus.consumen_q_by_{name}(integer)"
        )
        self.connection.execute(f"{verb} {what} {to} {self.role.name}")


def pytest_generate_tests(metafunc):
    """A normal run grants either by EXECUTE or by roles. A release tests both."""
    if "granted" in metafunc.fixturenames:
        metafunc.parametrize("granted", one_of(["by execute", "by roles"], metafunc))


@pytest.fixture
def rights(granted, connect, role):
    connection = connect()
    make(connection, roles=granted == "by roles")
    for name, selector in SELECTORS.items():
        consumer(connection, name, selector)
    user = role("user")
    connection.execute(
        f"grant usage on schema mbus to {user.name}; grant execute on function "
        "mbus.create_temporary_consumer(text, text), mbus.consume(text, text), mbus.list(), "
        "mbus.can_consume(text, text), mbus.take_lock(text, text), mbus.position(text, text), "
        f"mbus.claim(text, text, jsonb, integer, integer, text) to {user.name}"
    )
    yield Rights(connection, user, granted == "by roles")
    connection.execute("select mbus.drop_queue('q')")


@pytest.fixture
def user(rights, connect_to):
    return connect_to(rights.role.conninfo)


def temporary(user):
    return one(user, "select mbus.create_temporary_consumer('q')")


def refused(user, name):
    """Check that the temporary consumer is refused, in whichever way its maker receives."""
    for call in [
        lambda: consume(user, name),
        lambda: user.execute(f"select mbus.consumen_q_by_{name}(10)"),
        lambda: user.execute(f"select mbus.take_from_q_by_{name}('q.1')"),
    ]:
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="Access denied"):
            call()
    assert one(user, "select mbus.can_consume('q', %s)", name) is False
    return True


@pytest.mark.parametrize("revoked", ["wide", "narrow"])
def test_a_right_that_bound_a_temporary_consumer_ends_it_with_itself(rights, user, revoked):
    for name in ("wide", "narrow"):
        rights.change("grant", name)
    name = temporary(user)
    post(rights.connection, 1, kind="b")
    assert consume(user, name) == "1"
    rights.change("revoke", revoked)
    post(rights.connection, 2, kind="b")
    assert refused(user, name)
    anew = temporary(user)
    assert drain(user, anew) == ([] if revoked == "wide" else ["1", "2"])


def test_a_role_that_may_no_longer_consume_has_no_temporary_consumer(rights, user):
    rights.change("grant", "everything")
    name = temporary(user)
    rights.change("revoke", "everything")
    post(rights.connection, 1, kind="c")
    assert refused(user, name)
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="Access denied"):
        temporary(user)
    with pytest.raises((PgChangeError, psycopg.Error), match="Access denied"):
        taken(QueueFeed("q", name), rights.role.conninfo)


def test_a_right_that_bound_nothing_leaves_a_temporary_consumer(rights, user):
    rights.change("grant", "everything")
    rights.change("grant", "narrow")
    name = temporary(user)
    rights.change("revoke", "narrow")
    post(rights.connection, 1, kind="c")
    assert consume(user, name) == "1"
    rights.change("grant", "wide")
    post(rights.connection, 2, kind="c")
    assert consume(user, name) == "2"
