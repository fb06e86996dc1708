"""The files of sql/: each can be read from top to bottom, comments its objects, and repeats no function."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from airflow_pgchange.admin.versions import SYSTEMS, scripts
from tests.suite.sql_reading import (
    SqlFile,
    looking_forward,
    read,
    without_comment,
    written_twice,
)

ROOT = Path(__file__).parents[2]
NUMBERED = re.compile(r"(?:\w+/)?\b\d\d_[a-z_]+\.sql")


@pytest.fixture(scope="module")
def files() -> list[SqlFile]:
    """Return the files in the order in which they are loaded."""
    paths = [path for system in SYSTEMS for path in scripts(system)]
    return [read(path.relative_to(ROOT).as_posix(), path.read_text()) for path in paths]


def test_a_file_uses_only_what_stands_in_it_or_before_it(files):
    assert looking_forward(files) == []


def test_every_object_has_a_comment(files):
    assert without_comment(files) == []


def test_no_function_is_written_twice(files):
    assert written_twice(files) == []


def test_a_file_that_a_text_names_is_there(files):
    paths = {file.path for file in files}
    texts = {
        path: path.read_text()
        for path in [ROOT / "CONTRIBUTING.md", *ROOT.glob("sql/**/*.md"), *ROOT.glob("sql/**/*.sql")]
    }
    named = {
        (path.relative_to(ROOT).as_posix(), name)
        for path, text in texts.items()
        for name in NUMBERED.findall(text)
    }
    assert len(named) > 8
    assert [
        (path, name) for path, name in named if not any(file.endswith(f"/{name}") for file in paths)
    ] == []


def test_the_files_of_a_folder_have_numbers_of_their_own(files):
    numbers = [(path.parent, path.name[:2]) for path in (Path(file.path) for file in files)]
    assert [number for number, count in Counter(numbers).items() if count > 1] == []


EARLY = "create function shop.sell() returns void language {} as $$ {} $$;"
LATE = """
create function shop.pay(amount integer) returns void language sql as $$ select $$;
create procedure shop.close() language sql as $$ select $$;
create table shop.item (id bigint);
create view shop.cheap as select 1;
create type shop.sale as (item bigint);
create type shop.colour as enum ('red');
create domain shop.price as integer;
create sequence shop.number;
"""


def forward(*texts: str) -> list[str]:
    return looking_forward([read(f"{number}.sql", text) for number, text in enumerate(texts, 1)])


@pytest.mark.parametrize("late", ["pay", "close", "item", "cheap", "sale", "colour", "price", "number"])
def test_a_name_of_anything_that_is_made_later_is_found(late):
    assert forward(EARLY.format("sql", f"select shop.{late}"), LATE) == [
        f"1.sql:1 names shop.{late} of 2.sql"
    ]


@pytest.mark.parametrize(
    "body",
    [
        "begin perform shop.pay(1); end",
        "begin execute 'select shop.pay(1)'; end",
        "begin execute format('select shop.pay(%L) from shop.%I', 1, 'x'); end",
        "begin perform shop.place($body$ begin /* it's */ perform shop.pay(1); end $body$); end",
        "begin perform 'shop.pay(integer)'::regprocedure; end",
        "begin perform to_regprocedure('shop.pay'); end",
        "begin return query execute q || ' and shop.pay(1)'; end",
        "begin raise 'no'; execute 'select shop.pay(1)'; end",
        'begin perform shop."pay"(1); end',
    ],
)
def test_a_name_is_found_in_what_a_body_runs(body):
    assert forward(EARLY.format("plpgsql", body), LATE) == ["1.sql:1 names shop.pay of 2.sql"]


@pytest.mark.parametrize(
    "body",
    [
        "begin raise 'no' using hint = 'select shop.pay(1)'; end",
        "begin perform shop.refuse(format('no %s', (1)), 'select shop.pay(1)'); end",
        "begin return format('as its owner: select shop.pay(%L)', 1); end",
        "begin -- see shop.pay\n end",
        "begin /* see shop.pay */ end",
    ],
)
def test_a_text_for_people_may_name_an_object_of_a_later_file(body):
    told = "comment on function shop.sell() is 'Then select shop.pay(1).';"
    assert forward(EARLY.format("plpgsql", body) + told, LATE) == []


def test_a_name_is_found_on_its_line_and_outside_of_functions():
    text = "-- One's first.\n\nselect 'é';\ngrant execute\non function shop.pay(integer) to public;\n"
    assert forward(text, LATE) == ["1.sql:5 names shop.pay of 2.sql"]
    assert forward("do $$ begin\nperform shop.pay(1); end $$;", LATE) == ["1.sql:2 names shop.pay of 2.sql"]


def test_names_of_what_stands_in_a_file_or_before_it_are_no_fault():
    uses = EARLY.format("sql", "select shop.pay(1), shop.unknown()")
    assert forward(LATE, uses) == []
    assert forward(uses + LATE) == []
    assert forward(LATE, uses, LATE) == []


@pytest.mark.parametrize("kind", ["function", "procedure", "table", "view", "type", "domain"])
def test_each_kind_needs_a_comment_of_its_own(kind):
    comments = {
        "function": "shop.pay(integer)",
        "procedure": "shop.close()",
        "table": "shop.item",
        "view": "shop.cheap",
        "type": "shop.sale",
        "domain": "shop.price",
    }
    others = "comment on type shop.colour is 'x';" + "".join(
        f"comment on {other} {name} is 'x';" for other, name in comments.items() if other != kind
    )
    [found] = without_comment([read("1.sql", LATE), read("2.sql", others)])
    assert found.startswith(f"1.sql: {kind} {comments[kind].partition('(')[0]}")


def test_a_comment_is_about_the_function_that_takes_what_it_says():
    two = "".join(
        f"create function shop.pay({takes}) returns void language sql as '';"
        for takes in ("a int, b text[] default '{}', out c int", "a bigint")
    )
    told = "comment on function shop.pay(integer, text[]) is 'x';"
    assert without_comment([read("1.sql", two + told)]) == ["1.sql: function shop.pay(int8)"]
    assert without_comment([read("1.sql", two + "comment on function shop.pay is 'x';")]) == []


@pytest.mark.parametrize(
    ("above", "is_explained"),
    [("-- Take money.\n", True), ("", False), ("-- The till.\n\n", False), ("-- Money.\nselect 1;\n", False)],
)
def test_a_function_is_explained_by_the_comment_directly_above_it(above, is_explained):
    text = f"-- A shop.\n\n{above}create function shop.pay(a int) returns void language sql as '';"
    assert (without_comment([read("1.sql", text)]) == []) is is_explained


def test_a_long_body_that_is_there_twice_is_found():
    long = f"select {'1 +  ' * 50} 1"
    made = "create function shop.{}() returns int language sql as $$ {} $$;"
    again = made.format("b", long.replace("  ", "\n"))
    assert written_twice([read("1.sql", made.format("a", long)), read("2.sql", again)]) == [
        "1.sql: function shop.a() and 2.sql: function shop.b()"
    ]
    assert written_twice([read("1.sql", made.format("a", "select 1") + made.format("b", "select 1"))]) == []
