"""The link from a task to Spark's web interface."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from airflow.providers.common.compat.sdk import AirflowException, BaseHook, BaseOperatorLink

from airflow_pgchange.errors import InvalidArgument


class SparkUiLink(BaseOperatorLink):
    """Leads to the address in the extra ``ui`` of the task's Spark connection."""

    name = "Spark UI"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        return ui_of(operator.conn_id)


def ui_of(spark_conn_id: str) -> str:
    """Return the address of Spark's web interface, or an empty text if the connection has none. Raises
    InvalidArgument."""
    try:
        connection = BaseHook.get_connection(spark_conn_id)
    except AirflowException:
        return ""
    ui = str(connection.extra_dejson.get("ui") or "")
    if ui and urlsplit(ui).scheme not in ("http", "https"):
        raise InvalidArgument(
            f"the connection {spark_conn_id}: ui must be the address of Spark's pages, such as http://spark.example:4040"
        )
    return ui
