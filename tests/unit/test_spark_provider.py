"""The Spark operator uses only public names of Airflow's Spark provider, of the versions that were tested."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from airflow.providers.apache.spark.hooks import spark_connect as connect_hook
from airflow.providers.apache.spark.hooks import spark_submit as submit_hook
from airflow.providers.apache.spark.operators import spark_submit as submit_operator
from airflow.sdk import DAG
from packaging.requirements import Requirement
from packaging.version import Version

import airflow_pgchange
from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds import CommitFeed
from airflow_pgchange.operators import spark_arguments
from airflow_pgchange.operators.spark import SparkBatchOperator
from airflow_pgchange.operators.spark_submission import Submission
from tests.suite.parsing import syntax

ROOT = Path(__file__).parents[2]
PACKAGE = Path(airflow_pgchange.__file__).parent
PROVIDER = "apache-airflow-providers-apache-spark"
OF_SPARK = ("airflow.providers.apache.spark", "airflow_pgchange.operators.spark")


def private_names(source):
    """Return the private names in Python code: in attributes, functions and imports, and in texts as getattr() takes
    them."""
    found = set()
    for node in ast.walk(syntax(source)):
        match node:
            case ast.Attribute(attr=name) | ast.FunctionDef(name=name) | ast.alias(name=name):
                found.add(name)
            case ast.Name(id=name) | ast.Constant(value=str(name)):
                found.add(name)
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def theirs():
    return set().union(
        *(private_names(inspect.getsource(module)) for module in (connect_hook, submit_hook, submit_operator))
    )


def ours():
    """Return our modules that import the provider, or that import such a module."""
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text()
        for node in ast.walk(syntax(source)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(OF_SPARK):
                yield path.relative_to(PACKAGE).as_posix(), source
                break


@pytest.mark.parametrize(
    "code",
    [
        "self._conn_id",
        "operator._hook = None",
        "hook._connection['master']",
        "getattr(operator, '_archives')",
        "class Mine(SparkSubmitOperator):\n    def _get_hook(self): pass",
        "from airflow.providers.apache.spark.hooks.spark_submit import _build_spark_submit_command",
    ],
)
def test_a_private_name_of_the_provider_is_found(code):
    assert private_names(code) & theirs()


def test_no_private_name_of_the_provider_is_used():
    sources = dict(ours())
    assert {"operators/spark.py", "operators/spark_arguments.py", "decorators/spark.py"} <= sources.keys()
    known = theirs()
    assert {name: used for name, source in sources.items() if (used := private_names(source) & known)} == {}


def test_the_provider_is_one_that_the_extra_takes_and_no_later_major_version_than_the_tests_have():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (wanted,) = [one for one in map(Requirement, extras["spark-connect"]) if one.name == PROVIDER]
    assert wanted.specifier.contains(metadata.version(PROVIDER))
    (tested,) = re.findall(f"^{PROVIDER}==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert wanted.specifier.contains(tested)
    assert not wanted.specifier.contains(f"{Version(tested).major + 1}.0.0")


@pytest.fixture
def spark(monkeypatch):
    """A function that gives Airflow's connection ``spark`` other fields."""

    def connection(**fields):
        monkeypatch.setenv("AIRFLOW_CONN_SPARK", json.dumps({"conn_type": "spark", **fields}))

    connection(host="local[1]")
    return connection


def operator(**arguments):
    given = {"feed": CommitFeed("delays", 0), "application": "a.py", "conn_id": "spark", **arguments}
    return SparkBatchOperator(task_id="task", **given)


def hook_of(task):
    return task._arguments.hook(
        task,
        {},
        properties=task.conf or {},
        py_files=task.py_files or "",
        application_args=task.application_args,
    )


def parameters(function):
    return {name: one for name, one in inspect.signature(function).parameters.items() if name != "self"}


OF_THE_HOOK = parameters(submit_hook.SparkSubmitHook.__init__)
OF_CLUSTER_MODE = [name for name in spark_arguments.OF_CLUSTER_MODE if name in OF_THE_HOOK]
"""The arguments of the hook for cluster mode. Older providers lack some of them."""
OWN = {
    "conf": {"spark.a": "b"},
    "application_args": ["c"],
    "post_submit_commands": ["true"],
    "deploy_mode": "client",
}
"""Values for arguments that do not accept any text."""
UNSET = {"conn_id", "env_vars", "track_driver_via_k8s_api", "yarn_track_via_rm_api"}
"""Arguments that are not passed on as they are. ``conn_id`` is passed on, but must name an existing connection."""
VALUES = {name: OWN.get(name, f"a {name}") for name in OF_THE_HOOK.keys() - UNSET}


@pytest.fixture
def handed(monkeypatch):
    """The arguments with which hooks were created."""
    made = []
    monkeypatch.setattr(spark_arguments, "SparkSubmitHook", lambda **given: made.append(given))
    return made


@pytest.mark.parametrize("by", ["arguments", "default_args"])
def test_every_argument_of_the_hook_is_handed_on(spark, handed, by):
    if by == "arguments":
        hook_of(operator(**VALUES))
    else:
        with DAG("defaults", default_args=VALUES):
            hook_of(operator())
    assert handed == [{**VALUES, "conn_id": "spark", **dict.fromkeys(OF_CLUSTER_MODE, False)}]


def test_arguments_have_the_defaults_of_the_provider(spark, handed):
    hook_of(operator())
    theirs = parameters(submit_operator.SparkSubmitOperator.__init__)
    own = {"conf": {}, "conn_id": "spark", "py_files": "", "name": SPARK_NAME}
    assert handed == [
        {name: own.get(name, theirs[name].default) for name in OF_THE_HOOK.keys() - {"env_vars"}}
    ]


SPARK_NAME = "{{ dag.dag_id }}.{{ task.task_id }}"


def test_arguments_of_the_operator_and_not_of_the_hook_are_known():
    more = parameters(submit_operator.SparkSubmitOperator.__init__).keys() - OF_THE_HOOK.keys()
    newer = {"durable", "reconnect_on_retry"}
    assert more - newer == {
        "application",
        "kwargs",
        "openlineage_inject_parent_job_info",
        "openlineage_inject_transport_info",
    }


@pytest.mark.parametrize(
    ("extra", "arguments"),
    [
        ({"deploy-mode": "cluster"}, {}),
        ({}, {"deploy_mode": "cluster"}),
        ({"deploy-mode": "client"}, {"deploy_mode": "cluster"}),
        ({}, {"conf": {"spark.submit.deployMode": "cluster"}}),
    ],
)
def test_cluster_mode_is_refused_wherever_it_is_asked_for(spark, extra, arguments):
    spark(host="spark://master", port=7077, extra=extra)
    with pytest.raises(InvalidArgument, match="deploy mode 'cluster' is not supported"):
        hook_of(operator(**arguments))


def test_client_mode_in_an_argument_counts_before_the_connection(spark):
    spark(host="spark://master", port=7077, extra={"deploy-mode": "cluster"})
    assert isinstance(hook_of(operator(deploy_mode="client")), submit_hook.SparkSubmitHook)


@pytest.mark.parametrize("name", OF_CLUSTER_MODE)
def test_an_argument_of_cluster_mode_is_refused(spark, name):
    with pytest.raises(InvalidArgument, match=f"{name} needs deploy mode 'cluster'"):
        hook_of(operator(**{name: True}))


@pytest.mark.parametrize(
    "fields",
    [
        {"host": "local[2]"},
        {"host": "local"},
        {"conn_type": "local", "host": ""},
        {"host": "local", "port": 7077},
        {"host": "spark://local.example", "port": 7077},
        {"host": "spark://master"},
        {"host": "yarn"},
        {"conn_type": "yarn"},
        {"conn_type": "k8s", "host": "local.example", "port": 443},
        None,
    ],
)
def test_executors_have_this_python_where_the_hook_submits_to_a_local_master(spark, monkeypatch, fields):
    if fields is None:
        monkeypatch.delenv("AIRFLOW_CONN_SPARK")
    else:
        spark(**fields)

    class Submitted(Exception):
        pass

    def note(command, **_):
        raise Submitted(command[command.index("--master") + 1])

    task = operator()
    # The package for Kubernetes is searched for, and not used.
    monkeypatch.setattr(submit_hook, "kube_client", object(), raising=False)
    monkeypatch.setattr(subprocess, "Popen", note)
    with pytest.raises(Submitted) as submitted:
        hook_of(task).submit("a.py")
    (master,) = submitted.value.args
    local = {"PYSPARK_PYTHON": sys.executable} if master.startswith("local") else {}
    assert task._arguments.python() == {"PYSPARK_DRIVER_PYTHON": sys.executable, **local}


class Hook:
    """Replaces Airflow's hook: a job that sleeps until it is ended."""

    def __init__(self, after=lambda: None):
        self.after = after

    def submit(self, end, **options):
        command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, **options) as job:
            job.stdout.readline()
            self.group = os.getpgid(job.pid)
            end(job)
            self.ended_by = -job.wait(30)
        self.after()


@pytest.fixture
def killed(monkeypatch):
    """The process groups that were killed, without killing them."""
    found = []
    monkeypatch.setattr(os, "killpg", lambda group, _: found.append(group))
    return found


def test_a_submission_is_killed_with_its_process_group():
    hook, jobs = Hook(), []
    submission = Submission(hook, os.environ)
    submission.run(lambda job: (jobs.append(job), submission.kill()))
    assert (hook.ended_by, hook.group) == (signal.SIGKILL, jobs[0].pid)


def test_a_submission_that_has_not_begun_kills_nobody(killed):
    Submission(Hook(), os.environ).kill()
    assert killed == []


def test_a_submission_whose_process_has_ended_kills_nobody(killed):
    """Another process may have got its process id, also while the hook still does its work after the end."""
    hook, calls = Hook(after=lambda: (submission.kill(), calls.append("after"))), []
    submission = Submission(hook, os.environ)
    submission.run(lambda job: job.terminate())
    submission.kill()
    assert (hook.ended_by, calls, killed) == (signal.SIGTERM, ["after"], [])
