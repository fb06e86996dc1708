"""What an optional part says where its packages are missing."""

from __future__ import annotations

import importlib
import sys

import pytest

from airflow_pgchange.feeds.errors import ExtraMissing


@pytest.mark.parametrize(
    ("module", "package"),
    [
        ("airflow_pgchange.events.http", "fastapi"),
        ("airflow_pgchange.events.webhooks", "httpcore"),
        ("airflow_pgchange.events.webhooks", "standardwebhooks"),
    ],
)
def test_a_missing_package_is_named_with_how_to_install_it(module, package, monkeypatch):
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ExtraMissing, match=rf"need {package}: pip install 'airflow-provider-pgchange\[http\]'"
    ):
        importlib.import_module(module)
