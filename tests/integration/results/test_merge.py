"""Merge staged results into targets: every mode, completely or not at all."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
from psycopg import errors, sql

from airflow_pgchange.errors import (
    InvalidArgument,
    MergeRefused,
    PermissionDenied,
    SchemaMissing,
    StagingOutdated,
)
from airflow_pgchange.feeds.connections import connect as feed_connect
from airflow_pgchange.results.merge import Staged, merge, read_manifest, write_manifest
from airflow_pgchange.results.merge_modes import Mode
from airflow_pgchange.results.staging import create
from tests.staging import BATCH, PLACES, rows_of, stage
from tests.waiting import until, waits

COUNTS = (
    "create table public.counts (carrier text, day date, n bigint, delay numeric(12,2), "
    "primary key (carrier, day))"
)
COLUMNS = {"carrier": "text", "day": "date", "n": "bigint", "delay": "numeric(10,2)"}


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
    with pytest.raises(MergeRefused, match=r"id=3 was staged more than once"):
        merge(results, BATCH, [staged])


@pytest.mark.parametrize("there", [True, False])
def test_replace_refuses_a_row_that_comes_twice_whether_its_key_is_there_or_not(results, there):
    results.execute(PLACES)
    if there:
        results.execute("insert into places values (3, 'kept')")
    columns = {"id": "bigint", "code": "text"}
    staged = stage(results, "public.places", ["id"], "replace", columns, [(2, "b"), (3, "c"), (3, "d")])
    with pytest.raises(MergeRefused, match=r"id=3 was staged more than once"):
        merge(results, BATCH, [staged])
    assert rows_of(results, "select code from places") == ([("kept",)] if there else [])


def test_replace_refuses_a_row_that_comes_twice_where_a_trigger_keeps_the_first_out(results):
    results.execute(PLACES)
    results.execute("""
        insert into places values (3, 'kept');
        create trigger same before update on places for each row execute function suppress_redundant_updates_trigger()
    """)
    columns = {"id": "bigint", "code": "text"}
    staged = stage(results, "public.places", ["id"], "replace", columns, [(3, "kept"), (3, "d")])
    with pytest.raises(MergeRefused, match=r"id=3 was staged more than once"):
        merge(results, BATCH, [staged])


def test_a_null_key_is_refused(results):
    results.execute(PLACES)
    staged = stage(
        results, "public.places", ["id"], "replace", {"id": "bigint", "code": "text"}, [(None, "x")]
    )
    with pytest.raises(MergeRefused, match="has a NULL"):
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


def test_a_mirror_needs_no_id_beside_a_row_that_stands_under_one(results):
    results.execute(PLACES)
    results.execute("insert into places select n, n::text from generate_series(1, 5) n")
    staged = stage(results, "public.places", ["id"], "mirror", {"id": "bigint", "code": "text"}, [],
                   of_ids=[(2, "two"), (2, "two"), (6, "six")], touched=[3, 4, 6])  # fmt: skip
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
    with pytest.raises(MergeRefused, match="id=8 is not an id of this batch's changes"):
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
    with pytest.raises(StagingOutdated, match="2 rows were staged, but 1 exist"):
        merge(results, BATCH, [staged])


def test_a_staging_table_that_is_gone_refuses_the_merge(results):
    results.execute("create table public.log (line text)")
    staged = stage(results, "public.log", [], "append", {"line": "text"}, [("a",)])
    results.execute(sql.SQL("drop table {}").format(staged.identifier))
    with pytest.raises(StagingOutdated, match="is gone"):
        merge(results, BATCH, [staged])


@pytest.mark.parametrize("other", [{"attempt": 3}, {"id": "batch-2"}])
def test_results_of_another_attempt_or_batch_are_never_merged(results, other):
    results.execute("create table public.log (line text)")
    staged = stage(results, "public.log", [], "append", {"line": "text"}, [("a",)])
    with pytest.raises(MergeRefused, match="it is not merged"):
        merge(results, dataclasses.replace(BATCH, **other), [staged])


def test_a_merge_drops_its_staging_tables(results):
    results.execute("create table public.log (line text)")
    staged = stage(results, "public.log", [], "append", {"line": "text"}, [])
    assert len(rows_of(results, "select from pgchange.staged_tables()")) == 1
    merge(results, BATCH, [staged])
    assert rows_of(results, "select from pgchange.staged_tables()") == []


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


def test_a_consumer_needs_no_more_than_its_grants(results, role, connect_to):
    results.execute(COUNTS)
    consumer = role("consumer")
    connection = connect_to(consumer.conninfo)
    with pytest.raises(PermissionDenied):
        create(connection, BATCH, "public.counts", [])
    results.execute(f"select pgchange.grant_consumer('{consumer.name}')")
    results.execute(f"grant select, insert, update on counts to {consumer.name}")
    staged = stage(
        connection, "public.counts", ["carrier", "day"], "add", COLUMNS, [("UA", "2013-01-01", 1, 1)]
    )
    merge(connection, BATCH, [staged])
    assert rows_of(results, "select n from counts") == [(1,)]


def test_staging_without_our_schema_says_what_to_install(bare_db):
    with feed_connect(bare_db) as connection, pytest.raises(SchemaMissing, match="airflow-pgchange install"):
        create(connection, BATCH, "public.counts", [])


def test_an_unknown_mode_is_named():
    with pytest.raises(InvalidArgument, match="add, replace, mirror, append, not 'upsert'"):
        Mode.of("upsert")


def test_a_manifest_comes_back_as_it_was_written(tmp_path):
    staged = Staged(
        "public.t",
        ("a", "b"),
        Mode.ADD,
        "b00_1_00",
        (("a", "text"), ("b", "bigint")),
        ((7, 3), (9, 0)),
        "batch",
        4,
    )
    write_manifest(tmp_path / "manifest.json", [staged])
    assert read_manifest(tmp_path / "manifest.json") == (staged,)


def test_an_application_that_wrote_no_manifest_is_not_taken_for_one_without_results(tmp_path):
    with pytest.raises(MergeRefused, match="without a manifest of its results"):
        read_manifest(tmp_path / "manifest.json")


@pytest.mark.parametrize(
    ("mode", "rows", "touched"),
    [("add", True, False), ("replace", True, False), ("mirror", True, True), ("mirror", False, True)],
)
def test_keys_are_written_in_their_order_whatever_that_of_rows_is(results, connect, mode, rows, touched):
    """A merge that waits for the first row has locked none of the others, so two merges cannot wait for each other."""
    holder, watcher = connect(autocommit=False), connect()
    watcher.execute("create table public.counted (id bigint primary key, n bigint)")
    down = list(range(20, 0, -1))
    watcher.execute("insert into counted select unnest(%s::bigint[]), 0", [down])
    staged = stage(
        results,
        "public.counted",
        ["id"],
        mode,
        {"id": "bigint", "n": "bigint"},
        [(n, 1) for n in down if rows],
        touched=down if touched else (),
    )
    holder.execute("select from counted where id = 1 for update")
    # Without sorts in plans, PostgreSQL orders the rows only if the query of the merge has an order by.
    results.execute("set enable_sort = off")
    with ThreadPoolExecutor() as threads:
        merged = threads.submit(merge, results, BATCH, [staged])
        until(watcher, waits(results, behind=holder))
        free = watcher.execute("select id from counted where id > 1 for update skip locked").fetchall()
        holder.rollback()
        merged.result()
    assert sorted(free) == [(n,) for n in range(2, 21)]


@pytest.mark.parametrize(("mode", "n"), [("add", 11), ("replace", 1)])
def test_a_row_that_another_transaction_inserts_into_an_empty_table_meanwhile_is_changed(
    results, connect, mode, n
):
    holder, watcher = connect(autocommit=False), connect()
    results.execute("create table public.counted (id bigint primary key, n bigint)")
    columns, rows = {"id": "bigint", "n": "bigint"}, [(1, 1), (2, 1)]
    staged = stage(results, "public.counted", ["id"], mode, columns, rows)
    holder.execute("insert into counted values (2, 10)")
    with ThreadPoolExecutor() as threads:
        merged = threads.submit(merge, results, BATCH, [staged])
        until(watcher, waits(results, behind=holder))
        holder.commit()
        merged.result()
    assert rows_of(results, "select id, n from counted order by id") == [(1, 1), (2, n)]


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
