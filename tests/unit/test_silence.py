"""The time after which a silent server is detected."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds import server_timeout
from airflow_pgchange.feeds.connections import complete
from airflow_pgchange.feeds.watched_socket import Deadlines, WatchedSocket

MINUTE = Deadlines(60)
OPEN = Path("/proc/self/fd")


def test_a_silent_server_is_noticed_within_the_timeout_whenever_its_silence_begins():
    idle = MINUTE.tick + MINUTE.beat + MINUTE.answer
    login_again = MINUTE.answer / 2
    busy = MINUTE.tick + max(MINUTE.doubt, login_again) + MINUTE.answer
    at_rest = MINUTE.tick + MINUTE.quiet
    assert max(idle, busy, at_rest) < MINUTE.timeout


def test_a_server_frees_locks_within_twice_the_timeout_and_not_before_the_client_has_given_up():
    assert MINUTE.timeout + MINUTE.beat < MINUTE.server < 2 * MINUTE.timeout


def test_the_keepalives_of_tcp_end_with_the_timeout():
    given = conninfo_to_dict(complete("tcp_user_timeout=120000"))
    idle, interval, count = (int(given[f"keepalives_{name}"]) for name in ("idle", "interval", "count"))
    assert idle + interval * count == 120


def test_keepalives_and_timeouts_in_the_connection_string_win():
    given = conninfo_to_dict(complete("connect_timeout=33 keepalives_idle=7"))
    assert (given["connect_timeout"], given["keepalives_idle"]) == ("33", "7")


def test_the_kernel_is_not_told_the_timeout():
    assert "tcp_user_timeout" not in server_timeout.for_libpq(complete("dbname=x"))


def test_a_line_leaves_alone_what_has_the_number_of_its_closed_socket():
    ours, theirs = socket.socketpair()
    number = ours.fileno()
    sock = WatchedSocket(number, MINUTE, "", name="a server")
    sock.wait()
    ours.close()
    reader, writer = os.pipe()
    os.dup2(reader, number)
    before = len(list(OPEN.iterdir()))
    assert sock.quiet_for() < 60
    sock.cut()
    assert len(list(OPEN.iterdir())) == before
    assert not sock.is_open
    for each in {reader, writer, number}:
        os.close(each)
    theirs.close()


def test_a_line_whose_connection_nobody_has_any_more_is_closed():
    connection = psycopg.Connection(psycopg.pq.PGconn.connect_start(b"host=127.0.0.1 port=1"))
    with socket.socket() as ours:
        sock = WatchedSocket(ours.fileno(), MINUTE, "", name="a server", connection=connection)
    del connection
    sock.close_if_gone()
    assert not sock.is_open


@pytest.mark.parametrize(("text", "timeout"), [("", 60.0), ("tcp_user_timeout=5000", 5.0)])
def test_the_timeout_is_an_option_of_the_connection(text, timeout):
    assert server_timeout.deadlines(text) == Deadlines(timeout)


def test_a_timeout_of_zero_is_none():
    assert server_timeout.deadlines("tcp_user_timeout=0") is None


def test_a_timeout_that_is_no_number_is_refused():
    with pytest.raises(InvalidArgument, match="whole number of milliseconds"):
        complete("tcp_user_timeout=1min")
