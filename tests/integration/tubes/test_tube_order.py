"""The order of a backfill: no row is missed because of its value, or because the value changes meanwhile."""

from __future__ import annotations

import psycopg
import pytest

from airflow_pgchange import tubes
from airflow_pgchange.errors import Refused
from tests.tubes import attach, begin, chunk, detach, ids_in_order, make, one, run, steps, touched


@pytest.mark.parametrize("kind", ["pair", "checked_pair"])
def test_a_column_of_a_row_type_is_refused_as_an_order(connect, kind):
    """A row value that is partly null is neither null nor not null."""
    connection = connect()
    connection.execute(
        "create type pair as (a int, b text); create domain checked_pair as pair;"
        f"create table item (id bigint primary key, day {kind})"
    )
    make(connection)
    attach(connection)
    for way in (begin, steps):
        with pytest.raises(psycopg.Error, match="is a composite"):
            way(connection)


WORD = """
create type word;
create function word_in(cstring) returns word language internal immutable strict as 'textin';
create function word_out(word) returns cstring language internal immutable strict as 'textout';
create type word (input = word_in, output = word_out, like = text);
create cast (word as text) without function as implicit;
create function compared(word, word) returns int language sql immutable as
    'select pg_catalog.bttextcmp(lower($1::text), lower($2::text))';
"""
OPERATORS = {"<": "lower", "<=": "at_most", "=": "alike", ">=": "at_least", ">": "higher"}


def test_a_column_of_a_type_with_an_order_of_its_own_is_refused(connect):
    """Rows would be sorted by the operators of that type, and compared by those of text.

    So rows between two chunks would be missed.
    """
    connection = connect()
    connection.execute(WORD)
    for sign, name in OPERATORS.items():
        connection.execute(
            f"create function {name}(word, word) returns boolean language sql immutable as "
            f"'select public.compared($1, $2) {sign} 0';"
            f"create operator {sign} (leftarg = word, rightarg = word, function = {name})"
        )
    operators = ", ".join(f"operator {n} {sign}" for n, sign in enumerate(OPERATORS, 1))
    connection.execute(
        f"create operator class word_ops default for type word using btree as {operators}, "
        "function 1 compared(word, word);"
        "create domain checked_word as word;"
        "create table item (id bigint primary key, day word, checked checked_word);"
        "insert into item values (1, 'b', 'b'), (2, 'C', 'C'), (3, 'a', 'a')"
    )
    make(connection)
    attach(connection)
    for way in (begin, steps):
        for column in ("day", "checked"):
            with pytest.raises(
                psycopg.Error, match=f"column {column} of .* is public.word, a type with an order, casts"
            ):
                way(connection, order_col=column)


CHANGES = {
    "alter table item alter day type text using (id * 7919 % 1000)::text": "was date and is text",
    "alter table item alter day type timestamp": "was date and is timestamp",
    "alter table item rename day to date": "column day was dropped or renamed",
    "alter table item drop column day": "column day was dropped or renamed",
    "alter table item drop column id": "the column of its ids was dropped",
    "drop table item": "the table was dropped",
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_backfill_goes_by_is_changed_and_it_fails_with_the_reason(item, change):
    number = begin(item)
    chunk(item, number)
    item.execute(change)
    with pytest.raises(Refused, match=CHANGES[change]):
        next(progress for progress in tubes.backfill_chunks(item, number) if progress.finished)
    assert one(item, "select state from tube.backfills()") == "failed"
    assert len(touched(item)) == 100


def test_a_column_whose_collation_is_changed_has_another_order(item):
    number = begin(item, order_col="kind")
    chunk(item, number)
    item.execute('alter table item alter kind type text collate "C"')
    assert chunk(item, number)[3:] == (False, "failed")


@pytest.mark.parametrize("kind", ["kind", "kinds", "kind[]"])
def test_labels_that_are_renamed_have_another_order(item, kind):
    item.execute("create type kind as enum ('a', 'b', 'c'); create domain kinds as kind")
    item.execute(
        f"alter table item alter kind drop default, alter kind type {kind} using "
        f"(case when '{kind}' like '%[]' then '{{a}}' else 'a' end)::{kind}"
    )
    number = begin(item, order_col="kind")
    chunk(item, number)
    item.execute("alter type kind rename value 'a' to 'd'; alter type kind rename value 'c' to 'a'")
    assert chunk(item, number)[3:] == (False, "failed")
    assert "of 'a', 'b', 'c' and is" in one(item, "select message from tube.backfills()")


@pytest.mark.parametrize(
    ("setting", "column"), [("timezone = 'XXX+20'", "day"), ("quote_all_identifiers = on", "kind")]
)
def test_a_backfill_goes_on_in_a_session_with_settings_of_its_own(item, connect, setting, column):
    item.execute("alter table item alter day type timestamptz")
    number = begin(item, order_col=column)
    chunk(item, number)
    another = connect()
    another.execute(f"set {setting}")
    run(another, number)
    assert touched(item) == list(range(1, 1001))


def test_nothing_is_stale_in_a_session_that_quotes_all_names(item):
    item.execute("set quote_all_identifiers = on")
    assert one(item, "select stale from tube.attachments()") is False


def test_a_table_whose_backfill_failed_can_be_backfilled_anew(item):
    number = begin(item)
    chunk(item, number)
    item.execute("alter table item rename day to date")
    chunk(item, number)
    tubes.backfill(item, "q", "public.item", "date")
    assert set(touched(item)) == set(range(1, 1001))


@pytest.mark.parametrize("way", ["steps", "chunks"])
def test_rows_without_an_order_in_an_inheritance_child_are_not_missed(connect, way):
    connection = connect()
    connection.execute("create table item (id bigint primary key, day int)")
    connection.execute("create table child () inherits (item)")
    connection.execute("alter table only item add constraint filled check (day is not null) no inherit")
    connection.execute("insert into item values (1, 1); insert into child values (2, null), (3, 3)")
    if one(connection, "select current_setting('server_version_num')::int < 180000"):
        connection.execute("alter table only item alter day set not null")
    make(connection)
    attach(connection)
    if way == "steps":
        steps(connection)
    else:
        run(connection, begin(connection))
    assert touched(connection) == [1, 2, 3]


@pytest.mark.parametrize("way", ["steps", "chunks"])
def test_the_lowest_id_without_an_order_is_not_missed(connect, way):
    connection = connect()
    connection.execute("create table item (id bigint primary key, day int)")
    connection.execute("insert into item values (-9223372036854775808, null), (1, null), (2, 1)")
    make(connection)
    attach(connection)
    if way == "steps":
        steps(connection)
    else:
        run(connection, begin(connection, chunk_size=1))
    assert ids_in_order(connection) == [2, -9223372036854775808, 1]


def test_an_index_on_the_order_alone_is_not_enough_and_it_says_so(item):
    item.execute("create index on item (kind)")
    notices = []
    item.add_notice_handler(lambda notice: notices.append(notice.message_primary))
    number = begin(item, order_col="kind")
    assert "create index on public.item (kind, id)" in notices[0]
    item.execute("select tube.backfill_cancel(%s)", [number])
    item.execute("create index on item (kind, id)")
    begin(item, order_col="kind")
    begin(item, order_col="kind")
    assert len(notices) == 1


ELSEWHERE = {
    "another collation": 'create index on item (kind collate "C", id)',
    "other operators": "create index on item (kind text_pattern_ops, id)",
    "the parent alone": "create index on item (kind, id); create table child () inherits (item)",
}


@pytest.mark.parametrize("index", ELSEWHERE)
def test_an_index_that_gives_another_order_or_not_of_all_rows_is_not_enough(item, index):
    item.execute(ELSEWHERE[index])
    notices = []
    item.add_notice_handler(lambda notice: notices.append(notice.message_primary))
    begin(item, order_col="kind")
    assert "create index on public.item (kind, id)" in notices[0]


def test_a_role_whose_transactions_are_repeatable_read_by_default_can_backfill(item, connect):
    session = connect()
    session.execute("set default_transaction_isolation = 'repeatable read'")
    tubes.backfill(session, "q", "public.item", "day")
    assert set(touched(item)) == set(range(1, 1001))


COLUMNS = [
    ("nr", "id"),
    ("nr", "o"),
    ("nr", "wanted"),
    ("o", "day"),
    ("wanted", "day"),
    ("item", "c"),
    ("c", "item"),
]


@pytest.mark.parametrize("predicate", [None, "true"])
def test_no_row_is_missed_whatever_the_columns_are_called(connect, predicate):
    connection = connect()
    make(connection, predicate=predicate)
    for id_column, order_col in COLUMNS:
        connection.execute(
            f"create table item ({id_column} bigint primary key, {order_col} text);"
            "insert into item select n, left(md5(n::text), 1) from generate_series(1, 50) as n"
        )
        attach(connection, key=[id_column])
        run(connection, begin(connection, order_col=order_col, chunk_size=10))
        assert sorted(ids_in_order(connection)) == list(range(1, 51)), (id_column, order_col)
        connection.execute("delete from q")
        steps(connection, order_col=order_col, fetch=10)
        assert sorted(ids_in_order(connection)) == list(range(1, 51)), (id_column, order_col)
        detach(connection)
        connection.execute("delete from q; drop table item")


@pytest.mark.parametrize("kind", ["bigint", "integer", "smallint"])
def test_a_chunk_goes_along_an_index_whatever_the_size_of_the_ids(connect, kind):
    connection = connect()
    connection.execute(
        f"create table item (id {kind} primary key, day int not null); create index on item (day, id);"
        "insert into item select n, n / 100 from generate_series(1, 10000) as n"
    )
    connection.execute("vacuum analyze item")
    make(connection)
    attach(connection)
    for order_col in ("id", "day"):
        query = one(
            connection,
            "select tube.slice_sql(a, %s, row(false, '1', 100, 0, 0, false)::tube.keyset, 50, 'item', 'true') "
            "from tube.attachment as a",
            order_col,
        )
        plan = "\n".join(row[0] for row in connection.execute("explain " + query))
        assert "Index" in plan, order_col
        assert "Sort" not in plan, order_col
