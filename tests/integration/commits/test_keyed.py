"""Tables whose key is a uuid, a text or several columns: capture, consumers, backfill and restore."""

from __future__ import annotations

import threading
from uuid import UUID, uuid4

import psycopg
import pytest

from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction
from airflow_pgchange.feeds.keys import Key, text
from tests.commits import Failed, claim_and_fail, drain
from tests.tubes import one

SHAPES = {
    "uuid": ("id uuid primary key", "md5(n::text)::uuid", ("uuid",)),
    "text": ("id text primary key", "md5(n::text)", ("text",)),
    "pair": ("tenant uuid, no int, primary key (tenant, no)", "md5(n::text)::uuid, n", ("uuid", "bigint")),
    "day": (
        "id bigint, day date, primary key (id, day)) partition by range (day",
        "n, date '2026-01-01' + n % 60",
        ("bigint", "date"),
    ),
}
"""The columns of a table, an expression that gives the key of a new row, and the types of the key."""
PARTS = """
create table january partition of item for values from ('2026-01-01') to ('2026-02-01');
create table later partition of item default;
"""


class Table:
    """A table with a key of one of the shapes. Each row gets a unique key that its number gives, in no order."""

    def __init__(self, connection, shape):
        self.connection = connection
        columns, self.new, self.types = SHAPES[shape]
        connection.execute(f"create table item ({columns})")
        if shape == "day":
            connection.execute(PARTS)
        self.written = 0

    def insert(self, rows, connection=None):
        """Insert rows, and return their keys."""
        first, self.written = self.written + 1, self.written + rows
        query = f"insert into item select {self.new} from generate_series({first}, {self.written}) as n returning *"
        return [self.key(row) for row in (connection or self.connection).execute(query).fetchall()]

    def key(self, row) -> Key:
        parts = [part if isinstance(part, int) else str(part) for part in row]
        return parts[0] if len(parts) == 1 else tuple(parts)

    def rows(self):
        return sorted(text(self.key(row)) for row in self.connection.execute("select * from item").fetchall())


@pytest.fixture(params=SHAPES)
def table(request, connect):
    return Table(connect(), request.param)


@pytest.fixture
def pairs(connect):
    return Table(connect(), "pair")


def track(table):
    return one(table.connection, "select revision.track('item')")


def enqueued(table):
    """Enqueue the existing rows, and return the texts of all commits."""
    table.connection.execute("call revision.enqueue_existing('item', 7)")
    return sorted(
        row[0] for row in table.connection.execute("select key from revision.commit_queue").fetchall()
    )


def test_a_consumer_gets_each_key_once_as_python_has_it_though_an_attempt_fails(table, db):
    feed = CommitFeed("c", track(table))
    first = table.insert(5)
    batch = claim_and_fail(db, feed=feed)
    assert batch.key == table.types
    second = table.insert(5)
    with pytest.raises(Failed), ConsumerTransaction(feed, db) as consumer:
        assert consumer.claim(1000).id == batch.id
        assert [change.id for change in consumer.changes()] == first
        raise Failed
    assert drain(db, feed=feed, limit=3) == [*first, *second]
    assert drain(db, feed=feed) == []


def test_an_update_or_a_delete_is_no_commit(pairs, db):
    feed = CommitFeed("c", track(pairs))
    keys = pairs.insert(2)
    column = one(pairs.connection, "select key[1] from revision.tracked")
    pairs.connection.execute(f"update item set {column} = {column}; delete from item")
    assert drain(db, feed=feed) == keys


def test_rows_from_before_come_once_beside_those_that_were_captured(table):
    table.insert(25)
    track(table)
    table.insert(3)
    column = one(table.connection, "select key[1] from revision.tracked")
    table.connection.execute(f"update item set {column} = {column}")
    assert enqueued(table) == table.rows()
    assert enqueued(table) == table.rows()


def test_chunks_and_captured_rows_of_one_transaction_come_once(table):
    """A chunk leaves out the rows that earlier chunks have enqueued, but not the other rows of the same transaction."""
    table.insert(25)
    track(table)
    with table.connection.transaction():
        for _ in range(4):
            table.insert(2)
            table.connection.execute("select revision.enqueue_chunk('item', 6)")
            table.insert(2)
    assert one(table.connection, "select count(*) from revision.enqueued") == 4
    assert enqueued(table) == table.rows()
    assert one(table.connection, "select count(*) from revision.enqueued") == 0


def test_an_empty_table_has_no_rows_from_before(pairs):
    track(pairs)
    assert one(pairs.connection, "select existing_done from revision.tracked") is True


FORGETFUL = """
create or replace function revision.is_young(since pg_snapshot) returns text language sql immutable as
$$ select 'false' $$
"""
"""The planted fault: no row counts as young, so the backfill does not check whether the queue already has a row."""


@pytest.mark.parametrize(("shape", "fault"), [("uuid", None), ("day", None), ("uuid", FORGETFUL)])
def test_rows_from_before_come_once_while_writers_write(connect, shape, fault):
    """Backfill random keys while two writers insert. The planted fault would enqueue some rows twice."""
    table = Table(connect(), shape)
    table.insert(200)
    late = connect(autocommit=False)
    late.execute("select pg_current_xact_id()")
    track(table)
    if fault:
        table.connection.execute(fault)
    done, errors = threading.Event(), []

    def write(writer, first):
        try:
            n = first
            while not done.is_set():
                n += 1
                writer.execute(f"insert into item select {table.new} from (select {n} as n) as s")
        except psycopg.Error as error:
            errors.append(error)

    writers = [threading.Thread(target=write, args=(connect(), first)) for first in (10**6, 2 * 10**6)]
    for thread in writers:
        thread.start()
    table.insert(3, late)
    chunks = 0
    while table.connection.execute("select revision.enqueue_chunk('item', 20)").fetchone() != (None,):
        chunks += 1
        if chunks == 2:
            late.commit()
        if chunks > 8:
            done.set()
    done.set()
    for thread in writers:
        thread.join()
    assert (errors, chunks > 8) == ([], True)
    keys = sorted(
        row[0] for row in table.connection.execute("select key from revision.commit_queue").fetchall()
    )
    assert (keys == table.rows()) is (fault is None)
    assert sorted(set(keys)) == table.rows()


def test_a_key_whose_columns_are_named_in_another_order_pages_by_the_index(connect):
    connection = connect()
    connection.execute("create table item (a int, b text, unique (a, b))")
    connection.execute("alter table item alter a set not null, alter b set not null")
    connection.execute("insert into item select n % 3, n::text from generate_series(1, 20) n")
    connection.execute("select revision.track('item', '{b,a}'); ")
    connection.execute("call revision.enqueue_existing('item', 3)")
    assert connection.execute(
        "select count(*), count(distinct key) from revision.commit_queue"
    ).fetchone() == (20, 20)
    assert one(connection, "select key from revision.commit_queue order by id limit 1") == "{12,0}"
    connection.execute("set enable_seqscan = off")
    known = "(select t from revision.tracked t)"
    beyond = one(connection, f"select revision.beside_key({known}, '{{b,a}}', 'item', '>', '{{12,0}}')")
    ordered = one(connection, f"select revision.key_order({known}, '{{b,a}}', 'item')")
    plan = connection.execute(
        f"explain select from item where {beyond} order by {ordered} limit 3"
    ).fetchall()
    assert "Sort" not in str(plan)


def test_a_fault_is_replayed_by_its_key(pairs):
    track(pairs)
    (key,) = pairs.insert(1)
    pairs.connection.execute("truncate revision.commit_queue")
    fault = "insert into revision.fault (tbl, key, message) values ('item', %s, 'why')"
    pairs.connection.execute(fault, [text(key)])
    pairs.connection.execute("delete from revision.fault where key is null")
    assert one(pairs.connection, "select revision.replay_faults('item')") == 1
    assert one(pairs.connection, "select key from revision.commit_queue") == text(key)


def test_a_consumer_goes_on_in_a_restored_dump_which_gives_only_what_was_not_captured_before(
    connect, db, restored
):
    table = Table(connect(), "day")
    table.connection.execute("create table ledger (id bigint primary key)")
    table.connection.execute("insert into ledger select generate_series(10, 30, 10)")
    before = table.insert(3)
    feed = CommitFeed("c", track(table))
    done = table.insert(2)
    numbers = CommitFeed("c", one(table.connection, "select revision.track('ledger')"))
    table.connection.execute("insert into ledger values (15)")
    assert drain(db, feed=feed) == done
    there = restored()
    there.execute("call revision.enqueue_existing('ledger')")
    there.execute("select pubsub.rebase_after_restore()")
    there.execute("call revision.enqueue_existing('item')")
    assert sorted(drain(there.info.dsn, feed=feed)) == sorted(before)
    assert sorted(drain(there.info.dsn, feed=numbers)) == [10, 15, 20, 30]


CHANGED = {
    "alter table item alter id type text": "its key column id is text now, and was uuid",
    "alter table item drop constraint item_pkey": "its key column id is not unique any more",
    "alter table item drop constraint item_pkey; alter table item alter id drop not null": "can be null now",
    "alter table item drop column id; alter table item add n int": "its key column id was dropped",
}


@pytest.mark.parametrize("change", CHANGED)
def test_a_key_that_is_none_any_more_is_a_finding_and_no_row_is_lost(connect, change):
    table = Table(connect(), "uuid")
    track(table)
    table.connection.execute(change)
    told = [row[0] for row in table.connection.execute("select told from revision.health()").fetchall()]
    assert [CHANGED[change] in line for line in told] == [True]
    table.connection.execute(
        "insert into item values (null)"
        if "column" in change
        else "insert into item select gen_random_uuid()"
    )
    counts = "select (select count(*) from revision.commit_queue), (select count(*) from revision.fault)"
    assert table.connection.execute(counts).fetchone() == ((0, 1) if "column" in change else (1, 0))


def test_a_row_without_a_part_of_its_key_is_a_fault_and_the_others_of_its_statement_are_captured(connect):
    table = Table(connect(), "pair")
    track(table)
    table.connection.execute(
        "alter table item drop constraint item_pkey; alter table item alter no drop not null"
    )
    kept = uuid4()
    table.connection.execute("insert into item values (%s, 1), (%s, null)", [kept, uuid4()])
    assert one(table.connection, "select array_agg(key) from revision.commit_queue") == [f"{{{kept},1}}"]
    assert one(table.connection, "select message from revision.fault") == "its key is null"
    assert one(table.connection, "select without_key from revision.tracking()") == 1


def test_key_columns_that_were_renamed_are_captured_and_followed(connect):
    table = Table(connect(), "pair")
    branch = track(table)
    table.connection.execute("alter table item rename no to number; alter table item add no text default 'x'")
    first, second = uuid4(), uuid4()
    table.connection.execute("insert into item (tenant, number) values (%s, 1)", [first])
    assert [row[0] for row in table.connection.execute("select revision.recapture()")] == [
        "public.item: its key is captured as tenant, number"
    ]
    table.connection.execute("insert into item (tenant, number) values (%s, 2)", [second])
    assert one(table.connection, "select array_agg(key order by id) from revision.commit_queue") == [
        f"{{{first},1}}",
        f"{{{second},2}}",
    ]
    assert one(table.connection, "select revision.track('item')") == branch


def test_dates_and_bytes_have_one_text_whatever_a_writer_has_set(connect):
    connection = connect()
    connection.execute("create table item (at timestamptz, code bytea, primary key (at, code))")
    connection.execute("select revision.track('item')")
    connection.execute("set timezone = 'Asia/Kolkata'; set datestyle = 'German'; set bytea_output = 'escape'")
    connection.execute("insert into item values ('2026-11-29 14:00Z', '\\x00ff')")
    assert (
        one(connection, "select key from revision.commit_queue") == '{"2026-11-29 14:00:00+00","\\\\x00ff"}'
    )


def test_a_huge_key_is_captured_whole(connect, db):
    connection = connect()
    connection.execute("create table item (id text not null); create unique index on item (id)")
    feed = CommitFeed("c", one(connection, "select revision.track('item', '{id}')"))
    huge = "x" * 100_000
    connection.execute("insert into item values (%s)", [huge])
    assert drain(db, feed=feed) == [huge]


def test_a_branch_keeps_the_types_of_its_keys(connect):
    connection = connect()
    connection.execute("create table item (id uuid primary key, no int not null unique)")
    own = one(connection, "select revision.track('item')")
    connection.execute("select revision.untrack('item')")
    with pytest.raises(
        psycopg.Error, match=f"keys of branch {own} are uuid, and those of public.item are bigint"
    ) as refused:
        connection.execute("select revision.track('item', '{no}')")
    call = refused.value.diag.message_hint.split(": ")[1]
    other = one(connection, call)
    assert one(connection, "select revision.track('item', '{no}', %s)", str(other)) == other


def test_keys_are_polled_by_hand_as_texts(connect):
    table = Table(connect(), "pair")
    branch = track(table)
    (key,) = table.insert(1)
    table.connection.execute("select pubsub.lock_watermark('c', %s)", [branch])
    with pytest.raises(psycopg.Error, match=f"the keys of branch {branch} are texts"):
        table.connection.execute("select * from pubsub.poll('c', %s)", [branch])
    with pytest.raises(psycopg.Error, match="the keys of branch 0 are numbers"):
        table.connection.execute("select * from pubsub.poll_keyed('c', 0)")
    found = table.connection.execute("select id::text[] from pubsub.poll_keyed('c', %s)", [branch]).fetchall()
    assert found == [([str(part) for part in key],)]
    assert UUID(found[0][0][0])


def test_a_dead_letter_shows_its_keys(connect, db):
    table = Table(connect(), "pair")
    feed = CommitFeed("c", track(table))
    (key,) = table.insert(1)
    claim_and_fail(db, feed=feed)
    table.connection.execute(
        "select pubsub.skip('c', %s, (pubsub.in_work('c', %s, pubsub.position('c', %s))), 'bad')",
        [feed.branch] * 3,
    )
    shown = one(
        table.connection, "select pgchange.letter_content(id) -> 'commits' -> 0 ->> 'id' from pgchange.letter"
    )
    assert shown == text(key)
