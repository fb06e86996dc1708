"""PyArrow, which every format of lake tables needs."""

from __future__ import annotations

from airflow_pgchange.errors import ExtraMissing

try:
    import pyarrow as pa
    import pyarrow.compute as pc
except ImportError as error:
    raise ExtraMissing(
        "results in a lake need pyarrow: pip install 'airflow-provider-pgchange[iceberg]', or [delta]"
    ) from error

__all__ = ["pa", "pc"]
