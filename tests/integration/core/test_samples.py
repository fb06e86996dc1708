"""The samples of the last hour of consumers, which the database stores for the page."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from airflow_pgchange.admin import consumers
from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction
from airflow_pgchange.plugins.history import LastHour, Trend
from tests.commits import commits
from tests.conftest import Role
from tests.ledger import Connect
from tests.waiting import until, waits

FEED = CommitFeed("test", 0)
KEY = ("commit", "commits:test/0")
NOTE = 'select pgchange.note_samples(\'[{"kind": "commit", "consumer": "commits:test/0", "ready": 2}]\')'
Connection = psycopg.Connection[Any]


@pytest.fixture
def connection(connect: Connect, db: str) -> Connection:
    """A database with a consumer that has processed one commit, and has two ready."""
    connection = connect()
    commits(connection, 3)
    work(db)
    return connection


def work(db: str) -> None:
    with ConsumerTransaction(FEED, db) as transaction:
        transaction.claim(1)
        transaction.ack()


def look(connection: Connection) -> Trend | None:
    """Return the sample of the consumer."""
    hour = LastHour()
    hour.goes_on(connection, consumers.status(connection))
    assert hour.left_out == []
    return hour.trends.get(KEY)


def later(connection: Connection, seconds: int) -> None:
    """Make all samples and batches older by this number of seconds, as if the time had passed."""
    span = f"interval '{seconds} seconds'"
    connection.execute(f"update pgchange.sample set at = at - {span}")
    connection.execute(
        f"update pgchange.batch set noted_at = noted_at - {span}, acked_at = acked_at - {span}"
    )


def ready(connection: Connection) -> list[int]:
    query = "select ready from pgchange.samples('commit', 'commits:test/0')"
    return [number for (number,) in connection.execute(query).fetchall()]


def test_however_many_look_one_sample_of_a_consumer_is_kept_in_five_seconds(
    db: str, connection: Connection
) -> None:
    rows = [
        {"kind": "commit", "consumer": "commits:test/0", "ready": 2},
        {"kind": "commit", "consumer": "commits:other/0", "ready": 3},
        {"kind": "other", "consumer": "commits:test/0", "ready": 4},
    ]

    def note() -> None:
        with psycopg.connect(db, autocommit=True) as own:
            own.execute("select pgchange.note_samples(%s)", [Jsonb(rows)])

    lookers = [threading.Thread(target=note) for _ in range(8)]
    for looker in lookers:
        looker.start()
    for looker in lookers:
        looker.join()
    assert ready(connection) == [2]
    later(connection, 5)
    note()
    assert ready(connection) == [2, 2]


def test_of_two_sessions_that_note_at_the_same_time_one_does(
    connection: Connection, connect: Connect
) -> None:
    first = connect(autocommit=False)
    first.execute(NOTE)
    assert connection.execute(NOTE).fetchall() == [(0,)]
    first.commit()
    assert ready(connection) == [2]


def test_a_session_that_waited_before_the_lock_notes_no_second_sample(
    db: str, connection: Connection, connect: Connect
) -> None:
    connection.execute(
        """
        create or replace function pgchange.check_face(caller name, face regprocedure) returns void language plpgsql as $$
        begin
            if current_setting('application_name') = 'waits' then
                perform pg_advisory_lock(1);
            end if;
        end
        $$
        """
    )
    connection.execute("select pg_advisory_lock(1)")
    waiting = connect()
    waiting.execute("set application_name = 'waits'")
    waiter = threading.Thread(target=waiting.execute, args=[NOTE])
    waiter.start()
    until(connection, waits(waiting, "advisory"))
    connection.execute(NOTE)
    connection.execute("select pg_advisory_unlock(1)")
    waiter.join()
    assert ready(connection) == [2]


def test_samples_are_kept_for_an_hour(connection: Connection) -> None:
    for _ in range(3):
        look(connection)
        later(connection, 1800)
    look(connection)
    assert len(ready(connection)) == 2
    assert connection.execute("select count(*) from pgchange.sample").fetchall() == [(2,)]


def test_recording_a_sample_does_not_wait_for_the_deletion_of_old_samples(
    connect: Connect, connection: Connection
) -> None:
    connection.execute(NOTE)
    later(connection, 3601)
    other = connect(autocommit=False)
    other.execute("delete from pgchange.sample")
    connection.execute("set statement_timeout = '5s'")
    connection.execute(NOTE)
    assert ready(connection) == [2]


def test_a_role_keeps_so_many_samples_however_many_it_notes_and_others_keep_theirs(
    connection: Connection, role: Any
) -> None:
    look(connection)
    someone: Role = role("someone")
    connection.execute(f"select pgchange.grant_viewer('{someone.name}')")
    connection.execute(
        """
        insert into pgchange.sample (sampled_by, kind, consumer, at, number)
        select %s, 'commit', 'x' || n, now() - interval '1 minute', n from generate_series(1, 10) as n
        """,
        [someone.name],
    )
    connection.execute(
        "update pgchange.sample set number = number + 999990 where consumer ^@ 'x' and number > 5"
    )
    note = Jsonb([{"kind": "commit", "consumer": name} for name in ("y", "z")])
    with psycopg.connect(someone.conninfo, autocommit=True) as session:
        session.execute("select pgchange.note_samples(%s)", [note])
    kept = "select consumer, number from pgchange.sample where sampled_by = %s order by number"
    assert connection.execute(kept, [someone.name]).fetchall() == [
        *((f"x{n}", n) for n in (3, 4, 5)),
        *((f"x{n}", n + 999990) for n in (6, 7, 8, 9, 10)),
        ("y", 1000001),
        ("z", 1000002),
    ]
    assert ready(connection) == [2]


def test_rates_are_of_what_was_processed_and_of_what_came_meanwhile(db: str, connection: Connection) -> None:
    first = look(connection)
    assert first == Trend(None, None, [None] * 29 + [2])
    later(connection, 120)
    work(db)
    commits(connection, 5)
    trend = look(connection)
    assert trend is not None
    assert trend.rate_out == pytest.approx(1 / 120, rel=0.05)
    assert trend.rate_in == pytest.approx(5 / 120, rel=0.05)
    assert trend.ready[-2:] == [2, 6]


def test_a_sample_has_no_rate_if_its_ready_changes_are_estimated(
    connection: Connection,
) -> None:
    look(connection)
    later(connection, 120)
    commits(connection, 2000)
    trend = look(connection)
    assert trend is not None
    assert trend.rate_in is None
    assert trend.rate_out == 0


def test_a_role_is_shown_what_it_was_told_itself_and_rates_of_the_feeds_that_it_looks_after(
    db: str, connection: Connection, role: Any
) -> None:
    viewer: Role = role("viewer")
    connection.execute(
        "select pgchange.grant_viewer(%(who)s::regrole), pubsub.grant_consumer(%(who)s::regrole)",
        {"who": viewer.name},
    )
    look(connection)
    with psycopg.connect(viewer.conninfo, autocommit=True) as session:
        assert ready(session) == []
        assert look(session) == Trend(None, None, [None] * 29 + [2])
        later(connection, 120)
        work(db)
        trend = look(session)
    assert trend == Trend(None, None, [None] * 28 + [2, 1])


def test_a_role_that_may_not_is_told_so_and_sees_the_rest(connection: Connection, role: Any) -> None:
    stranger: Role = role("stranger")
    hour = LastHour()
    with psycopg.connect(stranger.conninfo, autocommit=True) as session:
        hour.goes_on(session, [])
    assert hour.trends == {}
    (told,) = hour.left_out
    assert "the last hour is left out" in told
