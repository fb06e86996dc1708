"""Markers for the expensive resources of a test, so that the test can be left out unless they have changed."""

from __future__ import annotations

import pytest

KINDS = {
    "spark": "starts a JVM",
    "airflow": "starts processes of Airflow",
}
SPARK = "tests.spark_session"
MAKERS_OF_JVMS = {"connect_server"}


def pytest_configure(config: pytest.Config) -> None:
    for kind, what in KINDS.items():
        config.addinivalue_line("markers", f"{kind}: {what}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for kind in _kinds(item):
            item.add_marker(kind)


def _kinds(item: pytest.Item) -> set[str]:
    if "system" in item.path.parts:
        return set(KINDS)
    kinds = set()
    if MAKERS_OF_JVMS.intersection(getattr(item, "fixturenames", ())):
        kinds.add("spark")
    module = item.getparent(pytest.Module)
    used = vars(module.obj).values() if module is not None else ()
    if any(getattr(one, "__module__", None) == SPARK for one in used):
        kinds.add("spark")
    return kinds
