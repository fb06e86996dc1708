"""Rows of a batch in an Iceberg table, whose catalog is in the database of the results: one commit for both."""

from __future__ import annotations

import json
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import date, datetime
from decimal import Decimal
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pyarrow as pa
import pytest
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.schema import Schema
from pyiceberg.transforms import BucketTransform, DayTransform, IdentityTransform, TruncateTransform
from pyiceberg.types import LongType, NestedField, StringType, UUIDType

from airflow_pgchange.errors import (
    InvalidArgument,
    MergeRefused,
    PermissionDenied,
    Refused,
    ServerUnavailable,
    StagingOutdated,
)
from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction
from airflow_pgchange.lake import Iceberg, iceberg, write
from airflow_pgchange.lake.iceberg import metadata_pointer
from airflow_pgchange.lake.rows import write_marked
from airflow_pgchange.lake.staged_files import StagedFiles
from airflow_pgchange.results.merge import merge
from airflow_pgchange.results.merge_modes import Mode
from airflow_pgchange.results.staging import TOUCHED, result_of
from tests.lakes import EACH_STORE, PAYMENTS, TABLE, Lake, payments, set_up
from tests.staging import BATCH
from tests.waiting import until, waits

FEED = CommitFeed("lake", 0)
FIVE = payments(*((number, f"a{number}", number * 100) for number in range(1, 6)))


@pytest.fixture
def connection(db):
    with psycopg.connect(db) as connection:
        yield connection


NUMBERS = count()


def written(connection, rows, table=TABLE, **options):
    """Write rows of another batch, and commit."""
    with connection.transaction():
        return write(connection, replace(BATCH, id=f"batch {next(NUMBERS)}"), table, rows, **options)


def ids(lake, name="payment"):
    return [row["id"] for row in lake.rows(name)]


@EACH_STORE
def test_the_snapshot_and_the_progress_are_one_commit(lake, db):
    set_up(db)
    table = lake.table()

    def process(limit, fails):
        with ConsumerTransaction(FEED, db) as transaction:
            batch = transaction.claim(limit)
            rows = payments(*((change.id, "a", 1) for change in transaction.changes()))
            transaction.ack(lambda connection: write(connection, batch, TABLE, rows))
            seen.append(ids(lake))
            if fails:
                raise ZeroDivisionError
        return batch

    seen = []
    with pytest.raises(ZeroDivisionError):
        process(4, fails=True)
    batch = process(4, fails=False)
    process(100, fails=False)
    assert seen == [[], [], [1, 2, 3, 4]]
    assert ids(lake) == list(range(1, 11))
    first = table.refresh().snapshots()[0].summary
    assert (first["pgchange.consumer"], first["pgchange.batch"]) == (FEED.name, batch.id)


def test_a_batch_that_comes_again_after_its_commit_is_not_written_twice(lake, connection):
    """If the progress is in another database, it can be lost after this commit."""
    lake.table()
    for _ in range(2):
        with connection.transaction():
            write(connection, BATCH, TABLE, payments((1, "a", 1)))
            write(connection, BATCH, TABLE, payments((2, "a", 1)))
    assert ids(lake) == [1, 2]


@EACH_STORE
def test_replace_deletes_the_rows_with_the_same_keys_first(lake, connection):
    lake.table()
    assert written(connection, FIVE) == 5
    written(connection, payments((2, "b", 1), (9, "b", 2)), mode="replace", key="id")
    assert [(row["id"], row["account"]) for row in lake.rows()] == [
        (1, "a1"), (2, "b"), (3, "a3"), (4, "a4"), (5, "a5"), (9, "b")]  # fmt: skip


def test_a_mirror_deletes_the_rows_that_are_gone_too(lake, connection):
    lake.table()
    written(connection, FIVE)
    gone = pa.table({"id": [3, 4, 77]})
    written(connection, payments((2, "b", 1), (2, "b", 1)), mode="mirror", key="id", gone=gone)
    assert ids(lake) == [1, 2, 5]


def test_only_a_mirror_deletes_rows_that_are_gone(lake, connection):
    lake.table()
    for mode in ("append", "replace"):
        with pytest.raises(InvalidArgument, match=f"mode {mode} deletes no rows that are gone"):
            written(connection, FIVE, mode=mode, key="id", gone=pa.table({"id": [1]}))


def test_a_key_may_be_a_uuid(lake, connection):
    lake.table(Schema(NestedField(1, "id", UUIDType()), NestedField(2, "cents", LongType())))
    first, second = (uuid.UUID(int=number).bytes for number in (1, 2))
    schema = pa.schema([("id", pa.uuid()), ("cents", pa.int64())])
    written(connection, pa.table({"id": [first, second], "cents": [1, 2]}, schema))
    written(connection, pa.table({"id": [first], "cents": [3]}, schema), mode="replace", key="id")
    gone = pa.table({"id": pa.array([second], pa.uuid())})
    written(connection, pa.table({"id": [first], "cents": [4]}, schema), mode="mirror", key="id", gone=gone)
    found = lake.catalog.load_table(TABLE.table).scan().to_arrow()
    assert found.to_pylist() == [{"id": uuid.UUID(bytes=first), "cents": 4}]


def test_a_key_may_have_several_columns(lake, connection):
    lake.table()
    written(connection, FIVE)
    written(connection, payments((2, "a2", 0), (3, "other", 0)), mode="replace", key=["account", "id"])
    assert [(row["account"], row["cents"]) for row in lake.rows() if row["id"] in (2, 3)] == [
        ("a2", 0), ("a3", 300), ("other", 0)]  # fmt: skip


def test_only_files_with_rows_of_the_keys_are_written_anew(lake, connection):
    table = lake.table()
    for first in (1, 101, 201):
        written(connection, payments(*((number, "a", 0) for number in range(first, first + 100, 2))))
    before = {task.file.file_path for task in table.refresh().scan().plan_files()}
    written(connection, payments((103, "b", 0), (150, "b", 0)), mode="replace", key="id")
    after = {task.file.file_path for task in table.refresh().scan().plan_files()}
    assert len(before - after) == 1
    assert len(lake.rows()) == 151


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (payments((1, "a", 1)), {"mode": "add", "key": "id"}, "mode add adds to rows"),
        (payments((1, "a", 1)), {"mode": "replace"}, "mode replace finds rows by their key: pass key="),
        (payments((1, "a", 1)), {"mode": "replace", "key": "no"}, "the key 'no' is not one of the columns id,"),
        (pa.table({"more": [2], "id": [1], "note": [3]}), {}, "no column more, note, which evolve=True adds: cast"),
        (pa.table({"id": pa.array([0], pa.timestamp("ns"))}), {}, r"unsupported type: timestamp.ns.: cast"),
        (pa.table({"id": ["1"]}), {}, "column id is of type string in the rows and long in the table: cast"),
        (payments((1, None, 1)), {"mode": "replace", "key": "account"}, "a key has a NULL"),
        (payments((1, "a", 1), (1, "b", 1)), {"mode": "replace", "key": "id"}, "the key id=1 was staged more than once"),
        ([], {}, "no record batch was given"),
        (payments(), {"mode": "mirror", "key": "id", "gone": pa.table({"no": [1]})}, "are gone lack the column id"),
        (payments(), {"mode": "mirror", "key": "id", "gone": pa.table({"id": [1, None]})}, "a key has a NULL"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_rows_that_do_not_fit_are_refused_and_leave_the_table_as_it_is(
    lake, connection, rows, options, message
):
    lake.table()
    written(connection, FIVE)
    with pytest.raises(MergeRefused, match=message):
        written(connection, rows, **options)
    assert ids(lake) == [1, 2, 3, 4, 5]


def test_a_table_or_a_catalog_that_is_not_there_is_named(lake, connection):
    with pytest.raises(InvalidArgument, match="no catalog .* in schema public"):
        written(connection, FIVE)
    lake.table()
    for other in (Iceberg("sales.payments", "lake"), Iceberg("sales.payment", "pond")):
        with pytest.raises(
            InvalidArgument, match=r"correct the name; .*iceberg_tables has lake\.sales\.payment$"
        ):
            written(connection, FIVE, other)
    with pytest.raises(InvalidArgument, match="names no Iceberg table"):
        Iceberg("payment", "lake")


def test_a_schema_may_have_any_name(lake, connection):
    lake.table()
    connection.execute('create schema "100%s{}"')
    connection.execute('create table "100%s{}".iceberg_tables as table iceberg_tables')
    connection.commit()
    assert written(connection, FIVE, Iceberg("sales.payment", "lake", schema="100%s{}")) == 5
    assert ids(lake) == []


@pytest.mark.parametrize(
    "planted",
    [
        # PyIceberg would call this with the table's location, and so execute the location.
        {
            "location": "open('PROOF', 'w')#",
            "properties": {"write.py-location-provider.impl": "builtins.exec"},
        },
        # PyIceberg would call this with the properties, and so execute their names as a command.
        {"properties": {"/usr/bin/touch": "", "PROOF": "", "py-io-impl": "subprocess.Popen"}},
    ],
    ids=["location provider", "access to files"],
)
def test_code_that_another_role_has_named_in_the_metadata_does_not_run(
    lake, connection, tmp_path, monkeypatch, planted
):
    file, proof = Path(urlsplit(lake.table().metadata_location).path), tmp_path / "proof"
    text = json.dumps({**json.loads(file.read_text()), **planted})
    file.write_text(text.replace("PROOF", str(proof)))
    monkeypatch.chdir(tmp_path)
    with suppress(Exception):
        written(connection, FIVE)
    time.sleep(0.1)
    assert not proof.exists()


def test_two_merges_lock_their_tables_in_the_same_order(lake, connection):
    """If their orders differed, each could wait for a table that the other has locked."""
    tables = [Iceberg(f"sales.{name}", "lake") for name in ("b", "a")]
    for table in tables:
        lake.table(name=table.name)
    order: list[str] = []
    with connection.transaction():
        staged = [StagedFiles(table, (), Mode.APPEND, BATCH.id, BATCH.attempt) for table in tables]
        merge(connection, BATCH, staged, lambda step, _: order.append(step))
    assert order == ["merging lake.sales.a", "merging lake.sales.b"]


def test_a_warehouse_that_this_machine_does_not_have_is_named(lake, connection):
    lake.table()
    lake.folder.rename(lake.folder.with_name("elsewhere"))
    with pytest.raises(
        ServerUnavailable,
        match=r"sales\.payment: .*metadata\.json, which the catalog names, does not exist.*same path",
    ):
        written(connection, FIVE)


def test_the_right_that_is_missing_is_named(lake, connection):
    lake.table()
    with connection.transaction(force_rollback=True):
        connection.execute(
            "create role reader; grant select on iceberg_tables to reader; set local role reader"
        )
        with pytest.raises(PermissionDenied, match=r"grant select, update on public\.iceberg_tables"):
            written(connection, FIVE)


def test_another_writer_waits_for_the_commit_and_then_adds_to_it(lake, connection, connect):
    table = lake.table()
    with ThreadPoolExecutor() as threads, connection.transaction():
        write(connection, BATCH, TABLE, FIVE)
        other = threads.submit(append, table, payments((9, "other", 1)))
        until(connect(), waits(kind="transactionid"))
    other.result(60)
    assert ids(lake) == [1, 2, 3, 4, 5, 9]


def append(table, rows):
    """Append rows as another writer does. PyIceberg 0.11 leaves it to the caller to retry a commit."""
    try:
        table.append(rows)
    except CommitFailedException:
        table.refresh().append(rows)


def test_a_commit_reads_the_table_again_that_another_writer_has_changed_meanwhile(lake, connection):
    """The other writer commits after the files were written and before the pointer to the metadata is locked."""
    table = lake.table()
    staged = staged_files(lake, FIVE.to_batches(), Mode.APPEND)
    table.append(payments((9, "other", 1)))
    with connection.transaction():
        iceberg.commit(connection, BATCH, staged)
    assert ids(lake) == [1, 2, 3, 4, 5, 9]


def staged_files(lake, batches, mode, key=(), name="payment"):
    """Return the staged files of an application, read back from the JSON of a manifest."""
    table = Iceberg(f"sales.{name}", "lake")
    rows = list(batches)
    with psycopg.connect(lake.conninfo) as connection:
        schema = pa.schema([field for field in rows[0].schema if field.name != TOUCHED])
        writer = iceberg.writer_of(connection, BATCH, table, schema, key=key, mode=mode)
    files = write_marked(writer, key, rows)
    staged = StagedFiles(table, key, mode, BATCH.id, BATCH.attempt).of(files)
    back = result_of(json.loads(json.dumps(asdict(staged))))
    assert back == result_of(asdict(back))
    return back


@EACH_STORE
def test_a_staged_mirror_has_the_keys_of_rows_to_delete_apart(lake, connection):
    lake.table()
    written(connection, FIVE)
    marked = payments((2, "b", 1), (3, None, None)).append_column(TOUCHED, pa.array([None, True]))
    staged = staged_files(lake, marked.to_batches(), Mode.MIRROR, ("id",))
    with connection.transaction():
        iceberg.commit(connection, BATCH, staged)
    assert (ids(lake), staged.rows) == ([1, 2, 4, 5], 1)


MANY = {
    "id": (pa.int64(), 5, BucketTransform(4)),
    "name": (pa.string(), "Zoë", TruncateTransform(2)),
    "day": (pa.date32(), date(2013, 1, 1), IdentityTransform()),
    "at": (pa.timestamp("us"), datetime(2013, 1, 1, 5, 17), DayTransform()),
    "price": (pa.decimal128(12, 2), Decimal("1.25"), IdentityTransform()),
    "flag": (pa.bool_(), True, IdentityTransform()),
    "nothing": (pa.int32(), None, IdentityTransform()),
}


def test_files_of_a_partitioned_table_keep_their_partition_on_the_way(lake, connection):
    schema = pa.schema([(name, kind) for name, (kind, *_) in MANY.items()])
    table = lake.table(schema, "many")
    with table.update_spec() as spec:
        for name, (_, _, transform) in MANY.items():
            spec.add_field(name, transform, f"{name}_part")
    row = {name: value for name, (_, value, _) in MANY.items()}
    rows = pa.Table.from_pylist([row, {**row, "id": 6}], schema)
    staged = staged_files(lake, rows.to_batches(), Mode.APPEND, name="many")
    with connection.transaction():
        iceberg.commit(connection, BATCH, staged)
    assert lake.rows("many") == rows.to_pylist()
    found = table.refresh().scan(
        row_filter="id = 5 and day = '2013-01-01' and price = 1.25 and nothing is null"
    )
    assert found.to_arrow().num_rows == 1


def test_instants_come_in_any_zone_and_are_kept_in_utc(lake, connection):
    at = datetime.fromisoformat("2013-01-01T05:17:00+00:00")
    lake.table(pa.schema([("at", pa.timestamp("us", "UTC"))]), "instant")
    rows = pa.table({"at": pa.array([at], pa.timestamp("us", "America/New_York"))})
    staged = staged_files(lake, rows.to_batches(), Mode.APPEND, name="instant")
    with connection.transaction():
        iceberg.commit(connection, BATCH, staged)
    assert lake.rows("instant") == [{"at": at}]


def test_a_catalog_of_the_first_version_is_used_as_it_is_and_a_view_is_no_table(lake, connection):
    lake.table()
    # PyIceberg 0.11 makes a catalog of the first version, which has no such column.
    connection.execute("alter table iceberg_tables add if not exists iceberg_type varchar(5)")
    connection.execute("update iceberg_tables set iceberg_type = 'VIEW'")
    connection.commit()
    with pytest.raises(InvalidArgument, match=r"has no table sales\.payment"):
        written(connection, FIVE)
    connection.execute("alter table iceberg_tables drop iceberg_type")
    connection.commit()
    written(connection, FIVE)
    assert ids(Lake(lake.conninfo, lake.folder)) == [1, 2, 3, 4, 5]


def test_the_metadata_files_are_numbered_in_order(lake, connection):
    table = lake.table()
    for _ in range(3):
        written(connection, FIVE)
    table.refresh()
    assert metadata_pointer.version_of(table.metadata_location) == 3
    assert [metadata_pointer.version_of(entry.metadata_file) for entry in table.metadata.metadata_log] == [
        0,
        1,
        2,
    ]
    assert metadata_pointer.version_of("s3://lake/any.json") == -1


NOTED = pa.schema([*PAYMENTS, ("note", pa.string()), ("more", pa.list_(pa.int64()))])


def test_a_table_gets_the_columns_of_the_rows_in_the_same_commit(lake, connection):
    table = lake.table()
    written(connection, FIVE)
    rows = pa.Table.from_pylist([{"id": 6, "account": "a", "cents": 1, "note": "n", "more": [1]}], NOTED)
    with connection.transaction(force_rollback=True):
        write(connection, BATCH, TABLE, rows, evolve=True)
    assert table.refresh().schema().column_names == PAYMENTS.names
    for number in range(2):
        written(connection, rows.set_column(0, "id", [[6 + number]]), evolve=True)
    assert [(row["id"], row["note"], row["more"]) for row in lake.rows()[4:]] == [
        (5, None, None), (6, "n", [1]), (7, "n", [1])]  # fmt: skip
    assert len(table.refresh().metadata.schemas) == 2


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (pa.table({"id": ["1"], "note": ["n"]}), "column id is of type string in the rows and long in the table"),
        (pa.table({"Id": [1]}), "the table has no column Id, but id: cast"),
        (pa.table({"id": [1], "note": pa.array([1], pa.uint64())}), "cannot write each value of 'note'"),
        (pa.table({"id": [1], "note": pa.array([None], pa.null())}), "note|null"),
        (pa.table({"id": [1], "note": pa.array([0], pa.timestamp("ns"))}), "'note' has an unsupported type"),
    ],
    ids=["another type", "another case", "no type of Iceberg's", "no type", "nanoseconds"],
)  # fmt: skip
def test_rows_that_would_still_not_fit_add_no_column(lake, connect, rows, message):
    """A Spark job adds columns in a transaction of its own, before it writes."""
    table = lake.table()
    with pytest.raises(MergeRefused, match=message):
        iceberg.evolve(connect(), TABLE, rows.schema, key=(), mode=Mode.APPEND)
        iceberg.writer_of(connect(), BATCH, TABLE, rows.schema, key=(), mode=Mode.APPEND)
    assert table.refresh().schema().column_names == PAYMENTS.names
    assert not list(lake.folder.rglob("*.parquet"))


def altered(change):
    def alter(lake):
        with lake.catalog.load_table(TABLE.table).update_schema(allow_incompatible_changes=True) as schema:
            change(schema)

    return alter


def partitioned(lake):
    with lake.catalog.load_table(TABLE.table).update_spec() as spec:
        spec.add_identity("account")


def made_anew(lake):
    lake.catalog.drop_table(TABLE.table)
    lake.table(pa.schema([("cents", pa.int64()), ("account", pa.string()), ("id", pa.int32())]))


@pytest.mark.parametrize(
    "alter",
    [
        altered(lambda schema: schema.rename_column("cents", "amount")),
        altered(lambda schema: schema.delete_column("cents")),
        altered(lambda schema: schema.update_column("cents", LongType())),
        altered(lambda schema: schema.update_column("account", required=True)),
        partitioned,
        made_anew,
    ],
    ids=["renamed", "dropped", "widened", "required", "partitioned", "made anew"],
)
@pytest.mark.parametrize("mode", [Mode.APPEND, Mode.REPLACE])
def test_files_of_an_earlier_shape_of_the_table_are_refused(lake, connection, alter, mode):
    lake.table()
    staged = staged_files(lake, FIVE.to_batches(), mode, ("id",))
    alter(lake)
    with (
        connection.transaction(),
        pytest.raises(StagingOutdated, match="were changed while the rows were written"),
    ):
        iceberg.commit(connection, BATCH, staged)
    assert lake.catalog.load_table(TABLE.table).current_snapshot() is None


def test_a_trigger_that_keeps_the_pointer_is_not_a_fault_of_the_batch(lake, connection):
    lake.table()
    connection.execute("create function keep() returns trigger language plpgsql as 'begin return null; end'")
    connection.execute(
        "create trigger keep before update on iceberg_tables for each row execute function keep()"
    )
    with pytest.raises(Refused, match=r"the row of the table in public\.iceberg_tables was not updated"):
        written(connection, FIVE)


def test_a_column_that_was_added_while_rows_were_written_is_null_in_them(lake, connection):
    lake.table()
    staged = staged_files(lake, FIVE.to_batches(), Mode.REPLACE, ("id",))
    altered(lambda schema: schema.add_column("note", StringType()))(lake)
    with connection.transaction():
        iceberg.commit(connection, BATCH, staged)
    assert [(row["id"], row["note"]) for row in lake.rows()] == [(number, None) for number in range(1, 6)]


def test_rows_are_found_by_a_key_that_was_widened(lake, connection):
    lake.table()
    written(connection, FIVE)
    altered(lambda schema: schema.update_column("cents", LongType()))(lake)
    rows = pa.table({"id": [9], "account": ["b"], "cents": [200]})
    written(connection, rows, mode="replace", key="cents")
    assert ids(lake) == [1, 3, 4, 5, 9]
