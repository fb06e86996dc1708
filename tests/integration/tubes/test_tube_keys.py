"""Tubes whose ids are texts: of keys of one column that is no integer, and of several columns."""

from __future__ import annotations

from dataclasses import dataclass

import psycopg
import pytest

from airflow_pgchange.admin import dead_letters, manual_operations
from airflow_pgchange.errors import Refused, StaleClaim
from airflow_pgchange.feeds import ConsumerTransaction, TubeFeed
from airflow_pgchange.feeds.error_translation import translated
from airflow_pgchange.tubes import TableDownstream, recompute, work_off
from tests.tubes import ack, attach, changes, claim, controls, drain, faults, make, one, take, touched

UUID = "00000000-0000-0000-0000-00000000000{}"


@dataclass(frozen=True)
class Shape:
    """A kind of key.

    It has the types of the tube's ids and the columns of the table. Functions of a number return a row and the id of
    the row.
    """

    types: tuple[str, ...]
    columns: str
    row: str
    id: str

    def values(self, *numbers: int) -> str:
        return ", ".join(f"({self.row.format(n)}, {n})" for n in numbers)


SHAPES = {
    "uuid": Shape(("uuid",), "id uuid primary key", f"'{UUID}'", UUID),
    "text": Shape(("text",), "id varchar primary key", "'a, {} \"é'", 'a, {} "é'),
    "pair": Shape(
        ("text", "bigint"), "tenant text, no integer, primary key (tenant, no)", "'t', {}", "{{t,{}}}"
    ),
    "moment": Shape(
        ("timestamp with time zone",),
        "id timestamptz primary key",
        "'2026-01-0{} 12:00+02'",
        "2026-01-0{} 10:00:00+00",
    ),
}


@pytest.fixture(params=SHAPES)
def shape(request):
    return SHAPES[request.param]


@pytest.fixture
def prepared_keyed():
    return _keyed


def _keyed(connection: psycopg.Connection[object]) -> None:
    for name, shape in SHAPES.items():
        make(connection, name, key=shape.types)
        connection.execute(
            f"create schema own_{name}; create table own_{name}.item ({shape.columns}, value integer)"
        )
        attach(connection, f"own_{name}.item", name)


@pytest.fixture
def keyed(prepared_keyed, connect, shape, request):
    """A connection to a table item with a key of this shape, and the tube that the table touches."""
    connection = connect()
    name = request.node.callspec.params["shape"]
    connection.execute(f"set search_path = own_{name}, public; set timezone = 'Asia/Tokyo'")
    return connection, name


def test_every_statement_touches_the_keys_before_and_after_it(keyed, shape):
    connection, tube = keyed
    connection.execute(f"insert into item values {shape.values(1, 2, 3)}")
    assert drain(connection, tube=tube) == [shape.id.format(n) for n in (1, 2, 3)]
    connection.execute("update item set value = 0 where value = 3")
    assert drain(connection, tube=tube) == [shape.id.format(3)]
    row = shape.row.format(7)
    columns = "(tenant, no)" if tube == "pair" else "id"
    connection.execute(f"update item set {columns} = ({row}) where value = 1")
    assert sorted(drain(connection, tube=tube)) == [shape.id.format(1), shape.id.format(7)]
    connection.execute("delete from item where value = 2")
    assert drain(connection, tube=tube) == [shape.id.format(2)]
    connection.execute("truncate item")
    assert [(op, control["type"]) for op, _, control in controls(connection, tube)] == [("T", "truncate")]
    assert faults(connection) == []


def test_a_backfill_brings_every_row_once_in_the_order_of_the_key_beside_a_writer(keyed, shape, connect):
    connection, tube = keyed
    connection.execute(f"insert into item values {shape.values(*range(1, 8))}")
    drain(connection, tube=tube)
    number = one(connection, "select tube.backfill_begin(%s, 'item', null, null, 2)", tube)
    finished, between = False, 0
    while not finished:
        state = connection.execute("select finished from tube.backfill_chunk(%s)", [number]).fetchone()
        finished = state == (True,)
        between += 1
        if between == 2:
            connection.execute(f"insert into item values {shape.values(9)}")
    assert between == 5
    found = drain(connection, tube=tube)
    assert sorted(set(found)) == [shape.id.format(n) for n in (1, 2, 3, 4, 5, 6, 7, 9)]
    assert len(found) in (8, 9)
    assert [control["type"] for _, _, control in controls(connection, tube)] == [
        "backfill_start",
        "backfill_end",
    ]
    assert one(connection, "select looked_at from tube.backfills()") == 8


def test_the_keys_of_a_batch_are_the_same_in_its_slices_and_when_workers_change(keyed, shape):
    connection, tube = keyed
    connection.execute(f"insert into item values {shape.values(*range(1, 10))}")
    batch = claim(connection, tube=tube)
    assert batch["bounds"]["key"] == list(shape.types)
    assert sorted(changes(connection, batch, tube=tube)) == [shape.id.format(n) for n in range(1, 10)]
    connection.execute("select tube.tube_ensure_exists(%s, 3)", [tube])
    with pytest.raises(StaleClaim), translated():
        ack(connection, batch, tube=tube)
    assert sorted(take(connection, 0, 3, tube=tube)) == [shape.id.format(n) for n in range(1, 10)]


def test_a_predicate_and_what_a_copy_is_to_hold(keyed, shape):
    connection, tube = keyed
    connection.execute("select tube.tube_ensure_exists(%s, predicate => 'value > 2')", [tube])
    connection.execute(f"insert into item values {shape.values(1, 2, 3, 4)}")
    assert touched(connection, tube) == [shape.id.format(3), shape.id.format(4)]
    asked = [shape.id.format(n) for n in (1, 3, 4, 5, 3)]
    wanted = connection.execute("select tube.wanted_keys(%s, 'item', %s::text[])", [tube, asked])
    assert sorted(id_ for (id_,) in wanted) == [shape.id.format(3), shape.id.format(3), shape.id.format(4)]
    connection.execute("select tube.tube_ensure_exists(%s, predicate => '1 / (value - 2) > 0')", [tube])
    wanted = connection.execute(
        "select tube.wanted_keys(%s, 'item', %s::text[])", [tube, [shape.id.format(2)]]
    )
    assert [id_ for (id_,) in wanted] == [shape.id.format(2)]


def test_a_worker_gets_typed_ids_and_recomputes_a_report_by_them(keyed, shape, db):
    connection, tube = keyed
    several = len(shape.types) > 1
    columns = ["tenant", "no"] if several else ["id"]
    connection.execute(f"create table own_{tube}.report (like own_{tube}.item including all)")
    connection.execute(f"insert into item values {shape.values(1, 2, 3)}; delete from item where value = 2")
    connection.execute(f"insert into report values {shape.values(2)}")
    where = "(tenant, no) in (select * from unnest(%(tenant)s, %(no)s))" if several else "id = any(%(ids)s)"
    with ConsumerTransaction(TubeFeed(tube), db) as consumer:
        assert consumer.claim(10) is not None
        found = {change.id for change in consumer.changes()}
        recompute(consumer, f"select * from own_{tube}.item where {where}", f"own_{tube}.report", columns)
    assert found == {("t", n) if several else shape.id.format(n) for n in (1, 2, 3)}
    assert one(connection, "select array_agg(value order by value) from report") == [1, 3]


def test_a_dead_letter_is_sent_again_and_a_key_erased_from_it(keyed, shape, db):
    connection, tube = keyed
    connection.execute(f"insert into item values {shape.values(1, 2)}")
    with pytest.raises(ValueError, match="bad"), ConsumerTransaction(TubeFeed(tube), db) as consumer:
        consumer.claim(10)
        raise ValueError("bad")
    manual_operations.skip_batch(connection, connection, TubeFeed(tube), "bad")
    assert touched(connection, tube) == []
    (letter,) = dead_letters.letters(connection)
    as_written = shape.id.format(2).strip("{}") if len(shape.types) > 1 else shape.id.format(2)
    assert one(connection, "select tube.erase_letter(%s, %s, null)", letter.id, as_written) == 1
    dead_letters.redrive(connection, ids=[letter.id])
    assert touched(connection, tube) == [shape.id.format(1)]


def test_ids_that_a_copy_holds_are_touched_after_a_truncate(keyed, shape, db):
    connection, tube = keyed
    connection.execute(f"create schema copies; create table copies.item (like own_{tube}.item including all)")
    connection.execute(f"insert into copies.item values {shape.values(1, 2)}; truncate item")
    feed = TubeFeed(tube)
    (done,) = work_off(feed, db, TableDownstream(db, db, feed, "copies.{table}"))
    assert done.touched == 2
    assert touched(connection, tube) == [shape.id.format(1), shape.id.format(2)]


def test_a_touch_by_hand_writes_the_id_as_the_capture_does(keyed, shape):
    connection, tube = keyed
    connection.execute(f"insert into item values {shape.values(1)}")
    drain(connection, tube=tube)
    given = {"uuid": f"{{{UUID.format(1).upper()}}}", "moment": "2026-01-01 12:00+02", "pair": '{ "t" , 01}'}
    given = given.get(tube, shape.id.format(1))
    connection.execute("select tube.touch_keys(%s, 0, %s::text[], 'T')", [tube, [given]])
    connection.execute("select item_touch(%s::text[])", [[given]])
    assert touched(connection, tube) == [shape.id.format(1)] * 2
    drain(connection, tube=tube)
    id_ = "array[tenant, no::text]" if len(shape.types) > 1 else "id"
    connection.execute("select tube.tube_pods_insert(%s, %s, 0)", [tube, f"select {id_}::text from item"])
    assert touched(connection, tube) == [shape.id.format(1)]
    with pytest.raises(Refused, match="of tube"), translated():
        connection.execute("select tube.touch(%s, 0, '{1}', 'T')", [tube])


def test_a_key_of_100000_characters_fails_no_write_and_is_not_lost(texts):
    long = "é" * 100_000
    texts.execute("insert into word select 'w' || n from generate_series(1, 3000) as n")
    texts.execute("insert into word values (%s), ('short')", [long])
    texts.execute("select word_touch(array[%s, 'short'])", [long])
    sizes = "select max(length(ids::text)) from w where length(ids::text) < 100000"
    assert 3000 < one(texts, sizes) < 8000
    found = drain(texts, tube="w")
    assert sorted(found) == sorted([f"w{n}" for n in range(1, 3001)] + [long, "short"])
    number = one(texts, "select tube.backfill_begin('w', 'word', null, null, 1000)")
    while not texts.execute("select finished from tube.backfill_chunk(%s)", [number]).fetchone()[0]:
        pass
    assert len(drain(texts, tube="w")) == 3002


@pytest.mark.parametrize("rows", [159, 160, 20_000, 20_001])
def test_pods_of_uuids_are_as_many_as_fit_and_lose_none(texts, rows):
    make(texts, "u", key=["uuid"])
    texts.execute("create table thing (id uuid primary key)")
    attach(texts, "thing", "u")
    texts.execute("insert into thing select gen_random_uuid() from generate_series(1, %s)", [rows])
    held = "select count(distinct i), max(pg_column_size(ids)) < 7500 from u, unnest(ids) as i"
    assert texts.execute(held).fetchone() == (rows, True)


@pytest.fixture
def prepared_texts():
    return _texts


def _texts(connection):
    make(connection, "w", key=["text"])
    connection.execute("create table word (id text primary key)")
    attach(connection, "word", "w")


@pytest.fixture
def texts(prepared_texts, connect):
    """A connection to a table of words, and the tube w that the table touches."""
    return connect()


@pytest.mark.parametrize(
    ("table", "options", "told"),
    [
        (
            "(a int, b int, primary key (a, b))",
            {},
            r"ids of .*, a, b, are bigint, bigint, and those of tube w are text",
        ),
        ("(id float primary key)", {}, r"double precision: equal values have different texts"),
        ("(a text, b text, primary key (a, b))", {"key": ["a"]}, r"column a of .* is not unique"),
        ("(a text, b text not null unique)", {}, r"no primary key"),
        ("(a text unique, b text)", {"key": ["a"]}, r"can be null"),
        ("(a text primary key)", {"group_by": ["b"]}, r"no column b"),
        ("(a text primary key)", {"key": ["a"], "group_by": ["a"]}, r"both key and group_by"),
    ],
)
def test_a_table_whose_ids_are_no_key_of_the_tubes_types_is_refused_with_what_helps(
    texts, table, options, told
):
    texts.execute(f"create table other {table}")
    with pytest.raises(Refused, match=told), translated():
        attach(texts, "other", "w", **options)
    assert one(texts, "select count(*) from tube.attachment") == 1


def test_a_column_that_several_rows_share_is_named_and_touched_by_each(texts):
    texts.execute("create table line (no int primary key, word text)")
    attach(texts, "line", "w", group_by=["word"])
    texts.execute("insert into line values (1, 'a'), (2, 'a'), (3, null)")
    assert drain(texts, tube="w") == ["a"]
    texts.execute("update line set word = 'b' where no = 1")
    assert drain(texts, tube="w") == ["a", "b"]
    assert not any("several rows" in line for line in health(texts))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("alter table word alter id type uuid using '00000000-0000-0000-0000-000000000001'", "is uuid now"),
        (
            "alter table word drop constraint word_pkey; alter table word alter id drop not null",
            "can be null",
        ),
        ("alter table word drop constraint word_pkey", "several rows can have one id"),
        ("alter table word add code text; alter table word drop id", "was dropped"),
    ],
)
def test_a_key_that_is_no_longer_one_is_found_and_no_write_fails(texts, change, told):
    texts.execute("insert into word values ('a')")
    drain(texts, tube="w")
    texts.execute(change)
    assert any(told in line for line in health(texts))
    texts.execute("delete from word")
    assert touched(texts, "w") or faults(texts)


def health(connection):
    return [told for (told,) in connection.execute("select told from tube.health()")]
