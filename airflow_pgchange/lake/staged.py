"""Rows of a batch staged for a table of a lake: data files that belong to no version of the table before the commit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from airflow_pgchange.lake.tables import LakeTable, table_of
from airflow_pgchange.results.modes import Mode


@dataclass(frozen=True)
class Files:
    """Data files, each as a description in JSON that its format understands.

    ``gone`` are the paths of Parquet files with the keys of rows to delete.
    """

    files: tuple[Mapping[str, Any], ...] = ()
    gone: tuple[str, ...] = ()


@dataclass(frozen=True)
class StagedFiles:
    """The files of one attempt on a batch for one table of a lake.

    Each description in ``files`` has the number of rows as ``rows``.
    """

    lake: LakeTable
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
                "lake": table_of(data["lake"]),
                "key": tuple(data["key"]),
                "mode": Mode(data["mode"]),
                "files": tuple(data["files"]),
                "gone": tuple(data["gone"]),
            }
        )
