"""The history of batches and the samples of watchers, as the database shows them to people."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from airflow_pgchange.admin.health import findings
from airflow_pgchange.admin.maintenance import maintain
from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction, TubeFeed
from airflow_pgchange.feeds.connections import connect_async
from airflow_pgchange.feeds.feed import Watched
from airflow_pgchange.triggers.observations import RECORD_EVERY, Observation, Observations, record
from tests.commits import commits
from tests.conftest import Role
from tests.ledger import Connect

pytestmark = pytest.mark.usefixtures("few_sessions")

FEED = CommitFeed("test", 0)
Connection = psycopg.Connection[Any]


@pytest.fixture
def connection(connect: Connect) -> Connection:
    """A database with commits that nobody has processed."""
    connection = connect()
    commits(connection)
    return connection


def work(results: str, source: str | None = None, fails: bool = False) -> None:
    with (
        contextlib.suppress(ZeroDivisionError),
        ConsumerTransaction(FEED, results, source) as transaction,
    ):
        transaction.claim(1)
        if fails:
            raise ZeroDivisionError("no reason")
        transaction.ack()


def batches(connection: Connection) -> list[tuple[Any, ...]]:
    """Return for each attempt, the first first: its number, its changes, and whether it was claimed, acked, failed or
    skipped."""
    return connection.execute("""
        select attempt, count, claimed_at is not null, acked_at is not null, failed_at is not null,
               skipped_at is not null
        from pgchange.batches('commits:test/0') order by noted_at
    """).fetchall()


def test_where_results_are_elsewhere_each_database_keeps_what_it_knows(
    db: str, other_db: str, connection: Connection, connect_to: Callable[[str], Connection]
) -> None:
    work(other_db, db)
    assert batches(connection) == [(1, 1, True, False, False, False)]
    assert batches(connect_to(other_db)) == [(1, 1, False, True, False, False)]


def test_an_attempt_is_noted_with_who_makes_it_wherever_the_results_are(
    db: str, other_db: str, connection: Connection
) -> None:
    for run in (None, "x" * 2000, "somebody"):
        with (
            contextlib.suppress(ZeroDivisionError),
            ConsumerTransaction(FEED, other_db, db, run=run) as transaction,
        ):
            transaction.claim(1)
            raise ZeroDivisionError
    noted = connection.execute(
        "select run from pgchange.batches('commits:test/0') order by attempt"
    ).fetchall()
    assert noted == [(None,), ("x" * 1000,), ("somebody",)]


def rows_read(connection: Connection, table: str) -> int:
    """Return the recent reads of this session from a table and its indexes."""
    query = """
        select (seq_tup_read + idx_tup_fetch)::integer from pg_stat_xact_user_tables where relid = %s::regclass
    """
    return connection.execute(query, [table]).fetchall()[0][0]


def test_maintenance_forgets_what_is_old_and_all_but_so_many_of_a_consumer(
    db: str, connection: Connection
) -> None:
    for _ in range(3):
        work(db, fails=True)
    connection.execute("update pgchange.batch set noted_at = now() - interval '8 days' where attempt = 1")
    assert "deleted 1 attempts on batches" in maintain(connection).done
    connection.execute("select pgchange.trim_batches(most => 1)")
    assert [attempt for attempt, *_ in batches(connection)] == [3]


def test_maintenance_goes_on_while_a_transaction_has_forgotten_as_many_attempts_as_it_may(
    connection: Connection,
) -> None:
    connection.execute("""
        insert into pgchange.batch (kind, consumer, batch_id, attempt, number, count, noted_at)
        select 'commit', 'commits:test/0', gen_random_uuid(), 1, 1, 1, now() - interval '8 days'
        from generate_series(1, 10001)
    """)
    said = maintain(connection).done
    assert [line for line in said if "attempts on batches" in line] == [
        "deleted 10000 attempts on batches",
        "deleted 1 attempts on batches",
    ]
    assert batches(connection) == []


def test_maintenance_forgets_no_attempt_that_is_just_being_acked_and_waits_for_no_ack(
    db: str, connection: Connection, connect: Connect
) -> None:
    work(db, fails=True)
    work(db)
    with connect() as acking, acking.transaction():
        acking.execute("update pgchange.batch set acked_at = now() where attempt = 1")
        connection.execute("set lock_timeout = '1s'")
        connection.execute("select pgchange.trim_batches(most => 0)")
    assert [attempt for attempt, *_ in batches(connection)] == [1]


def test_the_latest_attempts_are_read_and_no_others(connection: Connection) -> None:
    connection.execute("""
        insert into pgchange.batch (kind, consumer, batch_id, attempt, number, count, noted_at)
        select 'commit', case when i > 4900 then 'idle' else 'busy' end, gen_random_uuid(), 1, 5000 - i, 1,
               now() - i * interval '1 s'
        from generate_series(1, 5000) as i
    """)
    connection.execute("analyze pgchange.batch")
    for of_consumer, most in ((None, 10), ("idle", 200)):
        with connection.transaction():
            connection.execute("select from pgchange.batches(%s, 10)", [of_consumer])
            assert 10 <= rows_read(connection, "pgchange.batch") <= most


@pytest.mark.parametrize("analysed", [False, True])
def test_to_forget_attempts_reads_what_is_forgotten_and_little_else(
    connection: Connection, analysed: bool
) -> None:
    connection.execute("""
        insert into pgchange.batch (kind, consumer, batch_id, attempt, number, count, noted_at)
        select 'commit', i % 10, gen_random_uuid(), 1, i / 10, 1, now() - (5000 - i) * interval '1 s'
        from generate_series(1, 5000) as i
    """)
    if analysed:
        connection.execute("vacuum analyze pgchange.batch")
    for given, gone in (("", 0), ("keep => interval '4000 s'", 1000), ("most => 300", 1000)):
        with connection.transaction():
            before = rows_read(connection, "pgchange.batch")
            told = connection.execute(f"select pgchange.trim_batches({given})").fetchall()
            assert told == ([(f"deleted {gone} attempts on batches",)] if gone else [])
            assert rows_read(connection, "pgchange.batch") - before <= gone + 20


def test_old_notes_cost_nothing_while_a_snapshot_keeps_them(connection: Connection, connect: Connect) -> None:
    note = """select pgchange.note_watchers('[{"feed": "f", "kind": "commit", "ready": 0}]')"""
    queries = [
        note,
        "select * from pgchange.watchers()",
        "select pgchange.lag_limit_of('commit', 'f')",
        "select pgchange.trim_watchers()",
    ]

    def buffers() -> list[int]:
        explained = "explain (analyze, buffers, format json) "
        plans = [connection.execute(explained + query).fetchall()[0][0][0]["Plan"] for query in queries]
        return [plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] for plan in plans]

    connection.execute(note)
    buffers()
    before = buffers()
    with connect().transaction() as held:
        held.connection.execute("set transaction isolation level repeatable read")
        held.connection.execute("select 1")
        connection.execute(f"do $$ begin for i in 1..500 loop perform ({note[7:]}); commit; end loop; end $$")
        assert all(late <= early + 10 for late, early in zip(buffers(), before, strict=True))


def test_watchers_that_are_left_to_the_next_time_are_told_of(connection: Connection) -> None:
    connection.execute("""
        insert into pgchange.watcher (feed, kind, looked_at)
        select i, 'commit', now() - interval '8 days' from generate_series(1, 1001) as i
    """)
    forgotten = [len(connection.execute("select pgchange.trim_watchers()").fetchall()) for _ in range(3)]
    assert forgotten == [1000 + 1, 1, 0]


def noted(dsn: str, watchers: dict[Watched, Observations], now: float = 0) -> bool:
    async def once() -> bool:
        async with await connect_async(dsn) as connection:
            return await record(connection, watchers, now)

    return asyncio.run(once())


def test_a_feed_that_cannot_be_watched_is_a_finding_until_it_can_be_again(
    db: str, connection: Connection
) -> None:
    blind, seeing = (
        {FEED: Observations(Observation(error="no answer"))},
        {FEED: Observations(Observation(ready=7))},
    )
    assert noted(db, blind)  # type: ignore[arg-type]
    (found,) = findings(connection, pytest.fail)
    assert (found.kind, found.severity, found.consumer) == ("commit", "error", "commits:test/0")
    assert found.told.startswith("it cannot be watched by postgres since ")
    assert found.told.endswith(": no answer")
    assert noted(db, seeing)  # type: ignore[arg-type]
    assert findings(connection, pytest.fail) == []
    query = "select feed, error, ready, since <= looked_at from pgchange.watchers()"
    assert connection.execute(query).fetchall() == [("commits:test/0", None, 7, True)]


def test_watched_feeds_of_one_name_are_one_of_which_the_trouble_is_told(connection: Connection) -> None:
    connection.execute(
        "select pgchange.note_watchers(jsonb_build_array("
        "jsonb_build_object('feed', 'twin', 'kind', 'commit', 'ready', 1), "
        "jsonb_build_object('feed', 'twin', 'kind', 'commit', 'error', 'no answer'), "
        "jsonb_build_object('feed', 'twin', 'kind', 'commit', 'ready', 2)))"
    )
    watched = connection.execute("select feed, error from pgchange.watchers()").fetchall()
    assert watched == [("twin", "no answer")]


def test_a_watcher_tells_when_it_last_woke_anybody(db: str, connection: Connection) -> None:
    watcher = Observations(Observation(ready=1))
    query = "select woke_at, looked_at - woke_at from pgchange.watchers()"
    assert noted(db, {FEED: watcher})
    assert connection.execute(query).fetchall() == [(None, None)]
    watcher.woke_at = -60.0
    assert noted(db, {FEED: watcher})
    ((woke_at, before),) = connection.execute(query).fetchall()
    assert before >= timedelta(seconds=60)
    assert noted(db, {FEED: watcher})
    assert connection.execute(query).fetchall()[0][0] == woke_at
    assert noted(db, {FEED: Observations(Observation(ready=1), woke_at=-3600.0)})
    assert connection.execute(query).fetchall()[0][0] == woke_at


def test_a_watcher_that_looks_no_more_is_no_finding_and_is_forgotten(db: str, connection: Connection) -> None:
    noted(db, {FEED: Observations(Observation(error="no answer"))})
    connection.execute("update pgchange.watcher set looked_at = now() - interval '8 days'")
    assert findings(connection, pytest.fail) == []
    assert "deleted the watcher of commits:test/0" in maintain(connection).done
    assert connection.execute("select from pgchange.watchers()").fetchall() == []


def test_sight_is_noted_when_it_is_lost_or_found_and_else_from_time_to_time() -> None:
    watcher = Observations()
    assert not watcher.is_due(0)
    watcher.latest = Observation(ready=1)
    assert watcher.is_due(0)
    watcher.recorded, watcher.recorded_at = watcher.latest, 0
    watcher.latest = Observation(ready=2)
    assert not watcher.is_due(RECORD_EVERY - 1)
    assert watcher.is_due(RECORD_EVERY)
    watcher.latest = Observation(error="no answer")
    assert watcher.is_due(1)


def test_a_role_that_administers_no_feed_sees_its_own_watchers_and_no_batches(
    db: str, connection: Connection, role: Callable[[str], Role]
) -> None:
    work(db)
    reader, keeper, stranger = role("reader"), role("keeper"), role("stranger")
    connection.execute("select pubsub.grant_consumer(%s::regrole)", [reader.name])
    connection.execute("select pubsub.grant_admin(%s::regrole)", [keeper.name])
    assert noted(reader.conninfo, {FEED: Observations(Observation(ready=1))})
    assert not noted(stranger.conninfo, {FEED: Observations(Observation(ready=1))})
    seen = {}
    for who in (reader, keeper):
        with psycopg.connect(who.conninfo) as session:
            batch = session.execute("select from pgchange.batches()").fetchall()
            watchers = session.execute("select watched_by from pgchange.watchers()").fetchall()
            seen[who] = (len(batch), watchers)
    assert seen == {reader: (0, [(reader.name,)]), keeper: (1, [(reader.name,)])}


def test_a_role_that_works_some_tubes_sees_no_watchers_of_other_tubes(
    connection: Connection, role: Callable[[str], Role]
) -> None:
    watcher, other = role("watcher"), role("other")
    for who in (watcher, other):
        connection.execute("select tube.grant_consumer(%s::regrole)", [who.name])
    assert noted(watcher.conninfo, {TubeFeed("secret"): Observations(Observation(ready=1))})
    with psycopg.connect(other.conninfo) as session:
        assert session.execute("select from pgchange.watchers()").fetchall() == []


def test_a_role_that_recreates_a_dropped_schema_administers_no_feed(
    db: str, connection: Connection, role: Callable[[str], Role]
) -> None:
    work(db)
    maker = role("maker")
    connection.execute("select topology.grant_consumer(%s::regrole)", [maker.name])
    connection.execute("drop schema pubsub cascade")
    (name,) = connection.execute("select current_database()").fetchall()[0]
    connection.execute(f'grant create on database "{name}" to "{maker.name}"')
    with psycopg.connect(maker.conninfo) as session:
        session.execute("create schema pubsub")
        for function in ("letter_rights(jsonb)", "adopt_mark(text, bigint, jsonb)"):
            session.execute(
                f"create function pubsub.{function} returns text[] language sql as 'select null::text[]'"
            )
        assert session.execute("select from pgchange.batches()").fetchall() == []


def test_feeds_of_one_name_and_of_long_names_are_noted(db: str, connection: Connection) -> None:
    long = CommitFeed("".join(map(str, range(2000))), 0)
    same = (TubeFeed("copies", 0, 1), TubeFeed("copies", 0, 2))
    assert noted(
        db,
        {
            long: Observations(Observation(ready=1)),
            same[0]: Observations(Observation(ready=2)),
            same[1]: Observations(Observation(error="it has other workers")),
        },
    )
    seen = connection.execute("select left(feed, 13), error from pgchange.watchers()").fetchall()
    assert seen == [(long.name[:13], None), ("tube:copies/0", "it has other workers")]
