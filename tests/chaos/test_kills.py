"""Kill processes with SIGKILL at each step of a batch. Afterwards the results equal the source's ledger, and no process
remains."""

from __future__ import annotations

import signal

import pytest

from airflow_pgchange.spark.job import SMALL
from demo.spark import StandaloneSpark
from tests.chaos import kills
from tests.chaos.harness import FULL, PROOF

NASTIEST = (("operator", "staging"), ("PostgreSQL", "acked"))
"""The cases of a normal run: while a driver works, and right before a commit."""
OTHERS = pytest.mark.release(
    "every run kills an operator while its driver stages and PostgreSQL right before the commit; "
    "Spark tries the tasks of an executor again"
)
CASES = [
    pytest.param(victim, step, apart, marks=[] if (victim, step) in NASTIEST and not apart else [OTHERS])
    for victim, steps in kills.VICTIMS.items()
    for step in steps
    for apart in (False, True)
    if apart or victim != "source"
]
LAKE_CASES = [
    ("operator", "staging"),
    ("operator", "merged"),
    ("operator", "acked"),
    ("operator", "committed"),
    ("PostgreSQL", "staging"),
    ("PostgreSQL", "merged"),
    ("PostgreSQL", "acked"),
    ("driver", "staging"),
    ("driver's Python", "staging"),
    ("cluster's driver", "staging"),
    ("executor", "staging"),
]
"""The cases with a lake. At ``merged`` external catalogs have committed, and PostgreSQL has not."""
OF_LAKES = pytest.mark.release("every run has such kills by batches in Python, in test_lake.py")
DURING_SPARK = ("opened", "reading", "staging", "written")
AFTER_SPARK = ("merged", "acked", "committed")
LIVES_ON = ("source", "executor")
"""Victims without which the job continues: it queries the source again, and Spark retries the tasks of an executor."""
EXIT_CODES = {"driver": -signal.SIGKILL, "cluster's driver": -signal.SIGKILL}
"""The exit code of spark-submit in the operator's error."""


@pytest.fixture(scope="module")
def spark():
    with StandaloneSpark() as cluster:
        yield cluster


@pytest.fixture
def scene(new_cluster, tmp_path):
    def make(*, apart=False, changes=500, lakes=False):
        source = new_cluster()
        return kills.set_up(source, new_cluster() if apart else source, tmp_path, changes, lakes=lakes)

    return make


def master_of(step):
    """Return the master for a kill at a step.

    After Spark's end it makes no difference, so the shared server will do. A release starts a driver for each case.
    """
    return kills.SHARED if not FULL and step in AFTER_SPARK else "local[2]"


def finish(scene, master):
    """Run the operator again, as Airflow's retry does."""
    with kills.operator(scene, master if FULL else kills.SHARED, None) as again:
        assert again.wait() == 0, kills.log_of(scene, None)


@pytest.mark.parametrize(("victim", "step", "apart"), CASES)
def test_a_kill_loses_and_doubles_nothing(request, scene, victim, step, apart):
    """Takes seconds: the operator is a process, and its driver a JVM."""
    killed(request, scene, victim, step, apart=apart)


@OF_LAKES
@pytest.mark.parametrize(("victim", "step"), LAKE_CASES)
def test_a_kill_loses_and_doubles_nothing_in_a_lake(request, scene, victim, step):
    """Takes seconds: the operator is a process, its driver a JVM, and each table of the lake is read by a process of
    its own."""
    killed(request, scene, victim, step, lakes=True)


def killed(request, scene, victim, step, *, apart=False, lakes=False):
    """Kill the victim at a step, run the operator again, and compare all copies with the ledger."""
    master, changes = master_of(step), 500
    if victim in kills.IN_A_CLUSTER:
        master, changes = request.getfixturevalue("spark").master_url, SMALL + 5_000
    at = scene(apart=apart, changes=changes, lakes=lakes)
    with kills.operator(at, master, step) as process:
        kills.wait_for_step(at, process, step)
        assert kills.job_runs(at) == (step in DURING_SPARK)
        kills.kill(victim, at, process, step)
        if victim not in LIVES_ON:
            kills.until(lambda: not kills.job_runs(at), "the end of the job")
        (at.folder / "go").touch()
        ended = process.wait()
    if victim == "operator":
        assert ended == -signal.SIGKILL
    elif victim == "executor":
        assert kills.attempts(at, step) > 1
    elif victim != "source" and step != "committed":
        assert ended != 0, "nobody noticed the kill"
    if victim in EXIT_CODES:
        assert f"Error code is: {EXIT_CODES[victim]}." in kills.log_of(at, step)
    kills.until(lambda: not kills.job_runs(at), "the end of the job")
    finish(at, master)
    assert kills.judge(at) == kills.RIGHT
    assert kills.staging_left(at) == 0


@PROOF
def test_the_campaign_catches_results_that_are_committed_before_the_progress(scene):
    """Takes seconds: the operator runs twice, each time as a process."""
    at, master = scene(), master_of("merged")
    with kills.operator(at, master, "merged", separately=True) as process:
        kills.wait_for_step(at, process, "merged")
        kills.kill("operator", at, process, "merged")
        assert process.wait() == -signal.SIGKILL
    finish(at, master)
    verdict = kills.judge(at)
    assert verdict.doubled > 0
    assert verdict.wrong_totals > 0
