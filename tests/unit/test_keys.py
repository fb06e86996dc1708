"""Keys of rows as PostgreSQL, Python and people write them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.keys import shown, text, value, written

PARTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"))


@settings(max_examples=30)
@given(st.tuples(PARTS, st.integers(-(2**63), 2**63 - 1), PARTS))
def test_a_key_of_several_columns_survives_its_text_and_the_writing_of_people(key):
    types = ("text", "bigint", "text")
    assert value(text(key), types) == key
    assert written(shown(key), types) == key


@pytest.mark.parametrize(
    ("key", "sent", "seen"),
    [
        (7, "7", "7"),
        ("a,b", "a,b", "a,b"),
        (("a", 7), "{a,7}", "a,7"),
        (("a,b", 7), '{"a,b",7}', '"a,b",7'),
        (("", "null"), '{"","null"}', '"","null"'),
        (('a"\\', "{b}"), '{"a\\"\\\\","{b}"}', '"a\\"\\\\","{b}"'),
    ],
)
def test_a_key_has_the_text_of_postgresql_and_people_leave_the_braces_out(key, sent, seen):
    assert (text(key), shown(key)) == (sent, seen)


@pytest.mark.parametrize(
    ("given", "types", "key"),
    [
        ("7", ("bigint",), 7),
        ("7f", ("uuid",), "7f"),
        (" a , 12 ", ("text", "bigint"), ("a", 12)),
        ("{a,12}", ("text", "bigint"), ("a", 12)),
        ('" a",12', ("text", "bigint"), (" a", 12)),
    ],
)
def test_people_write_values_with_commas_between_them(given, types, key):
    assert written(given, types) == key


@pytest.mark.parametrize(
    ("given", "types", "told"),
    [
        ("x", ("bigint",), "whole number"),
        ("1_0", ("bigint",), "whole number"),
        ("a,b", ("text", "bigint"), "whole number"),
        ("a", ("text", "bigint"), "write 2 values"),
        ("a,1,2", ("text", "bigint"), "write 2 values"),
        ("a,", ("text", "bigint"), "no key"),
        ("", ("text", "bigint"), "no key"),
        ('"a,1', ("text", "bigint"), "no key"),
        ("{a,1},2", ("text", "bigint"), "no key"),
    ],
)
def test_a_text_that_is_no_key_is_refused(given, types, told):
    with pytest.raises(InvalidArgument, match=told):
        written(given, types)


def test_a_batch_says_the_types_of_its_keys():
    batch = Batch("1", "a", 1, 1, 0, (), {"key": ["uuid", "bigint"]})
    assert Batch.from_json(batch.to_json()).key == ("uuid", "bigint")
    assert Batch("1", "a", 1, 1, 0, (), {}).key == ("bigint",)
