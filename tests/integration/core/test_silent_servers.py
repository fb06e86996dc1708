"""Servers that fall silent behind a proxy which keeps its connections open, and healthy servers that are only slow."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psycopg
import pytest

from airflow_pgchange.admin.maintenance import maintain
from airflow_pgchange.errors import ConnectionLost, ServerUnavailable
from airflow_pgchange.feeds import ConsumerTransaction, heartbeat, watched_connection
from airflow_pgchange.feeds.connections import begun, kept_open
from airflow_pgchange.feeds.connections import connect as connect_ours
from airflow_pgchange.feeds.error_translation import translated
from tests.commits import FEED, commits
from tests.silence import TIMEOUT, ended, impatient, through
from tests.waiting import until

NO_LOCK = """
select not exists (
    select from pg_locks where locktype = 'advisory' and granted
    and database = (select oid from pg_database where datname = current_database()))
"""


LONG = 2.2 * TIMEOUT
"""Seconds: longer than the server keeps a transaction whose client sends nothing."""


@pytest.mark.parametrize(
    ("phase", "serve_new"),
    [("claim", False), ("claim", True), ("reading", True), ("write", False), ("write", True), ("ack", True)],
)
def test_a_batch_whose_server_falls_silent_ends_with_an_error_and_leaves_no_lock(
    db, connect, proxy, phase, serve_new
):
    connection = connect()
    commits(connection, 3)

    def reached(place: str) -> None:
        if place == phase:
            proxy.fall_silent(serve_new=serve_new)

    def write(results: psycopg.Connection) -> None:
        reached("write")
        results.execute("select 1")
        reached("ack")

    def work() -> None:
        with ConsumerTransaction(FEED, through(proxy, db)) as consumer:
            reached("claim")
            consumer.claim(10)
            reached("reading")
            list(consumer.changes())
            consumer.ack(write)

    error = ended(work)
    assert isinstance(error, ServerUnavailable | psycopg.OperationalError)
    assert "no answer from 127.0.0.1" in str(error)
    until(connection, NO_LOCK, patience=10)


def test_a_job_is_ended_when_the_consumers_server_falls_silent(db, connect, proxy):
    commits(connect())
    lost = threading.Event()

    def work() -> None:
        with ConsumerTransaction(FEED, through(proxy, db)) as consumer:
            consumer.claim(10)
            proxy.fall_silent(serve_new=True)
            with consumer.kept_alive(lost.set, poll_interval=0.1):
                assert lost.wait(10)

    assert isinstance(ended(work), ConnectionLost)


def test_maintenance_of_a_server_that_falls_silent_ends(db, proxy):
    with connect_ours(through(proxy, db)) as connection:
        proxy.fall_silent(serve_new=True)
        assert isinstance(ended(lambda: maintain(connection)), ServerUnavailable)


def test_a_client_whose_heartbeat_has_stopped_holds_no_lock_for_long(db, connect, monkeypatch):
    """The session is ended by the server's own timeout alone."""
    monkeypatch.setattr("airflow_pgchange.feeds.heartbeat._beat", _never)
    with (
        connect_ours(impatient(db)) as connection,
        pytest.raises(ServerUnavailable, match="idle-in-transaction timeout"),
        translated(),
        begun(connection),
    ):
        connection.execute("select pg_advisory_xact_lock(1)")
        until(connect(), NO_LOCK, patience=2 * TIMEOUT)
        connection.execute("select 1")


async def _never(sock: object) -> None:
    pass


@pytest.mark.parametrize("way", ["db", "pgbouncer"])
@pytest.mark.parametrize("work", ["computing", "merging", "waiting for a job"])
def test_a_healthy_batch_may_take_its_time(request, db, connect, way, work):
    commits(connect())

    def write(results: psycopg.Connection) -> None:
        if work == "computing":
            time.sleep(LONG)
        elif work == "merging":
            results.execute("select pg_sleep(%s)", [LONG])

    lost = threading.Event()
    with ConsumerTransaction(FEED, impatient(request.getfixturevalue(way))) as consumer:
        consumer.claim(10)
        if work == "waiting for a job":
            with consumer.kept_alive(lost.set):
                assert not lost.wait(LONG)
        consumer.ack(write)
    with ConsumerTransaction(FEED, db) as consumer:
        assert consumer.claim(10) is None


def test_a_long_statement_goes_on_though_its_role_may_open_no_second_connection(connection, role):
    slow = role("slow")
    with connect_ours(impatient(slow.conninfo)) as ours:
        connection.execute(f"alter role {slow.name} connection limit 0")
        assert ours.execute("select 1 from pg_sleep(%s)", [LONG]).fetchone() == (1,)


def test_a_long_statement_goes_on_though_the_pooler_has_no_session_to_spare(pgbouncer, connect_to):
    """The pooler of the tests has five server connections."""
    with connect_ours(impatient(pgbouncer)) as ours:
        for _ in range(4):
            connect_to(pgbouncer, autocommit=False).execute("select 1")
        assert ours.execute("select 1 from pg_sleep(%s)", [LONG]).fetchone() == (1,)


STATEMENT = """
import sys
from airflow_pgchange.feeds.connections import connect
with connect(sys.argv[1]) as connection:
    print(connection.execute("select 1 from pg_sleep(3.5)").fetchone())
"""


def test_a_long_statement_goes_on_though_its_process_was_stopped_for_a_while(db, connection):
    program = [sys.executable, "-c", STATEMENT, impatient(db)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        until(connection, "select exists (select from pg_stat_activity where wait_event = 'PgSleep')")
        # By then the heartbeat asks about the statement.
        time.sleep(TIMEOUT / 3)
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.5 * TIMEOUT)
        process.send_signal(signal.SIGCONT)
        assert process.communicate(timeout=30)[0] == "(1,)\n"


def test_a_long_statement_goes_on_behind_a_load_balancer_that_has_another_server(db, proxy, own_cluster):
    """The statement goes on even if the other server started later and does not know the statement."""
    with connect_ours(through(proxy, db)) as ours:
        own_cluster.stop()
        own_cluster.start()
        proxy.send_new_to(own_cluster.port)
        assert ours.execute("select 1 from pg_sleep(%s)", [LONG]).fetchone() == (1,)


@pytest.mark.parametrize("style", ["German, DMY", "SQL, MDY"])
def test_a_connection_is_watched_whatever_the_style_of_times(db, connection, style):
    connection.execute(f"alter database {connection.info.dbname} set datestyle = '{style}'")
    with connect_ours(db) as ours:
        assert ours.sock.pid == ours.info.backend_pid


def test_a_connection_is_opened_though_its_server_does_not_say_since_when_it_runs(connection, role):
    anybody = role("anybody")
    connection.execute("revoke execute on function pg_postmaster_start_time() from public")
    with connect_ours(anybody.conninfo) as ours:
        assert ours.execute("select 1").fetchone() == (1,)


def test_a_server_that_takes_no_bytes_for_long_is_not_given_up(db, connect):
    holder, writer = connect(), connect_ours(impatient(db))
    holder.execute(
        "create table public.wide (t text); create function public.wait() returns trigger language plpgsql as "
        "'begin perform pg_advisory_xact_lock_shared(1); return new; end'; "
        "create trigger wait before insert on public.wide for each row execute function public.wait(); "
        "select pg_advisory_lock(1)"
    )

    def let_go() -> None:
        time.sleep(LONG)
        holder.execute("select pg_advisory_unlock(1)")

    thread = threading.Thread(target=let_go)
    thread.start()
    with writer, writer.cursor() as cursor:
        with cursor.copy("copy public.wide from stdin") as copy:
            for _ in range(20):
                copy.write(b"x" * 1_000_000 + b"\n")
        thread.join()
        assert cursor.execute("select count(*) from public.wide").fetchone() == (20,)


def test_a_client_that_reads_slowly_is_not_given_up(db):
    rows = 0
    with connect_ours(impatient(db)) as connection, connection.cursor() as cursor:
        for _ in cursor.stream("select repeat('x', 1000000) from generate_series(1, 30)"):
            if rows in (0, 20):
                time.sleep(LONG / 2)
            rows += 1
    assert rows == 30


@pytest.mark.parametrize("way", ["stream", "copy"])
def test_a_slow_reader_over_a_connection_of_its_own_is_not_given_up(db, way):
    query = "select generate_series(1, 2)"
    with psycopg.connect(impatient(db), autocommit=True) as connection, connection.cursor() as cursor:
        with kept_open(connection):
            if way == "stream":
                for _ in cursor.stream(query):
                    time.sleep(TIMEOUT)
            else:
                with cursor.copy(f"copy ({query}) to stdout") as copy:
                    for _ in copy.rows():
                        time.sleep(TIMEOUT)
        assert cursor.execute("select 1").fetchone() == (1,)


def test_a_connection_of_the_callers_own_is_ended_when_its_server_falls_silent(db, proxy):
    with psycopg.connect(through(proxy, db), autocommit=True) as connection, kept_open(connection):
        proxy.fall_silent(serve_new=True)
        assert "no answer from" in str(ended(lambda: connection.execute("select 1")))


def test_a_connection_of_the_callers_own_is_the_callers_again_when_maintenance_ends(db):
    with psycopg.connect(impatient(db), autocommit=True) as connection:
        maintain(connection)
        assert vars(connection).get("wait") is None
        assert list(watched_connection.ADOPTED) == []


def test_a_notification_that_came_with_a_heartbeat_is_there_when_the_caller_asks(db, connect):
    with psycopg.connect(impatient(db), autocommit=True) as connection:
        connection.execute("listen news")
        with kept_open(connection):
            sock = watched_connection.ADOPTED[connection]
            connect().execute("notify news")
            heard_at = sock.heard_at
            while sock.heard_at == heard_at:
                time.sleep(0.01)
        assert [notification.channel for notification in connection.notifies(timeout=0)] == ["news"]


def test_each_who_uses_a_connection_that_was_lost_gets_an_error_of_its_own(db, proxy):
    with connect_ours(through(proxy, db)) as connection, connection.cursor() as cursor:
        proxy.fall_silent(serve_new=True)
        first, second = (ended(lambda: cursor.execute("select 1")) for _ in range(2))
        assert first is not second
        assert "no answer from" in str(first)


def test_a_heartbeat_has_its_answer_before_its_thread_begins_anew(db, watch, monkeypatch):
    failures: list[bool] = []
    look = watch._check_all

    async def failing_during_a_heartbeat() -> float:
        pause = await look()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if sock.is_beating and not failures:
            failures.append(True)
            raise OSError("Too many open files")
        return pause

    with connect_ours(impatient(db)) as connection:
        sock = connection.sock
        answered = heartbeat._answered
        monkeypatch.setattr(
            heartbeat, "_answered", lambda *of: time.monotonic() > sent_at + 0.1 and answered(*of)
        )
        sent_at = time.monotonic() + LONG
        monkeypatch.setattr(watch, "_check_all", failing_during_a_heartbeat)
        while not failures:
            time.sleep(0.01)
        sent_at = 0
        assert connection.execute("select 1").fetchone() == (1,)


def test_a_caller_that_computes_the_parameters_of_a_statement_is_not_given_up(db, connect):
    connect().execute("create table public.numbers (n int)")

    def numbers() -> Iterator[tuple[int]]:
        time.sleep(TIMEOUT)
        yield (1,)

    with connect_ours(impatient(db)) as connection, connection.cursor() as cursor:
        cursor.executemany("insert into public.numbers values (%s)", numbers())
        assert cursor.execute("select n from public.numbers").fetchone() == (1,)


def test_a_server_may_be_silent_for_ever_where_a_person_says_so(db, connect):
    with connect_ours(impatient(db, 0)) as connection, begun(connection):
        assert connection.execute("show idle_in_transaction_session_timeout").fetchone() == ("0",)


def test_the_database_owners_shorter_timeout_stays(db, connect):
    connection = connect()
    connection.execute(
        f"alter database {connection.info.dbname} set idle_in_transaction_session_timeout = '7s'"
    )
    with connect_ours(db) as ours:
        assert ours.execute("show idle_in_transaction_session_timeout").fetchone() == ("7s",)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> heartbeat.Watch:
    """The heartbeat of this process, before it has started its thread."""
    watch = heartbeat.Watch()
    monkeypatch.setattr(heartbeat, "WATCH", watch)
    return watch


def test_a_connection_is_watched_though_none_was_before_for_want_of_a_thread(db, watch, monkeypatch):
    with monkeypatch.context() as crowded:
        crowded.setattr(threading.Thread, "start", _no_thread)
        with pytest.raises(RuntimeError, match="new thread"):
            connect_ours(impatient(db))
    with connect_ours(impatient(db)) as connection, begun(connection):
        time.sleep(LONG)
        assert connection.execute("select 1").fetchone() == (1,)


def _no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_connection_opens_at_the_end_of_a_process_that_starts_no_thread_any_more(db, watch, monkeypatch):
    """This happens in Python 3.12.1 if a publisher publishes the last events at the end of its process."""

    def at_the_end(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", at_the_end)
    with connect_ours(db) as connection:
        assert connection.execute("select 1").fetchone() == (1,)


def test_a_connection_is_opened_while_the_heartbeat_waits_to_begin_anew(db, watch, monkeypatch):
    loops: list[asyncio.AbstractEventLoop] = []
    go_on = watch._go_on

    async def failing_once() -> None:
        if loops:
            await go_on()
            return
        loops.append(asyncio.get_running_loop())
        raise OSError("Too many open files")

    monkeypatch.setattr(watch, "_go_on", failing_once)
    with connect_ours(impatient(db)):
        while not (loops and loops[0].is_closed()):
            time.sleep(0.01)
        with connect_ours(impatient(db)) as connection:
            assert connection.execute("select 1").fetchone() == (1,)
