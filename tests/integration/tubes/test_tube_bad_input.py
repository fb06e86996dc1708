"""Invalid input: each error names the fault and contains advice, and nothing is half done."""

from __future__ import annotations

import psycopg
import pytest

from tests.tubes import attach, claim, make, one, take

UNKNOWN, REFUSED, STALE, NOTHING = "PC002", "PC008", "PC006", "PC009"


def make_item(connection):
    connection.execute("create table item (id bigint primary key, day date, data json)")
    make(connection)
    attach(connection)


@pytest.fixture
def prepared_item():
    return make_item


@pytest.fixture(scope="module")
def asked(shared):
    """A database with a table item in tube q, and relations that no tube can have.

    Calls that are refused share the database, because they change nothing.
    """
    make_item(shared)
    shared.execute("create table plain (id bigint primary key)")
    shared.execute("create table texts (id text primary key)")
    shared.execute("create table nameless (id bigint not null)")
    shared.execute("create view seen as select 1::bigint as id")
    shared.execute("create temporary table passing (id bigint primary key)")
    shared.execute("create table whole (id bigint not null) partition by range (id)")
    shared.execute("create table part partition of whole default")
    make(shared, "judging", predicate="weight > 3")
    shared.execute("select nextval('tube.seq')")
    return shared


def everything(connection):
    """Return everything that a failed call could have changed."""
    return connection.execute(
        "select (select count(*) from pg_class where relnamespace = 'public'::regnamespace), "
        "(select count(*) from pg_proc where pronamespace = 'public'::regnamespace), "
        "(select count(*) from pg_trigger), (select string_agg(t::text, ';') from tube.tube as t), "
        "(select string_agg(a::text, ';') from tube.attachment as a), (select count(*) from tube.moved), "
        "(select count(*) from q), (select count(*) from tube.backfill)"
    ).fetchone()


def refused(connection, call, *parameters):
    before = everything(connection)
    with pytest.raises(psycopg.Error) as told:
        connection.execute(call, parameters or None)
    assert everything(connection) == before
    return told.value


@pytest.mark.parametrize(
    "call",
    [
        "select tube.tube_backfill_schedule('nowhere', 'id', 0, 9)",
        "select tube.tube_table_ensure_attached('nowhere', 'item', 0)",
        "select tube.tube_pods_sql('nowhere', 1, 0)",
        "select tube.tube_pods_delete('nowhere', 1, 0, '{1}')",
        "select tube.tube_pods_insert('nowhere', 'select 1, 1', 0)",
        "select tube.tube_pods_insert('q,nowhere', 'select 1, 1', 0)",
        "select tube.touch('nowhere', 0, '{1}', 'T')",
        "select tube.tube_backfill_step3('0', 'nowhere', 'item', 'id')",
        "select tube.backfill_begin('nowhere', 'item', 'id')",
        "select tube.register('nowhere', 1, 0)",
        "select tube.lag('nowhere', 1, 0, '{}')",
        "select tube.claim('nowhere', 0, '{}', 1, 1)",
        "select * from tube.control_pods('nowhere', 1, 0)",
        "select tube.skip_batch('nowhere', 0, 'why')",
    ],
)
def test_a_tube_that_does_not_exist_is_named(asked, call):
    told = refused(asked, call)
    assert told.sqlstate == UNKNOWN
    assert "no tube nowhere" in str(told)
    assert "tube_list" in told.diag.message_hint


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("select tube.tube_ensure_exists(null)", "needs a name"),
        ("select tube.tube_ensure_exists('')", "needs a name"),
        ("select tube.tube_ensure_exists(repeat('x', 58))", "too long"),
        ("select tube.tube_ensure_exists('item')", "already"),
        ("select tube.tube_ensure_exists('n', 0)", "0 workers"),
        ("select tube.tube_ensure_exists('n', 1000)", "1000 workers"),
        ("select tube.tube_ensure_exists('n', -1)", "-1 workers"),
        ("select tube.tube_ensure_exists('q', 0)", "0 workers"),
        ("select tube.tube_ensure_exists('q', 1000)", "1000 workers"),
        ("select tube.tube_ensure_exists('n', 1, 'id >')", "does not parse"),
        ("select tube.tube_ensure_exists('n', 1, 'id = 1) or (')", "does not parse"),
        ("select tube.tube_ensure_exists('q', 1, 'id >')", "does not parse"),
        ("select tube.tube_ensure_exists('q', 1, 'nothing > 1')", "does not fit public.item"),
        ("select tube.tube_ensure_exists('q', 1, 'id')", "does not fit public.item"),
        ("select tube.tube_ensure_exists('q', 1, 'count(*) > 1')", "does not fit public.item"),
        ("select tube.tube_ensure_exists('q', 3, 'nothing > 1')", "does not fit public.item"),
        ("select tube.tube_table_ensure_attached('q', 'item', 0, '{nothing}')", "no column nothing"),
        ("select tube.tube_table_ensure_attached('q', 'item', 0, group_by => '{day}')", "day, are date"),
        ("select tube.tube_table_ensure_attached('q', 'plain')", "nor its own ends in the number of a shard"),
        ("select tube.tube_table_ensure_attached('q', 'texts', 0)", "id, are text"),
        ("select tube.tube_table_ensure_attached('q', 'nameless', 0)", "no primary key"),
        ("select tube.tube_table_ensure_attached('q', 'seen', 0)", "not a table"),
        ("select tube.tube_table_ensure_attached('q', 'passing', 0)", "temporary"),
        ("select tube.tube_table_ensure_attached('q', 'part', 0)", "is a partition"),
        ("select tube.tube_table_ensure_attached('q', 'q', 0)", "not a table of your own"),
        ("select tube.tube_table_ensure_attached('q', 'tube.worker', 0)", "not a table of your own"),
        ("select tube.tube_table_ensure_attached('q', null, 0)", "no such table"),
        ("select tube.tube_table_ensure_attached('judging', 'plain', 0)", "does not fit public.plain"),
        ("select tube.touch('q', null, '{1}', 'T')", "needs a shard"),
        ("select tube.touch('q', 0, '{1}', 'X')", "not a kind of touch"),
        ("select tube.touch('q', 0, '{1}', 'T', null, 0)", "a pod cannot have 0 ids"),
        ("select q_touch(0, '{1}', null)", "not a kind of touch"),
        ("select tube.tube_pods_insert('q', 'select 1, 1', null)", "needs a shard"),
        ("select tube.tube_pods_insert('q', 'select 1, 1', 0, 'X')", "not a kind of touch"),
        ("select tube.tube_pods_insert('q', 'select 1, 1', 0, fetch_chunk_size => 0)", "0 rows"),
        ("select tube.tube_pods_sql('q', 0, 0)", "no worker 0 of 0"),
        ("select tube.tube_pods_sql('q', 2, 2)", "no worker 2 of 2"),
        ("select tube.tube_pods_sql('q', 1000, 0)", "no worker 0 of 1000"),
        ("select tube.tube_pods_sql('q', null, 0)", "no worker 0 of"),
        ("select tube.tube_pods_delete('q', 2, -1, '{1}')", "no worker -1 of 2"),
        ("select tube.register('q', 1, 1)", "no worker 1 of 1"),
        ("select tube.skip_batch('q', 5, 'why')", "no worker 5 of 1"),
        ("select tube.tube_backfill_schedule('q', 'nothing', 0, 9)", "no column nothing"),
        ("select tube.tube_backfill_schedule('q', 'data', 0, 9)", "has no order"),
        ("select tube.tube_backfill_schedule('q', 'id', 9, 0)", "no shards from 9 to 0"),
        ("select tube.tube_backfill_schedule('q', 'id', null, 0)", "no shards from"),
        ("select tube.tube_backfill_step2(null)", "needs a timeout"),
        ("select tube.tube_backfill_step3('x', 'q', 'item', 'id')", "not a result of step 1"),
        ("select tube.tube_backfill_step3(null, 'q', 'item', 'id')", "not a result of step 1"),
        ("select tube.tube_backfill_step3('999999', 'q', 'item', 'id')", "not a result of step 1"),
        ("select tube.tube_backfill_step3('1', 'q', 'plain', 'id')", "not attached"),
        ("select tube.tube_backfill_step3('1', 'q', 'item', 'nothing')", "no column nothing"),
        ("select tube.tube_backfill_step3('1', 'q', 'item', null)", "no column null"),
        ("select tube.tube_backfill_step3('1', 'q', 'item', 'id; drop table item')", "no column"),
        ("select tube.tube_backfill_step3('1', 'q', 'item', 'id', 3)", "as shard 0, not 3"),
        ("select tube.tube_backfill_step3('1', 'q', 'item', 'id', 0, 0)", "0 rows"),
        ("select tube.tube_backfill_step3('1', 'q', 'item', 'id', 0, 10, 0)", "a pod cannot have 0 ids"),
        ("select tube.backfill_begin('q', 'item', 'data')", "has no order"),
        ("select tube.backfill_begin('q', 'item', 'id', chunk_size => 0)", "0 rows"),
        ("select tube.backfill_begin('q', 'item', 'id', chunk_size => 1000001)", "1000001 rows"),
        ("select tube.backfill_begin('q', 'item', 'id', 3)", "as shard 0, not 3"),
        ("select tube.backfill_begin('q', 'plain', 'id')", "not attached"),
    ],
)
def test_an_invalid_call_of_a_tube_is_refused_with_the_reason(asked, call, says):
    told = refused(asked, call)
    assert told.sqlstate == REFUSED
    assert says in told.diag.message_primary


def test_a_table_without_a_unique_key_is_refused_with_the_ways_out(asked):
    hint = refused(asked, "select tube.tube_table_ensure_attached('q', 'nameless', 0)").diag.message_hint
    assert [way in hint for way in ("a primary key or a unique index", "the event log", "group_by")] == [
        True
    ] * 3


@pytest.mark.parametrize("number", ["7", "null"])
@pytest.mark.parametrize("call", ["backfill_chunk", "backfill_pause", "backfill_resume", "backfill_cancel"])
def test_a_backfill_that_does_not_exist_is_told(asked, call, number):
    told = refused(asked, f"select tube.{call}({number})")
    assert (told.sqlstate, "there is no backfill" in str(told)) == (UNKNOWN, True)


def test_a_foreign_table_cannot_be_attached(item):
    item.execute("create table tree (id bigint not null)")
    item.execute("create foreign data wrapper nothing")
    item.execute("create server elsewhere foreign data wrapper nothing")
    item.execute("create foreign table leaf () inherits (tree) server elsewhere")
    told = refused(item, "select tube.tube_table_ensure_attached('q', 'tree', 0)")
    assert "foreign table" in str(told)


@pytest.mark.parametrize(
    "call",
    [
        "select tube.claim('q', 0, tube.position('q', 0), 0, 1)",
        "select tube.claim('q', 0, tube.position('q', 0), null, 1)",
        "select tube.lag('q', 1, 0, '{}', -1)",
        "select tube.skip_batch('q', 0, ' ')",
    ],
)
def test_numbers_and_reasons_that_make_no_sense_are_refused(asked, call):
    asked.execute("select tube.register('q', 1, 0)")
    assert refused(asked, call).sqlstate == "22023"


@pytest.mark.parametrize(
    "call",
    [
        "select tube.register('q', 2, 0)",
        "select tube.lag('q', 2, 0, '{}')",
        "select tube.claim('q', 0, '{}', 1, 2)",
        "select * from tube.control_pods('q', 2, 0)",
        "select tube.lag('q', null, 0, '{}')",
    ],
)
def test_a_worker_of_another_number_is_told_the_right_one(asked, call):
    told = refused(asked, call)
    assert told.sqlstate == STALE
    assert "shared by 1 workers" in str(told)


def test_a_query_that_fails_leaves_no_pods(asked):
    query = "select 10 / (5 - g), g from generate_series(1, 9) as g"
    told = refused(asked, "select tube.tube_pods_insert('q', %s, 0, fetch_chunk_size => 1)", query)
    assert isinstance(told, psycopg.errors.DivisionByZero)


def test_arguments_left_out_keep_what_is_set(item):
    make(item, workers=3, predicate="id > 0")
    make(item)
    assert item.execute("select partitions, predicate from tube.tube").fetchone() == (3, "id > 0")
    make(item, workers=2)
    assert item.execute("select partitions, predicate from tube.tube").fetchone() == (2, "id > 0")
    make(item, predicate="")
    assert item.execute("select partitions, predicate from tube.tube").fetchone() == (2, None)


def test_a_tubes_function_of_another_make_is_not_overwritten(item):
    item.execute("create table thing (id bigint primary key)")
    item.execute(
        "create function thing_touch(bigint[], character, jsonb, integer) returns void language sql as 'select'"
    )
    assert "there is a function" in str(
        refused(item, "select tube.tube_table_ensure_attached('q', 'thing', 0)")
    )


def test_nothing_in_work_cannot_be_skipped(item):
    assert refused(item, "select tube.skip_batch('q', 0, 'why')").sqlstate == NOTHING


def test_a_worker_at_work_is_not_skipped(item, connect):
    item.execute("select tube.touch('q', 0, '{1}', 'T')")
    claim(item)
    worker = connect(autocommit=False)
    worker.execute("select tube.take_lock('q', 0)")
    with pytest.raises(psycopg.errors.LockNotAvailable, match="is at work"):
        item.execute("select tube.skip_batch('q', 0, 'why')")
    worker.rollback()
    item.execute("select tube.skip_batch('q', 0, 'why')")
    assert take(item) == []


def test_status_shows_the_batch_in_work_and_its_attempts(item, connect):
    item.execute("select tube.touch('q', 0, '{1,2}', 'T')")
    claim(item)
    claim(item)
    query = "select ready, attempt, at_work, claimed_at is not null, waiting, faults from tube.status()"
    assert item.execute(query).fetchone() == (2, 2, False, True, 0, 0)
    worker = connect(autocommit=False)
    worker.execute("select tube.take_lock('q', 0)")
    assert item.execute(query).fetchone()[2] is True


def test_a_tube_whose_pods_were_dropped_says_so_and_can_be_removed(item):
    item.execute("drop table q")
    with pytest.raises(psycopg.Error, match="is gone") as told:
        item.execute("select tube.touch('q', 0, '{1}', 'T')")
    assert "tube.tube_ensure_exists('q') makes it anew" in told.value.diag.message_hint
    item.execute("select * from tube.status(), tube.tube_stats(), tube.attachments()")
    item.execute("select tube.tube_ensure_absent('q')")
    make(item)
    attach(item)
    item.execute("insert into item values (1)")
    assert take(item) == [1]
    assert one(item, "select count(*) from tube.fault") == 0


def test_a_call_without_a_tube_is_refused_with_what_the_name_is_for(item):
    with pytest.raises(psycopg.Error, match="a tube needs a name") as told:
        make(item, "")
    assert told.value.diag.message_hint == "its pods are in a table of that name"
