"""Dead letters of the commit queue after the history was trimmed, the source was restored, or the consumer was moved."""

from __future__ import annotations

import pytest
from psycopg.types.json import Jsonb

from airflow_pgchange.admin import dead_letters, manual_operations
from airflow_pgchange.errors import HistoryTrimmed, LetterRefused, SourceRestored
from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction
from tests.commits import FEED, commits, drain, narrow_partitions, use_up_transactions
from tests.letters import give_up, only

pytestmark = pytest.mark.usefixtures("few_sessions")

OTHER = CommitFeed("other", 0)


def trimmed(connection):
    use_up_transactions(connection)
    return manual_operations.trim_commit_queue(connection, "0 s")


def test_a_letter_at_rest_holds_back_no_trimming_and_says_that_it_can_no_longer_be_sent(
    own_database, connect_to
):
    connection = connect_to(own_database)
    narrow_partitions(connection)
    letter, _ = give_up(connection, own_database)
    assert only(connection).hindrance is None
    assert any("trimmed 3 commits" in line for line in trimmed(connection))
    assert "3 of the 3 changes" in only(connection).hindrance
    with pytest.raises(HistoryTrimmed, match="letters drop"):
        dead_letters.redrive(connection, ids=[letter])
    assert dead_letters.redrive(connection, consumer="commits:test/0") == []
    rest = commits(connection)
    assert drain(own_database) == rest


def test_trimming_of_other_history_hinders_no_letter(own_database, connect_to):
    connection = connect_to(own_database)
    narrow_partitions(connection)
    slow = connect_to(own_database, autocommit=False)
    slow.execute("select pg_current_xact_id()")
    commits(connection)
    drain(own_database)
    use_up_transactions(connection, 200)
    # The partition of new rows is not full by the end of the test.
    connection.execute("select revision.maintain_partitions(1000000, 1)")
    letter, ids = give_up(connection, own_database)
    slow.commit()
    assert any("trimmed 1 commits" in line for line in manual_operations.trim_commit_queue(connection, "0 s"))
    dead_letters.redrive(connection, ids=[letter])
    assert drain(own_database) == ids


def test_changes_of_a_letter_on_its_way_are_not_trimmed(own_database, connect_to):
    connection = connect_to(own_database)
    narrow_partitions(connection)
    letter, ids = give_up(connection, own_database)
    dead_letters.redrive(connection, ids=[letter])
    assert any(
        f"letter {letter} of commits:test/0 has not processed it" in line for line in trimmed(connection)
    )
    assert drain(own_database) == ids


def give_up_and_trim(connection, source, db, own_database):
    """A dead letter whose changes were trimmed at the source."""
    narrow_partitions(source)
    letter, _ = give_up(connection, db, source=own_database, at=source)
    use_up_transactions(source)
    commits(source)
    drain(db, own_database)
    trimmed(source)
    return letter


def test_a_letter_whose_source_trimmed_its_history_is_refused_before_its_consumer_gets_it(
    own_database, connect_to, db
):
    connection, source = connect_to(db), connect_to(own_database)
    letter = give_up_and_trim(connection, source, db, own_database)
    assert dead_letters.letters(connection)[0].hindrance is None
    assert "3 of the 3 changes" in dead_letters.letters(connection, source)[0].hindrance
    with pytest.raises(HistoryTrimmed):
        dead_letters.redrive(connection, source, ids=[letter])
    assert not only(connection).on_its_way


def test_a_claim_refuses_a_letter_that_was_trimmed_on_its_way_until_it_is_dropped(
    own_database, connect_to, db
):
    connection, source = connect_to(db), connect_to(own_database)
    letter = give_up_and_trim(connection, source, db, own_database)
    dead_letters.redrive(connection, ids=[letter])
    with (
        pytest.raises(HistoryTrimmed, match="letters drop"),
        ConsumerTransaction(FEED, db, own_database) as c,
    ):
        c.claim(10)
    dead_letters.drop_letters(connection, ids=[letter])
    rest = commits(source)
    assert drain(db, own_database) == rest


def test_a_letter_of_a_source_that_was_restored_is_refused_and_nobody_is_held_up(db, connection):
    (first, _), (second, _) = give_up(connection, db), give_up(connection, db)
    dead_letters.redrive(connection, ids=[second])
    connection.execute("update revision.origin set written_in = '3'")
    connection.execute("select pubsub.rebase_after_restore()")
    with pytest.raises(SourceRestored, match="letters drop"):
        dead_letters.redrive(connection, ids=[first])
    assert not any(letter.on_its_way for letter in dead_letters.letters(connection))
    rest = commits(connection)
    assert drain(db) == rest


def test_an_upgrade_that_keeps_transaction_ids_keeps_letters(own_database, connect_to):
    connection = connect_to(own_database)
    letter, ids = give_up(connection, own_database)
    connection.execute("update revision.origin set written_in = '3'")
    connection.execute("select pubsub.rebase_after_restore(txids_kept => true)")
    dead_letters.redrive(connection, ids=[letter])
    assert drain(own_database) == ids


def test_a_letter_that_the_source_lost_with_its_tail_is_void_after_the_repair(db, other_db, connect_to):
    connection, source = connect_to(db), connect_to(other_db)
    kept, _ = give_up(connection, db, source=other_db, at=source)
    mark = source.execute("select to_jsonb(c) from pgchange.claim as c").fetchone()[0]
    lost, ids = give_up(connection, db, source=other_db, at=source)
    dead_letters.redrive(connection, ids=[lost])
    # The state after a crash: the source has the previous claim, but not the last.
    source.execute("delete from pgchange.claim")
    source.execute(
        "insert into pgchange.claim select (jsonb_populate_record(null::pgchange.claim, %s)).*",
        [Jsonb(mark)],
    )
    assert manual_operations.repair_consumer(connection, source, FEED) == "at least once"
    assert drain(db, other_db) == ids
    with pytest.raises(LetterRefused, match="lost its latest transactions"):
        dead_letters.redrive(connection, source, ids=[lost])
    assert dead_letters.redrive(connection, source, consumer="commits:test/0") == [kept]


@pytest.mark.parametrize("sent", [False, True])
def test_a_letter_behind_which_its_consumer_was_moved_is_void_as_its_changes_come_by_themselves(
    db, connection, sent
):
    letter, ids = give_up(connection, db)
    if sent:
        dead_letters.redrive(connection, ids=[letter])
    manual_operations.move_consumer(connection, connection, FEED, "beginning")
    assert drain(db) == ids
    with pytest.raises(LetterRefused, match="come by themselves"):
        dead_letters.redrive(connection, ids=[letter])
    assert drain(db) == []


def test_a_letter_that_is_void_stays_so_for_the_reason_that_made_it_so(db, other_db, connect_to):
    connection, source = connect_to(db), connect_to(other_db)
    letter, _ = give_up(connection, db, source=other_db, at=source)
    source.execute("delete from pgchange.claim")
    manual_operations.repair_consumer(connection, source, FEED)
    manual_operations.move_consumer(connection, source, FEED, "beginning")
    with pytest.raises(LetterRefused, match="lost its latest transactions"):
        dead_letters.redrive(connection, source, ids=[letter])


def test_a_move_ahead_leaves_letters_as_they_are(db, connection):
    letter, ids = give_up(connection, db)
    commits(connection)
    manual_operations.move_consumer(connection, connection, FEED, "now")
    dead_letters.redrive(connection, ids=[letter])
    assert drain(db) == ids


def test_with_a_consumer_its_letters_are_forgotten(db, connection):
    give_up(connection, db)
    other, _ = give_up(connection, db, n=6, feed=OTHER)
    manual_operations.drop_consumer(connection, connection, FEED)
    assert [letter.id for letter in dead_letters.letters(connection)] == [other]


@pytest.mark.parametrize(("at", "covers"), [(6, False), (7, True), (8, True)])
def test_a_watermark_has_passed_a_batch_where_it_stands_at_its_end_within_a_transaction(connect, at, covers):
    """If a transaction has more commits than the limit, a batch ends at one of their ids."""
    places = [Jsonb({"snapshot": "9:9:", "partial": [9, n]}) for n in (at, 7)]
    [found] = connect().execute("select pubsub.covers(%s, %s)", places).fetchone()
    assert found == covers
