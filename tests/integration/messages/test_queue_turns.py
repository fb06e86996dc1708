"""A transaction that has created a queue and does not end: others who create or drop queues wait for it, but not for
ever."""

from __future__ import annotations

import pytest
from psycopg import errors

from tests.findings import findings

pytestmark = pytest.mark.hstore

MADE = "select mbus.create_queue('slow', 2)"
OTHERS = {
    "a queue": "select mbus.create_queue('other', 2)",
    "a consumer": "select mbus.create_consumer('extra', 'q')",
    "a temporary consumer": "select mbus.create_temporary_consumer('q')",
    "a queue that goes": "select mbus.drop_queue('q')",
}


@pytest.fixture
def changing(q, connect):
    """Return the process id of a transaction that has created a queue."""
    session = connect()
    with session.transaction(force_rollback=True):
        session.execute(MADE)
        yield session.info.backend_pid


@pytest.mark.parametrize("query", OTHERS.values(), ids=OTHERS)
def test_making_or_dropping_a_queue_names_the_open_transaction_in_the_way(q, changing, query):
    q.execute("set lock_timeout = '20ms'")
    with pytest.raises(
        errors.LockNotAvailable, match="message queues were not changed: .* does not end"
    ) as caught:
        q.execute(query)
    assert f"to end it: select pg_terminate_backend({changing})" in (caught.value.diag.message_hint or "")


def test_health_names_a_transaction_that_keeps_others_from_making_queues(q, changing):
    assert findings(q, "mbus") == []
    at_once(q)
    (line,) = findings(q, "mbus")
    assert f"the transaction of process {changing} (" in line
    assert f"to end it: select pg_terminate_backend({changing})" in line


def at_once(connection):
    """Let health name also a transaction that has just begun."""
    (definition,) = connection.execute(
        "select pg_get_functiondef('pgchange.lock_health(text, bigint, text, interval)'::regprocedure)"
    ).fetchone()
    connection.execute(definition.replace("'00:00:10'", "'0'"))
