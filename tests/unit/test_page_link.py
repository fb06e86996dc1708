"""A link from a task to its consumer on the page."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from airflow_pgchange.feeds import CommitFeed, TubeFeed
from airflow_pgchange.operators.batch import BatchOperator
from airflow_pgchange.operators.page_link import ConsumerLink


def link_of(feed: Any, **given: str) -> str:
    task = BatchOperator(task_id="task", feed=feed, process=print, postgres_conn_id="airline", **given)
    return ConsumerLink().get_link(task, ti_key=None)


def asked(url: str) -> dict[str, str]:
    return dict(parse_qsl(urlsplit(url).query))


def test_a_task_links_to_its_consumer_where_airflow_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", "http://airflow.example/pre/")
    url = link_of(CommitFeed("delays", 0))
    assert url.startswith("/pre/plugin/pgchange/consumer?")
    assert asked(url) == {"connection": "airline", "kind": "commit", "consumer": "commits:delays/0"}


def test_a_consumer_is_where_its_progress_is_kept() -> None:
    elsewhere = {"source_conn_id": "operations"}
    assert asked(link_of(CommitFeed("delays", 0), **elsewhere)) == {
        "connection": "airline",
        "source": "operations",
        "kind": "commit",
        "consumer": "commits:delays/0",
    }
    found = asked(link_of(TubeFeed("copies"), **elsewhere))
    assert (found["connection"], found.get("source")) == ("operations", None)
