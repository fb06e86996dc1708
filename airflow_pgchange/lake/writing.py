"""A batch's rows in an Iceberg table: written into files while the batch is processed, committed with its progress."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
from psycopg import sql
from pyiceberg.manifest import DataFile
from pyiceberg.table import FileScanTask, Table

from airflow_pgchange.errors import MergeRefused
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.key_columns import KeyNames, names_of
from airflow_pgchange.feeds.queries import ask
from airflow_pgchange.lake import data_files, fitting, pointer, rewriting
from airflow_pgchange.lake.tables import Iceberg
from airflow_pgchange.results.modes import Mode

Rows: TypeAlias = pa.Table | pa.RecordBatchReader | Iterable[pa.RecordBatch]


@dataclass(frozen=True)
class StagedFiles:
    """Data files of one attempt on a batch for one Iceberg table.

    ``files`` are the data files, as ``data_files.to_json`` describes them. ``gone`` are the paths of Parquet files with
    the keys of rows to delete. ``rows`` is the number of rows in ``files``.
    """

    lake: Iceberg
    key: tuple[str, ...]
    mode: Mode
    files: tuple[Mapping[str, Any], ...]
    gone: tuple[str, ...]
    batch_id: str
    attempt: int

    @property
    def target(self) -> str:
        return str(self.lake)

    @property
    def rows(self) -> int:
        return sum(file["rows"] for file in self.files)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StagedFiles:
        return cls(
            **{
                **data,
                "lake": Iceberg(**data["lake"]),
                "key": tuple(data["key"]),
                "mode": Mode(data["mode"]),
                "files": tuple(data["files"]),
                "gone": tuple(data["gone"]),
            }
        )


def write(
    connection: psycopg.Connection[Any],
    batch: Batch,
    lake: Iceberg,
    rows: Rows,
    *,
    mode: Mode | str = Mode.APPEND,
    key: KeyNames = (),
    gone: pa.Table | None = None,
) -> int:
    """Write rows into an Iceberg table in the consumer transaction, and return how many.

    ``connection`` is that of the transaction, as a ``BatchOperator`` passes it. The table's new snapshot and the progress
    are one commit: exactly once. The summary of the snapshot has the batch's id as ``pgchange.batch``.

    ``mode`` is a ``Mode`` or its name. ``append`` adds the rows. ``replace`` first deletes the rows with the same keys.
    ``mirror`` deletes those of ``gone`` as well, a table with the columns of the key. Both write the files that have such
    rows anew, in the memory of this process. Raises MergeRefused, before a file is written, if the rows do not fit.
    """
    chosen, names = Mode.of(mode), names_of(key)
    schema, batches = _batches(rows)
    table = pointer.opened(connection, lake)
    fitting.check(lake, table.metadata, schema, names, chosen)
    with refusals(lake):
        files = list(data_files.written(table.metadata, table.io, batches))
        commit_files(
            connection,
            batch,
            lake,
            files,
            mode=chosen,
            key=names,
            gone=[] if gone is None else [gone.select(names)],
        )
    return sum(file.record_count for file in files)


def commit(connection: psycopg.Connection[Any], batch: Batch, staged: StagedFiles) -> None:
    """Make the files that an attempt on the batch has staged a snapshot of their table, in the consumer transaction."""
    with refusals(staged.lake):
        table = pointer.opened(connection, staged.lake)
        files = [data_files.from_json(table.metadata, file) for file in staged.files]
        gone = [_keys_in(table, path) for path in staged.gone]
        commit_files(connection, batch, staged.lake, files, mode=staged.mode, key=staged.key, gone=gone)


def commit_files(
    connection: psycopg.Connection[Any],
    batch: Batch,
    lake: Iceberg,
    files: Sequence[DataFile],
    *,
    mode: Mode,
    key: tuple[str, ...],
    gone: Sequence[pa.Table],
) -> None:
    """Lock the table's pointer, and move it to a snapshot with the files.

    The pointer stays locked until the transaction ends. So other writers wait meanwhile, and then read the table again.
    """
    if not files and not gone:
        return
    table = pointer.opened(connection, lake, locked=True)
    told = _told(connection, batch)
    if _is_there(table, told):
        return
    with table.transaction() as transaction:
        snapshot = transaction.update_snapshot(snapshot_properties=told)
        if not mode.behaviour.needs_key:
            with snapshot.fast_append() as added:
                for file in files:
                    added.append_data_file(file)
            return
        keys = _keys(lake, table, files, key, gone, once=mode.behaviour.one_row_a_key)
        with snapshot.overwrite() as changed:
            for rewritten in rewriting.without(table, keys):
                changed.delete_data_file(rewritten.file)
                for file in rewritten.left:
                    changed.append_data_file(file)
            for file in files:
                changed.append_data_file(file)


def _told(connection: psycopg.Connection[Any], batch: Batch) -> dict[str, str]:
    """Return the properties of the batch for the summary of its snapshot."""
    transaction = ask(connection, sql.SQL("select pg_catalog.pg_current_xact_id()::text"))
    return {
        "pgchange.consumer": batch.feed,
        "pgchange.batch": batch.id,
        "pgchange.attempt": str(batch.attempt),
        "pgchange.transaction": transaction,
    }


def _is_there(table: Table, told: Mapping[str, str]) -> bool:
    """Whether another transaction has committed the batch to the table.

    Then the progress, which is in another database, was lost after that commit. Several writes of one transaction are
    several snapshots.
    """
    snapshots = [snapshot.summary for snapshot in table.metadata.snapshots if snapshot.summary is not None]
    return any(
        summary["pgchange.batch"] == told["pgchange.batch"]
        and summary["pgchange.transaction"] != told["pgchange.transaction"]
        for summary in snapshots
    )


def _keys(
    lake: Iceberg,
    table: Table,
    files: Sequence[DataFile],
    key: tuple[str, ...],
    gone: Sequence[pa.Table],
    *,
    once: bool,
) -> pa.Table:
    """The keys of all rows that are written or deleted."""
    kept = rewriting.rows_of(table, [FileScanTask(file) for file in files], key)
    if any(kept.column(name).null_count for name in key):
        raise MergeRefused(f"{lake}: a key holds NULL: drop such rows before merging")
    if once:
        _check_once(lake, kept, key)
    return pa.concat_tables([kept, *(keys.cast(kept.schema) for keys in gone)])


def _check_once(lake: Iceberg, kept: pa.Table, key: tuple[str, ...]) -> None:
    counted = kept.group_by(list(key)).aggregate([([], "count_all")])
    twice = (
        counted.filter(pa.compute.greater(counted.column("count_all"), 1))
        .select(list(key))
        .slice(0, 1)
        .to_pylist()
    )
    if twice:
        named = ", ".join(f"{name}={value}" for name, value in twice[0].items())
        raise MergeRefused(
            f"{lake}: the key {named} comes more than once, so which row should win? Use dropDuplicates or an aggregate "
            "before merging"
        )


def _keys_in(table: Table, path: str) -> pa.Table:
    with table.io.new_input(path).open() as file:
        return pq.read_table(file)


def _batches(rows: Rows) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    if isinstance(rows, pa.Table):
        return rows.schema, iter(rows.to_batches())
    if isinstance(rows, pa.RecordBatchReader):
        return rows.schema, iter(rows)
    batches = iter(rows)
    first = next(batches, None)
    if first is None:
        raise MergeRefused("no record batch was given, so the columns are unknown: give an empty one")
    return first.schema, chain([first], batches)


@contextmanager
def refusals(lake: Iceberg) -> Iterator[None]:
    """Turn what PyIceberg refuses into MergeRefused."""
    try:
        yield
    except (ValueError, NotImplementedError, pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise MergeRefused(f"{lake}: {error}") from error
