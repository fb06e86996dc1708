"""A link from a task to Spark's web interface, if its connection has the address."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
from airflow.providers.common.compat.sdk import AirflowFailException
from airflow.sdk import DAG

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds import CommitFeed
from airflow_pgchange.operators.spark import SparkBatchOperator
from airflow_pgchange.operators.spark_arguments import SparkArguments
from airflow_pgchange.operators.spark_detached import DetachedSpark
from airflow_pgchange.operators.spark_ui import SparkUiLink
from airflow_pgchange.utils.compat import dag_serialization

PAGES = "http://spark.example:4040"


def link_of(task: SparkBatchOperator) -> str:
    return SparkUiLink().get_link(task, ti_key=None)


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, dict[str, Any]], SparkBatchOperator]:
    """An operator with a connection of this type and these extras."""

    def make(kind: str, extra: dict[str, Any]) -> SparkBatchOperator:
        connection = {"conn_type": kind, "host": "sc://spark.example", "extra": extra}
        monkeypatch.setenv("AIRFLOW_CONN_PAGES", json.dumps(connection))
        feed = CommitFeed("delays", 0)
        return SparkBatchOperator(task_id="task", feed=feed, application="a.py", conn_id="pages")

    return make


@pytest.mark.parametrize("kind", ["spark", "spark_connect"])
def test_the_pages_are_those_that_the_connection_names(operator: Any, kind: str) -> None:
    assert link_of(operator(kind, {"ui": PAGES})) == PAGES
    assert link_of(operator(kind, {})) == ""


def test_a_task_without_a_connection_has_no_link() -> None:
    feed = CommitFeed("delays", 0)
    task = SparkBatchOperator(task_id="task", feed=feed, application="a.py", conn_id="nowhere")
    assert link_of(task) == ""


def test_a_text_that_is_no_address_of_a_page_is_refused(operator: Any) -> None:
    # Before Airflow 3.3 an operator raises AirflowFailException from an error that no retry corrects.
    with pytest.raises(
        (InvalidArgument, AirflowFailException), match="pages: ui must be the address of Spark's pages"
    ):
        operator("spark_connect", {"ui": "javascript:alert(1)"}).execute({})


def test_the_link_is_there_while_the_task_runs(operator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DetachedSpark, "execute", lambda *_: {})
    monkeypatch.setattr(SparkArguments, "check", lambda *_: None)
    ti = Mock()
    operator("spark_connect", {"ui": PAGES}).execute({"ti": ti})
    ti.xcom_push.assert_called_once_with("_link_SparkUiLink", PAGES)
    ti.reset_mock()
    operator("spark_connect", {}).execute({"ti": ti})
    ti.xcom_push.assert_not_called()


def test_airflow_knows_where_to_find_the_link(operator: Any) -> None:
    with DAG("linked") as dag:
        operator("spark", {})
    task: Any = (
        dag_serialization()
        .from_dict(json.loads(json.dumps(dag_serialization().to_dict(dag))))
        .get_task("task")
    )
    assert [(one.name, one.xcom_key) for one in task.operator_extra_links] == [
        ("Spark UI", "_link_SparkUiLink"),
        ("PG feeds", "_link_ConsumerLink"),
    ]
