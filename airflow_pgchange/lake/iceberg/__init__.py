"""The format of Iceberg tables. Needs the extra ``iceberg``."""

from __future__ import annotations

from airflow_pgchange.lake.libraries import require

require("pyiceberg", format="Iceberg", extra="iceberg", on_executors="'pyiceberg[pyiceberg-core]' pyarrow")

from airflow_pgchange.lake.iceberg.commits import commit  # noqa: E402
from airflow_pgchange.lake.iceberg.file_writer import evolve, writer_of  # noqa: E402

__all__ = ["commit", "evolve", "writer_of"]
