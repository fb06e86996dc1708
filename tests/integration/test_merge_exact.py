"""What is merged does not depend on where batches end: a column that would round what comes is refused by its name."""

from __future__ import annotations

import pytest

from airflow_pgchange.feeds.errors import MergeRefused
from airflow_pgchange.feeds.merge import merge, validate
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
"""Columns, and what comes for them finer than they are."""
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
    ("double precision", "double precision", "0.5", "5"),
    ("double precision", "real", "0.5", "5"),
    ("double precision", "integer", "1", "10"),
    ("bigint", "smallint", "1", "10"),
]


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
def test_what_its_column_would_round_is_not_added(summed, column, staged):
    connection = summed(column)
    with pytest.raises(MergeRefused, match='public.summed: "n" comes as .*(in Spark|alter table)'):
        validate(connection, "public.summed", ["k"], "add", {"k": "integer", "n": staged})


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
]


@pytest.mark.parametrize("mode", ["add", "replace"])
@pytest.mark.parametrize(("column", "staged", "values"), KEYS)
def test_keys_that_their_column_would_round_to_one_are_refused_each_alone(
    results, mode, column, staged, values
):
    """In a batch of both they would be a key that comes twice, and in two batches the same row."""
    results.execute(f"create table public.keyed (k {column} primary key, n int)")
    for value in values[1:]:
        rounded = stage(results, "public.keyed", ["k"], mode, {"k": staged, "n": "integer"}, [(value, 1)])
        with pytest.raises(MergeRefused, match=r'public\.keyed: the key k=.*, for "k" is .*widen the column'):
            merge(results, BATCH, [rounded])


@pytest.mark.parametrize("mode", ["add", "replace"])
@pytest.mark.parametrize(("column", "staged", "values"), KEYS)
def test_a_key_that_its_column_holds_as_it_is_is_merged(results, mode, column, staged, values):
    results.execute(f"create table public.keyed (k {column} primary key, n int)")
    (value,) = results.execute(f"select %s::{column}::text", [values[0]]).fetchone()
    fine = stage(results, "public.keyed", ["k"], mode, {"k": staged, "n": "integer"}, [(value, 1)])
    merge(results, BATCH, [fine])
    assert rows_of(results, "select k::text, n from keyed") == [(value, 1)]
