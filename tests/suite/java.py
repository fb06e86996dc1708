"""JVMs that start soon: those of the tests are gone in seconds, and each takes half of its time to load classes.

``python -m tests.suite.java``, a part of the set-up, makes an archive of the classes. A release runs without all this.
"""

from __future__ import annotations

import os
from pathlib import Path

from airflow_pgchange.spark import startup
from demo.spark import clean_environment

VARIABLE = "JAVA_TOOL_OPTIONS"
"""The environment variable that every JVM reads."""
CACHE = Path(__file__).parents[2] / ".cache"
KEPT = CACHE / "java-options"


def start_soon() -> None:
    """Let the JVMs of this process and its children use the archive of classes, if it exists. A variable that is set
    already is kept."""
    if KEPT.exists():
        os.environ.setdefault(VARIABLE, KEPT.read_text())


def make() -> None:
    CACHE.mkdir(exist_ok=True)
    os.environ |= clean_environment() | {"XDG_CACHE_HOME": str(CACHE)}
    KEPT.write_text(startup.conf()["spark.driver.extraJavaOptions"])


if __name__ == "__main__":
    make()
