"""Detached batches of every feed: no lock and no connection is held between claim and ack, and the attempt is the fencing
token."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from airflow_pgchange import detached
from airflow_pgchange.admin import consumers, dead_letters, manual_operations
from airflow_pgchange.admin.health import findings
from airflow_pgchange.detached import Handle
from airflow_pgchange.errors import BatchNotFinished, InvalidArgument, Leased, StaleClaim
from airflow_pgchange.feeds import Batch, CommitFeed, ConsumerTransaction, Feed, connections
from airflow_pgchange.feeds.draining import Plan, drain
from airflow_pgchange.feeds.queries import ask
from tests.integration.core.test_every_feed import FEEDS, MORE, each, each_claim, each_movable
from tests.ledger import Connect
from tests.readme import Guide, track_payments
from tests.waiting import until

Connection = psycopg.Connection[Any]
Fill = Callable[[Any], Any]

only_commits = pytest.mark.parametrize(("feed", "fill"), [FEEDS["commit"]])

NOBODY_ELSE = """
select not exists (select from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid())
   and not exists (select from pg_locks where locktype = 'advisory')
"""


def claimed(feed: Feed, db: str, seconds: float = 600) -> Handle:
    handle = detached.claim(feed, db, lease=seconds, owner="the job")
    assert handle is not None
    return handle


def ended(feed: Feed, db: str) -> Handle:
    """A handle whose lease has ended."""
    handle = claimed(feed, db, 0.001)
    time.sleep(0.01)
    return handle


def note(connection: Connection) -> None:
    connection.execute("insert into public.result values (1)")


@pytest.fixture
def connection(connect: Connect, fill: Fill) -> Connection:
    made = connect()
    fill(made)
    made.execute("create table public.result (n integer)")
    return made


def error_of_the_first(connection: Connection, feed: Feed) -> str | None:
    query = "select error from pgchange.batch where attempt = 1 and kind = %s"
    row = connection.execute(query, [feed.kind]).fetchone()
    return None if row is None else row[0]


def results(connection: Connection) -> int:
    row = connection.execute("select count(*) from public.result").fetchone()
    assert row is not None
    return int(row[0])


@each
def test_between_claim_and_ack_nothing_is_held(feed: Feed, connection: Connection, db: str) -> None:
    handle = claimed(feed, db)
    # A session ends shortly after its connection was closed.
    until(connection, NOBODY_ELSE)
    detached.ack(handle, db, write=note)
    assert (results(connection), detached.claim(feed, db, lease=600, owner="")) == (1, None)


@each
def test_a_leased_batch_is_not_claimed_again(feed: Feed, connection: Connection, db: str) -> None:
    handle = claimed(feed, db)
    if feed.kind == "queue":
        # The workers of a queue share a consumer, so another worker claims the next messages.
        assert detached.claim(feed, db, lease=600, owner="other") is None
    else:
        with pytest.raises(Leased, match="by the job: wait until it is acked or the lease ends"):
            claimed(feed, db)
        with pytest.raises(Leased), ConsumerTransaction(feed, db) as transaction:
            transaction.claim()
    detached.ack(handle, db)


@each
def test_after_the_lease_the_next_attempt_gets_the_batch_and_the_earlier_one_cannot_ack(
    feed: Feed, connection: Connection, db: str
) -> None:
    late = ended(feed, db)
    next_one = claimed(feed, db)
    assert next_one == replace(late, attempt=2)
    with pytest.raises(StaleClaim, match="attempt 1 on batch .* is over: attempt 2 has begun"):
        detached.ack(late, db, write=note)
    with pytest.raises(StaleClaim):
        detached.renew(late, db, lease=600)
    assert not detached.release(late, db)
    detached.ack(next_one, db, write=note)
    assert results(connection) == 1


@each_claim
def test_a_late_ack_is_kept_if_no_other_attempt_has_begun(
    feed: Feed, connection: Connection, db: str
) -> None:
    late = ended(feed, db)
    detached.ack(late, db, write=note)
    assert results(connection) == 1


@each_claim
def test_an_ack_is_refused_by_sql_too_if_another_attempt_has_begun(
    feed: Feed, connection: Connection, db: str
) -> None:
    """The server checks the token, because a client could skip its own check, as this test does."""
    late = ended(feed, db)
    with pytest.raises(StaleClaim), ConsumerTransaction(feed, db) as transaction:
        batch = transaction.resume(late.token)
        transaction.batch = replace(batch, attempt=7)
        transaction.ack(note)
    assert results(connection) == 0


@each_claim
def test_a_second_ack_of_an_attempt_writes_nothing(feed: Feed, connection: Connection, db: str) -> None:
    """A client repeats its ack if the answer to the first ack was lost."""
    handle = claimed(feed, db)
    assert detached.ack(handle, db, write=note)
    MORE[feed.kind](connection)
    assert not detached.ack(handle, db, write=note)
    assert results(connection) == 1


@each_claim
def test_an_ack_of_a_batch_that_was_given_up_is_refused(feed: Feed, connection: Connection, db: str) -> None:
    handle = ended(feed, db)
    manual_operations.skip_batch(connection, connection, feed, "no")
    with pytest.raises(StaleClaim):
        detached.ack(handle, db, write=note)
    assert results(connection) == 0


@each_claim
def test_a_claim_that_is_repeated_by_its_owner_gets_the_batch_with_the_next_attempt(
    feed: Feed, connection: Connection, db: str
) -> None:
    """A client repeats its claim if the connection was lost after the commit of the first claim.

    No lease of another attempt ends.
    """
    lost = claimed(feed, db)
    plan = Plan(feed, db, on_busy="skip", lease=600)
    found: list[Handle] = []

    def keep(transaction: ConsumerTransaction, batch: Batch) -> None:
        found.append(Handle.of(feed, batch, 600))

    drain(replace(plan, owner="other"), keep)
    assert found == []
    drain(replace(plan, owner="the job"), keep)
    assert found == [replace(lost, attempt=2)]


@each_claim
def test_a_leased_consumer_is_at_work_until_the_ack(feed: Feed, connection: Connection, db: str) -> None:
    """The number of attempts does not matter, because the batch has not failed. The lease ends with the ack."""
    for _earlier in range(2):
        ended(feed, db)
    handle = claimed(feed, db)

    def at_work() -> list[bool]:
        return [row["at_work"] for row in consumers.status(connection) if row["consumer"] == feed.name]

    assert at_work() == [True]
    assert [found.told for found in findings(connection) if found.consumer == feed.name] == []
    detached.ack(handle, db)
    until(connection, NOBODY_ELSE)
    assert at_work() == [False]
    with pytest.raises(StaleClaim):
        detached.renew(handle, db, lease=600)
    assert manual_operations.end_leases(connection, feed) == 0


@each
def test_the_owner_and_the_end_of_a_lease_are_shown(feed: Feed, connection: Connection, db: str) -> None:
    handle = claimed(feed, db)
    # Leased messages do not count in a queue's lag.
    MORE[feed.kind](connection)

    def shown() -> Any:
        query = (
            "select s.leased_by, s.leased_until::timestamptz(0)::text, r.why from pgchange.status() as s "
            "left join pgchange.reasons() as r using (kind, consumer) where s.consumer = %s"
        )
        return connection.execute(query, [feed.name]).fetchone()

    owner, end, why = shown()
    assert owner == "the job"
    assert why.startswith("a task is at work on it")
    assert why.endswith(f", leased by the job until {end}")
    detached.ack(handle, db)
    assert shown()[:2] == (None, None)


@each_claim
def test_an_ack_without_results_of_an_application_is_refused_and_is_no_fault_of_the_batch(
    feed: Feed, connection: Connection, db: str
) -> None:
    handle = claimed(feed, db)
    with pytest.raises(BatchNotFinished, match="no application has staged results"):
        detached.ack(handle, db, staged=True)
    detached.release(handle, db)
    with pytest.raises(BatchNotFinished), ConsumerTransaction(feed, db) as transaction:
        # An attempt that an outage ended does not count.
        assert transaction.claim(max_attempts=1, split=True) is not None


@each_claim
def test_a_renewed_lease_lasts_from_now(feed: Feed, connection: Connection, db: str) -> None:
    handle = ended(feed, db)
    detached.renew(handle, db, lease=600)
    if feed.kind == "queue":
        assert detached.claim(feed, db, lease=600, owner="other") is None
    else:
        with pytest.raises(Leased, match="by the job"):
            claimed(feed, db)


@each_claim
def test_a_released_batch_is_claimed_again_and_its_error_is_kept(
    feed: Feed, connection: Connection, db: str
) -> None:
    handle = claimed(feed, db)
    assert detached.release(handle, db, error="it broke", of_batch=True)
    again = claimed(feed, db)
    assert again == replace(handle, attempt=2)
    assert error_of_the_first(connection, feed) == "it broke"


@each_claim
def test_an_error_that_the_attempt_stored_itself_is_kept_unless_the_release_knows_the_cause(
    feed: Feed, connection: Connection, db: str
) -> None:
    handle = claimed(feed, db)
    ask(connection, feed.note_failure(detached.batch_of(handle, db), "division by zero", True))
    detached.release(handle, db, error="a task failed")
    assert error_of_the_first(connection, feed) == "division by zero"
    detached.release(handle, db, error="an outage", of_batch=False)
    assert error_of_the_first(connection, feed) == "an outage"


@only_commits
def test_a_lease_is_renewed_while_a_block_runs(feed: Feed, connection: Connection, db: str) -> None:
    """Takes seconds: the lease has to end if it is not renewed."""
    handle = claimed(feed, db, 1.5)
    with detached.renewed(handle, db):
        time.sleep(1.8)
        with pytest.raises(Leased):
            claimed(feed, db)
    time.sleep(1.6)
    assert claimed(feed, db).attempt == 2


@only_commits
def test_a_block_whose_attempt_is_over_fails_at_its_end(feed: Feed, connection: Connection, db: str) -> None:
    handle = claimed(feed, db)
    with pytest.raises(StaleClaim), detached.renewed(handle, db):
        manual_operations.end_leases(connection, feed)
        claimed(feed, db)
    with pytest.raises(StaleClaim), detached.renewed(handle, db):
        raise AssertionError("the block of an attempt that is over does not run")


@each_claim
def test_the_changes_of_a_handle_are_read_anywhere(feed: Feed, connection: Connection, db: str) -> None:
    handle = Handle.from_text(str(claimed(feed, db)))
    with ConsumerTransaction(handle.feed, db) as transaction:
        # The changes may be read from a standby, which may lag.
        assert transaction.resume(handle.token).lsn is not None
        assert len([*transaction.changes()]) == handle.count
        transaction.ack()


@each_claim
def test_a_drain_waits_until_a_lease_ends(
    feed: Feed, connection: Connection, db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drain keeps its sessions, because the wait may last for hours."""
    claimed(feed, db, 0.3)
    if feed.kind == "queue":
        time.sleep(0.3)
    opened: list[str] = []
    connect = connections.connect
    monkeypatch.setattr(
        connections, "connect", lambda *args, **how: opened.append(db) or connect(*args, **how)
    )
    done = drain(Plan(feed, db), lambda transaction, batch: transaction.ack())
    assert (done.batches, len(opened)) == (1, 2)


@each_movable
def test_a_drain_that_skips_busy_consumers_skips_a_leased_one(
    feed: Feed, connection: Connection, db: str
) -> None:
    claimed(feed, db)
    done = drain(Plan(feed, db, on_busy="skip"), lambda transaction, batch: transaction.ack())
    assert (done.batches, done.busy) == (0, True)


@each_claim
def test_a_leased_batch_is_not_given_up_until_its_lease_is_ended_by_hand(
    feed: Feed, connection: Connection, db: str
) -> None:
    handle = claimed(feed, db)
    with pytest.raises(BatchNotFinished if feed.kind == "queue" else Leased):
        manual_operations.skip_batch(connection, connection, feed, "no")
    assert (
        manual_operations.end_leases(connection, feed),
        manual_operations.end_leases(connection, feed),
    ) == (1, 0)
    assert manual_operations.skip_batch(connection, connection, feed, "no") == handle.batch_id


def test_the_handle_of_a_dead_letter_is_not_that_of_the_letter_sent_again(db: str, connect: Connect) -> None:
    """The batch keeps its id, and its attempts are counted from 1 again."""
    connection = connect()
    feed, fill = FEEDS["commit"]
    fill(connection)
    late = ended(feed, db)
    manual_operations.skip_batch(connection, connection, feed, "no")
    dead_letters.redrive(connection, consumer=feed.name)
    again = claimed(feed, db)
    with pytest.raises(StaleClaim):
        detached.renew(late, db, lease=600)
    with pytest.raises(StaleClaim):
        detached.ack(late, db)
    detached.ack(again, db)
    assert detached.claim(feed, db, lease=600, owner="next") is None


@each_movable
def test_a_consumer_with_a_leased_batch_is_neither_moved_nor_dropped(
    feed: Feed, connection: Connection, db: str
) -> None:
    claimed(feed, db)
    with pytest.raises(Leased):
        manual_operations.move_consumer(connection, connection, feed, "now")  # type: ignore[arg-type]
    with pytest.raises(Leased):
        manual_operations.drop_consumer(connection, connection, feed)  # type: ignore[arg-type]


def test_a_lease_counts_if_the_progress_is_in_another_database(
    db: str, other_db: str, connect: Connect, connect_to: Callable[[str], Connection]
) -> None:
    """The lease is in the database of the changes, the lock in the other."""
    source, there = connect(), connect_to(other_db)
    feed, fill = FEEDS["commit"]
    assert isinstance(feed, CommitFeed)
    fill(source)
    there.execute("create table public.result (n integer)")
    late = detached.claim(feed, other_db, db, lease=0.001, owner="late")
    time.sleep(0.01)
    handle = detached.claim(feed, other_db, db, lease=600, owner="the job")
    assert late is not None
    assert handle is not None
    with pytest.raises(StaleClaim):
        detached.ack(late, other_db, db, write=note)
    assert [row["at_work"] for row in consumers.status(there, source)] == [True]
    with pytest.raises(Leased, match="by the job"):
        manual_operations.drop_consumer(there, source, feed)
    assert detached.ack(handle, other_db, db, write=note)
    assert not detached.ack(handle, other_db, db, write=note)
    assert (results(there), detached.claim(feed, other_db, db, lease=600, owner="next")) == (1, None)


def test_a_tube_keeps_its_workers_while_a_batch_is_leased(db: str, connect: Connect) -> None:
    """When a tube comes to another cluster, the batches of its workers and their leases are dropped."""
    connection = connect()
    feed, fill = FEEDS["tube"]
    fill(connection)
    handle = claimed(feed, db)
    for change in ("tube_ensure_exists('q', 2)", "tube_ensure_absent('q')"):
        with pytest.raises(psycopg.Error, match="is leased until"):
            connection.execute(f"select tube.{change}")
    connection.execute("select tube.rebase_after_restore('q')")
    assert connection.execute("select tube.locked('q', 0)").fetchone() == (False,)
    with pytest.raises(StaleClaim):
        detached.ack(handle, db)
    connection.execute("select tube.tube_ensure_exists('q', 2)")


def test_a_group_with_a_leased_batch_is_neither_read_nor_moved_by_hand(db: str, connect: Connect) -> None:
    """Readers by hand see the group as if another session held its lock."""
    connection = connect()
    feed, fill = FEEDS["event"]
    fill(connection)
    handle = claimed(feed, db)
    read = "select count(*), pgmb.held_here('g') from pgmb.read_next_events('g')"
    assert connection.execute(read).fetchone() == (0, False)
    with pytest.raises(psycopg.Error, match="is leased until"):
        connection.execute("select pgmb.set_group_cursor('g', null)")
    detached.ack(handle, db)
    assert connection.execute(read).fetchone() == (0, True)


@pytest.mark.hstore
def test_the_messages_of_a_leased_batch_are_in_work_and_only_the_batch_takes_them(
    db: str, connect: Connect
) -> None:
    connection = connect()
    feed, fill = FEEDS["queue"]
    fill(connection)
    handle = claimed(feed, db)
    assert connection.execute("select ready, in_work from mbus.queues()").fetchall() == [(0, 1)]
    take = "select (mbus.take('q.1')).iid"
    with pytest.raises(psycopg.Error, match="is leased until"):
        connection.execute(take)
    detached.ack(handle, db, write=lambda own: own.execute(take))


@each_claim
def test_a_batch_that_was_claimed_without_a_lease_must_be_acked(
    feed: Feed, connection: Connection, db: str
) -> None:
    with pytest.raises(BatchNotFinished), ConsumerTransaction(feed, db) as transaction:
        transaction.claim()


def test_the_examples_of_the_guide_work(db: str, connect: Connect) -> None:
    connection = connect()
    track_payments(connection)
    connection.execute("create table report (payments integer)")
    guide = Guide("docs/how-to/detached.md", db, connection)
    guide.run("Claim, work, ack")
    assert connection.execute("select payments from report").fetchall() == [(3,)]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"feed": {"kind": "commit"}}', "x"])
def test_a_text_that_is_no_handle_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        Handle.from_text(text)
