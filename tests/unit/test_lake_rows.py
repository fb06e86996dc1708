"""The rows that a batch passes to a table of a lake."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.lake.rows import batches_of


@pytest.mark.parametrize("kind", ["table", "reader", "batch", "batches"])
def test_rows_may_be_anything_of_arrows(kind: str) -> None:
    table = pa.table({"id": [1, 2]})
    rows = {
        "table": table,
        "reader": table.to_reader(),
        "batch": table.to_batches()[0],
        "batches": table.to_batches(),
    }[kind]
    schema, batches = batches_of(rows)
    assert pa.Table.from_batches(batches, schema) == table


@pytest.mark.parametrize(
    ("rows", "kind"),
    [([{"id": 1}], "a list of dict"), ({"id": [1]}, "a dict of str")],
    ids=["rows", "columns"],
)
def test_rows_that_are_nothing_of_arrows_are_refused_with_the_way_to_make_them_so(
    rows: Any, kind: str
) -> None:
    with pytest.raises(
        InvalidArgument, match=f"the rows are {kind}.*: give an Arrow table, such as pa.Table.from"
    ):
        batches_of(rows)
