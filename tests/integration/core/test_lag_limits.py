"""The rights to set limits of the lag of consumers, and invalid limits."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from airflow_pgchange.admin import consumers
from airflow_pgchange.admin.health import findings
from airflow_pgchange.errors import InvalidArgument, PermissionDenied, UnknownConsumer
from airflow_pgchange.feeds.error_translation import translated
from tests.commits import commits, drain, narrow_partitions, use_up_transactions
from tests.conftest import Role
from tests.ledger import Connect

pytestmark = pytest.mark.usefixtures("few_sessions")


@pytest.fixture
def connection(connect: Connect) -> psycopg.Connection[Any]:
    """A database with a consumer that has commits before it."""
    connection = connect()
    commits(connection, 2)
    connection.execute("select pubsub.register('test', 0)")
    return connection


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        ("'commits:tset/0'", UnknownConsumer, "there is no consumer commits:tset/0 here"),
        ("'tube:copies/0'", UnknownConsumer, "there is no consumer tube:copies/0 here"),
        ("'diaries:ann'", UnknownConsumer, "there is no consumer diaries:ann here"),
        ("'commits:test/0', '0'", InvalidArgument, "00:00:00 cannot be a limit of commits:test/0"),
        ("'commits:test/0', max_changes => 0", InvalidArgument, "^0 cannot be a limit of commits:test/0"),
    ],
)
def test_a_limit_of_nobody_or_of_nothing_is_refused(
    connection: psycopg.Connection[Any], arguments: str, error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told), translated():
        connection.execute(f"select pgchange.limit_lag({arguments})")


def test_health_says_how_much_a_consumer_keeps_from_being_trimmed_and_why(
    connection: psycopg.Connection[Any], db: str
) -> None:
    """Health names the partitions that are kept because of a consumer, with their size, and the reason why the
    consumer is behind."""
    narrow_partitions(connection)
    commits(connection, 2)
    ((part,),) = connection.execute(
        "select tableoid::regclass::text from revision.commit_queue limit 1"
    ).fetchall()
    use_up_transactions(connection)
    # Pretend that the partition has 3 GB.
    connection.execute("update pg_class set relpages = 393216 where oid = %s::regclass", [part])
    assert why(connection) == "no task has ever worked on it; it keeps about 3 GB of the commit queue"
    connection.execute("update pg_class set relpages = 100000 where oid = %s::regclass", [part])
    assert why(connection) == "no task has ever worked on it"
    assert drain(db)
    commits(connection, 1)
    connection.execute("update pg_class set relpages = 393216 where oid = %s::regclass", [part])
    assert "keeps" not in why(connection)


DAY, HOUR = timedelta(days=1), timedelta(hours=1)


def limits(connection: psycopg.Connection[Any]) -> Any:
    return connection.execute("select * from pgchange.lag_limit_of('commit', 'commits:test/0')").fetchone()


def watched(connection: psycopg.Connection[Any], limits: str) -> None:
    seen = f'[{{"feed": "commits:test/0", "kind": "commit", "ready": 1, "limits": {limits}}}]'
    connection.execute("select pgchange.note_watchers(%s)", [seen])


def test_a_dag_limits_the_lag_for_as_long_as_its_watcher_says_so(connection: psycopg.Connection[Any]) -> None:
    watched(connection, '{"max_lag": 86400, "max_backlog": 7}')
    assert limits(connection) == (DAY, 7)
    watched(connection, "null")
    assert limits(connection) == (DAY, 7), "a sensor says nothing of limits"
    # Let another role watch the same consumer.
    connection.execute(
        "insert into pgchange.watcher (kind, feed, watched_by, max_lag, max_backlog) "
        "values ('commit', 'commits:test/0', 'other', '2 days', 5)"
    )
    assert limits(connection) == (DAY, 5)
    connection.execute("delete from pgchange.watcher where watched_by = 'other'")
    connection.execute("select pgchange.limit_lag('commits:test/0', max_age => '2 days')")
    assert limits(connection) == (timedelta(days=2), None)
    connection.execute("delete from pgchange.lag_limit")
    watched(connection, '{"max_lag": null, "max_backlog": null}')
    assert limits(connection) == (HOUR, None)


def test_a_watcher_that_gives_no_limits_gets_none_of_other_roles_feeds_and_kinds(
    connection: psycopg.Connection[Any],
) -> None:
    connection.execute(
        "insert into pgchange.watcher (kind, feed, watched_by, max_lag, max_backlog) values "
        "('commit', 'commits:test/0', 'other', '2 days', 5), "
        "('commit', 'commits:other/0', current_user, '1 minute', 1), "
        "('other', 'commits:test/0', current_user, '1 minute', 1)"
    )
    watched(connection, "null")
    assert limits(connection) == (timedelta(days=2), 5)
    connection.execute("delete from pgchange.watcher where watched_by = 'other'")
    assert limits(connection) == (HOUR, None)


def why(connection: psycopg.Connection[Any]) -> str:
    ((told,),) = connection.execute("select why from pgchange.reasons()").fetchall()
    return str(told)


def test_a_keeper_sets_limits_and_whoever_sees_the_consumer_gets_the_findings(
    connection: psycopg.Connection[Any], role: Callable[[str], Role]
) -> None:
    reader, keeper = role("reader"), role("keeper")
    connection.execute("select pubsub.grant_consumer(%s::regrole)", [reader.name])
    connection.execute("select pubsub.grant_admin(%s::regrole)", [keeper.name])
    limit = "select pgchange.limit_lag('commits:test/0', max_age => null, max_changes => 1)"
    with psycopg.connect(reader.conninfo, autocommit=True) as session:
        with pytest.raises(PermissionDenied), translated():
            session.execute(limit)
        with psycopg.connect(keeper.conninfo, autocommit=True) as other:
            other.execute(limit)
        rows = consumers.status(session, warn=lambda _: None)
        (found,) = findings(session, lambda _: None, rows)
    assert found.told.endswith("(limit: 1 change): no task has ever worked on it")
    connection.execute("select pgchange.limit_lag('commits:test/0')")
    assert findings(connection) == []
