"""One run of spark-submit, which can be ended with all that it has started."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from airflow_pgchange.spark.parent import die_with_parent

if TYPE_CHECKING:
    from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook

PID = 8
"""Bytes of a process id."""


class Submission:
    """A run of spark-submit by Airflow's hook, in a process group of its own.

    The hook does not tell the id of its process. So the new process itself writes it into memory that it shares with this
    one, before it becomes spark-submit.
    """

    def __init__(self, hook: SparkSubmitHook, environment: Mapping[str, str]) -> None:
        self._spark_hook = hook
        self._environment = environment
        self._pid = mmap.mmap(-1, PID)
        self._has_ended = False

    def run(self, application: str) -> None:
        """Return when the application has ended well. Raises what the hook raises."""
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
        """End it as the hook does: with the commands that run after a job."""
        self._spark_hook.on_kill()

    def kill(self) -> None:
        """Kill its process group, unless it has not begun or has ended."""
        pid = int.from_bytes(self._pid[:PID], "little")
        if pid and not self._has_ended and _is_child(pid):
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def _begin(self) -> None:
        """Run in the new process, before spark-submit takes its place."""
        self._pid[:PID] = os.getpid().to_bytes(PID, "little")
        die_with_parent()


def _is_child(pid: int) -> bool:
    """Whether a process is a child of this one that was not waited for: its number is nobody else's until then."""
    # On macOS Python has it since 3.13.
    if not hasattr(os, "waitid"):
        return True
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
