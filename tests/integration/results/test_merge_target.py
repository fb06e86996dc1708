"""Checks of targets: misfits are refused before any work. If the target refuses rows, the error names it."""

from __future__ import annotations

import re

import pytest
from psycopg import errors

from airflow_pgchange.errors import MergeRefused, PermissionDenied
from airflow_pgchange.results.merge import merge, validate
from airflow_pgchange.results.merge_modes import Mode
from tests.staging import BATCH, PLACES, rows_of, stage


@pytest.mark.parametrize("kind", ["varchar(3)", "char(3)", "shortword"])
def test_text_that_is_too_long_is_refused_and_never_cut(results, kind):
    results.execute(f"create domain shortword as varchar(3); create table public.short (word {kind})")
    staged = stage(results, "public.short", [], "append", {"word": "text"}, [("abcdef",)])
    with pytest.raises(MergeRefused, match="value too long"):
        merge(results, BATCH, [staged])


def test_a_violated_constraint_names_target_and_row(results):
    results.execute("create table public.checked (id bigint primary key, n int check (n > 0))")
    staged = stage(results, "public.checked", ["id"], "replace", {"id": "bigint", "n": "integer"}, [(1, -1)])
    with pytest.raises(MergeRefused, match=r"public\.checked: .*checked_n_check.*\(1, -1\)"):
        merge(results, BATCH, [staged])


def refusing(connection, body):
    """Create a target whose trigger refuses a row."""
    connection.execute(
        f"create table public.guarded (id bigint primary key); create function guard() returns trigger language "
        f"plpgsql as $$ begin {body}; return new; end $$; "
        "create trigger guard before insert on public.guarded for each row execute function guard()"
    )
    return stage(connection, "public.guarded", ["id"], "replace", {"id": "bigint"}, [(1,)])


def test_an_error_of_a_trigger_of_the_target_names_the_target(results):
    staged = refusing(results, "raise exception 'closed for the year'")
    with pytest.raises(MergeRefused, match=r"public\.guarded: closed for the year"):
        merge(results, BATCH, [staged])


def test_a_table_that_a_trigger_of_the_target_misses_is_not_taken_for_staging(results):
    staged = refusing(results, "perform from public.archive")
    with pytest.raises(errors.UndefinedTable, match=r"public\.archive"):
        merge(results, BATCH, [staged])


def test_identity_default_and_generated_columns_of_the_target_fill_themselves(results):
    results.execute(
        "create table public.filled (no bigint generated always as identity, k text primary key, v int, "
        "twice int generated always as (v * 2) stored, at timestamptz not null default '2020-01-01Z')"
    )
    staged = stage(results, "public.filled", ["k"], "replace", {"k": "text", "v": "integer"}, [("a", 1)])
    merge(results, BATCH, [staged])
    assert rows_of(results, "select no, k, v, twice, extract(year from at)::int from filled") == [
        (1, "a", 1, 2, 2020)
    ]


def test_a_key_that_the_target_makes_itself_is_the_one_that_was_staged(results):
    results.execute(
        "create table public.numbered (id bigint generated always as identity primary key, v int)"
    )
    for value in (1, 2):
        columns = {"id": "bigint", "v": "integer"}
        merge(results, BATCH, [stage(results, "public.numbered", ["id"], "replace", columns, [(7, value)])])
    assert rows_of(results, "select id, v from numbered") == [(7, 2)]


def test_an_id_that_the_key_of_a_mirror_cannot_hold_is_of_another_table(results):
    results.execute("create table public.small (id smallint primary key, v int)")
    staged = stage(
        results,
        "public.small",
        ["id"],
        "mirror",
        {"id": "bigint", "v": "integer"},
        [(1, 1)],
        touched=[1, 5_000_000_000],
    )
    merge(results, BATCH, [staged])
    assert rows_of(results, "select id, v from small") == [(1, 1)]


@pytest.mark.parametrize(("kind", "bits"), [("smallint", 16), ("integer", 32), ("bigint", 64)])
def test_the_key_of_a_mirror_holds_all_ids_of_its_type_and_no_other(results, kind, bits):
    lowest, highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    results.execute(f"create table public.bounded (id {kind} primary key)")
    results.execute(f"insert into bounded values ({lowest}), (0), ({highest})")
    beyond = [] if kind == "bigint" else [lowest - 1, highest + 1]
    touched = [lowest, highest, *beyond]
    staged = stage(results, "public.bounded", ["id"], "mirror", {"id": "bigint"}, [], touched=touched)
    merge(results, BATCH, [staged])
    assert rows_of(results, "select id from bounded") == [(0,)]


def test_rows_that_are_written_one_by_one_are_told_what_lets_values_change_places(results):
    results.execute(
        "create table public.tails (id bigint primary key, tail text unique); insert into tails values (1, 'a'), (2, 'b')"
    )
    columns, rows = {"id": "bigint", "tail": "text"}, [(1, "b"), (2, "a")]
    with pytest.raises(MergeRefused, match="deferrable initially deferred"):
        merge(results, BATCH, [stage(results, "public.tails", ["id"], "replace", columns, rows)])
    results.execute(
        "alter table tails drop constraint tails_tail_key; "
        "alter table tails add unique (tail) deferrable initially deferred"
    )
    merge(results, BATCH, [stage(results, "public.tails", ["id"], "replace", columns, rows)])
    assert rows_of(results, "select id, tail from tails order by id") == rows


PLACE, ODD, MADE = "public.places", "public.odd", "public.made"
MISFITS = {
    "no such table": ("public.nowhere", ["id"], "replace", {"id": "bigint"}, "no table public.nowhere"),
    "view": ("public.seen", ["id"], "replace", {"id": "bigint"}, "not a table"),
    "no such column": (PLACE, ["id"], "replace", {"id": "bigint", "size": "bigint"}, 'no column "size"'),
    "key not in frame": (PLACE, ["id"], "replace", {"code": "text"}, '"id" is not among the merged columns'),
    "no key": (PLACE, [], "add", {"area": "numeric"}, "needs a key"),
    "no index": (PLACE, ["note"], "replace", {"note": "text"},
                 r'create unique index on "public"."places" \("note"\)'),
    "partial index": (ODD, ["a"], "replace", {"a": "bigint"}, "no unique index on exactly"),
    "deferrable key": (ODD, ["b"], "replace", {"b": "bigint"}, "no unique index on exactly"),
    "index on more": (ODD, ["c"], "replace", {"c": "bigint"}, "no unique index on exactly"),
    "text is not added": (PLACE, ["id"], "add", {"id": "bigint", "note": "text"}, "cannot be added"),
    "no column to add": (PLACE, ["id"], "add", {"id": "bigint"}, "no column to add"),
    "rounded": (PLACE, ["id"], "replace", {"id": "double precision"}, "cast it in your code"),
    "float to decimal": (PLACE, ["id"], "add", {"id": "bigint", "area": "real"}, "cast it in your code"),
    "time zone guessed": (MADE, ["id"], "replace", {"id": "bigint", "at": "timestamp without time zone"},
                          "cast it in your code"),
    "mirror by text": (PLACE, ["code"], "mirror", {"code": "text"}, "must end with an integer column"),
    "mirror by two": (ODD, ["c", "d"], "mirror", {"c": "bigint", "d": "text"}, "must end with an integer column"),
    "generated": (MADE, ["id"], "replace", {"id": "bigint", "twice": "bigint"}, "always generated"),
    "identity": (MADE, ["id"], "replace", {"id": "bigint", "no": "bigint"}, "leave it out .*, or run `alter"),
    "more columns than a table has": (PLACE, ["id"], "replace", {f"c{n}": "text" for n in range(1599)},
                                      "1599 columns are merged, .*at most 1598: leave some out, or merge them"),
    "required": (MADE, ["id"], "replace", {"id": "bigint"}, '"must" must have a value'),
    "required by a domain": ("public.ruled", ["id"], "replace", {"id": "bigint"}, '"must" must have a value'),
    "reserved": (PLACE, ["id"], "replace", {"id": "bigint", "pgchange_attempt": "bigint"}, "reserved"),
}  # fmt: skip


def test_a_mirror_into_a_copy_that_numbers_its_rows_is_told_what_lets_it_take_the_sources_numbers(results):
    results.execute(
        "create table public.copy (id bigint primary key, no bigint generated always as identity); "
        "insert into copy (id) values (1)"
    )
    columns, rows = {"id": "bigint", "no": "bigint"}, [(1, 7), (2, 8)]
    staged = stage(results, "public.copy", ["id"], "mirror", columns, rows, touched=[1, 2])
    with pytest.raises(MergeRefused, match=r'"no" is generated always as identity, .*: run `') as refused:
        merge(results, BATCH, [staged])
    [mending] = re.findall("`(.*)`", str(refused.value))
    results.execute(mending)
    merge(results, BATCH, [staged])
    assert rows_of(results, "select id, no from copy order by id") == rows


def test_keys_that_become_one_as_they_are_written_are_refused_with_what_to_do(results):
    results.execute(
        "create table public.words (word text primary key, n int); create function public.lowered() returns trigger "
        "language plpgsql as $$ begin new.word = lower(new.word); return new; end $$; "
        "create trigger t before insert on words for each row execute function public.lowered()"
    )
    columns, rows = {"word": "text", "n": "integer"}, [("a", 1), ("A", 1)]
    with pytest.raises(MergeRefused, match="are equal in the table"):
        merge(results, BATCH, [stage(results, "public.words", ["word"], "add", columns, rows)])


def test_a_vector_of_the_catalogue_takes_the_text_that_it_is_read_as(results):
    results.execute("create table public.vectors (id bigint primary key, v int2vector, o oidvector)")
    columns = {"id": "bigint", "v": "text", "o": "text"}
    merge(results, BATCH, [stage(results, "public.vectors", ["id"], "replace", columns, [(1, "1 2", "3 4")])])
    assert rows_of(results, "select v::text, o::text from vectors") == [("1 2", "3 4")]


@pytest.fixture(scope="module")
def unfit(shared):
    """A connection to a database of results with tables that cannot be merged into."""
    shared.execute(PLACES)
    shared.execute(
        "create view public.seen as select * from places; "
        "create table public.odd (a bigint, b bigint unique deferrable, c bigint, d bigint, unique (c, d)); "
        "create unique index on odd (a) where a > 0; "
        "create table public.made (id bigint primary key, no bigint generated always as identity, "
        "twice bigint generated always as (id * 2) stored, must text not null, at timestamptz); "
        "create domain said as text not null; create table public.ruled (id bigint primary key, must said)"
    )
    return shared


@pytest.mark.parametrize("case", MISFITS)
def test_a_misfit_is_refused_before_any_work_is_done(unfit, case):
    target, key, mode, columns, message = MISFITS[case]
    with pytest.raises(MergeRefused, match=message):
        validate(unfit, target, key, Mode(mode), columns)


def test_a_role_without_rights_on_the_target_is_told_which_it_needs(results, role, connect_to):
    results.execute(PLACES)
    someone = role("someone")
    results.execute(f"grant select, insert on places to {someone.name}")
    connection = connect_to(someone.conninfo)
    validate(connection, "public.places", ["id"], Mode.APPEND, {"id": "bigint"})
    with pytest.raises(PermissionDenied, match=r'grant update, delete on "public"."places"'):
        validate(connection, "public.places", ["id"], Mode.MIRROR, {"id": "bigint"})
