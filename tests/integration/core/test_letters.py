"""Dead letters of the commit queue: given up, and sent again once, to their consumer alone."""

from __future__ import annotations

import pytest

from airflow_pgchange.admin import dead_letters, manual_operations
from airflow_pgchange.admin.health import findings
from airflow_pgchange.admin.maintenance import maintain
from airflow_pgchange.errors import (
    BatchGivenUp,
    BatchNotFinished,
    LetterRefused,
    StaleClaim,
    Stopped,
    UnknownLetter,
)
from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction, end_position
from airflow_pgchange.feeds.consumer_state import lag
from tests.commits import FEED, Failed, claim_and_fail, commits, drain
from tests.letters import give_up, only

pytestmark = pytest.mark.usefixtures("few_sessions")

OTHER = CommitFeed("other", 0)

IN_ORDER = CommitFeed("test", 0, in_order=True)


def claimed(db, feed=FEED, limit=1000, source=None):
    """Process and ack a batch. Return the batch and its changes."""
    with ConsumerTransaction(feed, db, source) as consumer:
        batch = consumer.claim(limit)
        if batch is None:
            return None, []
        ids = [change.id for change in consumer.changes()]
        consumer.ack()
    return batch, ids


def test_a_letter_tells_what_was_given_up_why_by_whom_and_after_how_many_attempts(db, connection):
    ids = commits(connection, 3)
    claim_and_fail(db)
    batch = claim_and_fail(db)
    manual_operations.skip_batch(connection, connection, FEED, "cannot be parsed")
    letter = only(connection)
    assert (letter.kind, letter.consumer, letter.changes) == ("commit", "commits:test/0", len(ids))
    assert (str(letter.batch_id), letter.reason, letter.attempts) == (batch.id, "cannot be parsed", 2)
    assert letter.given_up_by == connection.info.user
    assert (letter.sent_at, letter.on_its_way, letter.hindrance) == (None, False, None)


def test_a_letter_holds_the_error_of_the_last_attempt(db, connection):
    commits(connection)
    for n in (1, 2):
        with pytest.raises(ValueError, match="row"), ConsumerTransaction(FEED, db) as consumer:
            consumer.claim(1)
            raise ValueError(f"row {n} is no JSON")
    manual_operations.skip_batch(connection, connection, FEED, "why")
    assert only(connection).error == "ValueError: row 2 is no JSON"


@pytest.mark.parametrize("end", [KeyboardInterrupt, Stopped])
def test_an_error_of_an_attempt_before_is_kept_where_the_last_one_was_killed_or_stopped(db, connection, end):
    commits(connection)
    with pytest.raises(ValueError, match="first"), ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(1)
        raise ValueError("first")
    with pytest.raises(end), ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(1)
        raise end
    manual_operations.skip_batch(connection, connection, FEED, "why")
    assert only(connection).error == "ValueError: first"


def test_an_error_does_not_outlive_its_batch(db, connection):
    commits(connection)
    claim_and_fail(db)
    drain(db)
    commits(connection)
    with pytest.raises(KeyboardInterrupt), ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(1)
        raise KeyboardInterrupt
    manual_operations.skip_batch(connection, connection, FEED, "why")
    assert only(connection).error is None


def test_a_failure_in_the_ack_is_noted_too(db, connection):
    commits(connection)
    with pytest.raises(ValueError, match="late"), ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(1)
        consumer.ack()
        raise ValueError("late")
    manual_operations.skip_batch(connection, connection, FEED, "why")
    assert only(connection).error == "ValueError: late"


def test_a_batch_of_many_changes_is_one_small_letter(db, connection):
    commits(connection, 50_000)
    claim_and_fail(db, limit=100_000)
    manual_operations.skip_batch(connection, connection, FEED, "why")
    size = connection.execute("select pg_column_size(content), changes from pgchange.letter").fetchall()
    assert size[0][1] == 50_000
    assert size[0][0] < 2000


def test_a_letter_sent_again_is_the_same_batch_with_the_same_changes(db, connection):
    ids = commits(connection, 3)
    batch = claim_and_fail(db)
    manual_operations.skip_batch(connection, connection, FEED, "why")
    later = commits(connection, 2)
    assert drain(db) == later
    dead_letters.redrive(connection, ids=[only(connection).id])
    again, got = claimed(db)
    assert (again.id, got) == (batch.id, ids)
    assert dead_letters.letters(connection) == []
    assert claimed(db) == (None, [])


def test_only_the_consumer_that_gave_a_batch_up_gets_it_again(db, connection):
    letter, ids = give_up(connection, db)
    assert drain(db, feed=OTHER) == ids
    dead_letters.redrive(connection, ids=[letter])
    assert drain(db, feed=OTHER) == []
    assert drain(db, feed=CommitFeed("new", 0)) == ids
    assert drain(db) == ids


def test_a_late_commit_within_the_bounds_of_a_letter_is_not_processed_twice(db, connect, connection):
    slow = connect(autocommit=False)
    late = commits(slow, 2)
    letter, ids = give_up(connection, db)
    slow.commit()
    dead_letters.redrive(connection, ids=[letter])
    assert sorted(drain(db)) == sorted(ids + late)
    assert drain(db) == []


@pytest.mark.parametrize("limit", [1, 2])
def test_a_part_of_a_transaction_can_be_given_up_and_sent_again(db, connection, limit):
    ids = commits(connection, 5)
    assert claimed(db, limit=1)[1] == ids[:1]
    claim_and_fail(db, limit=limit)
    manual_operations.skip_batch(connection, connection, FEED, "why")
    dead_letters.redrive(connection, ids=[only(connection).id])
    assert claimed(db, limit=1)[1] == ids[1 : 1 + limit]
    assert drain(db, limit=1) == ids[1 + limit :]


def test_sending_again_moves_no_progress(db, connection):
    letter, _ = give_up(connection, db)
    commits(connection, 2)
    assert claimed(db, limit=1)[0] is not None
    query = (
        "select snapshot::text, partial_txid, partial_id, commit_id, in_order, source from pubsub.watermark"
    )
    before = connection.execute(query).fetchone()
    dead_letters.redrive(connection, ids=[letter])
    claimed(db)
    assert connection.execute(query).fetchone() == before


def test_a_consumer_in_order_goes_on_in_order_around_a_letter(own_database, connect_to):
    db, connection = own_database, connect_to(own_database)
    letter, ids = give_up(connection, db, feed=IN_ORDER)
    rest = commits(connection, 4)
    assert claimed(db, IN_ORDER, 2)[1] == rest[:2]
    dead_letters.redrive(connection, ids=[letter])
    assert claimed(db, IN_ORDER, 2)[1] == ids
    assert claimed(db, IN_ORDER, 2)[1] == rest[2:]
    assert connection.execute("select in_order from pubsub.watermark").fetchone() == (True,)


def test_a_letter_on_its_way_is_ready(db, connection):
    letter, ids = give_up(connection, db)
    assert lag(connection, connection, FEED, 100).ready == 0
    dead_letters.redrive(connection, ids=[letter])
    found = lag(connection, connection, FEED, 100)
    assert found.ready == len(ids)
    assert found.ready_age is not None
    commits(connection, 2)
    assert lag(connection, connection, FEED, 100).ready == len(ids) + 2


def test_a_letter_that_fails_again_is_the_same_letter_with_more_attempts(db, connection):
    letter, ids = give_up(connection, db)
    dead_letters.redrive(connection, ids=[letter])
    for _ in range(2):
        claim_and_fail(db)
    manual_operations.skip_batch(connection, connection, FEED, "still not")
    found = only(connection)
    assert (found.id, found.attempts, found.reason, found.on_its_way) == (letter, 3, "still not", False)
    assert found.sent_at is not None
    assert found.error.startswith("tests.commits.Failed")
    dead_letters.redrive(connection, ids=[letter])
    assert drain(db) == ids


def test_attempts_on_a_letter_are_counted_anew(db, connection):
    letter, _ = give_up(connection, db)
    dead_letters.redrive(connection, ids=[letter])
    for attempt in (1, 2):
        with pytest.raises(Failed), ConsumerTransaction(FEED, db) as consumer:
            assert consumer.claim(10, max_attempts=2).attempt == attempt
            raise Failed
    with pytest.raises(BatchGivenUp), ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(10, max_attempts=2)


def test_a_batch_in_work_comes_before_a_letter_and_stays_the_same(db, connection):
    letter, given = give_up(connection, db)
    ids = commits(connection, 2)
    batch = claim_and_fail(db)
    dead_letters.redrive(connection, ids=[letter])
    commits(connection)
    again, got = claimed(db)
    assert (again.id, got) == (batch.id, ids)
    assert claimed(db)[1] == given


def test_letters_come_in_the_order_in_which_they_were_sent(db, connection):
    (first, a), (second, b) = give_up(connection, db), give_up(connection, db)
    dead_letters.redrive(connection, ids=[second])
    dead_letters.redrive(connection, ids=[first])
    assert claimed(db)[1] == b
    assert claimed(db)[1] == a


def test_a_letter_in_work_that_is_dropped_keeps_nothing(db, connection):
    letter, _ = give_up(connection, db)
    dead_letters.redrive(connection, ids=[letter])
    with pytest.raises(StaleClaim), ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(10)
        dead_letters.drop_letters(connection, ids=[letter])
        consumer.ack(lambda c: c.execute("create table kept ()"))
    assert connection.execute("select to_regclass('kept')").fetchone() == (None,)
    rest = commits(connection)
    assert drain(db) == rest


def test_a_batch_of_a_letter_that_was_dropped_in_work_is_not_tried_again(db, connection):
    letter, _ = give_up(connection, db)
    dead_letters.redrive(connection, ids=[letter])
    claim_and_fail(db)
    dead_letters.drop_letters(connection, ids=[letter])
    rest = commits(connection)
    assert drain(db) == rest


def test_a_letter_in_work_is_finished_by_who_has_it_and_by_nobody_else(db, connection):
    letter, ids = give_up(connection, db)
    dead_letters.redrive(connection, ids=[letter])
    with ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(10)
        with pytest.raises(LetterRefused, match="on its way"):
            dead_letters.redrive(connection, ids=[letter])
        assert [change.id for change in consumer.changes()] == ids
        consumer.ack()
    with pytest.raises(UnknownLetter):
        dead_letters.redrive(connection, ids=[letter])


def test_a_letter_goes_with_its_results_or_not_at_all(db, connection):
    letter, ids = give_up(connection, db)
    dead_letters.redrive(connection, ids=[letter])
    with pytest.raises(Failed), ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(10)
        consumer.ack()
        raise Failed
    assert only(connection).on_its_way
    assert drain(db) == ids


def test_polling_by_hand_gives_a_letter_too(db, connection):
    letter, ids = give_up(connection, db)
    dead_letters.redrive(connection, ids=[letter])
    rows = connection.execute("select id from pubsub.poll('test', 0)").fetchall()
    assert [row[0] for row in rows] == ids
    assert dead_letters.letters(connection) == []


def test_a_point_is_passed_while_a_letter_is_open_as_it_was_when_it_was_given_up(db, connection):
    letter, _ = give_up(connection, db)
    point = end_position.point(connection, FEED)
    dead_letters.redrive(connection, ids=[letter])
    assert end_position.has_passed(connection, connection, FEED, point)[0]


def test_results_elsewhere_get_a_letter_from_the_source(db, other_db, connect_to, connection):
    source = connect_to(other_db)
    letter, ids = give_up(connection, db, source=other_db, at=source)
    assert dead_letters.letters(source) == []
    dead_letters.redrive(connection, source, ids=[letter])
    assert lag(connection, source, FEED, 100).ready == len(ids)
    assert drain(db, other_db) == ids
    assert dead_letters.letters(connection) == []


def test_a_letter_is_read_from_a_standby_too(own_cluster, own_database, connect_to):
    connection = connect_to(own_database)
    letter, ids = give_up(connection, own_database)
    standby = own_cluster.standby()
    try:
        standby.wait_for_replay(own_cluster)
        dead_letters.redrive(connection, ids=[letter])
        hosts = (
            f"host=127.0.0.1,127.0.0.1 port={standby.port},{own_cluster.port} dbname=postgres user=postgres"
        )
        with ConsumerTransaction(FEED, own_database, hosts) as consumer:
            assert consumer._on_standby
            consumer.claim(10)
            assert [change.id for change in consumer.changes()] == ids
            consumer.ack()
    finally:
        standby.remove()


def test_by_filter_everything_of_a_consumer_is_sent_that_can_be_and_nothing_else(db, connection):
    (first, _), (second, _) = give_up(connection, db), give_up(connection, db)
    other, _ = give_up(connection, db, n=6, feed=OTHER)
    dead_letters.redrive(connection, ids=[first])
    connection.execute(
        "update pgchange.letter set given_up_at = now() - interval '8 days' where id = %s", [second]
    )
    assert dead_letters.redrive(connection, older_than="7 days") == [second]
    assert dead_letters.redrive(connection, consumer="commits:other/0") == [other]
    assert dead_letters.redrive(connection, consumer="commits:test/0") == []


def test_by_filter_letters_are_dropped_and_others_stay(db, connection):
    (first, _), (second, _) = give_up(connection, db), give_up(connection, db)
    connection.execute(
        "update pgchange.letter set given_up_at = now() - interval '8 days' where id = %s", [first]
    )
    assert dead_letters.drop_letters(connection, older_than="7 days") == [first]
    assert dead_letters.drop_letters(connection, consumer="commits:nobody/0") == []
    assert [letter.id for letter in dead_letters.letters(connection)] == [second]


def test_sql_by_hand_does_the_same(db, connection):
    letter, ids = give_up(connection, db)
    give_up(connection, db)
    assert connection.execute("select * from pgchange.redrive(%s)", [letter]).fetchall() == [(letter,)]
    assert drain(db) == ids
    dropped = connection.execute("select pgchange.drop_letters(of_consumer => 'commits:test/0')").fetchall()
    assert len(dropped) == 1
    assert connection.execute("select * from pgchange.letters()").fetchall() == []


def test_giving_up_in_the_consumers_own_transaction_needs_a_batch_that_was_left(db, connection):
    commits(connection)
    with (
        pytest.raises(BatchNotFinished, match="no such batch in work"),
        ConsumerTransaction(FEED, db) as consumer,
    ):
        consumer.give_up("why")
    with pytest.raises(BatchNotFinished, match="of its own"), ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(1)
        consumer.give_up("why")


def test_giving_up_is_rolled_back_with_its_transaction(db, connection):
    ids = commits(connection)
    claim_and_fail(db)
    with pytest.raises(Failed), ConsumerTransaction(FEED, db) as consumer:
        consumer.give_up("why")
        raise Failed
    assert dead_letters.letters(connection) == []
    assert drain(db) == ids


def test_maintenance_names_letters_that_nobody_has_looked_at(db, connection):
    give_up(connection, db)
    letter, _ = give_up(connection, db)
    # The finding counts letters of any age, because no retention is given.
    connection.execute("update pgchange.letter set given_up_at = now() - interval '10 years'")
    (line,) = [line for line in maintain(connection).attention if "dead letter" in line]
    assert line.startswith("commits:test/0: 2 dead letters since ")
    dead_letters.redrive(connection, ids=[letter])
    (line,) = [line for line in maintain(connection).attention if "dead letter" in line]
    assert line.startswith("commits:test/0: 1 dead letter since ")


def test_consumers_with_letters_are_told_with_how_many_and_where_to_look(connection, db):
    give_up(connection, db)
    give_up(connection, db)
    found = connection.execute(
        "select severity, consumer, told, call from pgchange.letters_health()"
    ).fetchall()
    [(severity, consumer, told, call)] = found
    assert (severity, consumer, call) == (
        "warning",
        "commits:test/0",
        "airflow-pgchange letters list --consumer commits:test/0",
    )
    assert told.startswith("2 dead letters since 20")


def test_letters_are_counted_up_to_a_thousand_for_each_consumer(connection):
    connection.execute(
        "insert into pgchange.letter (kind, consumer, address, content, changes, reason, attempts, on_its_way) "
        "select 'commit', 'commits:' || c, '{}', '{}', 1, 'x', 1, n > kept "
        "from (values ('few/0', 2, 3), ('many/0', 1001, 1002), ('full/0', 1000, 1000), ('sent/0', 0, 5)) "
        "as v(c, kept, most), generate_series(1, most) as n"
    )
    told = connection.execute("select consumer, told from pgchange.letters_health()").fetchall()
    assert [(consumer, text.split(" since ")[0]) for consumer, text in told] == [
        ("commits:few/0", "2 dead letters"),
        ("commits:full/0", "1000 dead letters"),
        ("commits:many/0", "more than 1000 dead letters"),
    ]


def test_consumers_with_letters_are_told_in_the_order_of_their_names(connection, db):
    for name in ("zeta", "eta", "beta", "alpha", "mu"):
        give_up(connection, db, n=1, feed=CommitFeed(name, 0))
    told = [found.consumer for found in findings(connection, pytest.fail) if found.kind == "letters"]
    assert told == ["commits:alpha/0", "commits:beta/0", "commits:eta/0", "commits:mu/0", "commits:zeta/0"]


def test_letters_that_are_sent_in_one_moment_come_by_their_numbers(db, connection):
    (first, a), (second, b) = give_up(connection, db), give_up(connection, db)
    dead_letters.redrive(connection, ids=[second, first])
    (letters,) = connection.execute(
        "select c.oid::regclass::text from pg_class as c join pg_attribute as a on a.attrelid = c.oid "
        "where a.attname = 'on_its_way' and c.relkind = 'r'"
    ).fetchone()
    connection.execute(f"update {letters} set sent_at = now()")
    assert drain(db) == [*a, *b]


def test_the_oldest_letters_are_dropped_by_maintenance_in_slices_but_not_on_their_way(db, connection):
    letters = [give_up(connection, db, 1)[0] for _ in range(4)]
    connection.execute(
        "update pgchange.letter set given_up_at = now() - interval '91 days' where id <> %s", [letters[3]]
    )
    dead_letters.redrive(connection, ids=[letters[0]])
    # The update moves the row of the oldest letter behind the rows of the others.
    connection.execute("update pgchange.letter set reason = 'other' where id = %s", [letters[1]])
    assert [line for (line,) in connection.execute("select pgchange.expire_letters('90 days', 1)")][1:] == [
        "left more letters for the next run"
    ]
    assert [letter.id for letter in dead_letters.letters(connection)] == [letters[0], *letters[2:]]
    done = maintain(connection, letter_retention="90 days").done
    (line,) = [line for line in done if line.startswith("letters: ")]
    assert line.startswith("letters: dropped 1 that were given up before ")
    assert [letter.id for letter in dead_letters.letters(connection)] == [letters[0], letters[3]]


def test_of_a_letter_that_holds_bounds_alone_only_its_texts_are_erased(db, connection):
    letter, _ = give_up(connection, db)
    connection.execute(
        "update pgchange.letter set error = 'Key (mail)=(ann@x.org) is there', reason = 'ann@x.organic'"
    )
    before = dead_letters.letter_content(connection, letter)
    assert dead_letters.erase_letters(connection, "ann@x.org") == [dead_letters.ErasedLetter(letter, 0)]
    assert dead_letters.erase_letters(connection, "ann@x.org") == []
    assert (only(connection).error, only(connection).reason) == ("erased", "ann@x.organic")
    assert dead_letters.letter_content(connection, letter) == before
