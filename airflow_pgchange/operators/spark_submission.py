"""One run of spark-submit, which can be killed together with the processes that it started."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from airflow_pgchange.spark.parent_process import die_with_parent

if TYPE_CHECKING:
    from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook

PID = 8
"""The number of bytes in which a process id is stored."""


class Submission:
    """A run of spark-submit by Airflow's hook, in a process group of its own.

    The hook does not expose the id of its process. Therefore the new process writes its id into memory that it shares
    with this process, before it executes spark-submit.
    """

    def __init__(self, hook: SparkSubmitHook, environment: Mapping[str, str]) -> None:
        self._spark_hook = hook
        self._environment = environment
        self._pid = mmap.mmap(-1, PID)
        self._has_ended = False

    def run(self, application: str) -> None:
        """Run the application until it has succeeded. Raises the hook's error if it fails."""
        try:
            self._spark_hook.submit(
                application,
                env=dict(self._environment),
                preexec_fn=self._begin,
                start_new_session=True,
            )
        finally:
            self._has_ended = True

    def end(self) -> None:
        """End the run by the hook, which also runs the commands that are to run after a job."""
        self._spark_hook.on_kill()

    def kill(self) -> None:
        """Kill the process group of the run, if it runs."""
        pid = int.from_bytes(self._pid[:PID], "little")
        if pid and not self._has_ended and _is_child(pid):
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def _begin(self) -> None:
        """Called in the new process, before it executes spark-submit."""
        self._pid[:PID] = os.getpid().to_bytes(PID, "little")
        die_with_parent()


def _is_child(pid: int) -> bool:
    """Whether a process is a child that was not waited for yet. Until then its id cannot belong to another process."""
    # Python has os.waitid on macOS only since 3.13.
    if not hasattr(os, "waitid"):
        return True
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
