"""From Airflow's connections to libpq's strings."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk import Connection
from psycopg.conninfo import conninfo_to_dict

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.hooks import pgchange
from airflow_pgchange.hooks.pgchange import PgChangeHook, conninfo_of


def options(extra: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    connection = Connection(conn_id="airline", conn_type="postgres", **fields)
    return dict(conninfo_to_dict(conninfo_of(connection, extra or {})))


def test_an_ordinary_connection_says_who_and_where() -> None:
    given = options(host="db", port=5433, login="keeper", password="it's a 'secret'", schema="air")
    assert given == {
        "host": "db",
        "port": "5433",
        "user": "keeper",
        "password": "it's a 'secret'",
        "dbname": "air",
    }


def test_extras_go_to_libpq() -> None:
    given = options({"sslmode": "verify-full", "keepalives": True, "target_session_attrs": "any"}, host="db")
    assert (given["sslmode"], given["keepalives"], given["target_session_attrs"]) == (
        "verify-full",
        "1",
        "any",
    )


def test_several_hosts_pass_through() -> None:
    assert options(host="a,b", port=5433)["host"] == "a,b"


def test_hosts_with_ports_of_their_own_become_two_lists() -> None:
    given = options(host="a:5433, b", port=5434)
    assert (given["host"], given["port"]) == ("a,b", "5433,5434")


def test_an_ipv6_address_is_no_host_with_a_port() -> None:
    assert options(host="::1", port=5433)["host"] == "::1"


def test_empty_fields_of_a_connection_are_left_out() -> None:
    assert options({"sslmode": "", "target_session_attrs": None}, host="db") == {"host": "db"}


def test_an_extra_that_libpq_does_not_know_is_named() -> None:
    with pytest.raises(InvalidArgument, match=r"airline.*sslmod"):
        options({"sslmod": "require"})


def test_an_error_about_a_connection_does_not_tell_its_password() -> None:
    with pytest.raises(InvalidArgument) as caught:
        options({"sslmod": "require"}, password="hunter2")
    assert "hunter2" not in str(caught.value)


async def test_the_event_loop_gets_the_same_string(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", "postgres://keeper:s3same-shut@db:5433/air?sslmode=require")
    hook = PgChangeHook("airline")
    assert await hook.aconninfo() == hook.conninfo()


async def test_any_server_of_a_connection_will_do_unless_the_primary_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", "postgres://keeper@db1,db2/air")
    asked: list[bool] = []

    async def opened(_: str, *, primary: bool) -> None:
        asked.append(primary)

    monkeypatch.setattr(pgchange, "connect", lambda _, *, primary: asked.append(primary))
    monkeypatch.setattr(pgchange, "connect_async", opened)
    hook = PgChangeHook("airline")
    hook.get_conn()
    await hook.aget_conn()
    hook.get_conn(primary=True)
    await hook.aget_conn(primary=True)
    assert asked == [False, False, True, True]


def test_a_hook_logs_where_airflows_hooks_do() -> None:
    assert PgChangeHook("airline", logger_name="ours").log.name == "airflow.task.hooks.ours"


def test_a_connection_to_something_else_is_refused_by_its_type():
    spark = Connection(conn_id="spark_default", conn_type="spark", host="local[2]")
    with pytest.raises(InvalidArgument, match="spark_default is of type spark"):
        conninfo_of(spark, {})
