"""A job that processes batch after batch for the Spark operator. A script stands in for spark-submit."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest
from airflow.providers.common.compat.sdk import AirflowException

from airflow_pgchange.errors import Stopped
from tests.connect_operator import run
from tests.submit_operator import (
    FOREVER,
    WELL,
    Connect,
    MakeOperator,
    in_background,
    job_of,
    wait_for_end,
)
from tests.waiting import until

SERVE = """
import os, pathlib
from airflow_pgchange.results.merge import write_manifest
from airflow_pgchange.spark import request
log = pathlib.Path(os.environ["PID"]).with_name("served")
taken, done = request.take(), 0
while taken is not None:
    with log.open("a") as out:
        print(os.getpid(), taken.batch.id, file=out)
    {body}
    write_manifest(taken.manifest, [])
    done, taken = done + 1, request.take_next()
{end}
"""
"""The same as ``batch_jobs``, but without Spark."""


def serve(body: str = "", end: str = "") -> str:
    return SERVE.format(body=body, end=end)


def served(folder: Path) -> tuple[int, list[str]]:
    """Return the number of processes that worked, and the ids of the batches that they processed."""
    lines = [line.split() for line in (folder / "served").read_text().splitlines()]
    return len({pid for pid, _ in lines}), [batch for _, batch in lines]


def test_a_job_that_serves_batches_is_submitted_once_and_each_batch_is_committed_before_the_next(
    operator: MakeOperator, db: str, tmp_path: Path
) -> None:
    look = (
        "import psycopg; "
        f"assert psycopg.connect({db!r}).execute('select count(acked_at) from pgchange.batches()').fetchone() == (done,)"
    )
    done = run(operator(serve(look), limit=2, max_batches=None))
    assert served(tmp_path) == (1, done["batch_ids"])
    assert (done["batches"], done["changes"]) == (3, 5)


def test_a_job_that_serves_batches_ends_with_the_last_one_of_its_task(
    operator: MakeOperator, tmp_path: Path
) -> None:
    end = 'log.with_name("end").write_text(str(done))'
    assert run(operator(serve(end=end), limit=1, max_batches=2))["batches"] == 2
    assert (tmp_path / "end").read_text() == "2"


def test_a_job_that_serves_batches_waits_for_those_that_come_while_its_task_has_time(
    operator: MakeOperator, connect: Connect, tmp_path: Path
) -> None:
    later = threading.Timer(1.5, connect().execute, ["insert into ledger default values"])
    later.start()
    assert run(operator(serve(), max_batches=2, until="1 h"))["changes"] == 6
    later.join()
    assert served(tmp_path)[0] == 1


def test_a_job_that_fails_in_its_second_batch_keeps_the_first_and_goes_on_with_that_one(
    operator: MakeOperator, connect: Connect, tmp_path: Path
) -> None:
    with pytest.raises(AirflowException, match="Error code is: 1"):
        run(operator(serve("assert done < 1"), limit=2, max_batches=None))
    assert run(operator(serve(), limit=2, max_batches=None))["changes"] == 3
    processes, (first, failed, again, last) = served(tmp_path)
    assert (processes, again) == (2, failed)
    assert len({first, failed, last}) == 3


def test_a_job_that_fails_in_a_batch_that_is_given_up_is_submitted_anew_for_the_next(
    operator: MakeOperator, tmp_path: Path
) -> None:
    fail = "if not log.with_name('failed').exists(): log.with_name('failed').touch(); raise SystemExit(1)"
    give_up = {"max_attempts": 1, "on_give_up": "dead_letter"}
    done = run(operator(serve(fail), limit=2, max_batches=None, **give_up))
    assert (done["batches"], len(done["letters"]), served(tmp_path)[0]) == (2, 1, 2)


BLAME = """
    from airflow_pgchange.feeds import reading
    from airflow_pgchange.spark import poison_batch
    poison_batch.note_errors(taken.manifest)
    with reading.connected(taken.source, taken.batch.lsn) as connection:
        ids = [change.id for change in reading.changes(connection, taken.feed, taken.batch)]
    if 2 in ids: {fail}
"""


def test_a_change_on_which_a_job_fails_becomes_a_letter_alone(operator: MakeOperator, tmp_path: Path) -> None:
    fail = serve(BLAME.format(fail="raise ValueError('no such currency')"))
    done = run(operator(fail, limit=2, max_attempts=1))
    assert (done["changes"], len(done["letters"]), done["extra_attempts"]) == (1, 1, 2)
    processes, (whole, *parts) = served(tmp_path)
    assert (processes, done["splits"], len(parts)) == (2, [whole], 2)


def test_a_batch_is_not_halved_if_its_job_ends_without_an_error_of_the_batch(
    operator: MakeOperator, connect: Connect
) -> None:
    """Such an end means that the machine is gone or out of memory, so half of the batch would not help."""
    lost = serve(BLAME.format(fail="os._exit(1)"))
    for _ in range(2):
        with pytest.raises(AirflowException, match="Error code is: 1"):
            run(operator(lost, limit=2, max_attempts=1))
    rows = connect().execute("select attempt, split_at from pgchange.batches() order by attempt").fetchall()
    assert rows == [(1, None), (2, None)]


def test_a_job_that_fails_behind_its_last_batch_is_told_of_and_the_task_which_committed_all_succeeds(
    operator: MakeOperator,
) -> None:
    task = operator(serve(end="raise SystemExit(1)"), limit=2, max_batches=None)
    with patch.object(task.log, "warning") as warning:
        assert run(task)["changes"] == 5
    said = warning.call_args.args[0] % warning.call_args.args[1:]
    assert "every batch is committed" in said
    assert "Error code is: 1" in said


def test_a_job_that_dies_while_it_waits_for_a_batch_is_told_of_when_another_takes_its_place(
    operator: MakeOperator, connect: Connect, tmp_path: Path
) -> None:
    task = operator(serve(), max_batches=2, until="1 h")

    def kill() -> None:
        until(connect(), "select count(acked_at) = 1 from pgchange.batches()", patience=120)
        task._kill()
        serving = task._serving
        while serving is not None and serving.failure is None:
            time.sleep(0.02)
        connect().execute("insert into ledger default values")

    killer = threading.Thread(target=kill)
    killer.start()
    with patch.object(task.log, "error") as error:
        assert run(task)["changes"] == 6
    killer.join()
    (said,) = [call.args[0] % call.args[1:] for call in error.call_args_list]
    assert "starting it again" in said
    assert served(tmp_path)[0] == 2


def test_a_task_that_is_killed_while_its_job_ends_says_so(operator: MakeOperator, tmp_path: Path) -> None:
    task = operator(serve(end=FOREVER))
    with ThreadPoolExecutor(1) as pool:
        ran = pool.submit(run, task)
        job = job_of(tmp_path)
        task.on_kill()
        with pytest.raises(Stopped, match="every batch is committed"):
            ran.result()
    wait_for_end(job)
    assert run(operator(WELL))["changes"] == 0


def test_a_killed_task_ends_a_job_that_waits_for_a_batch(
    operator: MakeOperator, connect: Connect, tmp_path: Path
) -> None:
    task = operator(serve(), max_batches=None, until="1 h")
    thread = in_background(task)
    until(connect(), "select count(acked_at) = 1 from pgchange.batches()", patience=120)
    task.on_kill()
    thread.join()
    job = int((tmp_path / "served").read_text().split()[0])
    wait_for_end(job)
    assert run(operator(WELL))["changes"] == 0
