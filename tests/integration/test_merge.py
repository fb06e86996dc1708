"""Staged results into targets: each mode, and every misfit refused before anything is written."""

from __future__ import annotations

import dataclasses

import pytest
from psycopg import errors, sql

from airflow_pgchange.feeds import Batch
from airflow_pgchange.feeds.connect import connect as feed_connect
from airflow_pgchange.feeds.errors import InvalidArgument, MergeRefused, PermissionDenied, SchemaMissing
from airflow_pgchange.feeds.merge import Staged, merge, read_manifest, validate, write_manifest
from airflow_pgchange.feeds.staging import checked_mode, create

BATCH = Batch(id="batch-1", feed="test/0", version=1, attempt=2, count=3, slices=(), bounds={})
LOSER = 99


@pytest.fixture
def results(db):
    connection = feed_connect(db)
    yield connection
    connection.close()


def stage(connection, target, key, mode, columns, rows, *, touched=(), losers=(), batch=BATCH):
    """What a job's writers leave behind: rows of winners (task attempts 0 and 1) and of losers."""
    table = create(connection, batch, target, list(columns.items()))
    names = sql.SQL(", ").join(map(sql.Identifier, ["pgchange_attempt", "pgchange_touched", *columns]))
    winners = {}

    def insert(*values):
        query = sql.SQL("insert into {} ({}) values ({})").format(
            sql.Identifier("pgchange_staging", table), names, sql.SQL(", ").join(map(sql.Literal, values))
        )
        connection.execute(query)
        winners[values[0]] = winners.get(values[0], 0) + 1

    for number, row in enumerate(rows):
        insert(number % 2, None, *row)
    for id_ in touched:
        insert(1, True, *(id_ if name in key else None for name in columns))
    for row in losers:
        insert(LOSER, None, *row)
    winners.pop(LOSER, None)
    kinds, counts = tuple(columns.items()), tuple(winners.items())
    return Staged(target, tuple(key), mode, table, kinds, counts, batch.id, batch.attempt)


def rows_of(connection, query):
    return connection.execute(query).fetchall()


COUNTS = (
    "create table public.counts (carrier text, day date, n bigint, delay numeric(12,2), "
    "primary key (carrier, day))"
)
COLUMNS = {"carrier": "text", "day": "date", "n": "bigint", "delay": "numeric"}


def test_add_sums_what_was_staged_onto_what_is_there(results):
    results.execute(COUNTS)
    results.execute("insert into counts values ('UA', '2013-01-01', 10, 1.50), ('DL', '2013-01-01', 1, null)")
    staged = stage(results, "public.counts", ["carrier", "day"], "add", COLUMNS,
                   [("UA", "2013-01-01", 1, 0.25), ("UA", "2013-01-01", 2, 0.25), ("DL", "2013-01-01", 1, 3),
                    ("AA", "2013-01-02", 7, None)])  # fmt: skip
    merge(results, BATCH, [staged])
    assert rows_of(results, "select carrier, n, delay::text from counts order by carrier") == [
        ("AA", 7, None), ("DL", 2, "3.00"), ("UA", 13, "2.00")]  # fmt: skip


def test_add_keeps_a_sum_where_the_new_value_is_null(results):
    results.execute(COUNTS)
    results.execute("insert into counts values ('UA', '2013-01-01', 10, 1.50)")
    staged = stage(
        results, "public.counts", ["carrier", "day"], "add", COLUMNS, [("UA", "2013-01-01", None, None)]
    )
    merge(results, BATCH, [staged])
    assert rows_of(results, "select n, delay::text from counts") == [(10, "1.50")]


def test_add_past_the_range_of_a_column_is_refused_by_name(results):
    results.execute("create table public.small (k int primary key, n smallint)")
    staged = stage(
        results, "public.small", ["k"], "add", {"k": "integer", "n": "bigint"}, [(1, 20000), (1, 20000)]
    )
    with pytest.raises(MergeRefused, match=r"public\.small: smallint out of range"):
        merge(results, BATCH, [staged])


PLACES = (
    "create table public.places (id bigint primary key, code text unique, area numeric, "
    "note text default 'none')"
)


def test_replace_inserts_new_rows_and_overwrites_old_ones(results):
    results.execute(PLACES)
    results.execute("insert into places values (1, 'a', 1, 'kept'), (2, 'b', 2, 'kept')")
    staged = stage(
        results, "public.places", ["id"], "replace", {"id": "bigint", "code": "text"}, [(2, "B"), (3, "c")]
    )
    merge(results, BATCH, [staged])
    assert rows_of(results, "select id, code, note from places order by id") == [
        (1, "a", "kept"), (2, "B", "kept"), (3, "c", "none")]  # fmt: skip


def test_replace_refuses_a_key_that_comes_twice_and_names_it(results):
    results.execute(PLACES)
    staged = stage(results, "public.places", ["id"], "replace", {"id": "bigint"}, [(2,), (3,), (3,)])
    with pytest.raises(MergeRefused, match=r"id=3 comes more than once"):
        merge(results, BATCH, [staged])


def test_a_null_key_is_refused(results):
    results.execute(PLACES)
    staged = stage(
        results, "public.places", ["id"], "replace", {"id": "bigint", "code": "text"}, [(None, "x")]
    )
    with pytest.raises(MergeRefused, match="holds NULL"):
        merge(results, BATCH, [staged])


def test_a_mirror_upserts_what_is_there_and_deletes_what_is_gone(results):
    results.execute(PLACES)
    results.execute("insert into places select n, n::text from generate_series(1, 5) n")
    staged = stage(results, "public.places", ["id"], "mirror", {"id": "bigint", "code": "text"},
                   [(2, "two"), (2, "two"), (6, "six")], touched=[2, 2, 3, 4, 6, 7])  # fmt: skip
    merge(results, BATCH, [staged])
    assert rows_of(results, "select id, code from places order by id") == [
        (1, "1"),
        (2, "two"),
        (5, "5"),
        (6, "six"),
    ]


def test_a_mirror_frees_what_is_gone_before_it_writes(results):
    results.execute(PLACES)
    results.execute("insert into places values (1, 'same')")
    staged = stage(
        results,
        "public.places",
        ["id"],
        "mirror",
        {"id": "bigint", "code": "text"},
        [(2, "same")],
        touched=[1, 2],
    )
    merge(results, BATCH, [staged])
    assert rows_of(results, "select id, code from places") == [(2, "same")]


def test_a_mirror_refuses_rows_that_the_batch_does_not_name(results):
    results.execute(PLACES)
    staged = stage(results, "public.places", ["id"], "mirror", {"id": "bigint"}, [(2,), (8,)], touched=[2])
    with pytest.raises(MergeRefused, match="id=8 is no id that this batch's changes name"):
        merge(results, BATCH, [staged])


def test_append_writes_every_row_and_needs_no_key(results):
    results.execute("create table public.log (at timestamptz default now(), line text)")
    staged = stage(results, "public.log", [], "append", {"line": "text"}, [("a",), ("a",), (None,)])
    merge(results, BATCH, [staged])
    assert rows_of(results, "select line from log order by line") == [("a",), ("a",), (None,)]


def test_rows_of_losing_attempts_are_not_merged(results):
    results.execute("create table public.log (line text)")
    staged = stage(results, "public.log", [], "append", {"line": "text"}, [("won",)], losers=[("lost",)])
    merge(results, BATCH, [staged])
    assert rows_of(results, "select line from log") == [("won",)]


def test_a_staged_row_that_is_missing_refuses_the_merge(results):
    results.execute("create table public.log (line text)")
    staged = stage(results, "public.log", [], "append", {"line": "text"}, [("a",), ("b",)])
    results.execute(sql.SQL("delete from {} where line = 'b'").format(staged.identifier))
    with pytest.raises(MergeRefused, match="2 rows were staged, 1 are there"):
        merge(results, BATCH, [staged])


def test_a_staging_table_that_is_gone_refuses_the_merge(results):
    results.execute("create table public.log (line text)")
    staged = stage(results, "public.log", [], "append", {"line": "text"}, [("a",)])
    results.execute(sql.SQL("drop table {}").format(staged.identifier))
    with pytest.raises(MergeRefused, match="is gone"):
        merge(results, BATCH, [staged])


@pytest.mark.parametrize("other", [{"attempt": 3}, {"id": "batch-2"}])
def test_what_another_attempt_or_batch_staged_is_never_merged(results, other):
    results.execute("create table public.log (line text)")
    staged = stage(results, "public.log", [], "append", {"line": "text"}, [("a",)])
    with pytest.raises(MergeRefused, match="it is not merged"):
        merge(results, dataclasses.replace(BATCH, **other), [staged])


def test_a_merge_drops_its_staging_tables(results):
    results.execute("create table public.log (line text)")
    staged = stage(results, "public.log", [], "append", {"line": "text"}, [])
    assert len(rows_of(results, "select from pgchange_staging.staged_tables()")) == 1
    merge(results, BATCH, [staged])
    assert rows_of(results, "select from pgchange_staging.staged_tables()") == []


def test_a_merge_that_is_rolled_back_leaves_staging_for_another_try(results):
    results.execute(COUNTS)
    staged = stage(results, "public.counts", ["carrier", "day"], "add", COLUMNS, [("UA", "2013-01-01", 1, 1)])
    with results.transaction(force_rollback=True):
        merge(results, BATCH, [staged])
    merge(results, BATCH, [staged])
    assert rows_of(results, "select n from counts") == [(1,)]


def test_text_becomes_the_type_of_its_column(results):
    results.execute(
        "create type mood as enum ('sad', 'happy'); "
        "create domain postcode as varchar(5) check (value ~ '^[0-9]+$'); "
        "create table public.typed (id uuid primary key, mood mood, code postcode, doc jsonb, span interval, "
        "period tstzrange, at time, ids uuid[], grid int[], big numeric)"
    )
    values = {
        "id": "c3b0a4ce-0000-0000-0000-000000000001", "mood": "happy", "code": "01234", "doc": '{"a": 1}',
        "span": "1 mon", "period": "[2020-01-01 00:00:00+00,infinity)", "at": "12:00:00",
        "grid": "{{1,2},{3,4}}", "big": "1" * 60,
    }  # fmt: skip
    columns = {**dict.fromkeys(values, "text"), "ids": "text[]"}
    staged = stage(results, "public.typed", ["id"], "replace", columns, [(*values.values(), [values["id"]])])
    merge(results, BATCH, [staged])
    shown = ", ".join(f'"{name}"::text' for name in values)
    values["period"] = '["2020-01-01 00:00:00+00",infinity)'
    assert rows_of(results, f"select {shown} from typed") == [
        tuple({**values, "period": '["2020-01-01 00:00:00+00",infinity)'}.values())
    ]


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
    """A target whose trigger does not let a row in."""
    connection.execute(
        f"create table public.guarded (id bigint primary key); create function guard() returns trigger language "
        f"plpgsql as $$ begin {body}; return new; end $$; "
        "create trigger guard before insert on public.guarded for each row execute function guard()"
    )
    return stage(connection, "public.guarded", ["id"], "replace", {"id": "bigint"}, [(1,)])


def test_what_a_trigger_of_the_target_raises_names_the_target(results):
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


def test_a_partitioned_target_and_names_that_need_quotes(results):
    results.execute(
        'create schema "My Schema"; '
        'create table "My Schema"."Tar""get" ("Key {x}" bigint primary key, "a%b" int) '
        'partition by hash ("Key {x}"); '
        'create table "My Schema".p0 partition of "My Schema"."Tar""get" '
        "for values with (modulus 1, remainder 0)"
    )
    target, columns = 'My Schema.Tar"get', {"Key {x}": "bigint", "a%b": "integer"}
    for _ in range(2):
        merge(results, BATCH, [stage(results, target, ["Key {x}"], "add", columns, [(1, 2)])])
    assert rows_of(results, 'select * from "My Schema"."Tar""get"') == [(1, 4)]


def test_many_targets_are_merged_or_none(results):
    results.execute(COUNTS)
    results.execute("create table public.log (line varchar(1))")
    fine = stage(results, "public.counts", ["carrier", "day"], "add", COLUMNS, [("UA", "2013-01-01", 1, 1)])
    broken = stage(results, "public.log", [], "append", {"line": "text"}, [("too long",)])
    with pytest.raises(MergeRefused), results.transaction():
        merge(results, BATCH, [fine, broken])
    assert rows_of(results, "select n from counts") == []


PLACE, ODD, MADE = "public.places", "public.odd", "public.made"
MISFITS = {
    "no such table": ("public.nowhere", ["id"], "replace", {"id": "bigint"}, "no table public.nowhere"),
    "view": ("public.seen", ["id"], "replace", {"id": "bigint"}, "not a table"),
    "no such column": (PLACE, ["id"], "replace", {"id": "bigint", "size": "bigint"}, 'no column "size"'),
    "key not in frame": (PLACE, ["id"], "replace", {"code": "text"}, '"id" is not in what is merged'),
    "no key": (PLACE, [], "add", {"area": "numeric"}, "needs a key"),
    "no index": (PLACE, ["note"], "replace", {"note": "text"},
                 r'create unique index on "public"."places" \("note"\)'),
    "partial index": (ODD, ["a"], "replace", {"a": "bigint"}, "no unique index on exactly"),
    "deferrable key": (ODD, ["b"], "replace", {"b": "bigint"}, "no unique index on exactly"),
    "index on more": (ODD, ["c"], "replace", {"c": "bigint"}, "no unique index on exactly"),
    "text is not added": (PLACE, ["id"], "add", {"id": "bigint", "note": "text"}, "cannot be added"),
    "nothing to add": (PLACE, ["id"], "add", {"id": "bigint"}, "nothing to add"),
    "rounded": (PLACE, ["id"], "replace", {"id": "double precision"}, "cast it in Spark"),
    "float to decimal": (PLACE, ["id"], "add", {"id": "bigint", "area": "real"}, "cast it in Spark"),
    "time zone guessed": (MADE, ["id"], "replace", {"id": "bigint", "at": "timestamp without time zone"},
                          "cast it in Spark"),
    "mirror by text": (PLACE, ["code"], "mirror", {"code": "text"}, "ends with an integer column"),
    "mirror by two": (ODD, ["c", "d"], "mirror", {"c": "bigint", "d": "text"}, "ends with an integer column"),
    "generated": (MADE, ["id"], "replace", {"id": "bigint", "twice": "bigint"}, "always generated"),
    "identity": (MADE, ["id"], "replace", {"id": "bigint", "no": "bigint"}, "always generated"),
    "required": (MADE, ["id"], "replace", {"id": "bigint"}, '"must" must have a value'),
    "required by a domain": ("public.ruled", ["id"], "replace", {"id": "bigint"}, '"must" must have a value'),
    "reserved": (PLACE, ["id"], "replace", {"id": "bigint", "pgchange_attempt": "bigint"}, "reserved"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS)
def test_a_misfit_is_refused_before_any_work_is_done(results, case):
    results.execute(PLACES)
    results.execute(
        "create view public.seen as select * from places; "
        "create table public.odd (a bigint, b bigint unique deferrable, c bigint, d bigint, unique (c, d)); "
        "create unique index on odd (a) where a > 0; "
        "create table public.made (id bigint primary key, no bigint generated always as identity, "
        "twice bigint generated always as (id * 2) stored, must text not null, at timestamptz); "
        "create domain said as text not null; create table public.ruled (id bigint primary key, must said)"
    )
    target, key, mode, columns, message = MISFITS[case]
    with pytest.raises(MergeRefused, match=message):
        validate(results, target, key, mode, columns)


def test_a_role_without_rights_on_the_target_is_told_which_it_needs(results, role, connect_to):
    results.execute(PLACES)
    someone = role("someone")
    results.execute(f"grant select, insert on places to {someone.name}")
    connection = connect_to(someone.conninfo)
    validate(connection, "public.places", ["id"], "append", {"id": "bigint"})
    with pytest.raises(PermissionDenied, match=r'grant update, delete on "public"."places"'):
        validate(connection, "public.places", ["id"], "mirror", {"id": "bigint"})


def test_a_consumer_needs_no_more_than_its_grants(results, role, connect_to):
    results.execute(COUNTS)
    consumer = role("consumer")
    connection = connect_to(consumer.conninfo)
    with pytest.raises(PermissionDenied):
        create(connection, BATCH, "public.counts", [])
    results.execute(f"select pgchange_staging.grant_consumer('{consumer.name}')")
    results.execute(f"grant select, insert, update on counts to {consumer.name}")
    staged = stage(
        connection, "public.counts", ["carrier", "day"], "add", COLUMNS, [("UA", "2013-01-01", 1, 1)]
    )
    merge(connection, BATCH, [staged])
    assert rows_of(results, "select n from counts") == [(1,)]


def test_staging_without_our_schema_says_what_to_install(bare_db):
    with feed_connect(bare_db) as connection, pytest.raises(SchemaMissing, match="airflow pgchange install"):
        create(connection, BATCH, "public.counts", [])


def test_an_unknown_mode_is_named():
    with pytest.raises(InvalidArgument, match="add, replace, mirror, append, not 'upsert'"):
        checked_mode("upsert")


def test_a_manifest_comes_back_as_it_was_written(tmp_path):
    staged = Staged(
        "public.t",
        ("a", "b"),
        "add",
        "b00_1_00",
        (("a", "text"), ("b", "bigint")),
        ((7, 3), (9, 0)),
        "batch",
        4,
    )
    write_manifest(tmp_path / "manifest.json", [staged])
    assert read_manifest(tmp_path / "manifest.json") == (staged,)


def test_an_application_that_wrote_no_manifest_is_not_taken_for_one_without_results(tmp_path):
    with pytest.raises(MergeRefused, match="without saying what it staged"):
        read_manifest(tmp_path / "manifest.json")


def test_a_deadlock_is_left_to_the_transaction_that_tries_again(results, monkeypatch):
    results.execute("create table public.log (line text)")
    staged = stage(results, "public.log", [], "append", {"line": "text"}, [("a",)])
    results.execute(
        "create function public.deadlock() returns trigger language plpgsql as "
        "$$ begin raise sqlstate '40P01'; end $$; "
        "create trigger t before insert on log for each row execute function public.deadlock()"
    )
    with pytest.raises(errors.DeadlockDetected):
        merge(results, BATCH, [staged])
