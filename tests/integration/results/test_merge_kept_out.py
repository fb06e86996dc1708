"""Rows of a merge that a trigger or a rule of the target suppresses: the merge is refused, unless the target already has
them."""

from __future__ import annotations

import pytest

from airflow_pgchange.errors import MergeRefused
from airflow_pgchange.results.merge import merge
from tests.staging import BATCH, rows_of, stage

ITEMS = "create table public.items (id bigint primary key, n int, note text)"
COLUMNS = {"id": "bigint", "n": "integer"}
SUPPRESS = "create trigger same before update on items for each row execute function suppress_redundant_updates_trigger()"


def trigger(connection, body, when="insert", table="items", name="guard"):
    """Create a row-level trigger with this body."""
    connection.execute(
        f"create function public.{name}() returns trigger language plpgsql as $$ begin {body} end $$; "
        f"create trigger {name} before {when} on {table} for each row execute function public.{name}()"
    )


def merge_rows(connection, mode, rows, table="public.items", columns=COLUMNS, **options):
    merge(connection, BATCH, [stage(connection, table, ["id"], mode, columns, rows, **options)])


def ids(connection, table="items"):
    return [row[0] for row in rows_of(connection, f"select id from {table} order by id")]


@pytest.fixture
def items(results):
    results.execute(ITEMS)
    return results


@pytest.mark.parametrize("mode", ["append", "add", "replace", "mirror"])
def test_rows_that_a_trigger_keeps_out_are_counted_and_refused(items, mode):
    trigger(items, "if new.n = 2 then return null; end if; return new;")
    touched = [1, 2, 3] if mode == "mirror" else []
    with pytest.raises(MergeRefused, match=r"public\.items: 1 of 3 rows was not written") as refused:
        merge_rows(items, mode, [(1, 1), (2, 2), (3, 3)], touched=touched)
    assert ids(items) == []
    assert mode == "append" or "id=2" in str(refused.value)


@pytest.mark.parametrize("mode", ["add", "replace", "mirror"])
def test_an_overwrite_that_a_trigger_keeps_out_is_refused(items, mode):
    items.execute("insert into items values (1, 1), (2, 1)")
    trigger(items, "return case when new.id = 1 then new end;", "update")
    with pytest.raises(MergeRefused, match="1 of 2 rows was not written, id=2"):
        merge_rows(items, mode, [(1, 5), (2, 5)], touched=[1, 2] if mode == "mirror" else [])
    assert rows_of(items, "select n from items") == [(1,), (1,)]


def test_rows_that_a_trigger_of_a_partition_keeps_out_are_refused(results):
    results.execute(
        "create table public.items (id bigint primary key, n int) partition by range (id); "
        "create table items_low partition of items for values from (0) to (10); "
        "create table items_high partition of items for values from (10) to (20)"
    )
    trigger(results, "return null;", table="items_high")
    with pytest.raises(MergeRefused, match="1 of 2 rows was not written, id=12"):
        merge_rows(results, "replace", [(1, 1), (12, 1)])


def test_rows_that_a_rule_swallows_are_refused(items):
    items.execute("create rule guard as on insert to items where new.n = 2 do instead nothing")
    with pytest.raises(MergeRefused, match="1 of 2 rows was not written"):
        merge_rows(items, "append", [(1, 1), (2, 2)])
    assert ids(items) == []


@pytest.mark.parametrize("event", ["insert", "update"])
def test_a_target_whose_rules_forbid_to_overwrite_is_refused_by_their_names(items, event):
    items.execute(f"create rule guard as on {event} to items do also notify heard")
    with pytest.raises(MergeRefused, match=r"a table with rules \(guard\)"):
        merge_rows(items, "replace", [(1, 1)])


def test_a_target_with_a_rule_takes_what_is_appended(items):
    items.execute("create rule guard as on insert to items do also notify heard")
    merge_rows(items, "append", [(1, 1)])
    assert ids(items) == [1]


@pytest.mark.parametrize(("mode", "same", "other"), [("add", 0, 1), ("replace", 1, 2), ("mirror", 1, 2)])
def test_a_trigger_may_keep_out_what_would_change_nothing(items, mode, same, other):
    items.execute("insert into items values (1, 1), (2, 1), (3, null)")
    items.execute(SUPPRESS)
    rows = [(1, same), (2, other), (3, None)]
    merge_rows(items, mode, rows, touched=[1, 2, 3] if mode == "mirror" else [])
    assert rows_of(items, "select n from items order by id") == [(1,), (2,), (None,)]


def test_a_trigger_may_keep_out_what_would_change_nothing_where_another_changes_what_is_written(items):
    items.execute("insert into items values (1, 1, 'same'), (2, 1, 'same')")
    trigger(items, "new.note := lower(new.note); return new;", "insert or update", name="a_lower")
    items.execute(SUPPRESS)
    columns = {**COLUMNS, "note": "text"}
    merge_rows(items, "replace", [(1, 1, "same"), (2, 2, "OTHER")], columns=columns)
    assert rows_of(items, "select id, n, note from items order by id") == [(1, 1, "same"), (2, 2, "other")]


@pytest.mark.parametrize("kind", ["json", "point", "numeric(6,1)", "timestamptz"])
def test_whether_a_row_stands_there_is_told_of_each_type(results, kind):
    value = {"json": "{}", "point": "(1,2)", "numeric(6,1)": "1.25"}.get(kind, "2020-01-01 00:00Z")
    staged = {"numeric(6,1)": "numeric(6,2)", "timestamptz": "timestamp with time zone"}.get(kind, "text")
    results.execute(f"create table public.items (id bigint primary key, v {kind})")
    results.execute(SUPPRESS)
    for _ in range(2):
        merge_rows(results, "replace", [(1, value)], columns={"id": "bigint", "v": staged})
    assert ids(results) == [1]


def test_keys_alone_that_are_there_are_no_rows_kept_out(items):
    items.execute("insert into items values (1)")
    merge_rows(items, "replace", [(1,), (2,)], columns={"id": "bigint"})
    assert ids(items) == [1, 2]


@pytest.mark.parametrize("mode", ["append", "replace"])
def test_rows_that_a_trigger_puts_into_a_child_of_the_table_are_written(items, mode):
    items.execute("create table public.items_2 (check (id >= 10)) inherits (items)")
    trigger(items, "if new.id >= 10 then insert into items_2 select new.*; return null; end if; return new;")
    merge_rows(items, mode, [(1, 1), (12, 1)])
    assert ids(items) == [1, 12]


GONE = {
    "a trigger": "create function public.guard() returns trigger language plpgsql as 'begin return null; end'; "
    "create trigger guard before delete on items for each row execute function public.guard()",
    "a rule": "create rule guard as on delete to items do instead nothing",
}


@pytest.mark.parametrize("way", GONE)
def test_a_row_that_a_mirror_cannot_delete_is_refused(items, way):
    items.execute("insert into items values (1, 1), (2, 2)")
    items.execute(GONE[way])
    with pytest.raises(MergeRefused, match=r"public\.items: 1 row was not deleted, id=2"):
        merge_rows(items, "mirror", [(1, 5)], touched=[1, 2])
    assert rows_of(items, "select n from items order by id") == [(1,), (2,)]


def test_a_row_that_a_trigger_only_marks_as_gone_is_not_deleted(items):
    items.execute("insert into items values (2, 2)")
    trigger(items, "update items set note = 'gone' where id = old.id; return null;", "delete")
    with pytest.raises(MergeRefused, match="To note deleted rows, use a trigger after delete"):
        merge_rows(items, "mirror", [], touched=[2])


def test_a_trigger_may_note_what_a_mirror_deletes(items):
    items.execute("insert into items values (2, 2); create table public.gone (id bigint)")
    trigger(items, "insert into gone values (old.id); return old;", "delete")
    merge_rows(items, "mirror", [(1, 5)], touched=[1, 2])
    assert (ids(items), ids(items, "gone")) == ([1], [2])
