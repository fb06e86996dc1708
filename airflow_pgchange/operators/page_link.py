"""The link from a task to its consumer on the page."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode, urlsplit

from airflow.providers.common.compat.sdk import BaseOperatorLink, conf

from airflow_pgchange.utils.arguments import feed_of

ROUTE = "plugin/pgchange/consumer"


class ConsumerLink(BaseOperatorLink):
    """Leads to the page of the consumer whose batches the task processes: its lag, its batches, and its actions."""

    name = "PG feeds"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        feed = feed_of(operator.feed)
        elsewhere = operator.source_conn_id not in (None, operator.postgres_conn_id)
        home, source = operator.postgres_conn_id, operator.source_conn_id if elsewhere else None
        if feed.progress == "source" and source is not None:
            home, source = source, None
        parameters = {"connection": home, "kind": feed.kind, "consumer": feed.name}
        root = urlsplit(conf.get("api", "base_url", fallback="")).path.rstrip("/")
        return f"{root}/{ROUTE}?{urlencode(parameters | ({'source': source} if source else {}))}"
