"""The SQL of a merge: in key order, for winners only, and with every name quoted."""

from __future__ import annotations

import re

import pytest

from airflow_pgchange.results.column_checks import EXACT, _fits
from airflow_pgchange.results.merge import _delete_gone
from airflow_pgchange.results.merge_modes import Mode
from airflow_pgchange.results.merge_queries import insert as insert_query
from airflow_pgchange.results.staging import Staged
from airflow_pgchange.results.target import Column, Target

COLUMNS = {"id": "bigint", 'odd "name" {}': "numeric"}
TARGET = Target(
    "public.t",
    {
        name: Column(name, kind, kind, None, required=False, generated=False, identity=False)
        for name, kind in COLUMNS.items()
    },
    [frozenset({"id"})],
    {},
)


def staged(mode, key=("id",)):
    return Staged(
        "public.t", key, Mode(mode), "b00_1_00", tuple(COLUMNS.items()), ((7, 1), (9, 2)), "batch", 1
    )


def insert(mode, **kwargs):
    return insert_query(staged(mode, **kwargs), TARGET).as_string(None)


@pytest.mark.parametrize("mode", ["add", "replace", "mirror", "append"])
def test_rows_are_written_in_the_order_of_their_keys(mode):
    assert 'order by "id"' in insert(mode)


@pytest.mark.parametrize("mode", ["add", "replace", "mirror", "append"])
def test_only_rows_of_winners_are_read(mode):
    assert re.search(r"where \"pgchange_attempt\" = any\('\{7,9\}'[^)]*\) and", insert(mode))


@pytest.mark.parametrize("mode", ["add", "replace", "mirror", "append"])
def test_every_name_is_quoted(mode):
    assert insert(mode).replace('"odd ""name"" {}"', "").count("odd") == 0


def test_add_sums_before_it_adds_and_survives_nulls_on_either_side():
    query = insert("add")
    assert 'sum("odd ""name"" {}")' in query
    assert 'group by "id"' in query
    name = '"odd ""name"" {}"'
    assert f"do update set {name} = coalesce(t.{name} + excluded.{name}, t.{name}, excluded.{name})" in query


def test_replace_of_a_key_alone_writes_what_is_missing_and_nothing_else():
    assert insert("replace", key=tuple(COLUMNS)).endswith("do nothing")


def test_append_conflicts_with_nothing():
    assert "on conflict" not in insert("append", key=())


def test_rows_that_are_gone_are_locked_in_the_order_of_their_keys():
    asked = []

    class Connection:
        def execute(self, query):
            asked.append(query.as_string(None))

    _delete_gone(Connection(), staged("mirror"), TARGET)
    assert 'order by "id" for update' in asked[0]


@pytest.mark.parametrize("kind", sorted(EXACT))
def test_each_type_that_is_staged_goes_into_a_column_of_its_own_type(kind):
    assert _fits(kind, kind)
    assert _fits(f"{kind}[]", f"{kind}[]")


@pytest.mark.parametrize(
    ("kind", "column"),
    [
        ("double precision", "integer"),
        ("double precision", "numeric"),
        ("double precision", "real"),
        ("bigint", "double precision"),
        ("integer", "real"),
        ("numeric(12,2)", "double precision"),
        ("numeric(12,2)[]", "bigint[]"),
        ("numeric", "bigint"),
        ("timestamp with time zone", "timestamp without time zone"),
        ("timestamp without time zone", "timestamp with time zone"),
        ("timestamp without time zone", "date"),
        ("text", "bigint"),
        ("bigint", "boolean"),
        ("bigint", "text"),
        ("bigint[]", "bigint"),
        ("numeric[]", "bigint[]"),
    ],
)
def test_a_type_that_would_be_rounded_guessed_or_reinterpreted_does_not_fit(kind, column):
    assert not _fits(kind, column)
