"""Sessions that a drain loop keeps: the next batch gets a session in the state of a new session."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from psycopg.pq import PGconn
from psycopg.rows import dict_row

from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction, sessions, watched_connection
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.draining import Plan, drain
from airflow_pgchange.feeds.sessions import Sessions
from tests import commits

Connection = psycopg.Connection[Any]

LEFT: dict[str, tuple[str, str]] = {
    "a setting": ("set work_mem = '3MB'", "current_setting('work_mem') = '3MB'"),
    "a setting of its own": (
        "select set_config('app.secret', 'x', false)",
        "current_setting('app.secret', true) = 'x'",
    ),
    "a role": ("set role pg_monitor", "current_user = 'pg_monitor'"),
    "a temporary table": ("create temp table left_over (n integer)", "to_regclass('left_over') is not null"),
    "a cursor": ("declare c cursor with hold for select 1", "exists (select from pg_cursors)"),
    "a listener": ("listen news", "exists (select from pg_listening_channels())"),
    "a lock": (
        "select pg_advisory_lock(7)",
        "exists (select from pg_locks where locktype = 'advisory' and pid = pg_backend_pid())",
    ),
    "a prepared statement": ("prepare p as select 1", "exists (select from pg_prepared_statements)"),
}
ATTRIBUTES: dict[str, Callable[[Connection], object]] = {
    "row_factory": lambda c: setattr(c, "row_factory", dict_row),
    "autocommit": lambda c: setattr(c, "autocommit", False),
    "read_only": lambda c: setattr(c, "read_only", True),
    "isolation_level": lambda c: setattr(c, "isolation_level", psycopg.IsolationLevel.SERIALIZABLE),
    "prepare_threshold": lambda c: setattr(c, "prepare_threshold", 1),
    "cursor_factory": lambda c: setattr(c, "cursor_factory", psycopg.RawCursor),
}


def pid(connection: Connection) -> int:
    return connection.info.backend_pid


@pytest.mark.parametrize("kind", LEFT)
def test_settings_of_a_batch_do_not_reach_the_next_batch_of_the_session(db: str, kind: str) -> None:
    leave, is_there = LEFT[kind]
    with Sessions() as kept:
        with kept.connect(db) as first:
            first.execute(leave)
            assert first.execute(f"select {is_there}").fetchone() == (True,)
            of_first = pid(first)
        with kept.connect(db) as second:
            assert pid(second) == of_first
            assert second.execute(f"select coalesce({is_there}, false)").fetchone() == (False,)


def test_a_session_keeps_the_settings_of_a_new_connection(db: str) -> None:
    """The session has the settings of the connection string's options, and those by which the server detects a lost
    client."""
    ours = "select name, setting from pg_settings where source in ('client', 'session') order by name"
    with Sessions() as kept:
        with kept.connect(db) as first:
            at_first = first.execute(ours).fetchall()
        with kept.connect(db) as second:
            assert second.execute(ours).fetchall() == at_first != []


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes_of_the_connection_do_not_reach_the_next_batch(db: str, name: str) -> None:
    with Sessions() as kept:
        with kept.connect(db) as first:
            was = getattr(first, name)
            ATTRIBUTES[name](first)
        with kept.connect(db) as second:
            assert getattr(second, name) == was


def test_handlers_and_adapters_do_not_reach_the_next_batch(db: str) -> None:
    notices: list[object] = []
    with Sessions() as kept:
        with kept.connect(db) as first:
            first.add_notice_handler(notices.append)
            first.adapters.register_loader("int4", psycopg.types.string.TextLoader)
            of_first = pid(first)
        with kept.connect(db) as second:
            second.execute("do $$ begin raise notice 'x'; end $$")
            assert (pid(second), second.execute("select 1").fetchone(), notices) == (of_first, (1,), [])


def test_a_connection_that_a_batch_has_kept_is_closed_and_cannot_use_the_session(db: str) -> None:
    with Sessions() as kept:
        with kept.connect(db) as first:
            pass
        with kept.connect(db):
            assert first.closed
            with pytest.raises(psycopg.OperationalError):
                first.execute("select 1")


def test_a_session_is_watched_without_a_gap(db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that watches sessions may access the session at any moment of the handover.

    Here it does so when the old object closes.
    """
    with Sessions() as kept:
        with kept.connect(db) as first:
            assert isinstance(first, watched_connection.Connection)
            sock = first.sock
            assert sock is not None

            def closed(conninfo: bytes) -> PGconn:
                monkeypatch.setattr(first, "pgconn", PGconn.connect_start(conninfo))
                sock.close_if_gone()
                return first.pgconn

            monkeypatch.setattr(watched_connection, "PGconn", SimpleNamespace(connect_start=closed))
        assert sock.is_open


def test_after_an_error_the_next_batch_gets_a_new_session(db: str) -> None:
    with Sessions() as kept:
        with pytest.raises(ZeroDivisionError), kept.connect(db) as first:
            of_first = pid(first)
            raise ZeroDivisionError
        with kept.connect(db) as second:
            assert pid(second) != of_first


def test_a_session_that_the_server_has_ended_is_replaced(db: str, connect: Callable[[], Connection]) -> None:
    with Sessions() as kept:
        with kept.connect(db) as first:
            of_first = pid(first)
        ended = connect().execute("select pg_terminate_backend(%s, 5000)", [of_first]).fetchone()
        assert ended == (True,)
        with kept.connect(db) as second:
            assert pid(second) != of_first


def test_a_session_is_replaced_when_it_is_old(db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "LIFETIME", 0.0)
    with Sessions() as kept:
        with kept.connect(db) as first:
            of_first = pid(first)
        with kept.connect(db) as second:
            assert pid(second) != of_first


def test_a_connection_to_a_pooler_is_not_kept(pgbouncer: str) -> None:
    """A pooler may give the session to another client in the meantime."""
    with Sessions() as kept:
        with kept.connect(pgbouncer) as first:
            pass
        assert first.closed
        with kept.connect(pgbouncer) as second:
            assert pid(second) != 0
        assert not any(kept._idle.values())


def test_the_batches_of_a_drain_use_the_same_sessions(db: str, connect: Callable[[], Connection]) -> None:
    commits.commits(connect(), 3)
    pids = []

    def process(transaction: ConsumerTransaction, batch: Batch) -> None:
        pids.append((pid(transaction.reader), pid(transaction.connection)))
        transaction.ack()

    done = drain(Plan(CommitFeed("one", 0), db, limit=1, max_batches=None), process)
    assert (done.batches, len(set(pids))) == (3, 1)


def test_the_end_of_the_loop_closes_the_sessions(db: str, connect: Callable[[], Connection]) -> None:
    with Sessions() as kept, kept.connect(db) as first:
        of_first = pid(first)
    gone = "select not exists (select from pg_stat_activity where pid = %s)"
    watcher = connect()
    assert any(watcher.execute(gone, [of_first]).fetchone() == (True,) for _ in range(1000))
