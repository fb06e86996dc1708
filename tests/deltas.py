"""Delta tables that ``deltalake`` creates and reads, because users' tables also come from other programs than ours."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

from airflow_pgchange.lake import Delta
from airflow_pgchange.lake.delta import object_store
from tests.lakes import PAYMENTS
from tests.s3 import KEY, SECRET, Server


def environment(server: Server) -> dict[str, str]:
    """Return the environment variables by which ``deltalake`` connects to an S3 server."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }


def made(location: str, schema: Any = PAYMENTS, **options: Any) -> Delta:
    """Create a table, and return it."""
    lake = Delta(location)
    DeltaTable.create(location, schema, storage_options=object_store.options(lake), **options)
    return lake


def rows(lake: Delta) -> list[dict[str, Any]]:
    found: pa.Table = object_store.opened(lake).to_pyarrow_table()
    return found.sort_by([(column, "ascending") for column in found.column_names[:1]]).to_pylist()


@dataclass(frozen=True)
class DeltaLake:
    """A folder with a Delta table, for tests of all formats."""

    folder: Path

    @property
    def into(self) -> Delta:
        return Delta(str(self.folder / "payment"))

    def table(self, schema: pa.Schema = PAYMENTS) -> Delta:
        return made(self.into.location, schema)

    def rows(self) -> list[dict[str, Any]]:
        return rows(self.into)

    def batches(self) -> list[str]:
        """Return the ids of the batches that the table's log records."""
        history = object_store.opened(self.into).history()
        return [commit["pgchange.batch"] for commit in history if "pgchange.batch" in commit]
