"""Rows of a batch in a Delta table, whose log has the number and the id of each batch."""

from __future__ import annotations

import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from itertools import count
from pathlib import Path
from threading import Event

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Field, Schema, write_deltalake
from deltalake.schema import PrimitiveType

from airflow_pgchange.errors import (
    InvalidArgument,
    MergeRefused,
    OutcomeUnknown,
    ServerUnavailable,
    SourceRestored,
    StagingOutdated,
)
from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction
from airflow_pgchange.feeds.error_translation import is_of_the_batch
from airflow_pgchange.lake import Delta, delta, write
from airflow_pgchange.lake.delta import commits, log, object_store
from airflow_pgchange.lake.file_names import Attempt
from airflow_pgchange.lake.rows import write_marked
from airflow_pgchange.lake.staged_files import StagedFiles
from airflow_pgchange.results.merge_modes import Mode
from airflow_pgchange.results.staging import TOUCHED, result_of
from tests.deltas import made, rows
from tests.lakes import PAYMENTS, payments, set_up
from tests.proxy import proxy_before
from tests.s3 import SECRET
from tests.silence import ended
from tests.staging import BATCH

FEED = CommitFeed("lake", 0)
FIVE = payments(*((number, f"a{number}", number * 100) for number in range(1, 6)))
NUMBERS = count(1)


@pytest.fixture
def lake(delta_location: str) -> Delta:
    return made(delta_location)


@pytest.fixture
def connection(shared_db):
    with psycopg.connect(shared_db) as connection:
        yield connection


def another(**values):
    """Return another batch of the same consumer."""
    number = next(NUMBERS)
    return replace(BATCH, id=f"batch {number}", version=number, **values)


def once(connection, batch, lake, found):
    """Write rows of a batch in a transaction of their own, and commit it."""
    with connection.transaction():
        return write(connection, batch, lake, found)


def written(connection, lake, rows, **options):
    """Write rows of another batch, and commit."""
    with connection.transaction():
        return write(connection, another(), lake, rows, **options)


def ids(lake):
    return [row["id"] for row in rows(lake)]


EACH_STORE = pytest.mark.parametrize("delta_location", ["local files", "S3"], indirect=True)


@EACH_STORE
def test_each_batch_is_in_the_table_once_wherever_an_attempt_fails(lake, db):
    set_up(db)

    def process(limit, fails):
        with ConsumerTransaction(FEED, db) as transaction:
            batch = transaction.claim(limit)
            found = payments(*((change.id, "a", 1) for change in transaction.changes()))
            transaction.ack(lambda connection: write(connection, batch, lake, found))
            if fails:
                raise ZeroDivisionError
        return batch

    with pytest.raises(ZeroDivisionError):
        process(4, fails=True)
    batch = process(4, fails=False)
    process(100, fails=False)
    assert ids(lake) == list(range(1, 11))
    first = object_store.opened(lake).history()[1]
    assert (first["pgchange.consumer"], first["pgchange.batch"]) == (FEED.name, batch.id)
    assert first["pgchange.attempt"] == "1"


def test_each_write_of_a_transaction_is_known_by_its_number(lake, connection):
    for fails in (True, False):
        with connection.transaction(force_rollback=fails):
            write(connection, BATCH, lake, payments((1, "a", 1)))
            if not fails:
                write(connection, BATCH, lake, payments())
                write(connection, BATCH, lake, payments((2, "a", 1)))
    assert ids(lake) == [1, 2]


def test_two_names_of_a_table_are_one_table(lake, connection):
    with connection.transaction():
        write(connection, BATCH, lake, payments((1, "a", 1)))
        write(connection, BATCH, Delta(f"{lake.location}/"), payments((2, "a", 1)))
        write(connection, BATCH, Delta(f"file://{lake.location}"), payments((3, "a", 1)))
    assert ids(lake) == [1, 2, 3]


@EACH_STORE
def test_an_attempt_that_stops_between_look_and_commit_finds_the_commit_of_its_retry(
    lake, connection, shared_db, monkeypatch
):
    """The next attempt begins because the lease has ended or the connection was lost."""
    looked, goes_on, version_in = Event(), Event(), log.Write.version_in

    def slow(self, table):
        found = version_in(self, table)
        if self.batch.attempt == 2 and not looked.is_set():
            looked.set()
            assert goes_on.wait(30)
        return found

    monkeypatch.setattr(log.Write, "version_in", slow)
    with ThreadPoolExecutor() as threads, psycopg.connect(shared_db) as first:
        attempt = threads.submit(write, first, BATCH, lake, FIVE)
        assert looked.wait(30)
        write(connection, replace(BATCH, attempt=3), lake, FIVE)
        goes_on.set()
        assert attempt.result(30) == 5
    assert ids(lake) == [1, 2, 3, 4, 5]


def test_another_writer_between_look_and_commit_loses_nothing(lake, connection, monkeypatch):
    version_in, others = log.Write.version_in, iter([1, 2, 3])

    def interrupted(self, table):
        found = version_in(self, table)
        if (number := next(others, None)) is not None:
            write_deltalake(lake.location, payments((90 + number, "other", 1)), mode="append")
        return found

    monkeypatch.setattr(log.Write, "version_in", interrupted)
    written(connection, lake, FIVE)
    assert ids(lake) == [1, 2, 3, 4, 5, 91, 92, 93]
    monkeypatch.setattr(commits, "CONFLICTS", 1)
    others = iter([4])
    with pytest.raises(ServerUnavailable, match="other writers were faster 1 times") as raised:
        written(connection, lake, payments((6, "a", 1)))
    assert not is_of_the_batch(raised.value)


def test_a_part_of_a_batch_that_the_table_has_is_not_written_again(lake, connection):
    part = replace(
        BATCH, id="part", version=5, bounds={"split": {"parts_of": [BATCH.id]}}, first_claimed_at=now()
    )
    for batch in (BATCH, replace(BATCH, id="a letter", version=4), part):
        once(connection, batch, lake, payments((batch.version, "a", 1)))
    assert ids(lake) == [1, 4]


def now(**ago):
    return (datetime.now(UTC) - timedelta(**ago)).isoformat()


def test_a_number_that_comes_again_after_a_restore_is_refused_until_repair(lake, connection):
    first, second = (replace(BATCH, version=number, id=f"batch {number}") for number in (1, 2))
    for batch in (first, second):
        once(connection, batch, lake, payments((batch.version, "a", 1)))
    for batch in (first, second):  # A committed batch is not written again.
        assert once(connection, batch, lake, payments((77, "a", 1))) == 1
    restored = replace(first, id="restored")
    for batch in (restored, replace(second, id="restored")):
        with pytest.raises(SourceRestored, match="airflow-pgchange repair commits:test/0 --delta"):
            once(connection, batch, lake, payments((3, "a", 1)))
    log.repair(lake, restored)
    once(connection, restored, lake, payments((3, "a", 1)))
    assert ids(lake) == [1, 2, 3]


def test_another_database_has_numbers_of_its_own(lake, connection):
    for source in ("here", "there"):
        once(connection, replace(BATCH, id=source, bounds={"source": source}), lake, payments((1, source, 1)))
    assert {row["account"] for row in rows(lake)} == {"here", "there"}


def test_a_log_that_does_not_go_back_to_the_first_attempt_is_not_guessed_from(lake, connection):
    part = replace(BATCH, id="part", bounds={"split": {"parts_of": ["whole"]}}, first_claimed_at=now())
    for version in range(1, 4):
        once(connection, replace(BATCH, version=version, id=f"{version}"), lake, payments((version, "a", 1)))
    DeltaTable(lake.location).create_checkpoint()
    for version in range(3):
        (Path(lake.location) / "_delta_log" / f"{version:020}.json").unlink()
    with pytest.raises(OutcomeUnknown, match="the log no longer shows whether batch part"):
        once(connection, replace(part, version=9), lake, payments((9, "a", 1)))
    with pytest.raises(SourceRestored, match="has the number 3, and the table has another batch as number 3"):
        once(connection, replace(BATCH, version=3, id="other"), lake, payments((9, "a", 1)))
    log.repair(lake, replace(part, version=9))
    once(connection, replace(part, version=9), lake, payments((9, "a", 1)))
    assert ids(lake) == [1, 2, 3, 9]


def test_a_write_outside_of_a_transaction_is_refused(lake, db):
    with (
        psycopg.connect(db, autocommit=True) as connection,
        pytest.raises(InvalidArgument, match="transaction"),
    ):
        write(connection, BATCH, lake, FIVE.append_column("note", [["n"] * 5]), evolve=True)
    assert object_store.opened(lake).version() == 0
    assert not list(Path(lake.location).glob("*.parquet"))


@EACH_STORE
def test_replace_deletes_the_rows_with_the_same_keys_first(lake, connection):
    assert written(connection, lake, FIVE) == 5
    written(connection, lake, payments((2, "b", 1), (9, "b", 2)), mode="replace", key="id")
    assert [(row["id"], row["account"]) for row in rows(lake)] == [
        (1, "a1"), (2, "b"), (3, "a3"), (4, "a4"), (5, "a5"), (9, "b")]  # fmt: skip


def test_a_mirror_deletes_the_rows_that_are_gone_too_and_has_a_row_once(lake, connection):
    written(connection, lake, FIVE)
    gone = pa.table({"id": [3, 4, 77]})
    written(
        connection, lake, payments((2, "b", 1), (8, "b", 1), (2, "b", 1)), mode="mirror", key="id", gone=gone
    )
    assert ids(lake) == [1, 2, 5, 8]
    written(connection, lake, payments(), mode="mirror", key="id", gone=pa.table({"id": [1]}))
    assert ids(lake) == [2, 5, 8]


def test_a_time_is_found_in_a_file_whose_bounds_are_milliseconds(connection, tmp_path):
    """Other writers write bounds in this way. The time is then above the upper bound."""
    schema = pa.schema([("at", pa.timestamp("us")), ("cents", pa.int32())])
    times = made(str(tmp_path / "times"), schema)
    at = datetime(2013, 1, 1, 5, 17, 0, 123456)
    write_deltalake(times.location, pa.Table.from_pylist([{"at": at, "cents": 1}], schema), mode="append")
    found = pa.Table.from_pylist([{"at": at, "cents": 2}], schema)
    written(connection, times, found, mode="replace", key="at")
    assert rows(times) == [{"at": at, "cents": 2}]


def test_the_bounds_of_a_column_are_not_those_of_a_field_of_the_same_name(connection, tmp_path):
    schema = pa.schema([("a.b", pa.int64()), ("a", pa.struct([("b", pa.int64())]))])
    table = made(str(tmp_path / "dots"), schema)
    row = {"a.b": 1, "a": {"b": 7}}
    write_deltalake(table.location, pa.Table.from_pylist([row], schema), mode="append")
    written(connection, table, pa.Table.from_pylist([row], schema), mode="replace", key="a.b")
    assert rows(table) == [row]


def test_a_key_may_have_several_columns(lake, connection):
    written(connection, lake, FIVE)
    written(connection, lake, payments((2, "a2", 0), (3, "other", 0)), mode="replace", key=["account", "id"])
    assert [(row["account"], row["cents"]) for row in rows(lake) if row["id"] in (2, 3)] == [
        ("a2", 0), ("a3", 300), ("other", 0)]  # fmt: skip


def test_only_files_with_rows_of_the_keys_are_written_anew(lake, connection, monkeypatch):
    for first in (1, 101, 201):
        written(connection, lake, payments(*((number, "a", 0) for number in range(first, first + 100, 2))))
    before = set(DeltaTable(lake.location).file_uris())
    written(connection, lake, payments((103, "b", 0), (150, "b", 0)), mode="replace", key="id")
    after = set(DeltaTable(lake.location).file_uris())
    assert (len(before - after), len(after - before)) == (1, 2)
    assert len(rows(lake)) == 151


@pytest.mark.parametrize(
    ("found", "options", "message"),
    [
        (payments((1, "a", 1)), {"mode": "add", "key": "id"}, "mode add adds to rows"),
        (payments((1, "a", 1)), {"mode": "replace"}, "mode replace finds rows by their key: pass key="),
        (payments((1, "a", 1)), {"mode": "replace", "key": "no"}, "the key 'no' is not one of the columns id,"),
        (pa.table({"id": [1], "more": [2]}), {}, "the table has no column more, which evolve=True adds: cast"),
        (pa.table({"id": ["1"], "cents": [1.5]}), {},
         "column id is of type string in the rows and int64 in the table; column cents is of type double .*: cast"),
        (payments((1, None, 1)), {"mode": "replace", "key": "account"}, "a key has a NULL"),
        (payments((1, "a", 1), (1, "b", 1)), {"mode": "replace", "key": "id"}, "the key id=1 was staged more than once"),
        ([], {}, "no record batch was given"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_rows_that_do_not_fit_are_refused_and_leave_the_table_as_it_is(
    lake, connection, found, options, message
):
    written(connection, lake, FIVE)
    with pytest.raises(MergeRefused, match=message):
        written(connection, lake, found, **options)
    assert ids(lake) == [1, 2, 3, 4, 5]


GENERATED = {"delta.generationExpression": '"id" + 1'}


@pytest.mark.parametrize(
    ("declared", "mode", "message"),
    [
        ({"schema": Schema([Field("id", PrimitiveType("long"), metadata=GENERATED)])}, "append", "a generated column"),
        ({"configuration": {"delta.columnMapping.mode": "name"}}, "append", "column mapping"),
        ({"configuration": {"delta.setTransactionRetentionDuration": "interval 1 day"}}, "append", "it forgets batches"),
        ({"configuration": {"delta.appendOnly": "true"}}, "replace", "the property delta.appendOnly"),
        ({"configuration": {"delta.enableChangeDataFeed": "true"}}, "mirror", "delta.enableChangeDataFeed"),
        ({"configuration": {"delta.enableDeletionVectors": "true"}}, "replace", "deletion vectors"),
        ({"configuration": {"delta.appendOnly": "true", "delta.enableDeletionVectors": "true"}}, "append", ""),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_table_that_asks_for_more_than_is_done_is_refused_before_a_file_is_written(
    connection, tmp_path, declared, mode, message
):
    DeltaTable.create(str(tmp_path), **{"schema": pa.schema([("id", pa.int64())]), **declared})
    options = {} if mode == "append" else {"mode": mode, "key": "id"}
    if not message:
        assert written(connection, Delta(str(tmp_path)), pa.table({"id": [1]}), **options) == 1
        return
    with pytest.raises(MergeRefused, match=message):
        written(connection, Delta(str(tmp_path)), pa.table({"id": [1]}), **options)
    assert not list(tmp_path.rglob("part-*"))


def test_a_constraint_and_a_column_that_may_not_be_null_are_kept(connection, tmp_path):
    schema = Schema(
        [Field("id", PrimitiveType("long"), nullable=False), Field("cents", PrimitiveType("integer"))]
    )
    table = DeltaTable.create(str(tmp_path), schema)
    where = Delta(str(tmp_path))
    for found, message in (
        (pa.table({"id": [1, None]}), "the column 'id' may not be NULL, but some rows have a NULL"),
        (pa.table({"cents": pa.array([1], pa.int32())}), "column id is missing, and the table requires it"),
    ):
        with pytest.raises(MergeRefused, match=message):
            written(connection, where, found)
    written(connection, where, pa.table({"id": [1]}))
    assert rows(where) == [{"id": 1, "cents": None}]
    table.update_incremental()
    table.alter.add_constraint({"positive": "id > 0"})
    with pytest.raises(MergeRefused, match="a constraint"):
        written(connection, where, pa.table({"id": [2]}))


def test_a_location_that_has_no_table_or_shows_a_secret_is_named(connection, tmp_path):
    with pytest.raises(InvalidArgument, match="there is no Delta table at this location: make it first"):
        written(connection, Delta(str(tmp_path)), FIVE)
    with pytest.raises(InvalidArgument, match="is no location of a Delta table"):
        Delta("payment")
    with pytest.raises(InvalidArgument, match="no password") as told:
        Delta("s3://me:secret@lake/payment")
    assert "secret" not in str(told.value)


def test_the_settings_of_the_object_store_travel_with_the_place_and_are_not_shown(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", "other")
    settings = object_store.options(Delta("s3://lake/payment"))
    assert settings["AWS_SECRET_ACCESS_KEY"] == "hidden"
    assert not any(name.startswith("GOOGLE_") for name in settings)
    layout = delta.data_files.Layout(Attempt("b", 1), "s3://lake/payment", settings, PAYMENTS, (), "")
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert "hidden" not in repr(layout)
    assert object_store.options(Delta("/data/lake")) == {}


def test_a_store_on_which_two_writers_could_commit_one_version_is_refused(connection, monkeypatch):
    monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")
    with pytest.raises(InvalidArgument, match="AWS_CONDITIONAL_PUT turns off conditional writes"):
        written(connection, Delta("s3://lake/payment"), FIVE)


def silent(proxy, call):
    """The call before which the store falls silent."""

    def silenced(*arguments):
        proxy.fall_silent()
        return call(*arguments)

    return silenced


@pytest.mark.parametrize("delta_location", ["S3"], indirect=True)
@pytest.mark.parametrize(
    ("owner", "step"), [(object_store, "opened"), (commits, "_is_committed"), (delta.data_files, "written")]
)
def test_a_store_that_says_nothing_fails_the_task_and_not_the_batch(
    lake, connection, s3_server, monkeypatch, owner, step
):
    """Takes seconds without work: the task waits until the store counts as silent."""
    monkeypatch.setattr(
        object_store, "PATIENCE", {"timeout": "0.2s", "max_retries": "1", "retry_timeout": "1s"}
    )
    with proxy_before(s3_server.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        monkeypatch.setattr(owner, step, silent(proxy, getattr(owner, step)))
        error = ended(lambda: written(connection, lake, FIVE), within=20)
    assert isinstance(error, OSError)
    assert not is_of_the_batch(error)
    assert SECRET not in str(error)


def staged_files(connection, lake, found, mode, key=()):
    """Return the results that an application has staged, read back from the manifest's JSON."""
    batches = found.to_batches()
    schema = pa.schema([field for field in found.schema if field.name != TOUCHED])
    writer = pickle.loads(pickle.dumps(delta.writer_of(connection, BATCH, lake, schema, key=key, mode=mode)))
    files = write_marked(writer, key, batches)
    staged = StagedFiles(lake, key, mode, BATCH.id, BATCH.attempt).of(files)
    back = result_of(json.loads(json.dumps(asdict(staged))))
    assert back == result_of(asdict(back))
    return back


def test_a_staged_mirror_has_the_keys_of_rows_to_delete_apart(lake, connection):
    written(connection, lake, FIVE)
    marked = payments((2, "b", 1), (3, None, None)).append_column(TOUCHED, pa.array([None, True]))
    staged = staged_files(connection, lake, marked, Mode.MIRROR, ("id",))
    with connection.transaction():
        delta.commit(connection, another(), staged)
    assert (ids(lake), staged.rows) == ([1, 2, 4, 5], 1)


def test_files_are_not_committed_to_a_table_that_was_altered_since(lake, connection):
    staged = staged_files(connection, lake, FIVE, Mode.APPEND)
    DeltaTable(lake.location).alter.add_columns([Field("more", PrimitiveType("long"))])
    with pytest.raises(StagingOutdated, match="the table was altered since the files were written"):
        delta.commit(connection, BATCH, staged)


def test_a_table_gets_the_columns_of_the_rows_that_may_add_them(lake, connection):
    written(connection, lake, FIVE)
    noted = pa.table(
        {"id": [6], "note": pa.array(["n"], pa.large_string()), "at": pa.array([0], pa.timestamp("us"))}
    )
    assert written(connection, lake, noted, evolve=True) == 1
    assert rows(lake)[4:] == [
        {"id": 5, "account": "a5", "cents": 500, "note": None, "at": None},
        {"id": 6, "account": None, "cents": None, "note": "n", "at": datetime(1970, 1, 1)}]  # fmt: skip
    version = DeltaTable(lake.location).version()
    for more, message in (
        (pa.array([1], pa.uint32()), "the table can get no column 'more' of type uint32: cast it to int32"),
        (pa.array([1], pa.time64("us")), "the table can get no such columns"),
        (
            pa.array([1], pa.timestamp("ns")),
            "no column 'more' of type timestamp.ns.: cast it, for example to",
        ),
        (pa.array([[None]], pa.list_(pa.null())), "no column 'more' of type list"),
    ):
        with pytest.raises(MergeRefused, match=message):
            written(connection, lake, pa.table({"id": [7], "more": more}), evolve=True)
    with pytest.raises(MergeRefused, match="column id is of type string in the rows and int64 in the table"):
        written(connection, lake, pa.table({"id": ["7"], "more": [1]}), evolve=True)
    assert DeltaTable(lake.location).version() == version


MANY = {
    "name": (pa.string(), "Zoë / 1%"),
    "day": (pa.date32(), date(2013, 1, 1)),
    "at": (pa.timestamp("us"), datetime(2013, 1, 1, 5, 17, 0, 1)),
    "instant": (pa.timestamp("us", "UTC"), datetime(2013, 1, 1, 5, 17, 0, 1, UTC)),
    "price": (pa.decimal128(12, 2), Decimal("1.25")),
    "flag": (pa.bool_(), True),
    "nothing": (pa.int32(), None),
}


def test_files_of_a_partitioned_table_keep_their_partition_on_the_way(connection, tmp_path):
    schema = pa.schema([("id", pa.int64()), *((name, kind) for name, (kind, _) in MANY.items())])
    DeltaTable.create(str(tmp_path), schema, partition_by=list(MANY))
    where = Delta(str(tmp_path))
    row = {"id": 1, **{name: value for name, (_, value) in MANY.items()}}
    found = pa.Table.from_pylist([row, {**row, "id": 2}, {**row, "id": 3, "name": "b"}], schema)
    staged = staged_files(connection, where, found, Mode.APPEND)
    with connection.transaction():
        delta.commit(connection, another(), staged)
    assert rows(where) == found.to_pylist()
    # Other writers name the folders of partitions, and deltalake's log has these names in an encoding.
    write_deltalake(str(tmp_path), found.slice(0, 1), mode="append", partition_by=list(MANY))
    changed = pa.Table.from_pylist([{**row, "id": 2}, {**row, "id": 1, "flag": False}], schema)
    written(connection, where, changed, mode="replace", key=["id", "name"])
    assert (
        rows(where) == pa.concat_tables([changed.slice(1), changed.slice(0, 1), found.slice(2)]).to_pylist()
    )
    with pytest.raises(MergeRefused, match="Delta reads an empty text there as NULL"):
        written(connection, where, pa.Table.from_pylist([{**row, "name": ""}], schema))


def add_file(lake, name, found, **options):
    """Add a file to the table as another program could have written it."""
    path = Path(lake.location) / name
    pq.write_table(found, path, **options)
    table, counted = DeltaTable(lake.location), json.dumps({"numRecords": found.num_rows})
    described = {"path": name, "bytes": path.stat().st_size, "partition": {}, "statistics": counted}
    table.create_write_transaction([delta.data_files.action(described)], "append", table.schema(), [])


def test_a_file_that_the_log_names_otherwise_is_not_removed_by_a_wrong_name(lake, connection):
    add_file(lake, "a*b.parquet", FIVE)
    entry = Path(lake.location) / "_delta_log" / f"{1:020}.json"
    entry.write_text(entry.read_text().replace("a%2Ab", "a*b"))
    with pytest.raises(MergeRefused, match="cannot be removed, because deltalake would escape"):
        written(connection, lake, payments((1, "b", 1)), mode="replace", key="id")
    assert len(rows(lake)) == 5


def test_files_of_another_table_are_not_rewritten(lake, connection):
    """The log of a shallow clone names the files of its original."""
    add_file(lake, "a.parquet", FIVE)
    entry = Path(lake.location) / "_delta_log" / f"{1:020}.json"
    entry.write_text(entry.read_text().replace("a.parquet", "file:///data/original/a.parquet"))
    with pytest.raises(MergeRefused, match="is not in its own location, as after a shallow clone"):
        written(connection, lake, payments((1, "b", 1)), mode="replace", key="id")


def test_times_that_spark_writes_as_int96_are_kept(connection, tmp_path):
    schema = pa.schema([("id", pa.int64()), ("at", pa.timestamp("us", "UTC"))])
    DeltaTable.create(str(tmp_path), schema)
    found = pa.table(
        {"id": [1, 2], "at": [datetime(9999, 12, 31, tzinfo=UTC), datetime(1, 1, 1, tzinfo=UTC)]}, schema
    )
    add_file(Delta(str(tmp_path)), "spark.parquet", found, use_deprecated_int96_timestamps=True)
    written(connection, Delta(str(tmp_path)), found.slice(0, 1), mode="replace", key="id")
    assert rows(Delta(str(tmp_path))) == found.to_pylist()
