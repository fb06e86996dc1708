"""The servers of a connection string, in order."""

from __future__ import annotations

import socket

import pytest
from psycopg.conninfo import conninfo_to_dict

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.topology import TopologyClient
from airflow_pgchange.topology import conninfo as names
from airflow_pgchange.topology.conninfo import servers


def places(text):
    found = [conninfo_to_dict(one) for one in servers(conninfo_to_dict(text))]
    assert all(one.get("user") == "ann" for one in found)
    return [tuple(one.get(name) for name in ("host", "hostaddr", "port")) for one in found]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host=10.0.0.1 port=4327", [("10.0.0.1", "10.0.0.1", "4327")]),
        (
            "host=10.0.0.1,10.0.0.2 port=4327",
            [("10.0.0.1", "10.0.0.1", "4327"), ("10.0.0.2", "10.0.0.2", "4327")],
        ),
        (
            "host=10.0.0.1,/run port=1,2",
            [("10.0.0.1", "10.0.0.1", "1"), ("/run", None, "2")],
        ),
        ("host=a,b hostaddr=::1,::2 port=1", [("a", "::1", "1"), ("b", "::2", "1")]),
        ("hostaddr=::1,::2 port=1", [(None, "::1", "1"), (None, "::2", "1")]),
        ("service=relays", [(None, None, None)]),
    ],
)
def test_each_server_comes_alone_and_in_order(text, expected):
    assert places(f"{text} user=ann") == expected


def test_a_name_of_several_addresses_is_as_many_servers(monkeypatch):
    def resolve(host, port, type):
        return [(socket.AF_INET, type, 6, "", (f"10.0.0.{number}", 1)) for number in (1, 1, 2)]

    monkeypatch.setattr(names.socket, "getaddrinfo", resolve)
    assert places("host=relay port=1 user=ann") == [
        ("relay", "10.0.0.1", "1"),
        ("relay", "10.0.0.2", "1"),
    ]


def test_a_name_without_an_address_is_left_to_libpq(monkeypatch):
    def resolve(host, port, type):
        raise socket.gaierror("unknown")

    monkeypatch.setattr(names.socket, "getaddrinfo", resolve)
    assert places("host=relay port=1 user=ann") == [("relay", None, "1")]


def test_a_name_that_can_be_none_is_left_to_libpq():
    assert places("host=relay..example port=1 user=ann") == [("relay..example", None, "1")]


def test_the_environment_names_servers_where_the_string_does_not(monkeypatch):
    monkeypatch.setenv("PGHOST", "10.0.0.1,10.0.0.2")
    monkeypatch.setenv("PGPORT", "7,8")
    assert places("user=ann") == [("10.0.0.1", "10.0.0.1", "7"), ("10.0.0.2", "10.0.0.2", "8")]


def test_a_service_file_takes_precedence_over_the_environment(monkeypatch):
    monkeypatch.setenv("PGHOST", "10.0.0.1")
    assert places("service=relays user=ann") == [(None, None, None)]


def test_servers_are_shuffled_for_who_wants_their_load_balanced(monkeypatch):
    monkeypatch.setattr(names.random, "shuffle", list.reverse)
    text = "host=10.0.0.1,10.0.0.2 port=1 load_balance_hosts=random user=ann"
    assert [host for host, _, _ in places(text)] == ["10.0.0.2", "10.0.0.1"]


@pytest.mark.parametrize("text", ["host=a,b,c port=1,2", "host=a,b hostaddr=::1"])
def test_servers_that_do_not_fit_their_ports_are_refused(text):
    with pytest.raises(InvalidArgument, match="equally many"):
        servers(conninfo_to_dict(text))


@pytest.mark.parametrize(
    "text",
    [
        "host=relay password=my hush",
        "postgresql://ann:hush%zz@relay/",
        "postgresql://ann:hush/hush@relay/",
        "postgresql://ann:hush@hush@relay/",
    ],
)
def test_a_string_that_cannot_be_read_is_refused_without_a_part_of_its_password(text):
    with pytest.raises(InvalidArgument, match="write it as") as caught:
        TopologyClient(text)
    assert "hush" not in str(caught.value)
