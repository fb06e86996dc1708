"""Batches beside a Spark Connect server that end early, and their visibility for other users."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import pytest

from airflow_pgchange.errors import ApplicationFailed, ConnectionLost, Stopped
from airflow_pgchange.spark import fork_client
from airflow_pgchange.spark.application import Application
from tests.connect_operator import ADD_UP, BUSY, LEDGER, PASSWORD, airline, make_operator, run
from tests.proxy import proxy_before
from tests.spark_server import wait_until
from tests.suite.processes import runs
from tests.waiting import until


@pytest.fixture
def ledger(db, connect, monkeypatch):
    """A ledger of five changes."""
    connection = connect()
    connection.execute(LEDGER)
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", airline(db))
    return connection


@pytest.fixture
def operator(connect_server, ledger, tmp_path):
    """A function that makes an operator of an application's text."""
    return lambda text, **arguments: make_operator(tmp_path, text, **arguments)


def is_at_work(server):
    wait_until(server.running, "something to run on the server")


def nothing_is_left(folder, server):
    """Wait until the application, the processes that it started, and its operations on the server are gone."""
    pids = [int(pid) for pid in (folder / "pids").read_text().split()]
    wait_until(lambda: not any(map(runs, pids)), "the end of the application and of its child")
    server.wait_until_idle()


def test_a_killed_task_leaves_the_server_idle_and_keeps_nothing(operator, ledger, connect_server, tmp_path):
    """Takes seconds: two applications."""
    task = operator(BUSY)
    killer = threading.Thread(target=lambda: (is_at_work(connect_server), task.on_kill()))
    killer.start()
    with pytest.raises(Stopped, match="killed"):
        run(task)
    killer.join()
    nothing_is_left(tmp_path, connect_server)
    assert run(operator(ADD_UP))["changes"] == 5


def test_a_task_that_is_killed_before_its_application_starts_starts_none(operator, monkeypatch):
    """Takes seconds: a fork server starts."""
    task = operator(BUSY)
    start = fork_client.start

    def late(*arguments):
        task.on_kill()
        return start(*arguments)

    monkeypatch.setattr(fork_client, "start", late)
    with pytest.raises(Stopped, match="killed"):
        run(task)


def test_a_lost_connection_ends_the_application_and_what_it_has_on_the_server(
    operator, connect, connect_server, tmp_path
):
    """Takes seconds: an application must be running first."""
    task = operator(BUSY)
    task.ping_every = 0.1

    def cut():
        is_at_work(connect_server)
        # The operator is between two of its short pings.
        until(
            connect(),
            "select count(pg_terminate_backend(pid)) > 0 from pg_stat_activity where application_name = 'airline' "
            "and datname = current_database() and state = 'idle in transaction'",
            patience=300,
        )

    cutter = threading.Thread(target=cut)
    cutter.start()
    with pytest.raises(ConnectionLost):
        run(task)
    cutter.join()
    nothing_is_left(tmp_path, connect_server)


TASK = """
import sys
from pathlib import Path
from unittest.mock import patch
from tests.connect_operator import BUSY, make_operator, run
run(make_operator(Path({folder!r}), BUSY))
"""


def test_a_task_that_is_killed_outright_leaves_nothing_at_work(operator, ledger, connect_server, tmp_path):
    """Takes seconds: a process of Airflow has to be at work before it is killed."""
    root = Path(__file__).parents[3]
    with subprocess.Popen(
        [sys.executable, "-c", TASK.format(folder=str(tmp_path))], cwd=root, env=os.environ
    ) as task:
        is_at_work(connect_server)
        task.send_signal(signal.SIGKILL)
    nothing_is_left(tmp_path, connect_server)
    assert run(operator(ADD_UP))["changes"] == 5
    assert ledger.execute("select attempt from pgchange.claim").fetchall() == [(2,)]


@pytest.fixture
def proxy(connect_server, monkeypatch):
    """A proxy before the server, through which the operator connects."""
    with proxy_before(connect_server.port) as made:
        there = {**connect_server.connection, "port": made.port}
        monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps(there))
        yield made


def test_a_batch_whose_server_is_cut_off_is_kept_by_nobody_and_the_next_try_goes_on_with_it(
    operator, ledger, connect_server, proxy, tmp_path, monkeypatch
):
    """Takes a minute: Spark's client retries for that long if the server has answered before."""
    # The server would go on with the query for an hour and take CPU from other tests, so let it end after seconds.
    busy = BUSY.replace("3600000L", "10000L")
    assert busy != BUSY
    cutter = threading.Thread(target=lambda: (is_at_work(connect_server), proxy.close()))
    cutter.start()
    with pytest.raises(ApplicationFailed):
        run(operator(busy))
    cutter.join()
    assert proxy.connections > 0, "the operator went past the proxy"
    assert ledger.execute("select * from total").fetchall() == []
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    wait_until(lambda: not any(map(runs, pids)), "the end of the application and of its child")
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps(connect_server.connection))
    assert run(operator(ADD_UP))["changes"] == 5
    assert ledger.execute("select attempt from pgchange.claim").fetchall() == [(2,)]
    assert ledger.execute("select n from total").fetchone() == (5,)


LARGE = "import airflow_pgchange.spark.job as jobs\njobs.SMALL = 0\n"


def test_no_secret_is_on_a_command_line_in_a_log_or_where_the_server_tells_what_it_does(
    operator, ledger, connect_server, capfd
):
    """Takes seconds: executors read and stage."""
    seen, ended = set(), threading.Event()
    watch = threading.Thread(target=look_at_command_lines, args=(seen, ended))
    watch.start()
    task = operator(LARGE + ADD_UP)
    try:
        with patch.object(task.log, "info") as info:
            run(task)
    finally:
        ended.set()
        watch.join()
    assert ledger.execute("select n from total").fetchone() == (5,)
    where = {
        "command lines": "\n".join(seen),
        "the task's output": "".join(capfd.readouterr()) + str(info.call_args_list),
        "the server's log and events": connect_server.written(),
        **{
            page: connect_server.page(page)
            for page in ("/connect/", "/SQL/", "/jobs/", "/environment/", "/stages/")
        },
    }
    traces = {
        "command lines": "fork_server",
        "the server's log and events": "pgchange",
        "/connect/": "session(s)",
    }
    assert [place for place, trace in traces.items() if trace not in where[place]] == [], (
        "looked in the wrong place"
    )
    secrets = (PASSWORD, connect_server.token)
    assert [place for place, text in where.items() if any(secret in text for secret in secrets)] == []


def look_at_command_lines(seen, ended):
    """Record the command lines of all processes, and go on with those of new processes until ``ended``."""
    old = set()
    while not ended.wait(0.02):
        found = set(Path("/proc").glob("[0-9]*"))
        for process in found - old:
            with suppress(OSError):
                seen.add((process / "cmdline").read_text(errors="replace"))
        old = old or found


def test_the_fork_server_ends_with_the_process_that_uses_it(connect_server, tmp_path):
    """Takes seconds: a new process imports Spark's client."""
    application = tmp_path / "application.py"
    application.write_text("import os; print(os.getsid(0))")
    said = []
    with subprocess.Popen(["sleep", "3600"]) as keeper:
        try:
            for _ in range(2):
                # Each application has its own session. The end of the first may close its session after the second has
                # begun.
                asked = Application(str(application), connect_server.remote, environment=dict(os.environ))
                fork_client.start(asked, keeper.pid).wait(said.append)
            sockets = list(fork_client._folder().glob(f"{keeper.pid}-*"))
        finally:
            keeper.kill()
    assert (len(said), len(set(said)), len(sockets)) == (2, 1, 1)
    # Signals to the task's process group, or from its terminal, do not reach other tasks' applications.
    assert said[0] != str(os.getsid(0))
    wait_until(lambda: not sockets[0].exists(), "the end of what forks applications")
