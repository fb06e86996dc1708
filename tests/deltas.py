"""Delta tables as a company has them: made by ``deltalake`` itself, and read by it."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

from airflow_pgchange.lake import Delta
from airflow_pgchange.lake.delta import store
from tests.lakes import PAYMENTS
from tests.s3 import KEY, SECRET, Server


def environment(server: Server) -> dict[str, str]:
    """The variables by which ``deltalake`` reaches a server of S3."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }


def made(location: str, schema: Any = PAYMENTS, **options: Any) -> Delta:
    """A new table."""
    lake = Delta(location)
    DeltaTable.create(location, schema, storage_options=store.options(lake), **options)
    return lake


def rows(lake: Delta) -> list[dict[str, Any]]:
    found: pa.Table = store.opened(lake).to_pyarrow_table()
    return found.sort_by([(column, "ascending") for column in found.column_names[:1]]).to_pylist()
