"""Write the rows of a batch into a table of a lake, without Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg

from airflow_pgchange.feeds import outputs
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.key_columns import KeyNames, names_of
from airflow_pgchange.lake import keys
from airflow_pgchange.lake.commit_numbers import check_transaction
from airflow_pgchange.lake.formats import commit, prepared
from airflow_pgchange.lake.rows import Rows, batches_of
from airflow_pgchange.lake.tables import LakeTable
from airflow_pgchange.results.merge_modes import Mode

if TYPE_CHECKING:
    import pyarrow as pa


def write(
    connection: psycopg.Connection[Any],
    batch: Batch,
    lake: LakeTable,
    rows: Rows,
    *,
    mode: Mode | str = Mode.APPEND,
    key: KeyNames = (),
    gone: pa.Table | None = None,
    evolve: bool = False,
) -> int:
    """Write rows into a table of a lake in the consumer transaction, and return how many.

    ``connection`` is that of the transaction, as a ``BatchOperator`` passes it. The rows are in the table exactly once.
    The new snapshot of an ``Iceberg`` table and the progress are one commit. The catalog of a ``RemoteIceberg`` table
    commits at once, and a retry finds the batch in the table. The summary of the snapshot has the batch's id as
    ``pgchange.batch``.

    ``mode`` is a ``Mode`` or its name. ``append`` adds the rows. ``replace`` first deletes the rows with the same keys.
    ``mirror`` deletes those of ``gone`` as well, a table with the columns of the key. No other mode accepts ``gone``.
    Both modes write files with such rows again, in the memory of this process. ``evolve``: the table first gets the
    columns of the rows that it lacks, each of which may be null. Raises MergeRefused, before a file is written, if the
    rows do not fit. Raises OutcomeUnknown if the table does not show any more whether an earlier attempt has written
    the batch. Raises StaleClaim if the table has a part of the batch, which was split meanwhile.
    """
    # Check the transaction before a column is added or a file is written.
    check_transaction(connection, lake)
    chosen, names = Mode.of(mode), names_of(key)
    keys_gone = [] if gone is None else keys.of_gone(lake, gone, names, chosen).to_batches()
    schema, batches = batches_of(rows)
    writer, begun = prepared(connection, batch, lake, schema, key=names, mode=chosen, evolve=evolve)
    staged = begun.of(writer.write(batches, keys_gone))
    outputs.note(connection, [commit(connection, batch, staged)])
    return staged.rows
