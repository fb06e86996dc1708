"""A process that has imported what an application beside a Spark Connect server needs, and forks itself for each.

``python -m airflow_pgchange.spark.fork_server SOCKET KEEPER``, which ``fork_client`` starts. It ends with the process
``KEEPER``, or when nobody has asked for anything in a while. It is never a client of Spark itself, for a client's threads
would be missing in its forks.

Each application has a minder: a fork that starts it, ends it when it ends or when whoever asked is gone, and closes its
session on the server. The application cannot do that: a killed one does nothing any more, and what Spark's client does
at its end may wait for a server for ever.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import grpc

from airflow_pgchange.spark import application
from airflow_pgchange.spark.application import Application
from airflow_pgchange.spark.parent import die_with_parent
from airflow_pgchange.spark.wire import LOCK, receive, tell

IDLE = 600.0
"""Seconds without an application after which the server ends."""
LOOK = 1.0
"""Seconds between two looks at what nobody tells of."""
CLOSING = 60.0
"""Seconds for each of the things that the session's server is asked at the end."""


def main() -> None:
    path, keeper = Path(sys.argv[1]), int(sys.argv[2])
    with closing(socket.socket(socket.AF_UNIX)) as listening:
        _import_all()
        listening.bind(str(path))
        listening.listen(64)
        try:
            serve(listening, path, _watch(keeper))
        finally:
            path.unlink(missing_ok=True)


def serve(listening: socket.socket, path: Path, keeper_ended: Callable[[], bool]) -> None:
    """Fork a minder for each connection, until there is no more use for it."""
    last, minders = time.monotonic(), set[int]()
    while not keeper_ended():
        if select.select([listening], [], [], LOOK)[0]:
            last = time.monotonic()
            minders.add(_accept(listening))
        minders -= {pid for pid in minders if os.waitpid(pid, os.WNOHANG)[0]}
        if minders:
            last = time.monotonic()
        elif time.monotonic() - last > IDLE and _leave(listening, path):
            return


def _leave(listening: socket.socket, path: Path) -> bool:
    """Take the place away, unless somebody connects meanwhile: who does so holds the lock."""
    with (path.parent / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if select.select([listening], [], [], 0)[0]:
            return False
        path.unlink(missing_ok=True)
        return True


def _accept(listening: socket.socket) -> int:
    connection, _ = listening.accept()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            listening.close()
            mind(connection)
            code = 0
        finally:
            os._exit(code)
    connection.close()
    return pid


def mind(connection: socket.socket) -> None:
    """Run the application that the connection asks for, tell it the exit code, and close the session."""
    told, log = receive(connection)
    asked = Application.from_bytes(told)
    ended = _told_of_children()
    pid = _start(asked, log, connection, ended)
    os.close(log)
    ready: list[socket.socket] = []
    while not ready and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        readable = select.select([connection, ended], [], [])[0]
        ready = [one for one in readable if one is connection]
        if not ready:
            ended.recv(64)
    # Until it is waited for nobody else can have its number.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    tell(connection, code)
    connection.close()
    close_session(asked.remote, asked.environment)


def _start(asked: Application, log: int, *foreign: socket.socket) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setpgid(0, 0)
            die_with_parent()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for one in foreign:
                one.close()
            code = application.run(asked, log)
        finally:
            os._exit(code)
    with suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)
    return pid


def _told_of_children() -> socket.socket:
    """What becomes readable when a child ends."""
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writing.detach(), warn_on_full_buffer=False)
    return reading


def close_session(remote: str, environment: dict[str, str]) -> None:
    """Interrupt what runs in a session on the server, and close it; as its client would, but not for ever."""
    from pyspark.sql.connect import proto  # noqa: PLC0415
    from pyspark.sql.connect.client import DefaultChannelBuilder  # noqa: PLC0415
    from pyspark.sql.connect.proto.base_pb2_grpc import SparkConnectServiceStub  # noqa: PLC0415

    os.environ.clear()
    os.environ.update(environment)
    builder = DefaultChannelBuilder(remote)
    user = builder.userId or environment.get("SPARK_USER") or environment.get("USER") or ""
    context = proto.UserContext(user_id=user)
    whose: dict[str, Any] = {
        "session_id": builder.session_id,
        "user_context": context,
        "client_type": builder.userAgent,
    }
    everything = proto.InterruptRequest.InterruptType.INTERRUPT_TYPE_ALL
    with closing(builder.toChannel()) as channel:
        server = SparkConnectServiceStub(channel)  # type: ignore[no-untyped-call]
        how: dict[str, Any] = {"timeout": CLOSING, "metadata": builder.metadata()}
        # A server that is gone, or that knows no such session, has nothing to close.
        with suppress(grpc.RpcError):
            told = server.Interrupt(proto.InterruptRequest(interrupt_type=everything, **whose), **how)
            for operation in told.interrupted_ids:
                _until_over(
                    server.ReattachExecute(
                        proto.ReattachExecuteRequest(operation_id=operation, **whose), **how
                    )
                )
        with suppress(grpc.RpcError):
            server.ReleaseSession(proto.ReleaseSessionRequest(**whose), **how)


def _until_over(answers: Iterator[object]) -> None:
    """Wait for the end of what was interrupted: Spark fails to close a session, half way, while one is still ending."""
    with suppress(grpc.RpcError):
        for _ in answers:
            pass


def _watch(pid: int) -> Callable[[], bool]:
    """Whether a process has ended, which is no child of this one."""
    if hasattr(os, "pidfd_open"):
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            return lambda: True
        return lambda: bool(select.select([handle], [], [], 0)[0])

    def ended() -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        return False

    return ended


def _import_all() -> None:
    # A fork has none of the threads that an import started.
    os.environ["OMP_NUM_THREADS"] = "1"
    import pyspark.sql.connect.session  # noqa: F401, PLC0415

    import airflow_pgchange.spark.job  # noqa: PLC0415
    import airflow_pgchange.spark.session  # noqa: F401, PLC0415


if __name__ == "__main__":
    main()
