"""A transaction that changed the catalogue and does not end: others wait for it, but not for ever, and their error names
it."""

from __future__ import annotations

import threading

import pytest
from psycopg import errors

from tests.findings import findings
from tests.waiting import until

CHANGE = "select topology.set_state('r1-i2', 'Offline')"
OTHERS = {
    "a new master": "select topology.set_master('r2', 'r2-i2')",
    "a new replicaset": "select topology.add_replicaset('r3')",
    "buckets": "select topology.move_buckets('default', 0, 9, 'copying', 'r2')",
    "trimming": "select topology.trim_log('1 day')",
    "plain SQL": "update topology._pico_replicaset set weight = 2",
}


@pytest.fixture
def changing(catalogue, connect):
    """Return the process id of a transaction that has changed the catalogue."""
    session = connect()
    with session.transaction(force_rollback=True):
        session.execute(CHANGE)
        yield session.info.backend_pid


@pytest.fixture
def two_phase(catalogue, connect):
    """The name of a prepared transaction that has changed the catalogue."""
    session = connect()
    session.execute("begin")
    session.execute(CHANGE)
    session.execute("prepare transaction 'a change'")
    yield "a change"
    if session.execute("select gid from pg_prepared_xacts where database = current_database()").fetchone():
        session.execute("rollback prepared 'a change'")


@pytest.mark.parametrize("query", OTHERS.values(), ids=OTHERS)
def test_a_change_behind_one_that_does_not_end_fails_and_names_it(catalogue, changing, query):
    catalogue.execute("set lock_timeout = '20ms'")
    with pytest.raises(errors.LockNotAvailable, match="catalogue was not changed: .* does not end") as caught:
        catalogue.execute(query)
    assert f"process {changing} (" in str(caught.value)
    assert f"to end it: select pg_terminate_backend({changing})" in (caught.value.diag.message_hint or "")


def test_a_change_behind_a_prepared_transaction_names_that(catalogue, two_phase):
    catalogue.execute("set lock_timeout = '20ms'")
    with pytest.raises(errors.LockNotAvailable, match="the prepared transaction 'a change'") as caught:
        catalogue.execute(OTHERS["a new master"])
    assert "rollback prepared 'a change'" in (caught.value.diag.message_hint or "")


def test_a_session_that_sets_no_limit_does_not_wait_for_ever(catalogue, changing):
    catalogue.execute(
        "create or replace function pgchange.longest_wait() returns text language sql immutable as $$select '20ms'$$"
    )
    catalogue.execute("set lock_timeout = 0; set statement_timeout = '30s'")
    with pytest.raises(errors.LockNotAvailable, match="does not end"):
        catalogue.execute(OTHERS["a new master"])


def test_a_change_that_has_waited_leaves_the_limit_of_its_session_as_it_was(catalogue, connect):
    first, second = connect(), connect()
    limits = []

    def change():
        with second.transaction():
            second.execute(OTHERS["a new master"])
            limits.append(second.execute("show lock_timeout").fetchone())

    waiter = threading.Thread(target=change)
    with first.transaction():
        first.execute(CHANGE)
        waiter.start()
        until(catalogue, f"select cardinality(pg_blocking_pids({second.info.backend_pid})) = 1")
    waiter.join(30)
    assert limits == [("0",)]


def test_health_names_a_transaction_that_keeps_others_from_changing_the_catalogue(catalogue, changing):
    (line,) = findings(catalogue, "topology", "0 s")
    assert f"the transaction of process {changing} (" in line
    assert f"to end it: select pg_terminate_backend({changing})" in line


def test_health_names_a_prepared_transaction_and_the_call_that_ends_it(catalogue, two_phase):
    (line,) = findings(catalogue, "topology", "0 s")
    assert f"prepared transaction '{two_phase}'" in line
    catalogue.execute(f"rollback prepared '{two_phase}'")
    assert findings(catalogue, "topology", "0 s") == []
    catalogue.execute(OTHERS["a new master"])


def test_health_says_nothing_of_a_change_that_has_just_begun(catalogue, changing):
    assert findings(catalogue, "topology") == []


def test_health_of_all_feeds_has_what_the_topology_says(catalogue, changing):
    catalogue.execute("alter function topology.health(interval) rename to health_within")
    catalogue.execute(
        "create function topology.health() returns setof pgchange.finding language sql as "
        "$$select * from topology.health_within('0 s')$$"
    )
    kinds = catalogue.execute("select kind, severity from pgchange.health()").fetchall()
    assert ("topology", "error") in kinds
