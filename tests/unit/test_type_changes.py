"""Types of the columns of a copy that hold every value of the source, and type changes that rewrite no table."""

from __future__ import annotations

import pytest

from airflow_pgchange.results.type_changes import TypeChange, type_change

SAFE = {
    ("character varying(20)", "character varying(10)"): "character varying(20)",
    ("character varying", "character varying(10)"): "character varying",
    ("text", "character varying(10)"): "text",
    ("character(20)", "character varying(10)"): "character varying(20)",
    ("bpchar", "character varying(10)"): "character varying",
    ("numeric(12,2)", "numeric(10,2)"): "numeric(12,2)",
    ("numeric(12,1)", "numeric(10,2)"): "numeric(13,2)",
    ("numeric(3,-4)", "numeric(2,-4)"): "numeric(3,-4)",
    ("numeric", "numeric(10,2)"): "numeric",
}
REWRITTEN = {
    ("bigint", "integer"): "bigint",
    ("integer", "smallint"): "integer",
    ("numeric(12,4)", "numeric(12,2)"): "numeric(14,4)",
    ("numeric(4,4)", "numeric(12,2)"): "numeric(14,4)",
    ("character(5)", "character(3)"): "character(5)",
    ("text", "character(3)"): "text",
    ("timestamp(6) with time zone", "timestamp(3) with time zone"): "timestamp(6) with time zone",
    ("timestamp without time zone", "timestamp(0) without time zone"): "timestamp without time zone",
    ("bit varying(9)", "bit varying(8)"): "bit varying(9)",
    ("character varying(9)[]", "character varying(8)[]"): "character varying(9)[]",
    ("numeric(12,2)[]", "numeric(10,2)[]"): "numeric(12,2)[]",
    ("numeric[]", "numeric(10,2)[]"): "numeric[]",
}
HELD = [
    ("character varying(10)", "character varying(10)"),
    ("character varying(9)", "character varying(10)"),
    ("character varying(9)", "text"),
    ("text", "character varying"),
    ("text", "bpchar"),
    ("character(3)", "character(5)"),
    ("numeric(10,2)", "numeric"),
    ("numeric(10,2)", "numeric(12,2)"),
    ("numeric(10,2)", "numeric(14,4)"),
    ("smallint", "bigint"),
    ("timestamp(3) without time zone", "timestamp without time zone"),
    ("interval day to second(3)", "interval day to second(3)"),
]
OTHER = [
    ("integer", "numeric(10,2)"),
    ("numeric", "bigint"),
    ("shop.mood", "text"),
    ("uuid", "character varying(10)"),
    ("character varying(9)", "character varying(8)[]"),
    ("timestamp with time zone", "timestamp(3) without time zone"),
    ('"a(b"', '"a(b"'),
]


@pytest.mark.parametrize(("source", "copy"), SAFE)
def test_longer_strings_and_wider_numbers_are_changed_in_place(source: str, copy: str) -> None:
    assert type_change(source, copy) == TypeChange(SAFE[source, copy], in_place=True)


@pytest.mark.parametrize(("source", "copy"), REWRITTEN)
def test_any_other_type_that_holds_more_would_be_a_rewrite(source: str, copy: str) -> None:
    assert type_change(source, copy) == TypeChange(REWRITTEN[source, copy], in_place=False)


@pytest.mark.parametrize(("source", "copy"), [*HELD, *OTHER])
def test_a_type_that_holds_all_values_and_one_of_another_family_are_left(source: str, copy: str) -> None:
    assert type_change(source, copy) is None
