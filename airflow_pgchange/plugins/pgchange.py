"""The plugin: a page in Airflow's UI. Every component of Airflow loads it, and only the API server builds the API."""

from __future__ import annotations

import sys
from functools import cached_property
from importlib import import_module
from typing import Any

from airflow.plugins_manager import AirflowPlugin

from airflow_pgchange.plugins.page import PREFIX, url

TITLE = "PG feeds"
ROUTE = "pgchange"
TRIGGERER = "airflow.jobs.triggerer_job_runner"
"""A module that only a triggerer imports."""


class PgChangePlugin(AirflowPlugin):
    """A page in the navigation, and the API of the page."""

    name = "pgchange"

    def __init__(self) -> None:
        self.react_apps = [
            {
                "name": TITLE,
                "url_route": ROUTE,
                "destination": "nav",
                "bundle_url": url("main.js"),
                "icon": url("icon.svg"),
                "icon_dark_mode": url("icon-dark.svg"),
            }
        ]

    @classmethod
    def on_load(cls, *_: Any, **__: Any) -> None:
        """Import the triggers in a triggerer, which loads its plugins before it starts the process of its event loop.

        An import on the loop would block all triggers, for a second on a busy machine.
        """
        if TRIGGERER in sys.modules:
            for name in ("feed", "spark_driver"):
                import_module(f"airflow_pgchange.triggers.{name}")

    @cached_property
    def fastapi_apps(self) -> list[dict[str, Any]]:  # type: ignore[override]
        from airflow_pgchange.plugins.api import build  # noqa: PLC0415 - only the API server has FastAPI

        return [{"name": TITLE, "url_prefix": PREFIX, "app": build()}]
