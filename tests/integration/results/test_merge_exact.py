"""The merged values do not depend on where batches end. A column that would round values is refused by its name."""

from __future__ import annotations

import pytest

from airflow_pgchange.errors import MergeRefused
from airflow_pgchange.feeds.connections import connect as feed_connect
from airflow_pgchange.results.merge import merge, validate
from airflow_pgchange.results.merge_modes import Mode
from tests.staging import BATCH, rows_of, stage

TENS = {
    "numeric(12,2)": ["numeric(12,4)", "numeric", "text"],
    "two_places": ["numeric(12,4)"],
    "numeric(12,-2)": ["integer", "numeric(4,0)"],
    "money": ["numeric(12,4)", "text"],
    "interval second(1)": ["text"],
    "real": ["real", "double precision", "integer", "numeric(12,4)"],
    "double precision": ["bigint", "numeric(12,4)"],
}
"""Columns, and staged values with more digits than the columns hold."""
ROUNDED = [(column, staged) for column, kinds in TENS.items() for staged in kinds]
ADDED = [
    ("numeric(12,2)", "numeric(12,2)", "0.01", "0.10"),
    ("numeric(12,2)", "numeric(3,1)", "0.1", "1.00"),
    ("numeric(12,2)", "bigint", "1", "10.00"),
    ("two_places", "numeric(10,2)", "0.01", "0.10"),
    ("numeric", "numeric(12,4)", "0.0040", "0.0400"),
    ("numeric", "text", "0.0040", "0.0400"),
    ("money", "numeric(10,2)", "0.01", "0.10"),
    ("interval", "text", "0.04 sec", "00:00:00.4"),
    ("interval day to second", "text", "1 day 0.04 sec", "10 days 00:00:00.4"),
    ("interval second(6)", "text", "0.04 sec", "00:00:00.4"),
    ("double precision", "double precision", "0.5", "5"),
    ("double precision", "real", "0.5", "5"),
    ("double precision", "integer", "1", "10"),
    ("bigint", "smallint", "1", "10"),
]


@pytest.fixture(scope="module")
def shared_results(shared_db):
    """A connection to the database of the results, as a consumer opens it, for all tests of the module."""
    with feed_connect(shared_db) as connection:
        yield connection


THEIRS = "select format('%I.%I', schemaname, tablename) from pg_tables where schemaname in ('public', 'pgchange_staging')"


@pytest.fixture
def results(shared_results):
    """A connection to the shared database of the results.

    The tables that a test creates and stages are dropped after it.
    """
    yield shared_results
    tables = [name for (name,) in shared_results.execute(THEIRS).fetchall()]
    if tables:
        shared_results.execute(f"drop table {', '.join(tables)}")
    shared_results.execute("drop domain if exists two_places")


@pytest.fixture
def summed(results):
    """A function that makes a table with a sum of a type."""

    def make(kind):
        results.execute(
            "set lc_monetary = 'C'; create domain two_places as numeric(12,2); "
            f"create table public.summed (k int primary key, n {kind})"
        )
        return results

    return make


def batch(connection, kind, values):
    rows = [(1, value) for value in values]
    merge(
        connection,
        BATCH,
        [stage(connection, "public.summed", ["k"], "add", {"k": "integer", "n": kind}, rows)],
    )


@pytest.mark.parametrize(("column", "staged"), ROUNDED)
def test_a_value_that_its_column_would_round_is_not_added(summed, column, staged):
    connection = summed(column)
    with pytest.raises(
        MergeRefused, match='public.summed: "n" comes as .*(in your code|in Spark|alter table)'
    ):
        validate(connection, "public.summed", ["k"], Mode.ADD, {"k": "integer", "n": staged})


@pytest.mark.parametrize(("column", "staged", "value", "total"), ADDED)
def test_ten_batches_of_one_row_add_what_one_of_ten_does(summed, column, staged, value, total):
    connection = summed(column)
    shown = "select n::text from summed"
    for _ in range(10):
        batch(connection, staged, [value])
    assert rows_of(connection, shown) == [(total if column != "money" else f"${total}",)]
    connection.execute("truncate summed")
    batch(connection, staged, [value] * 10)
    assert rows_of(connection, shown) == [(total if column != "money" else f"${total}",)]


KEYS = [
    ("numeric(12,2)", "numeric(12,4)", ["1.001", "1.002"]),
    ("timestamp(0)", "timestamp without time zone", ["2024-01-01 00:00:00.1", "2024-01-01 00:00:00.2"]),
    (
        "timestamptz(3)",
        "timestamp with time zone",
        ["2024-01-01 00:00:00.0001Z", "2024-01-01 00:00:00.0002Z"],
    ),
    ("time(0)", "text", ["00:00:00.1", "00:00:00.2"]),
    ("interval(0)", "text", ["0.1 sec", "0.2 sec"]),
    ("varchar(2)", "text", ["ab", "ab  "]),
    ("money", "numeric(12,4)", ["1.001", "1.002"]),
]


@pytest.mark.parametrize("mode", ["add", "replace"])
@pytest.mark.parametrize(("column", "staged", "values"), KEYS)
def test_keys_that_their_column_would_round_to_one_are_refused_each_alone(
    results, mode, column, staged, values
):
    """In one batch, such keys would be one key that comes twice. In two batches they would name the same row."""
    results.execute(f"create table public.keyed (k {column} primary key, n int)")
    for value in values[1:]:
        rounded = stage(results, "public.keyed", ["k"], mode, {"k": staged, "n": "integer"}, [(value, 1)])
        with pytest.raises(
            MergeRefused, match=r'public\.keyed: the key k=.*, because "k" is .*widen the column'
        ):
            merge(results, BATCH, [rounded])


@pytest.mark.parametrize("mode", ["add", "replace"])
@pytest.mark.parametrize(("column", "staged", "values"), KEYS)
def test_a_key_that_its_column_holds_as_it_is_is_merged(results, mode, column, staged, values):
    results.execute(f"create table public.keyed (k {column} primary key, n int)")
    (value,) = results.execute(f"select %s::{column}::{staged}::text", [values[0]]).fetchone()
    fine = stage(results, "public.keyed", ["k"], mode, {"k": staged, "n": "integer"}, [(value, 1)])
    merge(results, BATCH, [fine])
    assert rows_of(results, f"select k::{staged}::text, n from keyed") == [(value, 1)]


CUT = [("name", "x" * 64), ('"char"', "ab"), ("name[]", ["x" * 64])]


@pytest.mark.parametrize("mode", ["add", "replace", "append"])
@pytest.mark.parametrize(("column", "value"), CUT)
def test_a_value_that_its_columns_type_would_cut_is_refused(results, mode, column, value):
    results.execute(f"create table public.keyed (k {column} unique, n int)")
    kinds = {"k": "text[]" if isinstance(value, list) else "text", "n": "integer"}
    cut = stage(results, "public.keyed", [] if mode == "append" else ["k"], mode, kinds, [(value, 1)])
    with pytest.raises(MergeRefused, match=r'public\.keyed: .* in "k" would be cut, .*shorten it'):
        merge(results, BATCH, [cut])


def test_a_key_of_money_is_not_read_from_text(results):
    results.execute("create table public.keyed (k money primary key, n int)")
    with pytest.raises(MergeRefused, match=r'"k" is money, .*decimal'):
        validate(results, "public.keyed", ["k"], Mode.REPLACE, {"k": "text", "n": "integer"})


def test_a_text_that_a_key_would_cut_is_to_be_shortened_and_a_number_to_be_rounded(results):
    results.execute("create table public.short (k varchar(2) primary key, n int)")
    results.execute("create table public.coarse (k numeric(12,2) primary key, n int)")
    cut = stage(results, "public.short", ["k"], "add", {"k": "text", "n": "integer"}, [("ab  ", 1)])
    with pytest.raises(MergeRefused, match="shorten it in Spark"):
        merge(results, BATCH, [cut])
    fine = stage(
        results, "public.coarse", ["k"], "add", {"k": "numeric(9,4)", "n": "integer"}, [("1.001", 1)]
    )
    with pytest.raises(MergeRefused, match="round it in Spark"):
        merge(results, BATCH, [fine])


BEYOND = [
    ("smallint", "bigint", [40000], "40000", ["add", "replace", "append"]),
    ("smallint", "bigint", [20000, 20000], "40000", ["add"]),
    ("integer", "bigint", [-3000000000], "-3000000000", ["add", "replace", "append"]),
    ("numeric(4,1)", "numeric(10,2)", ["999.95"], "1000.0", ["replace", "append"]),
    ("numeric(4,1)", "numeric(4,1)", ["999.0", "999.0"], "1998.0", ["add"]),
    ("numeric(2,-2)", "integer", [9950], "10000", ["replace", "append"]),
]


@pytest.mark.parametrize(("column", "staged", "values", "shown", "modes"), BEYOND)
def test_a_value_beyond_the_range_of_a_column_is_named_with_its_row(
    results, column, staged, values, shown, modes
):
    results.execute(f"create table public.small (k int primary key, m numeric, n {column})")
    kinds = {"k": "integer", "m": "integer", "n": staged}
    for mode in modes:
        rows = [(1, 1, 1), *((7, 1, value) for value in values)]
        too_large = stage(results, "public.small", [] if mode == "append" else ["k"], mode, kinds, rows)
        where = "" if mode == "append" else " of the row k=7"
        with pytest.raises(
            MergeRefused, match=rf'public\.small: .*: "n"{where} would be {shown}, .*widen it'
        ):
            merge(results, BATCH, [too_large])
        assert rows_of(results, "select * from small") == []


def test_a_total_beyond_the_range_of_its_column_is_named_with_its_row(summed):
    connection = summed("smallint")
    batch(connection, "integer", [30000])
    with pytest.raises(MergeRefused, match='"n" of the row k=1 would be 60000, and its column is smallint'):
        batch(connection, "integer", [30000])
    assert rows_of(connection, "select n from summed") == [(30000,)]


def test_a_total_is_found_by_a_key_that_came_as_text(results):
    key = "00000000-0000-0000-0000-000000000001"
    results.execute("create table public.small (k uuid primary key, n smallint)")
    results.execute("insert into small values (%s, 30000)", [key])
    more = stage(results, "public.small", ["k"], "add", {"k": "text", "n": "integer"}, [(key, 30000)])
    with pytest.raises(MergeRefused, match=f'"n" of the row k={key} would be 60000'):
        merge(results, BATCH, [more])


def test_a_key_beyond_the_range_of_its_column_is_named(results):
    results.execute("create table public.small (k smallint primary key, n int)")
    kinds = {"k": "bigint", "n": "integer"}
    with pytest.raises(MergeRefused, match='"k" would be 40000, and its column is smallint'):
        merge(results, BATCH, [stage(results, "public.small", ["k"], "add", kinds, [(40000, 1)])])
