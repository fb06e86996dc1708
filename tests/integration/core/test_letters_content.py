"""The content of a dead letter of the commit queue, for people."""

from __future__ import annotations

import pytest

from airflow_pgchange.admin import dead_letters, manual_operations
from airflow_pgchange.feeds import ConsumerTransaction
from tests.commits import FEED, Failed, claim_and_fail, commits


def test_a_letter_tells_the_first_of_its_commits_in_their_order(db, connection):
    ids = commits(connection, 120)
    claim_and_fail(db, limit=110)
    manual_operations.skip_batch(connection, connection, FEED, "bad")
    (letter,) = dead_letters.letters(connection)
    held = dead_letters.letter_content(connection, letter.id)
    assert [commit["id"] for commit in held["commits"]] == ids[:100]
    assert held["count"] == 110


def test_a_letter_whose_commits_are_elsewhere_tells_where_they_begin_and_end(db, other_db, connect_to):
    results, source = connect_to(db), connect_to(other_db)
    commits(source)
    with pytest.raises(Failed), ConsumerTransaction(FEED, db, other_db) as consumer:
        consumer.claim(10)
        raise Failed
    manual_operations.skip_batch(results, source, FEED, "bad")
    (letter,) = dead_letters.letters(results, source)
    assert "commits" not in dead_letters.letter_content(results, letter.id)
