"""A process that forks itself for each application of Spark Connect, because importing Spark's client takes seconds.

``fork_client`` starts it by ``python -m airflow_pgchange.spark.fork_server SOCKET KEEPER``. It ends with the process
``KEEPER``, or when it was not used for a while. It is never a client of Spark itself, because its forks would lack the
client's threads.

Each application has a minder: a fork that starts the application, and closes its session on the server after its end.
The minder kills the application if the process that asked for it is gone. The application cannot close the session
itself: it may have been killed, and Spark's client may wait for a server for ever.
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
from airflow_pgchange.spark.fork_protocol import LOCK, receive, send_exit_code
from airflow_pgchange.spark.parent_process import die_with_parent

IDLE = 600.0
"""Seconds without an application after which the server ends."""
LOOK = 1.0
"""Seconds between two checks for the end of the keeper and of minders."""
CLOSING = 60.0
"""The timeout of each request to the Spark Connect server when a session is closed, in seconds."""


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
    """Fork a minder for each connection, until the keeper has ended or no application has run for ``IDLE`` seconds."""
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
    """Remove the socket's file, unless a client is connecting. Clients connect under the same lock."""
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
    """Run the application that the connection asks for, send the exit code to the connection, and close the session."""
    message, log = receive(connection)
    requested = Application.from_bytes(message)
    ended = _told_of_children()
    pid = _start(requested, log, connection, ended)
    os.close(log)
    ready: list[socket.socket] = []
    while not ready and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        readable = select.select([connection, ended], [], [])[0]
        ready = [one for one in readable if one is connection]
        if not ready:
            ended.recv(64)
    # Kill the process group before waiting for its leader: until then no other process can get the same id.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    send_exit_code(connection, code)
    connection.close()
    close_session(requested.remote, requested.environment)


def _start(requested: Application, log: int, *foreign: socket.socket) -> int:
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
            code = application.run(requested, log)
        finally:
            os._exit(code)
    with suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)
    return pid


def _told_of_children() -> socket.socket:
    """Return a socket that becomes readable when a child process ends."""
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writing.detach(), warn_on_full_buffer=False)
    return reading


def close_session(remote: str, environment: dict[str, str]) -> None:
    """Interrupt the operations of a session on the server, and close it. The client would do the same, but without a
    timeout."""
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
            interrupted = server.Interrupt(proto.InterruptRequest(interrupt_type=everything, **whose), **how)
            for operation in interrupted.interrupted_ids:
                _until_over(
                    server.ReattachExecute(
                        proto.ReattachExecuteRequest(operation_id=operation, **whose), **how
                    )
                )
        with suppress(grpc.RpcError):
            server.ReleaseSession(proto.ReleaseSessionRequest(**whose), **how)


def _until_over(answers: Iterator[object]) -> None:
    """Wait until an interrupted operation has ended. Spark fails to close a session, and leaves it half closed, if an
    operation is still ending."""
    with suppress(grpc.RpcError):
        for _ in answers:
            pass


def _watch(pid: int) -> Callable[[], bool]:
    """Return a function that tells whether a process has ended. The process need not be a child."""
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
    # Keep OpenMP from starting threads at import, because a fork would lack them.
    os.environ["OMP_NUM_THREADS"] = "1"
    import pyspark.sql.connect.session  # noqa: F401, PLC0415

    import airflow_pgchange.spark.job  # noqa: PLC0415
    import airflow_pgchange.spark.session  # noqa: F401, PLC0415


if __name__ == "__main__":
    main()
