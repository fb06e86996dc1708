"""Reads and writes of executors whose server falls silent behind a proxy, and of executors whose server is only slow."""

from __future__ import annotations

import socket
import threading
import time

import psycopg
import pyarrow as pa
import pytest

from airflow_pgchange.errors import ServerUnavailable
from airflow_pgchange.feeds.watched_socket import Deadlines
from airflow_pgchange.results.staging import ATTEMPT, SCHEMA
from airflow_pgchange.spark import adbc, watched_connections
from airflow_pgchange.spark.unsupported_values import Rows
from airflow_pgchange.spark.watched_connections import transaction
from tests.proxy import proxy_before
from tests.silence import TIMEOUT, ended, impatient, through
from tests.waiting import until

LONG = 1.5 * TIMEOUT
ROWS = Rows("staged", ("id",))


@pytest.fixture
def staged(connection):
    """Create a staging table, and return its name."""
    connection.execute(f"create table {SCHEMA}.staged ({ATTEMPT} bigint, id bigint)")
    return "staged"


def batches(between):
    """Yield two record batches, and call ``between`` between them."""
    yield pa.RecordBatch.from_pydict({"id": [1]})
    between()
    yield pa.RecordBatch.from_pydict({"id": [2]})


def test_a_read_of_a_server_that_falls_silent_ends(db, proxy):
    def read():
        with transaction(through(proxy, db)) as reading:
            list(reading.batches("select 1 as n"))
            proxy.fall_silent()
            list(reading.batches("select 2 as n"))

    error = ended(read)
    assert isinstance(error, ServerUnavailable)
    assert "no answer from 127.0.0.1" in str(error)


def test_a_write_to_a_server_that_falls_silent_ends(db, proxy, staged):
    def write():
        adbc.write(through(proxy, db), staged, 1, batches(proxy.fall_silent), rows=ROWS)

    assert isinstance(ended(write), ServerUnavailable)


def test_a_read_of_a_server_that_began_anew_meanwhile_ends(own_cluster):
    """Takes as long as the start of a server."""
    with proxy_before(own_cluster.port) as proxy:

        def begin_anew():
            with psycopg.connect(own_cluster.conninfo("postgres"), autocommit=True) as connection:
                until(connection, "select exists (select from pg_stat_activity where wait_event = 'PgSleep')")
            proxy.fall_silent(serve_new=True)
            own_cluster.stop()
            own_cluster.start()

        beginning = threading.Thread(target=begin_anew)

        def read():
            with transaction(through(proxy, own_cluster.conninfo("postgres"))) as reading:
                beginning.start()
                list(reading.batches("select 1 as n from pg_sleep(100)"))

        assert isinstance(ended(read), ServerUnavailable)
        beginning.join()


@pytest.mark.parametrize("way", ["db", "pgbouncer"])
def test_a_long_query_is_read_to_its_end(request, way):
    with transaction(impatient(request.getfixturevalue(way))) as reading:
        [batch] = reading.batches(f"select 1 as n from pg_sleep({LONG})")
    assert batch.num_rows == 1


def test_a_slow_reader_is_not_given_up(db):
    read = 0
    with transaction(impatient(db)) as reading:
        for batch in reading.batches("select repeat('x', 1000000) as t from generate_series(1, 100)"):
            if read == 0:
                time.sleep(LONG)
            read += batch.num_rows
    assert read == 100


def test_a_slow_writer_is_not_given_up(db, connection, staged):
    assert adbc.write(impatient(db), staged, 1, batches(lambda: time.sleep(LONG)), rows=ROWS) == 2
    assert connection.execute(f"select count(*) from {SCHEMA}.staged").fetchone() == (2,)


def test_a_connection_of_another_thread_is_not_taken_for_one_over_a_unix_socket():
    with socket.create_server(("127.0.0.1", 0)) as server:
        before = watched_connections._sockets()
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            assert (
                watched_connections._watched_socket(
                    f"host=/run/postgresql port={port}", Deadlines(60), before
                )
                is None
            )


def test_a_connection_that_cannot_be_told_from_others_is_said_to_be_unwatched(caplog):
    with socket.create_server(("127.0.0.1", 0)) as server:
        before = watched_connections._sockets()
        address = server.getsockname()
        with socket.create_connection(address), socket.create_connection(address):
            assert (
                watched_connections._watched_socket(
                    f"host=127.0.0.1 port={address[1]}", Deadlines(60), before
                )
                is None
            )
    [said] = caplog.messages
    assert f"port {address[1]} is not watched, because 2 connections were opened" in said
