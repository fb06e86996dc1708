"""The request to a Spark application, and that the application ends with the process that started it."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from airflow_pgchange.errors import InvalidArgument, MergeRefused
from airflow_pgchange.feeds import Batch, CommitFeed, consumer_names
from airflow_pgchange.feeds.batch import Slice
from airflow_pgchange.results.merge import read_manifest
from airflow_pgchange.spark import package, request, startup, submit
from tests.suite.processes import runs, said_with

SECRET = "hunter2-of-the-airline"
FEED = CommitFeed("delays", 3)
SLICES = tuple(Slice(10_000, (n, n), (n + 1, n + 1)) for n in range(5000))
BATCH = Batch(
    id="b", feed="commits:delays/3", version=7, attempt=2, count=50_000_000, slices=SLICES, bounds={"x": 1}
)


@pytest.fixture
def handed(tmp_path, monkeypatch):
    """Set the environment of a submission in this process."""
    environment = submit.environment(
        BATCH, FEED, f"host=a password={SECRET}", f"host=b password={SECRET}", tmp_path / "manifest.json"
    )
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return environment


def test_the_environment_holds_no_secret(handed):
    assert SECRET not in json.dumps(handed)


def test_the_request_can_be_read_by_its_user_alone(handed):
    assert stat.S_IMODE(Path(handed[request.REQUEST]).stat().st_mode) == 0o600


def test_a_request_arrives_as_it_was_handed_over_however_large(handed, tmp_path):
    taken = request.take()
    assert taken.feed == FEED
    assert taken.batch.to_json() == json.loads(json.dumps(BATCH.to_json()))
    assert (taken.results, taken.source) == (f"host=a password={SECRET}", f"host=b password={SECRET}")
    assert taken.manifest == tmp_path / "manifest.json"


def test_a_source_that_is_not_named_is_where_the_results_are(tmp_path, monkeypatch):
    for name, value in submit.environment(BATCH, FEED, "host=a", None, tmp_path / "m").items():
        monkeypatch.setenv(name, value)
    assert request.take().source == "host=a"


def test_a_request_is_taken_once_and_then_gone_from_the_disk(handed):
    request.take()
    assert not Path(handed[request.REQUEST]).exists()
    with pytest.raises(InvalidArgument, match=r"one batch_job\(\) in an application"):
        request.take()


def test_an_application_that_nobody_handed_a_batch_says_how_to_start_it(monkeypatch):
    monkeypatch.delenv(request.REQUEST, raising=False)
    with pytest.raises(InvalidArgument, match="start it with SparkBatchOperator"):
        request.take()


def test_a_request_shows_no_secret_when_it_is_printed(handed):
    assert SECRET not in repr(request.take())


def test_the_package_imports_without_airflow(tmp_path):
    archive = package.archive(tmp_path)
    code = (
        "import sys; sys.modules['airflow'] = None; "
        "import airflow_pgchange.spark.entry_point, airflow_pgchange.spark.source; "
        "print(airflow_pgchange.spark.entry_point.__file__)"
    )
    assert said_with(archive, code, tmp_path).startswith(str(archive))


def test_the_package_is_made_once_and_again_when_it_changes(tmp_path, monkeypatch):
    first = package.archive(tmp_path)
    made = first.stat().st_ino
    assert package.archive(tmp_path).stat().st_ino == made
    monkeypatch.setattr(package, "FOLDERS", ("feeds",))
    assert package.archive(tmp_path) != first


def planted(file, how, monkeypatch):
    """Replace a file, as another user who may write there could."""
    file.unlink(missing_ok=True)
    real = file.with_name("planted")
    real.write_bytes(b"something else")
    real.chmod(0o600)
    if how == "a link":
        file.symlink_to(real)
        return
    real.rename(file)
    if how == "of somebody else":
        mine = os.geteuid()
        monkeypatch.setattr(package.os, "geteuid", lambda: mine + 1)
    else:
        file.chmod(0o620)


PLANTED = ("of somebody else", "that others may write", "a link")


@pytest.mark.parametrize("how", PLANTED)
def test_a_package_that_others_could_have_put_there_is_not_taken(how, tmp_path, monkeypatch):
    made = package.archive(tmp_path)
    planted(made, how, monkeypatch)
    assert package.archive(tmp_path) == made
    assert zipfile.is_zipfile(made)
    assert not made.is_symlink()
    assert stat.S_IMODE(made.stat().st_mode) == 0o600


@pytest.mark.parametrize("how", PLANTED)
def test_an_archive_of_classes_that_others_could_have_put_there_is_not_taken(how, spark_submit, monkeypatch):
    program, calls = spark_submit()
    startup.conf(program)
    (made,) = package.cache().glob("classes-*.jsa")
    monkeypatch.setattr(package, "cache", lambda: made.parent)
    planted(made, how, monkeypatch)
    assert "SharedArchiveFile" in startup.conf(program)["spark.driver.extraJavaOptions"]
    assert calls() == 2
    assert not made.is_symlink()
    assert stat.S_IMODE(made.stat().st_mode) == 0o600


def test_a_cache_of_somebody_else_is_refused_and_ones_own_is_closed_to_others(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "airflow_pgchange"
    folder.mkdir()
    folder.chmod(0o777)
    assert package.cache() == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    mine = os.geteuid()
    monkeypatch.setattr(package.os, "geteuid", lambda: mine + 1)
    with pytest.raises(PermissionError, match="XDG_CACHE_HOME"):
        package.archive()
    assert "SharedArchiveFile" not in startup.conf(sys.executable)["spark.driver.extraJavaOptions"]
    assert "XDG_CACHE_HOME" in caplog.text


@pytest.mark.parametrize("python", ["this", "another"])
def test_executors_import_the_bytecode_of_the_package_or_its_sources_where_their_python_is_another(
    python, tmp_path
):
    made, shipped = package.archive(tmp_path), tmp_path / "shipped.zip"
    with zipfile.ZipFile(made) as archive, zipfile.ZipFile(shipped, "w") as out:
        for name in archive.namelist():
            content = archive.read(name)
            out.writestr(
                name, b"else" + content[4:] if python == "another" and name.endswith(".pyc") else content
            )
    code = "import airflow_pgchange.feeds.consumer_names as names; print(names.__file__, names.__doc__)"
    told = said_with(shipped, code, tmp_path)
    file = "consumer_names.pyc" if python == "this" else "consumer_names.py"
    assert told.startswith(f"{shipped}/airflow_pgchange/feeds/{file} ")
    assert str(consumer_names.__doc__).splitlines()[0] in told


def test_a_package_that_nobody_has_asked_for_in_a_month_goes_when_a_new_one_is_made(tmp_path, monkeypatch):
    recent, old = package.archive(tmp_path), tmp_path / "airflow_pgchange-0123.zip"
    old.touch()
    os.utime(old, (0, time.time() - package.KEPT - 1))
    package.archive(tmp_path)
    assert old.exists()
    monkeypatch.setattr(package, "FOLDERS", ("feeds",))
    new = package.archive(tmp_path)
    assert set(tmp_path.glob("*.zip")) == {recent, new}


def test_the_packages_that_executors_need_are_those_that_the_zip_imports():
    needed = {"psycopg", "pyarrow", "adbc_driver_manager", "adbc_driver_postgresql"}
    listed = {Requirement(line).name.replace("-", "_") for line in package.EXECUTOR_PACKAGES}
    assert listed == needed


PRETEND = """#!/bin/sh
echo once >> {log}
for word in "$@"; do case "$word" in *ArchiveClassesAtExit=*)
  file=${{word#*ArchiveClassesAtExit=}}; touch "${{file%% *}}";; esac; done
echo refused >&2
exit {code}
"""


@pytest.fixture
def spark_submit(tmp_path, monkeypatch):
    """A script that replaces spark-submit, records its calls, and ends with the given exit code."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    program, log = tmp_path / "spark-submit", tmp_path / "log"

    def make(code=0):
        log.write_text("")
        program.write_text(PRETEND.format(log=log, code=code))
        program.chmod(0o755)
        return str(program), lambda: len(log.read_text().split())

    return make


def test_a_quick_start_makes_its_archive_once(spark_submit):
    program, calls = spark_submit()
    confs = [submit.startup_conf(fast_start=True, spark_binary=program) for _ in range(3)]
    assert calls() == 1
    options = confs[0]["spark.driver.extraJavaOptions"]
    assert "-XX:SharedArchiveFile=" in options
    assert confs == [confs[0]] * 3


def test_a_quick_start_does_without_an_archive_that_cannot_be_made(spark_submit, caplog):
    program, _ = spark_submit(code=1)
    options = submit.startup_conf(fast_start=True, spark_binary=program)["spark.driver.extraJavaOptions"]
    assert "SharedArchiveFile" not in options
    assert options == " ".join(startup.SHORT_RUN)
    assert "no class-data archive" in caplog.text
    assert "refused" in caplog.text


def test_nothing_is_changed_unless_a_quick_start_is_asked_for():
    assert submit.startup_conf() == {}


JOB = """
import sys
from unittest.mock import MagicMock
from airflow_pgchange.spark import batch_job, session
session.SparkSession = MagicMock()
with batch_job() as batch:
    {body}
"""


def run_job(handed, tmp_path, body):
    application = tmp_path / "application.py"
    application.write_text(JOB.format(body=body))
    environment = {**os.environ, **handed, "PYTHONPATH": str(package.ROOT.parent)}
    return subprocess.run(
        [sys.executable, application], env=environment, capture_output=True, text=True, check=False
    )


def test_a_job_that_ends_well_says_what_it_staged(tmp_path):
    small = Batch(
        id="b", feed="commits:delays/3", version=1, attempt=1, count=1, slices=(Slice(1, 0, 1),), bounds={}
    )
    handed = submit.environment(small, FEED, "host=a", None, tmp_path / "manifest.json")
    ran = run_job(handed, tmp_path, "pass")
    assert ran.returncode == 0, ran.stderr
    assert read_manifest(tmp_path / "manifest.json") == ()


def test_a_merge_after_the_block_fails_the_job_instead_of_being_forgotten(tmp_path):
    small = Batch(
        id="b", feed="commits:delays/3", version=1, attempt=1, count=1, slices=(Slice(1, 0, 1),), bounds={}
    )
    handed = submit.environment(small, FEED, "host=a", None, tmp_path / "manifest.json")
    ran = run_job(handed, tmp_path, "pass\nbatch.merge(None, 'public.delays', 'id', 'replace')")
    assert ran.returncode != 0
    assert "merge inside it" in ran.stderr


def test_a_job_that_fails_leaves_no_manifest_that_could_be_merged(tmp_path):
    small = Batch(
        id="b", feed="commits:delays/3", version=1, attempt=1, count=1, slices=(Slice(1, 0, 1),), bounds={}
    )
    handed = submit.environment(small, FEED, "host=a", None, tmp_path / "manifest.json")
    ran = run_job(handed, tmp_path, "raise RuntimeError('on purpose')")
    assert "on purpose" in ran.stderr
    with pytest.raises(MergeRefused):
        read_manifest(tmp_path / "manifest.json")


MIDDLE = """
import subprocess, sys, time
from airflow_pgchange.spark import submit
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, **eval(sys.argv[2]))
assert child.stdout.readline() == b'up\\n'
print(child.pid, flush=True)
time.sleep(600)
"""
SLEEPER = "import time; print('up', flush=True); time.sleep(600)"
FOLLOWER = "from airflow_pgchange.spark.parent_process import follow_parent; follow_parent(); " + SLEEPER
WATCHER = (
    "from airflow_pgchange.spark import parent_process; parent_process._LIBC = None; parent_process.follow_parent(); "
    + SLEEPER
)


def test_a_process_that_follows_its_parent_ends_once_its_work_is_done():
    follow = "from airflow_pgchange.spark.parent_process import follow_parent; follow_parent()"
    assert subprocess.run([sys.executable, "-c", follow], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    ("child", "options"),
    [(SLEEPER, "{'preexec_fn': submit.die_with_parent}"), (FOLLOWER, "{}"), (WATCHER, "{}")],
    ids=["started to die with it", "follows it", "watches it where the kernel does not help"],
)
def test_a_process_dies_with_a_parent_that_was_killed(child, options):
    environment = {**os.environ, "PYTHONPATH": str(package.ROOT.parent)}
    with subprocess.Popen(
        [sys.executable, "-c", MIDDLE, child, options], env=environment, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert runs(pid)
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while runs(pid):
        assert time.monotonic() < deadline, "the child outlived its parent"
        time.sleep(0.01)
