"""`make demo`, with a day of movements."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.release(
    "make install-test runs the demo; every run has tests of its parts: Airflow, the example DAGs, the Connect server"
)
def test_the_demo_ends_with_a_result_that_equals_the_file() -> None:
    """Takes minutes: the whole demo, with Airflow, Spark and PostgreSQL of its own."""
    environment = {**os.environ, "DAYS": "1", "LAKE": "1"}
    for name in ("DSN", "KEEP", "RATE", "SPARK", "WRITERS"):
        environment.pop(name, None)
    ran = subprocess.run(
        [sys.executable, "-m", "demo"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=850,
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    assert "the result equals the file to the last flight" in ran.stdout
    assert "rows in the lake, read by DuckDB, equal the table" in ran.stdout
    assert "DIFFERS" not in ran.stdout
    assert re.search(r"commit to result: p50 \d+\.\d s, p95 \d+\.\d s", ran.stdout)
