"""A link from a task to Spark's pages."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from airflow.sdk import BaseHook, BaseOperatorLink
from airflow.sdk.exceptions import AirflowException

from airflow_pgchange.errors import InvalidArgument


class SparkUiLink(BaseOperatorLink):
    """The pages that the extra ``ui`` of the task's Spark connection names."""

    name = "Spark UI"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        return ui_of(operator.conn_id)


def ui_of(spark_conn_id: str) -> str:
    """The address of Spark's pages, empty where nothing names it. Raises InvalidArgument for what is none."""
    try:
        connection = BaseHook.get_connection(spark_conn_id)
    except AirflowException:
        return ""
    ui = str(connection.extra_dejson.get("ui") or "")
    if ui and urlsplit(ui).scheme not in ("http", "https"):
        raise InvalidArgument(
            f"the connection {spark_conn_id}: ui is to be the address of Spark's pages, such as http://spark.example:4040"
        )
    return ui
