"""Rows of a batch staged for a table of a lake: data files that belong to no version of the table before the commit."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from airflow_pgchange.errors import StagingOutdated
from airflow_pgchange.lake.file_names import Attempt
from airflow_pgchange.lake.tables import LakeTable, table_of
from airflow_pgchange.results.merge_modes import Mode

LIFE = timedelta(days=2)
"""The time in which an attempt may commit its files, since it began to write them.

Maintenance removes only older files, so it never removes a file that an attempt could still commit.
"""


@dataclass(frozen=True)
class Files:
    """Data files, each as a description in JSON in the terms of its format.

    ``gone`` are the paths of Parquet files with the keys of rows to delete.
    """

    files: tuple[Mapping[str, Any], ...] = ()
    gone: tuple[str, ...] = ()


@dataclass(frozen=True)
class StagedFiles:
    """The files of one attempt on a batch for one table of a lake.

    Each description in ``files`` has the number of rows as ``rows``. ``began`` is the time at which the attempt began to
    write them, in seconds since 1970.
    """

    lake: LakeTable
    key: tuple[str, ...]
    mode: Mode
    batch_id: str
    attempt: int
    files: tuple[Mapping[str, Any], ...] = ()
    gone: tuple[str, ...] = ()
    began: float = field(default_factory=time.time)

    @property
    def target(self) -> str:
        return str(self.lake)

    @property
    def by(self) -> Attempt:
        """The attempt, as the names of its files have it."""
        return Attempt.of(self.batch_id, self.attempt)

    @property
    def rows(self) -> int:
        return sum(file["rows"] for file in self.files)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write and nothing to delete."""
        return not self.files and not self.gone

    def of(self, files: Files) -> StagedFiles:
        """Return a copy with these files in place of its own."""
        return replace(self, files=files.files, gone=files.gone)

    def check_life(self) -> None:
        """Raise StagingOutdated if the files are so old that maintenance may have removed them."""
        age = timedelta(seconds=time.time() - self.began)
        if age > LIFE:
            raise StagingOutdated(
                f"{self.lake}: the files were begun {age.days} days ago, but may be committed only for {LIFE.days} "
                f"days. Nothing was written, and the batch is tried again"
            )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StagedFiles:
        return cls(
            **{
                **data,
                "lake": table_of(data["lake"]),
                "key": tuple(data["key"]),
                "mode": Mode(data["mode"]),
                "files": tuple(data["files"]),
                "gone": tuple(data["gone"]),
            }
        )


@dataclass(frozen=True)
class Version:
    """A version of a table of a lake. ``name`` is the id of a snapshot, or a number. ``location`` is the table's."""

    name: str | None
    location: str
