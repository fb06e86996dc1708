"""The format of Delta tables. Needs the extra ``delta``."""

from __future__ import annotations

from airflow_pgchange.lake.libraries import require

require("deltalake", format="Delta", extra="delta", on_executors="deltalake pyarrow")

from airflow_pgchange.lake.delta.commits import commit  # noqa: E402
from airflow_pgchange.lake.delta.file_writer import evolve, writer_of  # noqa: E402

__all__ = ["commit", "evolve", "writer_of"]
