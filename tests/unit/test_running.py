"""The messages that a task gets from the supervisor of an application beside a Spark Connect server."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from airflow_pgchange.errors import ApplicationFailed
from airflow_pgchange.spark import fork_client, fork_protocol
from airflow_pgchange.spark.application import Application, one_line

SECRET = "hunter2-of-the-airline"


@dataclass
class Minder:
    """The process at the other end of the connection, which supervises the application."""

    connection: socket.socket
    log: int

    def say(self, text: str) -> None:
        os.write(self.log, text.encode())


@pytest.fixture
def ends() -> Iterator[tuple[fork_client.Running, Minder]]:
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()
    yield fork_client.Running(ours, reading), Minder(theirs, writing)
    theirs.close()
    os.close(writing)


def heard(running: fork_client.Running) -> list[str]:
    said: list[str] = []
    running.wait(said.append)
    return said


def test_each_line_is_handed_on_and_so_is_the_last_without_its_end(
    ends: tuple[fork_client.Running, Minder],
) -> None:
    running, minder = ends
    minder.say("one\n\n  two \nthr")
    minder.say("ee")
    fork_protocol.send_exit_code(minder.connection, 0)
    assert heard(running) == ["one", "  two", "three"]


def test_bytes_that_are_no_text_do_not_end_the_task(ends: tuple[fork_client.Running, Minder]) -> None:
    running, minder = ends
    os.write(minder.log, b"\xff\n")
    fork_protocol.send_exit_code(minder.connection, 0)
    assert heard(running) == ["\N{REPLACEMENT CHARACTER}"]


def test_a_line_is_handed_on_while_the_application_goes_on(ends: tuple[fork_client.Running, Minder]) -> None:
    running, minder = ends
    minder.say("at work\n")
    running.wait(lambda _: fork_protocol.send_exit_code(minder.connection, 0))


def test_an_error_shows_the_code_and_the_last_words_without_the_stack(
    ends: tuple[fork_client.Running, Minder],
) -> None:
    running, minder = ends
    minder.say("Traceback\n  File\nValueError: no\n\tat org.apache.spark\n")
    fork_protocol.send_exit_code(minder.connection, 1)
    with pytest.raises(ApplicationFailed, match="code 1: ValueError: no$"):
        heard(running)


def test_an_application_whose_minder_is_gone_has_failed(ends: tuple[fork_client.Running, Minder]) -> None:
    running, minder = ends
    minder.connection.close()
    with pytest.raises(ApplicationFailed, match="supervises it has ended"):
        heard(running)


def test_the_minder_of_one_that_is_to_stop_is_told_and_tells_the_end(
    ends: tuple[fork_client.Running, Minder],
) -> None:
    running, minder = ends

    def mind() -> None:
        assert minder.connection.recv(1) == b""
        fork_protocol.send_exit_code(minder.connection, -9)

    minding = threading.Thread(target=mind)
    minding.start()
    running.stop()
    with pytest.raises(ApplicationFailed, match="code -9: it said nothing"):
        heard(running)
    minding.join()
    running.stop()


def test_a_message_of_any_size_arrives_with_an_open_file(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    message = os.urandom(3_000_000)
    with (tmp_path / "output").open("wb") as output, ours, theirs:
        sending = threading.Thread(target=fork_protocol.send, args=(ours, message, output.fileno()))
        sending.start()
        received, file = fork_protocol.receive(theirs)
        sending.join()
    os.write(file, b"said")
    os.close(file)
    assert received == message
    assert (tmp_path / "output").read_bytes() == b"said"


def test_an_application_arrives_as_it_was_sent_and_shows_no_secret() -> None:
    sent = Application(
        "a.py", f"sc://host/;token={SECRET}", ("a",), {"SPARK": SECRET}, {"c": "1"}, ("b.zip",)
    )
    assert Application.from_bytes(sent.to_bytes()) == sent
    assert SECRET not in repr(sent)


def test_each_application_has_a_session_of_its_own_that_others_can_name() -> None:
    one, other = Application("a.py", "sc://host/;token=t"), Application("a.py", "sc://host/")
    assert one.remote == f"sc://host/;token=t;session_id={one.session_id}"
    assert other.remote == f"sc://host/;session_id={other.session_id}"
    assert one.session_id != other.session_id


def open_to_all(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o755)


def of_somebody_else(folder: Path) -> None:
    folder.symlink_to(folder.parent)


@pytest.mark.parametrize("made", [open_to_all, of_somebody_else])
def test_sockets_are_made_where_nobody_else_can_reach_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Callable[[Path], None]
) -> None:
    monkeypatch.setattr(fork_client, "LONGEST", 1000)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = fork_client._folder()
    assert folder.parent == tmp_path
    folder.rmdir()
    made(folder)
    with pytest.raises(PermissionError, match="only this user can use"):
        fork_client._folder()


def test_an_error_of_an_executor_is_reported_by_the_last_line_of_its_traceback() -> None:
    told = """
  An exception was thrown from the Python worker. Please see the stack trace below.
Traceback (most recent call last):
  File "balance.py", line 1, in <module>
ValueError: no such account


JVM stacktrace:
org.apache.spark.api.python.PythonException
\tat org.apache.spark.api.python.BasePythonRunner"""
    assert one_line(RuntimeError(told)) == "RuntimeError: ValueError: no such account"
