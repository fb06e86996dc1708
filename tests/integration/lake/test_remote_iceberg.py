"""Rows of a batch in an Iceberg table whose catalog cannot take part in a commit of PostgreSQL."""

from __future__ import annotations

import json
import socket
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from pyiceberg.catalog import Catalog
from pyiceberg.table.update import AssertRefSnapshotId

from airflow_pgchange.errors import (
    InvalidArgument,
    MergeRefused,
    OutcomeUnknown,
    PermissionDenied,
    ServerUnavailable,
    StagingOutdated,
    StaleClaim,
)
from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction
from airflow_pgchange.lake import Iceberg, RemoteIceberg, formats, write
from airflow_pgchange.lake.iceberg import history, maintenance, remote_catalog
from airflow_pgchange.lake.staged_files import Files, StagedFiles
from airflow_pgchange.results.merge import merge
from airflow_pgchange.results.merge_modes import Mode
from airflow_pgchange.results.staging import Staged, result_of
from tests.lakes import HAS_SQL_CATALOG, PAYMENTS, Lake, payments, set_up
from tests.rest_catalog import RETRIED, Fault, RestCatalog
from tests.staging import BATCH

pytestmark = pytest.mark.skipif(
    not HAS_SQL_CATALOG, reason="the REST catalog of the tests needs SQLAlchemy 2"
)

FEED, TABLE = CommitFeed("lake", 0), RemoteIceberg("sales.payment", "rest")
ONE = payments((1, "a", 100))
AGAIN = replace(BATCH, attempt=3)
"""A later claim of ``BATCH``."""


@dataclass
class Remote:
    """A table behind a REST catalog, or in a second SQL catalog."""

    catalog: Catalog
    rest: RestCatalog

    def rows(self) -> list[tuple[int, str, int]]:
        found = self.catalog.load_table(TABLE.table).scan().to_arrow().sort_by("id").to_pylist()
        return [tuple(row.values()) for row in found]

    def expire(self, snapshots: int = 1) -> None:
        """Expire all snapshots except the latest."""
        table = self.catalog.load_table(TABLE.table)
        for snapshot in table.snapshots()[:-snapshots]:
            table.maintenance.expire_snapshots().by_id(snapshot.snapshot_id).commit()


@pytest.fixture
def table(rest, monkeypatch):
    monkeypatch.setattr(remote_catalog, "PAUSES", (0, 0, 0, 0))
    rest.catalog.create_table(TABLE.table, PAYMENTS)
    return Remote(rest.catalog, rest)


@pytest.fixture
def connection(shared_db):
    with psycopg.connect(shared_db) as connection:
        yield connection


def written(connection, rows, batch=BATCH, **options):
    """Write rows of the batch in a transaction of their own."""
    with connection.transaction():
        return write(connection, batch, TABLE, rows, **options)


def test_rows_are_appended_replaced_and_mirrored(table, connection):
    written(connection, payments((1, "a", 1), (2, "a", 2), (3, "a", 3)))
    other, last = (replace(BATCH, id=id) for id in ("batch-2", "batch-3"))
    written(connection, payments((2, "b", 20)), other, mode="replace", key="id")
    written(connection, payments((3, "c", 30)), last, mode="mirror", key="id", gone=ONE.select(["id"]))
    assert table.rows() == [(2, "b", 20), (3, "c", 30)]
    summary = table.catalog.load_table(TABLE.table).current_snapshot().summary
    assert (summary["pgchange.batch"], summary["pgchange.consumer"]) == (last.id, BATCH.feed)
    required = [
        requirement.snapshot_id
        for commit in table.rest.commits
        for requirement in commit.requirements
        if isinstance(requirement, AssertRefSnapshotId)
    ]
    snapshots = table.catalog.load_table(TABLE.table).snapshots()
    assert required == [None, *(snapshot.snapshot_id for snapshot in snapshots[:-1])]


def test_a_sql_catalog_in_another_database_is_reached_by_its_settings(tmp_path, connection, monkeypatch):
    from pyiceberg.catalog.sql import SqlCatalog

    uri = f"sqlite:///{tmp_path / 'second.db'}"
    monkeypatch.setenv("PYICEBERG_CATALOG__SECOND__URI", uri)
    with SqlCatalog("second", uri=uri, warehouse=tmp_path.as_uri()) as catalog:
        catalog.create_namespace("sales")
        catalog.create_table(TABLE.table, PAYMENTS)
        for batch in (BATCH, AGAIN):
            with connection.transaction():
                write(connection, batch, RemoteIceberg(TABLE.table, "second"), ONE)
        assert catalog.load_table(TABLE.table).scan().to_arrow().num_rows == 1


def test_a_batch_whose_progress_was_lost_after_the_commit_of_the_catalog_is_not_written_again(table, db):
    set_up(db)

    def process(fails):
        with ConsumerTransaction(FEED, db) as transaction:
            batch = transaction.claim()
            rows = payments(*((change.id, "a", 1) for change in transaction.changes()))
            transaction.ack(lambda connection: write(connection, batch, TABLE, rows))
            if fails:
                raise ZeroDivisionError
        return batch

    with pytest.raises(ZeroDivisionError):
        process(fails=True)
    assert process(fails=False).attempt == 2
    assert [row[0] for row in table.rows()] == list(range(1, 11))


def test_each_write_of_a_batch_is_found_by_its_number(table, connection):
    """The process is killed after the first of two writes."""
    written(connection, ONE)
    with connection.transaction():
        write(connection, AGAIN, TABLE, ONE)
        write(connection, AGAIN, TABLE, payments((2, "second", 1)))
    assert [row[0] for row in table.rows()] == [1, 2]


def test_a_write_that_an_ack_repeats_after_a_deadlock_is_found(table, connection):
    with connection.transaction():
        with connection.transaction() as savepoint:
            write(connection, BATCH, TABLE, ONE)
            raise psycopg.Rollback(savepoint)
        write(connection, BATCH, TABLE, ONE)
    assert len(table.rows()) == 1


def test_a_part_of_a_batch_that_the_table_has_is_not_written(table, connection):
    written(connection, ONE)
    part = replace(BATCH, id="part", bounds={"split": {"parts_of": [BATCH.id]}})
    written(connection, ONE, part)
    assert len(table.rows()) == 1


def test_an_attempt_on_a_batch_that_was_split_meanwhile_adds_nothing(table, connection):
    """The process was stopped for so long that later attempts failed and a part of the batch was written."""
    part = replace(BATCH, id="part", bounds={"split": {"parts_of": ["whole", BATCH.id]}})
    written(connection, ONE, part)
    with pytest.raises(StaleClaim, match="the table has a part of batch batch-1"):
        written(connection, payments((1, "a", 100), (2, "a", 100)))
    assert len(table.rows()) == 1


@pytest.mark.parametrize("fault", RETRIED, ids=lambda fault: fault.name)
def test_an_unknown_outcome_is_not_guessed(table, connection, fault, monkeypatch):
    monkeypatch.setattr(remote_catalog, "PATIENCE", 1 if fault is Fault.SILENT else 60)
    table.rest.faults = [fault]
    written(connection, ONE)
    assert table.rest.fired == [fault]
    assert len(table.rows()) == 1


def no_requirement(monkeypatch):
    commit = remote_catalog.OneTry.commit_table
    monkeypatch.setattr(
        remote_catalog.OneTry,
        "commit_table",
        lambda self, table, _, updates: commit(self, table, (), updates),
    )


def no_second_look(monkeypatch):
    looked = set()

    def has(table, write):
        if write.batch.attempt in looked:
            return False
        looked.add(write.batch.attempt)
        return history.has(table, write)

    monkeypatch.setattr(remote_catalog, "has", has)


@pytest.mark.parametrize(
    ("mode", "planted"),
    [
        ("append", None),
        ("append", no_requirement),
        ("append", no_second_look),
        ("replace", None),
        ("replace", no_second_look),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_an_attempt_that_is_stopped_after_its_look_until_its_retry_has_committed_adds_nothing(
    table, shared_db, planted, mode, monkeypatch
):
    """If the fault is planted, rows come twice, or the later rows of another batch are lost."""
    if planted:
        planted(monkeypatch)
    key = "id" if mode == "replace" else ()
    later = replace(BATCH, id="later")

    def attempt(batch, rows):
        with psycopg.connect(shared_db) as connection:
            written(connection, rows, batch, mode=mode, key=key)

    with ThreadPoolExecutor() as threads:
        with table.rest.held() as held:
            stopped = threads.submit(attempt, BATCH, ONE)
            assert held.wait(60)
            attempt(AGAIN, ONE)
            attempt(later, payments((1, "later", 200)))
        with suppress(ServerUnavailable):
            stopped.result(60)
    right = [(1, "later", 200)] if mode == "replace" else [(1, "a", 100), (1, "later", 200)]
    assert (sorted(table.rows()) == right) is (planted is None)


@pytest.mark.parametrize("mode", ["append", "replace"])
def test_a_commit_that_another_writer_has_overtaken_is_done_again_on_the_table_as_it_is_then(
    table, shared_db, mode
):
    def attempt():
        with psycopg.connect(shared_db) as connection:
            written(connection, ONE, mode=mode, key="id" if mode == "replace" else ())

    with ThreadPoolExecutor() as threads, table.rest.held() as held:
        overtaken = threads.submit(attempt)
        assert held.wait(60)
        table.catalog.load_table(TABLE.table).append(payments((1, "other", 9), (2, "other", 9)))
        table.rest.release()
        overtaken.result(60)
    others = [(2, "other", 9)] if mode == "replace" else [(1, "other", 9), (2, "other", 9)]
    assert sorted(table.rows()) == [(1, "a", 100), *others]
    assert len(table.rest.commits) == 2


def old(**changes):
    """A claim of the batch whose first attempt began before the oldest snapshot of the table."""
    return replace(BATCH, first_claimed_at=datetime.now(UTC).isoformat(), **changes)


def test_where_the_snapshots_since_the_first_claim_have_expired_a_person_says_whether_the_batch_is_there(
    table, connection
):
    written(connection, ONE, old())
    for id in (8, 9):
        table.catalog.load_table(TABLE.table).append(payments((id, "other", 1)))
    table.expire()
    with pytest.raises(OutcomeUnknown, match=r"set the table's property pgchange\.batch-1 to written"):
        written(connection, ONE, old())
    # The rows were deleted by hand, for the test.
    table.catalog.load_table(TABLE.table).delete("id = 1")
    for answer, there in [("written", [8, 9]), ("missing", [1, 8, 9])]:
        with table.catalog.load_table(TABLE.table).transaction() as transaction:
            transaction.set_properties({f"pgchange.{BATCH.id}": answer})
        written(connection, ONE, old())
        assert [row[0] for row in table.rows()] == there
    # The property is valid for one commit.
    assert not any(name.startswith("pgchange") for name in table.catalog.load_table(TABLE.table).properties)


def test_snapshots_from_before_the_first_claim_may_have_expired(table, connection):
    for id in (8, 9):
        table.catalog.load_table(TABLE.table).append(payments((id, "other", 1)))
    table.expire()
    soon = datetime.now(UTC) + timedelta(seconds=history.CLOCKS + 1)
    written(connection, ONE, replace(BATCH, first_claimed_at=soon.isoformat()))
    assert len(table.rows()) == 3


def test_where_table_and_progress_are_one_commit_no_history_is_needed(db, tmp_path):
    """Tubes and queues with results in another database need the history: the commit does not have their progress."""
    lake = Lake(db, tmp_path)
    table = lake.table()
    for id in (8, 9):
        table.append(payments((id, "other", 1)))
    table.maintenance.expire_snapshots().by_id(table.snapshots()[0].snapshot_id).commit()
    with psycopg.connect(db) as connection:
        with pytest.raises(OutcomeUnknown):
            write(connection, old(), Iceberg("sales.payment", "lake"), ONE)
        write(connection, old(atomic=True), Iceberg("sales.payment", "lake"), ONE)
    assert [row["id"] for row in lake.rows()] == [1, 8, 9]


def test_a_catalog_that_confirms_nothing_is_given_up(table, connection):
    table.rest.faults = [Fault.REFUSED] * 4
    with pytest.raises(
        ServerUnavailable, match=r"none of 4 tries to commit batch batch-1: ServiceUnavailable"
    ):
        written(connection, ONE)
    assert len(table.rest.fired) == 4
    assert table.rows() == []


@pytest.mark.parametrize(
    ("lake", "error", "message"),
    [
        (RemoteIceberg("sales.payment", "none"), InvalidArgument, "configuration has no catalog none"),
        (RemoteIceberg("sales.no", "rest"), InvalidArgument, r"catalog rest has no table sales\.no: make it"),
        (
            RemoteIceberg("sales.payment", "gone"),
            ServerUnavailable,
            "catalog gone has not answered: Connection",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, RemoteIceberg) else "",
)
def test_a_catalog_or_a_table_that_is_not_there_is_named(rest, connection, lake, error, message, monkeypatch):
    monkeypatch.setenv("PYICEBERG_CATALOG__GONE__URI", "http://127.0.0.1:1")
    with pytest.raises(error, match=message):
        write(connection, BATCH, lake, ONE)


def test_a_catalog_that_accepts_and_never_answers_is_not_waited_for(rest, connection, monkeypatch):
    monkeypatch.setattr(remote_catalog, "PATIENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("PYICEBERG_CATALOG__REST__URI", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ServerUnavailable, match=r"has not answered: NoAnswer: no answer for 0\.2 s"):
            write(connection, BATCH, TABLE, ONE)


def test_a_user_who_may_not_commit_is_told_at_once(table, connection):
    table.rest.faults = [Fault.DENIED]
    with pytest.raises(PermissionDenied, match="rest refuses the user: ForbiddenError: .*to commit to it"):
        written(connection, ONE)
    assert (table.rest.fired, table.rows()) == ([Fault.DENIED], [])


ANSWERS = {
    InvalidArgument: (400, 404, 422, 501),
    PermissionDenied: (401, 403),
    ServerUnavailable: (419, 429, 500, 503),
}


def test_a_mistake_is_told_from_an_outage_by_the_answer_of_the_catalog(rest, connection):
    """For example, 400 and 404 mean that there is no such warehouse."""
    for error, codes in ANSWERS.items():
        for rest.answers in codes:
            with pytest.raises(error, match="catalog rest (refuses|cannot be opened as|has not answered)"):
                write(connection, BATCH, TABLE, ONE)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"TYPE": "rset"}, InvalidArgument, "'rset' is not a valid CatalogType: correct its type, address"),
        ({"TYPE": "rest"}, InvalidArgument, "URI missing"),
        ({"WAREHOUSE": "lake"}, InvalidArgument, "URI missing"),
        ({"TYPE": "rest", "URI": "catalog.example.com"}, InvalidArgument, "No scheme supplied"),
        ({"URI": "http://localhost:port"}, InvalidArgument, "not a valid host or port"),
        ({"TYPE": "sql", "URI": "postgresql+none://h/lake"}, InvalidArgument, "Can't load plugin"),
        ({"TYPE": "sql", "URI": "postgresql+psycopg://127.0.0.1:1/lake"}, ServerUnavailable, "Connection refused"),
        ({"PY-CATALOG-IMPL": "no.Catalog"}, InvalidArgument, "Could not initialize Catalog"),
    ],
    ids=lambda value: " ".join(value.values()) if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_mistake_in_the_configuration_needs_a_person(connection, monkeypatch, settings, error, message):
    for name, value in settings.items():
        monkeypatch.setenv(f"PYICEBERG_CATALOG__MISTAKEN__{name}", value)
    with pytest.raises(error, match=message):
        write(connection, BATCH, RemoteIceberg("sales.payment", "mistaken"), ONE)


@pytest.mark.parametrize("text", ["catalog: [", "catalog: lake", "catalog:\n  rest: lake"])
def test_a_configuration_that_is_malformed_is_told_for_every_catalog(connection, tmp_path, monkeypatch, text):
    (tmp_path / ".pyiceberg.yaml").write_text(text)
    monkeypatch.setenv("PYICEBERG_HOME", str(tmp_path))
    with pytest.raises(
        InvalidArgument, match=r"(?s)configuration cannot be read: .*: correct \.pyiceberg\.yaml"
    ):
        write(connection, BATCH, TABLE, ONE)


def test_a_configuration_with_which_pyiceberg_cannot_be_imported_is_told(monkeypatch):
    def fails(name):
        raise ValueError("secret: planted")

    monkeypatch.setattr(formats, "import_module", fails)
    with pytest.raises(InvalidArgument, match=r"cannot be imported: ValueError: secret: \*\*\*: correct"):
        formats.format_of(TABLE)


def test_a_catalog_that_cannot_be_opened_is_named_without_its_password(connection, monkeypatch):
    monkeypatch.setenv("PYICEBERG_CATALOG__OTHER__URI", "mysql://lake:planted@localhost/lake")
    with pytest.raises(InvalidArgument, match=r"other cannot be opened.* mysql://lake:") as raised:
        write(connection, BATCH, RemoteIceberg("sales.payment", "other"), ONE)
    assert "planted" not in "".join(traceback.format_exception(raised.value))


def test_a_table_of_the_first_format_version_is_refused(rest, connection):
    rest.catalog.create_table("sales.old", PAYMENTS, properties={"format-version": "1"})
    with pytest.raises(MergeRefused, match="set its property format-version to 2"):
        write(connection, BATCH, RemoteIceberg("sales.old", "rest"), ONE)


def test_a_catalog_commits_only_after_postgresql_has_taken_the_other_results_of_the_batch(table, connection):
    writer = remote_catalog.writer_of(connection, BATCH, TABLE, PAYMENTS, key=(), mode=Mode.APPEND)
    files = StagedFiles(TABLE, (), Mode.APPEND, BATCH.id, BATCH.attempt).of(writer.write(ONE.to_batches()))
    other = Staged("public.no", ("id",), Mode.REPLACE, "no", (("id", "bigint"),), (), BATCH.id, BATCH.attempt)
    with pytest.raises(MergeRefused, match=r"public\.no"), connection.transaction():
        merge(connection, BATCH, [files, other])
    assert table.rest.commits == []


def test_files_of_an_earlier_shape_of_the_table_are_not_committed(table, connection):
    writer = remote_catalog.writer_of(connection, BATCH, TABLE, PAYMENTS, key=(), mode=Mode.APPEND)
    files = StagedFiles(TABLE, (), Mode.APPEND, BATCH.id, BATCH.attempt).of(writer.write(ONE.to_batches()))
    with table.catalog.load_table(TABLE.table).update_schema(allow_incompatible_changes=True) as schema:
        schema.delete_column("cents")
    with pytest.raises(StagingOutdated, match="were changed while the rows were written"):
        remote_catalog.commit(connection, BATCH, files)
    assert table.rows() == []


def test_the_manifest_keeps_the_kind_of_the_catalog():
    files = Files(({"rows": 1},), ("gone",))
    staged = StagedFiles(TABLE, ("id",), Mode.REPLACE, BATCH.id, BATCH.attempt).of(files)
    assert result_of(json.loads(json.dumps(asdict(staged)))) == staged


def test_maintenance_is_the_same_with_another_catalog(table, connection):
    for number in (1, 2):
        written(connection, payments((number, "a", 1)), replace(BATCH, id=f"b{number}"))
    remote_catalog.writer_of(connection, BATCH, TABLE, PAYMENTS, key=(), mode=Mode.APPEND).write(
        ONE.to_batches()
    )
    assert maintenance.expire(connection, TABLE, timedelta()) == 1
    left = maintenance.remove_orphans(connection, TABLE, timedelta())
    assert {each.batch: each.files for each in left} == {BATCH.id: 1, "b1": 1}
    assert table.rows() == [(1, "a", 1), (2, "a", 1)]


def test_a_table_of_another_catalog_gets_the_columns_of_the_rows(table, connection):
    noted = ONE.append_column("note", [["n"]])
    with pytest.raises(MergeRefused, match="the table has no column note"):
        written(connection, noted)
    written(connection, noted, evolve=True)
    assert table.rows() == [(1, "a", 100, "n")]
