"""Find a batch in the log of a Delta table.

Each commit of this package has an application and a number, which are Delta's means for idempotent writes. The
application is a consumer of a database, and the number is the batch's version. The table keeps the last number of each
application. A commit fails if the table has another version than the version that was read.

A restored database uses numbers again. So a number that the table has counts only if the commit's information has the
id of the same batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError

from airflow_pgchange.errors import ConsumerBusy, OutcomeUnknown, SourceRestored
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.lake.delta import object_store
from airflow_pgchange.lake.tables import Delta

BATCH, WRITE, REPAIRED = "pgchange.batch", "pgchange.write", "pgchange.repaired"
SKEW = timedelta(days=1)
"""The largest difference between the clocks of the writers and of the database. Only a commit that is older than the
batch by more cannot have the batch."""
WINDOWS = (100, 1000, None)
"""The numbers of commits to read, one after another. A batch that is tried again is nearly always in a recent commit."""


@dataclass(frozen=True)
class Write:
    """A write of a batch to a table. ``number`` counts the writes of a transaction to this table, from 1."""

    lake: Delta
    batch: Batch
    number: int = 1

    @property
    def consumer(self) -> str:
        """The consumer, with the id of the source in which the numbers of its batches are valid."""
        return f"{self.batch.bounds.get('source', '')}/{self.batch.feed}"

    @property
    def application(self) -> str:
        return f"pgchange/{self.number}/{self.consumer}"

    def version_in(self, table: DeltaTable) -> int | None:
        """Return the version of the table that an earlier attempt has committed with these rows, or None.

        Raises OutcomeUnknown if the log does not show whether there is such a version. Raises SourceRestored if the
        number of the batch belongs to another batch, or is lower than the last number.
        """
        last_number, number = table.transaction_version(self.application), self.batch.version
        if last_number is not None and last_number < number and not self.batch.parts_of:
            return None
        last: dict[str, Any] = {}
        for last in self._commits(table):
            if last.get(BATCH) in {self.batch.id, *self.batch.parts_of} and last.get(WRITE) == str(
                self.number
            ):
                return int(last["version"])
        if last_number is not None and last_number >= number:
            raise SourceRestored(
                f"{self.lake}: batch {self.batch.id} of {self.batch.feed} has the number {number}, and the table has "
                f"another batch as number {last_number}. Either this attempt is over, or the database was restored to an "
                f"earlier time. After a restore: restore the table, too, or keep its rows, and then {self._repair}"
            )
        if last_number is not None and not self._is_before(last):
            raise OutcomeUnknown(
                f"{self.lake}: the log no longer shows whether batch {self.batch.id} of {self.batch.feed} was written. "
                f"Look for its rows. If they are there: airflow-pgchange skip. If not: {self._repair}"
            )
        return None

    def properties(self) -> CommitProperties:
        """Return the information of the commit of these rows. The commit is tried once, because the log must be read
        before the next try."""
        return CommitProperties(
            {
                BATCH: self.batch.id,
                WRITE: str(self.number),
                "pgchange.consumer": self.batch.feed,
                "pgchange.attempt": str(self.batch.attempt),
            },
            0,
            [Transaction(self.application, self.batch.version)],
        )

    @property
    def _repair(self) -> str:
        return f"airflow-pgchange repair {self.batch.feed} --delta {self.lake}"

    def _commits(self, table: DeltaTable) -> Iterator[dict[str, Any]]:
        """Yield the information of the commits in the log that may have the batch, the latest first."""
        for commit in _commits(table):
            yield commit
            if self._is_before(commit):
                return

    def _is_before(self, commit: dict[str, Any]) -> bool:
        """Whether no commit before this commit can have the batch."""
        if commit.get(REPAIRED) == self.consumer or commit.get("version") == 0:
            return True
        if self.batch.first_claimed_at is None or "timestamp" not in commit:
            return False
        made_at = datetime.fromtimestamp(commit["timestamp"] / 1000, UTC)
        return made_at < datetime.fromisoformat(self.batch.first_claimed_at) - SKEW


def repair(lake: Delta, batch: Batch) -> None:
    """Let the batch be written, although the log has its number, or does not show whether it has the batch.

    If the table has rows of the batch already, it gets them a second time.
    """
    table = object_store.opened(lake)
    applications, write = [], Write(lake, batch)
    while (last_number := table.transaction_version(write.application)) is not None:
        applications.append(Transaction(write.application, min(last_number, batch.version - 1)))
        write = Write(lake, batch, write.number + 1)
    properties = CommitProperties({REPAIRED: write.consumer}, 0, applications)
    try:
        table.create_write_transaction(
            [], "append", table.schema(), table.metadata().partition_columns, commit_properties=properties
        )
    except CommitFailedError as error:
        raise ConsumerBusy(f"{lake}: another writer committed meanwhile: run the repair again") from error


def _commits(table: DeltaTable) -> Iterator[dict[str, Any]]:
    """Yield the information of the commits that the log still has, the latest first."""
    read = 0
    for window in WINDOWS:
        commits = table.history(window)
        yield from commits[read:]
        if window is None or len(commits) < window:
            return
        read = len(commits)
