"""Batches that have failed ``max_attempts`` times."""

from __future__ import annotations

import pytest

from airflow_pgchange.admin import dead_letters, manual_operations
from airflow_pgchange.errors import BatchGivenUp, InvalidArgument, PgChangeError, Stopped
from airflow_pgchange.feeds import ConsumerTransaction
from airflow_pgchange.feeds.draining import Plan, drain
from airflow_pgchange.feeds.queries import ask
from tests.commits import FEED, claim_and_fail, commits
from tests.commits import drain as drain_all
from tests.letters import Poison, drain_but, only, plan

pytestmark = pytest.mark.usefixtures("few_sessions")


def test_after_the_last_try_a_batch_and_its_error_are_a_letter_and_the_consumer_goes_on(db, connection):
    ids = commits(connection, 5)
    assert drain_but({ids[1]}, plan(db, limit=2)) == ids[2:]
    letter = only(connection)
    assert (letter.changes, letter.attempts) == (2, 1)
    assert letter.error == f"tests.letters.Poison: cannot parse {ids[1]}"
    assert "max_attempts=1" in letter.reason
    dead_letters.redrive(connection, ids=[letter.id])
    assert drain_all(db) == ids[:2]


def test_before_the_last_try_a_batch_fails_and_is_tried_again(db, connection):
    ids = commits(connection, 2)
    for _ in range(2):
        with pytest.raises(Poison):
            drain_but({ids[0]}, plan(db, max_attempts=3))
    assert dead_letters.letters(connection) == []
    assert drain_but({ids[0]}, plan(db, max_attempts=3)) == []
    assert only(connection).attempts == 3


def test_a_batch_whose_last_try_was_killed_is_given_up_by_the_next_run_which_goes_on(db, connection):
    poison = commits(connection, 2)
    claim_and_fail(db, limit=2)
    ids = commits(connection, 2)
    assert drain_but(set(), plan(db, limit=2, max_batches=1)) == ids
    assert only(connection).changes == len(poison)


def test_a_batch_that_failed_as_often_as_it_may_stays_and_fails_if_it_is_to_fail(db, connection):
    ids = commits(connection, 2)
    given = plan(db, on_give_up="fail")
    with pytest.raises(Poison):
        drain_but(set(ids), given)
    with pytest.raises(BatchGivenUp):
        drain_but(set(), given)
    assert dead_letters.letters(connection) == []


def test_a_last_try_counts_as_one_of_the_batches_of_a_run(db, connection):
    ids = commits(connection, 5)
    assert drain_but(set(ids), plan(db, limit=1, max_batches=2)) == []
    assert len(dead_letters.letters(connection)) == 2


def test_the_callback_for_letters_gets_their_numbers(db, connection):
    commits(connection, 3)
    told = []

    def fail(transaction, batch):
        raise Poison

    drained = drain(plan(db, limit=2), fail, given_up=told.append)
    assert tuple(told) == drained.letters == tuple(letter.id for letter in dead_letters.letters(connection))
    assert drained.summary()["letters"] == told


def test_a_stopped_task_gives_no_batch_up(db, connection):
    ids = commits(connection)

    def stop(transaction, batch):
        raise Stopped("stopped")

    with pytest.raises(Stopped):
        drain(plan(db), stop)
    assert dead_letters.letters(connection) == []
    assert drain_all(db) == ids


def test_a_letter_that_fails_as_often_as_it_may_goes_back_where_it_was(db, connection):
    ids = commits(connection)
    drain_but(set(ids), plan(db))
    letter = only(connection)
    dead_letters.redrive(connection, ids=[letter.id])
    drain_but(set(ids), plan(db))
    found = only(connection)
    assert (found.id, found.attempts, found.on_its_way) == (letter.id, 2, False)


def test_a_batch_that_cannot_be_given_up_fails_again_and_is_given_up_later(db, connection, monkeypatch):
    ids = commits(connection)

    def refuse(self, reason, batch_id):
        raise PgChangeError("not now")

    with monkeypatch.context() as patch, pytest.raises(Poison):
        patch.setattr(ConsumerTransaction, "give_up", refuse)
        drain_but(set(ids), plan(db))
    assert drain_but(set(), plan(db)) == []
    assert only(connection).error.startswith("tests.letters.Poison")


def test_a_batch_that_another_process_claimed_meanwhile_is_not_given_up(db, connection):
    ids = commits(connection, 2)

    def meanwhile(text):
        assert drain_all(db) == ids
        commits(connection)
        claim_and_fail(db)
        return text

    with pytest.raises(Poison):
        drain_but(set(ids), plan(db, hide=meanwhile))
    assert dead_letters.letters(connection) == []


def test_an_error_that_arrives_after_its_batch_was_acked_is_not_written_on_the_next_batch(db, connection):
    commits(connection)
    acked = claim_and_fail(db)
    drain_all(db)
    commits(connection)
    assert claim_and_fail(db).attempt == acked.attempt
    ask(connection, FEED.note_failure(acked, "the late error"))
    manual_operations.skip_batch(connection, connection, FEED, "no use")
    assert only(connection).error.startswith("tests.commits.Failed")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"on_give_up": "drop"}, "bisect, fail, dead_letter"),
        ({"on_give_up": "dead_letter", "max_attempts": None}, "max_attempts"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(options, says):
    with pytest.raises(InvalidArgument, match=says):
        Plan(FEED, "", **options)


def test_an_error_that_cannot_be_noted_hides_nothing(db, connection, monkeypatch):
    commits(connection)
    monkeypatch.setattr("airflow_pgchange.feeds.error_text.connect", lambda *_, **__: connect_to_nothing())
    with pytest.raises(Poison), ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(1)
        raise Poison
    monkeypatch.undo()
    manual_operations.skip_batch(connection, connection, FEED, "why")
    assert only(connection).error is None


def connect_to_nothing():
    raise PgChangeError("no server")


def test_by_default_a_run_is_one_batch(db, connection):
    ids = commits(connection, 4)
    assert drain_but(set(), Plan(FEED, db, limit=2)) == ids[:2]
