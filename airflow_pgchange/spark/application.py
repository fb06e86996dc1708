"""An application beside a Spark Connect server: its description, and how it runs in a process of its own."""

from __future__ import annotations

import json
import logging
import os
import runpy
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from uuid import uuid4

REMOTE = "SPARK_REMOTE"
"""The environment variable that Spark's client takes the server from."""
TRACEBACK = "Traceback (most recent call last):"


def new_session() -> str:
    return str(uuid4())


@dataclass(frozen=True)
class Application:
    """A Python file to run, with its arguments and its whole environment, in a session of its own on the server.

    ``server`` is Spark's connection string. It holds the token, so it is a secret, as the environment is.
    """

    path: str
    server: str = field(repr=False)
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict, repr=False)
    conf: dict[str, str] = field(default_factory=dict, repr=False)
    py_files: tuple[str, ...] = ()
    folder: str = field(default_factory=os.getcwd)
    session_id: str = field(default_factory=new_session)

    @property
    def remote(self) -> str:
        """The connection string of the session. Another process can end the session by it."""
        return f"{self.server};session_id={self.session_id}"

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Application:
        values = json.loads(data)
        return cls(**values | {name: tuple(values[name]) for name in ("arguments", "py_files")})


def run(application: Application, log: int) -> int:
    """Run the application in this process, and return its exit code. Its output goes to the file ``log``."""
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    for output in (1, 2):
        os.dup2(log, output)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(_environment(application))
    time.tzset()
    sys.argv = [application.path, *application.arguments]
    try:
        os.chdir(application.folder)
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        # Leave out the folder in which the fork server was started.
        others = [path for path in sys.path if path not in ("", os.sep)]
        sys.path[:] = [str(Path(application.path).resolve().parent), *filter(None, paths), *others]
        _run(application)
        code = 0
    except SystemExit as end:
        code = _code_of(end)
    except BaseException as error:  # noqa: BLE001
        sys.excepthook(type(error), error, error.__traceback__)
        # The task reports the last line, and the text of an error of Spark ends with a plan or with frames of Java.
        if "\n" in str(error):
            print(one_line(error), file=sys.stderr)
        code = 1
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def one_line(error: BaseException) -> str:
    """Return the class of an error, and the line of its text that names the cause.

    This is the first line, or if the error is one of Python on an executor, the last line of that traceback.
    """
    text = str(error).partition("JVM stacktrace:")[0]
    lines = [line for line in text.splitlines() if line.strip() and not line[0].isspace()] or [""]
    cause = lines[-1 if TRACEBACK in lines else 0]
    kind = traceback.format_exception_only(error)[0].partition(":")[0]
    return f"{kind}: {cause}"


def _environment(application: Application) -> dict[str, str]:
    variables = {name: value for name, value in application.environment.items() if name != "MASTER"}
    return {**variables, REMOTE: application.remote, "SPARK_CONNECT_MODE_ENABLED": "1"}


def _run(application: Application) -> None:
    from airflow_pgchange.spark import session  # noqa: PLC0415

    session.prepare(application.remote, application.conf, application.py_files)
    runpy.run_path(application.path, run_name="__main__")


def _code_of(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1
