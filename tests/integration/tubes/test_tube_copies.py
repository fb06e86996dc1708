"""Copies that the shipped Spark application keeps, of shards, several tables and tubes; and the ids that they return."""

from __future__ import annotations

import re
import runpy
import threading
from pathlib import Path

import psycopg
import pytest

from airflow_pgchange import tubes
from airflow_pgchange.errors import InvalidArgument, MergeRefused
from airflow_pgchange.feeds import TubeFeed
from airflow_pgchange.tubes import TableDownstream, work_off
from tests.spark_session import batch_of
from tests.tubes import attach, detach, make, one
from tests.waiting import until, waits

MIRROR = Path(__file__).parents[3] / "dags" / "spark" / "mirror.py"
COPIES = TubeFeed("copies")
COPY = "{tube}.{table}"


@pytest.fixture
def replay(db, monkeypatch):
    """Process one batch with dags/spark/mirror.py."""

    def run(feed=COPIES):
        with batch_of(feed, db) as job:
            monkeypatch.setattr("airflow_pgchange.batch_jobs", lambda: [job])
            runpy.run_path(str(MIRROR))

    return run


@pytest.fixture
def settle(db, connect, replay):
    """Do all work of a tube's worker until nothing is left."""

    def run(feed=COPIES):
        connection = connect()
        while one(connection, f"select count(*) from {feed.tube}"):
            if one(connection, f"select count(*) from {feed.tube} where ids <> '{{}}'"):
                replay(feed)
            work_off(feed, db, TableDownstream(db, db, feed, COPY))

    return run


def make_shards(connection):
    """Create a table in two shards with partly the same ids, and a copy of both."""
    connection.execute(
        "create schema copies; create table copies.flight (shard int, id bigint, word text, primary key (shard, id))"
    )
    make(connection, "copies")
    for shard in (1, 2):
        name = f"sh000{shard}"
        connection.execute(
            f"create schema {name}; create table {name}.flight (id bigint primary key, word text)"
        )
        attach(connection, f"{name}.flight", "copies", None)
        connection.execute(f"insert into {name}.flight values (1, '{name}'), (10 * {shard}, '{name}')")


@pytest.fixture
def prepared_shards():
    return make_shards


@pytest.fixture
def shards(prepared_shards, connect):
    return connect()


@pytest.fixture
def copied(shards):
    """The two tables, once the copy has everything that was touched."""
    shards.execute(f"insert into copies.flight {BOTH}; delete from copies")
    return shards


BOTH = "select 1 as shard, * from sh0001.flight union all select 2, * from sh0002.flight"


def rows(connection, query):
    return connection.execute(f"select * from ({query}) as r order by 1, 2").fetchall()


def test_equal_ids_of_two_shards_do_not_overwrite_each_other(shards, settle):
    settle()
    assert rows(shards, "select * from copies.flight") == rows(shards, BOTH)


def test_a_row_that_is_deleted_in_one_shard_stays_in_the_other(copied, settle):
    copied.execute("delete from sh0001.flight where id = 1")
    settle()
    assert rows(copied, "select * from copies.flight") == rows(copied, BOTH)


def test_a_backfill_of_one_shard_gives_up_what_that_shard_lost_and_nothing_of_another(copied, settle):
    copied.execute("insert into copies.flight values (1, 77, 'ghost'), (2, 77, 'ghost')")
    tubes.backfill(copied, "copies", "sh0001.flight", "id")
    settle()
    assert rows(copied, "select * from copies.flight") == rows(
        copied, BOTH + " union all select 2, 77, 'ghost'"
    )


def test_a_truncate_of_one_shard_empties_the_copy_of_that_shard(copied, settle):
    copied.execute("truncate sh0001.flight")
    settle()
    assert rows(copied, "select * from copies.flight") == rows(copied, BOTH)


def test_a_copy_stays_that_of_several_tables_when_one_of_them_was_detached(copied, settle):
    detach(copied, "sh0002.flight", "copies")
    copied.execute("update sh0001.flight set word = 'new'")
    settle()
    assert rows(copied, "select * from copies.flight") == rows(copied, BOTH)


@pytest.mark.parametrize("detached", [False, True])
def test_a_copy_stays_that_of_several_tables_when_one_of_them_was_dropped(copied, settle, detached):
    left = rows(copied, "select * from copies.flight where shard = 2")
    if detached:
        detach(copied, "sh0002.flight", "copies")
    copied.execute(
        "drop table sh0002.flight; update sh0001.flight set word = 'new'; delete from sh0001.flight where id = 1"
    )
    settle()
    tubes.backfill(copied, "copies", "sh0001.flight", "id")
    settle()
    assert rows(copied, "select * from copies.flight where shard = 1") == rows(
        copied, "select 1, * from sh0001.flight"
    )
    assert rows(copied, "select * from copies.flight where shard = 2") == left


def test_a_table_that_has_no_copy_stops_none_of_another_shard(copied, settle):
    copied.execute("create schema sh0003; create table sh0003.gate (id bigint primary key)")
    attach(copied, "sh0003.gate", "copies", None)
    copied.execute("update sh0001.flight set word = 'new'")
    settle()
    assert rows(copied, "select * from copies.flight") == rows(copied, BOTH)


def test_only_tables_of_shards_that_were_touched_are_staged(copied, db):
    copied.execute("update sh0002.flight set word = 'new' where id = 1")
    with batch_of(COPIES, db) as job:
        assert [attached.table for attached in job.attached()] == ["sh0002.flight"]


def test_a_column_that_the_copy_lacks_is_told_with_what_adds_it(copied, settle, connect):
    copied.execute(
        "alter table sh0001.flight add column gate text; insert into sh0001.flight values (8, 'new', 'A1')"
    )
    with pytest.raises(MergeRefused, match="lacks columns of sh0001.flight") as refused:
        settle()
    [add] = re.findall(r"run `(alter table .*?)`", str(refused.value))
    copied.execute(add)
    settle()
    assert one(copied, "select gate from copies.flight where (shard, id) = (1, 8)") == "A1"


def test_other_workers_shards_count_for_who_shares_a_copy(copied, settle, replay, db):
    make(copied, "copies", 2)
    copied.execute("update sh0001.flight set word = 'new'")
    replay(TubeFeed("copies", 1, 2))
    assert rows(copied, "select * from copies.flight") == rows(copied, BOTH)


def test_a_shared_copy_without_a_shard_is_refused_by_name(shards, replay, db):
    shards.execute("drop table copies.flight; create table copies.flight (id bigint primary key, word text)")
    with pytest.raises(
        InvalidArgument, match=r"no column shard to tell them apart. .* make \(shard, id\) the key"
    ):
        replay()
    shards.execute("delete from copies; truncate sh0001.flight")
    with pytest.raises(InvalidArgument, match="no column shard to tell them apart"):
        work_off(COPIES, db, TableDownstream(db, db, COPIES, COPY))


@pytest.fixture
def twins(shards):
    """Two tables of different names that were renamed: both now have the same name, under the same shard."""
    shards.execute("create schema other; create table other.trip (id bigint primary key, word text)")
    attach(shards, "other.trip", "copies", 1)
    shards.execute("alter table other.trip rename to flight")
    return shards


def test_a_second_table_of_one_name_and_shard_is_refused_and_the_first_is_kept(shards, settle):
    shards.execute("create schema other; create table other.flight (id bigint primary key, word text)")
    with pytest.raises(psycopg.Error, match=r"flight would both touch tube copies under shard 1") as told:
        attach(shards, "other.flight", "copies", 1)
    assert (told.value.sqlstate, told.value.diag.message_hint) == (
        "PC008",
        "attach one of them under another shard, or to another tube",
    )
    attach(shards, "other.flight", "copies", 3)
    with pytest.raises(psycopg.Error, match=r"sh0001\.flight would both touch tube copies"):
        attach(shards, "other.flight", "copies", 1)
    make(shards, "early")
    attach(shards, "other.flight", "early", 1)
    shards.execute("update sh0001.flight set word = 'new'")
    settle()
    assert rows(shards, "select * from copies.flight where shard < 3") == rows(shards, BOTH)


def test_of_two_tables_of_one_name_and_shard_that_are_attached_at_once_one_is_refused(shards, connect):
    first, second = connect(autocommit=False), connect()
    shards.execute(
        "create schema a; create schema b; create table a.gate (id bigint primary key);"
        "create table b.gate (id bigint primary key)"
    )
    attach(first, "a.gate", "copies", 1)
    refused: list[psycopg.Error] = []

    def attach_second():
        try:
            attach(second, "b.gate", "copies", 1)
        except psycopg.Error as error:
            refused.append(error)

    thread = threading.Thread(target=attach_second)
    thread.start()
    until(shards, waits(kind="advisory"))
    first.commit()
    thread.join()
    assert [error.sqlstate for error in refused] == ["PC008"]


def test_the_capture_of_tables_that_came_to_one_name_and_shard_is_mended_all_the_same(twins):
    twins.execute("alter table sh0001.flight rename id to number")
    mended = [row[0] for row in twins.execute("select tube.recapture()")]
    assert [line.endswith("was repaired") for line in mended] == [True, True]
    attach(twins, "other.flight", "copies", 1)


def test_two_tables_of_one_name_and_shard_are_refused_by_the_mirror(twins, replay):
    with pytest.raises(InvalidArgument, match=r"sh0001\.flight both touch|other\.flight both touch"):
        replay()


def test_two_tables_of_one_name_and_shard_are_refused_when_they_give_up_rows(twins, db):
    twins.execute("delete from copies; insert into copies.flight values (1, 5, 'x'); truncate other.flight")
    with pytest.raises(InvalidArgument, match="under shard 1, so a copy could not tell their rows apart"):
        work_off(COPIES, db, TableDownstream(db, db, COPIES, COPY))
    assert one(twins, "select count(*) from copies where ids = '{}'") == 1


def test_two_tables_in_a_shard_have_copies_of_their_own(shards, settle):
    """Takes seconds if this test starts the worker's Spark session."""
    shards.execute(
        "create table sh0001.gate (id bigint primary key, word text);"
        "create table copies.gate (id bigint primary key, word text)"
    )
    attach(shards, "sh0001.gate", "copies", None)
    shards.execute("insert into sh0001.gate values (1, 'gate'), (2, 'gate')")
    settle()
    tubes.backfill(shards, "copies", "sh0001.gate", "id")
    shards.execute("truncate sh0001.flight")
    settle()
    assert rows(shards, "select * from copies.gate") == rows(shards, "select * from sh0001.gate")
    assert rows(shards, "select * from copies.flight") == rows(shards, BOTH)


def test_several_tubes_on_a_table_each_keep_a_copy(shards, settle):
    shards.execute(
        "create schema early; create table early.flight (shard int, id bigint, word text, primary key (shard, id))"
    )
    make(shards, "early", predicate="id < 20")
    attach(shards, "sh0001.flight", "early", None)
    attach(shards, "sh0002.flight", "early", None)
    for shard in (1, 2):
        tubes.backfill(shards, "early", f"sh000{shard}.flight", "id")
    settle(TubeFeed("early"))
    settle()
    assert rows(shards, "select * from copies.flight") == rows(shards, BOTH)
    assert rows(shards, "select * from early.flight") == rows(
        shards, f"select * from ({BOTH}) as b where id < 20"
    )


def test_a_table_with_a_shard_of_its_own_cannot_share_a_copy_unseen(shards, replay):
    shards.execute("alter table sh0001.flight add shard int default 7")
    with pytest.raises(InvalidArgument, match='"shard" of its own'):
        replay()


def test_ids_touched_in_a_shard_without_a_table_are_reported(shards, settle, caplog):
    shards.execute("select copies_touch(7, '{1}', 'T')")
    settle()
    assert [record.getMessage() for record in caplog.records if "shard 7" in record.getMessage()] == [
        "no attached table has shard 7: what was touched there is copied nowhere"
    ]


def test_a_detached_tables_copy_is_kept_no_more_and_a_backfill_puts_it_right(copied, settle):
    """Touches of the table from before it was detached are replayed without reading it.

    So it needs a backfill when it is attached again.
    """
    copied.execute("update sh0001.flight set word = 'last'")
    detach(copied, "sh0001.flight", "copies")
    settle()
    assert one(copied, "select count(*) from copies.flight where word = 'last'") == 0
    notices = []
    copied.add_notice_handler(lambda notice: notices.append(notice.message_primary))
    attach(copied, "sh0001.flight", "copies", None)
    assert "backfill" in notices[0]
    tubes.backfill(copied, "copies", "sh0001.flight", "id")
    settle()
    assert rows(copied, "select * from copies.flight") == rows(copied, BOTH)


NAMES = [("Item", "Id"), ("a.b", "key.of"), ("with, comma", "no"), ('quo"te', 'i"d'), ("sélect", "table")]
EACH = pytest.mark.release("a name with all of these oddities is in every run")


@pytest.mark.parametrize(
    ("name", "key"), [('A.b, quo"té', 'Key.of, i"d'), *(pytest.param(*each, marks=EACH) for each in NAMES)]
)
def test_tables_and_id_columns_may_be_called_anything(connect, settle, name, key):
    """Takes seconds if this test starts the worker's Spark session."""
    connection = connect()
    table, column = ('"' + part.replace('"', '""') + '"' for part in (name, key))
    connection.execute("create schema copies; create schema source")
    for schema in ("source", "copies"):
        connection.execute(f"create table {schema}.{table} ({column} bigint primary key, word text)")
    make(connection, "copies", predicate="word <> 'no'")
    attach(connection, f"source.{table}", "copies", key=[key])
    connection.execute(f"insert into copies.{table} values (7, 'ghost')")
    connection.execute(f"truncate source.{table}; insert into source.{table} values (1, 'a'), (2, 'no')")
    settle()
    assert rows(connection, f"select * from copies.{table}") == [(1, "a")]
    connection.execute("select tube.tube_backfill_schedule('copies', %s, 0, 0)", [key])
    connection.execute(f"insert into copies.{table} values (8, 'ghost')")
    settle()
    (attached,) = tubes.attached(connection, "copies")
    tubes.backfill(connection, "copies", attached, key)
    settle()
    assert rows(connection, f"select * from copies.{table}") == [(1, "a")]
    assert one(connection, "select count(*) from tube.fault") == 0


OTHER_KEYS = {
    "text": ("code text", "code", ["text"], "'é, ' || n"),
    "several columns": (
        "no smallint, at timestamptz, price numeric(9,2)",
        "no, at, price",
        ["bigint", "timestamp with time zone", "numeric"],
        "n, timestamptz '2024-11-03 05:30:00.5Z' + n * interval '1 hour', n + 0.5",
    ),
}


@pytest.mark.parametrize("kind", OTHER_KEYS)
def test_a_copy_by_another_key_follows_and_gives_up_what_is_gone(connect, settle, kind):
    """Takes seconds if this test starts the worker's Spark session."""
    columns, key, types, values = OTHER_KEYS[kind]
    connection = connect()
    connection.execute(
        "create schema copies; create schema source; "
        f"create table source.seat ({columns}, word text, primary key ({key})); "
        "create table copies.seat (like source.seat including indexes)"
    )
    make(connection, "copies", predicate="word <> 'no'", key=types)
    attach(connection, "source.seat", "copies")
    ghost = f"insert into copies.seat select {values}, 'ghost' from generate_series(%s::int, %s) as n"
    connection.execute(ghost, [5, 7])
    connection.execute("truncate source.seat")
    connection.execute(
        f"insert into source.seat select {values}, case n when 2 then 'no' else 'a' end from generate_series(1, 4) as n"
    )
    connection.execute("delete from source.seat where word = 'a' and ctid = '(0,4)'")
    settle()
    held, wanted = "select * from copies.seat", "select * from source.seat where word <> 'no'"
    assert rows(connection, held) == rows(connection, wanted)
    assert one(connection, "select count(*) from copies.seat") == 2
    connection.execute(ghost, [6, 8])
    tubes.backfill(connection, "copies", "source.seat", key.split(",")[0])
    settle()
    assert rows(connection, held) == rows(connection, wanted)
    assert one(connection, "select count(*) from tube.fault") == 0
