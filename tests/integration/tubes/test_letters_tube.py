"""Dead letters of tubes: the ids of a batch that was given up, touched again."""

from __future__ import annotations

import pytest

from airflow_pgchange.admin import dead_letters, manual_operations
from airflow_pgchange.feeds import ConsumerTransaction, TubeFeed
from tests.letters import only
from tests.tubes import attach, claim, detach, drain, make, one, pods, touched

FEED = TubeFeed("q")


def make_item(connection):
    connection.execute("create table item (id bigint primary key)")
    make(connection)
    attach(connection)


@pytest.fixture
def prepared_item():
    return make_item


def give_up(item, worker=0, workers=1):
    assert claim(item, worker, workers) is not None
    one(item, "select tube.skip_batch('q', %s, 'cannot be parsed')", worker)
    return dead_letters.letters(item)[-1].id


def touches(connection):
    """Return (shard, op, ids, payload) of every pod that is not processed yet."""
    rows = connection.execute(
        "select shard, op, array(select unnest(ids) order by 1), payload from q where ids <> '{}' order by seq"
    )
    return [tuple(row) for row in rows]


def test_a_letter_of_a_tube_tells_what_was_given_up(db, item):
    item.execute("insert into item values (1), (2)")
    with pytest.raises(ValueError, match="row"), ConsumerTransaction(FEED, db) as consumer:
        batch = consumer.claim(10)
        raise ValueError("row 1 is too long")
    assert manual_operations.skip_batch(item, item, FEED, "cannot be parsed") == batch.id
    letter = only(item)
    assert (letter.kind, letter.consumer, letter.changes, letter.attempts) == ("tube", "tube:q/0", 2, 1)
    assert (str(letter.batch_id), letter.error) == (batch.id, "ValueError: row 1 is too long")
    assert touched(item) == []


def test_ids_come_again_under_their_shard_with_their_kind_and_payload(item):
    item.execute(
        """select tube.touch('q', 3, '{1,2}', 'T', '{"why": "by hand"}'), tube.touch('q', 4, '{1}', 'D')"""
    )
    item.execute("select tube.touch('q', 3, '{7,8}', 'B')")
    before = touches(item)
    letter = give_up(item)
    assert touches(item) == []
    assert dead_letters.redrive(item, ids=[letter]) == [letter]
    assert touches(item) == before
    assert dead_letters.letters(item) == []


def test_ids_that_are_sent_again_are_worked_once(item):
    item.execute("insert into item values (1), (2)")
    dead_letters.redrive(item, ids=[give_up(item)])
    assert sorted(drain(item)) == [1, 2]
    assert drain(item) == []


def test_sending_is_rolled_back_with_its_letter(item, connect):
    item.execute("insert into item values (1)")
    letter = give_up(item)
    holder = connect(autocommit=False)
    one(holder, "select pgchange.redrive(%s)", letter)
    assert touched(holder) == [1]
    holder.rollback()
    assert touched(item) == []
    assert only(item).id == letter


def test_a_table_that_changed_its_shard_is_touched_under_the_new_one(item):
    item.execute("create table thing (id bigint primary key)")
    attach(item, "thing", shard=5)
    item.execute("insert into item values (1); insert into thing values (2)")
    letter = give_up(item)
    attach(item, shard=7)
    dead_letters.redrive(item, ids=[letter])
    assert pods(item) == [("I", 7, [1]), ("I", 5, [2])]


def test_of_two_tables_that_shared_a_shard_both_are_touched_where_they_are_now(item):
    item.execute("create table thing (id bigint primary key)")
    attach(item, "thing", shard=0)
    item.execute("insert into item values (1)")
    letter = give_up(item)
    attach(item, "thing", shard=9)
    dead_letters.redrive(item, ids=[letter])
    assert sorted(shard for _, shard, _ in pods(item)) == [0, 9]


@pytest.mark.parametrize("harm", ["detached", "dropped"])
def test_a_table_that_left_is_touched_under_the_shard_that_it_had(item, harm):
    item.execute("insert into item values (1)")
    letter = give_up(item)
    if harm == "detached":
        detach(item)
    else:
        item.execute("drop table item")
    dead_letters.redrive(item, ids=[letter])
    assert pods(item) == [("I", 0, [1])]


def test_another_number_of_workers_does_not_matter(item):
    item.execute("select tube.touch('q', 5, '{1}', 'T')")
    letter = give_up(item)
    make(item, workers=4)
    dead_letters.redrive(item, ids=[letter])
    assert drain(item, 1, 4) == [1]


def test_with_a_tube_its_letters_are_forgotten(item):
    item.execute("insert into item values (1)")
    give_up(item)
    item.execute("select tube.tube_ensure_absent('q')")
    make(item)
    assert dead_letters.letters(item) == []


def test_a_big_batch_is_one_letter(item):
    item.execute("insert into item select generate_series(1, 20000)")
    claim(item, limit=100_000)
    one(item, "select tube.skip_batch('q', 0, 'why')")
    letter = only(item)
    assert letter.changes == 20_000
    dead_letters.redrive(item, ids=[letter.id])
    assert touched(item) == list(range(1, 20_001))


def test_a_failure_behind_the_ack_is_noted_too(db, item):
    item.execute("insert into item values (1)")
    with pytest.raises(ValueError, match="late"), ConsumerTransaction(FEED, db) as consumer:
        consumer.claim(10)
        consumer.ack()
        raise ValueError("late")
    manual_operations.skip_batch(item, item, FEED, "why")
    assert only(item).error == "ValueError: late"


def test_an_id_is_erased_from_letters_and_the_others_come_again(item):
    item.execute(
        """select tube.touch('q', 3, '{1,2}', 'T', '{"who": {"mail": "ann"}}'), tube.touch('q', 4, '{1}', 'D'),
                  tube.touch('q', 5, '{7,8}', 'T', '{"who": {"mail": "bob"}}')"""
    )
    letter = give_up(item)
    assert dead_letters.erase_letters(item, "1") == [dead_letters.ErasedLetter(letter, 2)]
    assert dead_letters.erase_letters(item, "bob", field="who.mail") == [dead_letters.ErasedLetter(letter, 2)]
    assert dead_letters.erase_letters(item, "1") == []
    assert "bob" not in str(dead_letters.letter_content(item, letter))
    assert only(item).changes == 1
    dead_letters.redrive(item, ids=[letter])
    assert touches(item) == [(3, "T", [2], {"who": {"mail": "ann"}})]
    # A letter without any remaining id is dropped.
    letter = give_up(item)
    assert dead_letters.erase_letters(item, "2", consumer="tube:other/0") == []
    assert dead_letters.erase_letters(item, "2", consumer="tube:q/0") == [
        dead_letters.ErasedLetter(letter, 1)
    ]
    assert dead_letters.letters(item) == []
