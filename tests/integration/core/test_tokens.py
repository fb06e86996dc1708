"""Airflow connections that sign in with a cloud's token, on a server that checks it."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import psycopg
import pytest

from airflow_pgchange.errors import InvalidArgument, ServerUnavailable
from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction, tokens
from airflow_pgchange.feeds.connections import connect
from airflow_pgchange.hooks.pgchange import PgChangeHook
from tests.suite import clusters
from tests.suite.clusters import TEMPLATE


class Cloud:
    """Stands in for Amazon's client. Each token is the role's password until it expires or the next token is
    requested."""

    def __init__(self, server):
        self.server = server
        self.given = []

    def __call__(self, aws_conn_id, client_type):
        assert (aws_conn_id, client_type) == ("aws_default", "rds")
        return SimpleNamespace(conn=SimpleNamespace(generate_db_auth_token=self.token))

    def token(self, host, port, user):
        assert (host, user) == ("127.0.0.1", "keeper")
        self.given.append(f"token {len(self.given) + 1} of {user} at {host}:{port}")
        self.set_password(self.given[-1])
        return self.given[-1]

    def expire(self):
        self.set_password("nobody knows it")

    def set_password(self, password):
        with psycopg.connect(self.server, autocommit=True) as connection:
            connection.execute(f"alter role keeper password '{password}'")


@pytest.fixture(scope="module")
def checking():
    """A cluster that requires a password of the role ``keeper``."""
    cluster = clusters.new_cluster("embedded")
    with psycopg.connect(cluster.conninfo(TEMPLATE), autocommit=True) as connection:
        connection.execute("create role keeper superuser login")
    rules = cluster.data / "pg_hba.conf"
    rules.write_text("host all keeper 127.0.0.1/32 scram-sha-256\n" + rules.read_text())
    cluster.stop()
    cluster.start()
    yield cluster
    cluster.remove()


@pytest.fixture
def cloud(checking, monkeypatch):
    cloud = Cloud(checking.conninfo())
    module = ModuleType("airflow.providers.amazon.aws.hooks.base_aws")
    module.AwsBaseHook = cloud
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(tokens, "_sign_ins", {})
    monkeypatch.setattr(tokens, "_names", {})
    monkeypatch.setenv(
        "AIRFLOW_CONN_AIRLINE",
        f"postgres://keeper@127.0.0.1:{checking.port}/{TEMPLATE}?iam=true&aws_conn_id=aws_default",
    )
    return cloud


def user_of(connection):
    with connection:
        return connection.execute("select session_user").fetchone()[0]


def test_a_connection_signs_in_with_a_token_which_is_asked_for_once_while_it_is_young(cloud):
    """Takes seconds: it starts its own cluster, with its own pg_hba.conf."""
    hook = PgChangeHook("airline")
    assert [user_of(hook.get_conn()), user_of(hook.get_conn())] == ["keeper", "keeper"]
    assert len(cloud.given) == 1


async def test_the_event_loop_signs_in_with_a_token_too(cloud):
    connection = await PgChangeHook("airline").aget_conn()
    await connection.close()
    assert len(cloud.given) == 1


def test_a_string_whose_token_has_expired_opens_a_connection_with_another_one(cloud, monkeypatch):
    kept = PgChangeHook("airline").conninfo()
    cloud.expire()
    with pytest.raises(ServerUnavailable, match="password authentication failed"):
        connect(kept)
    monkeypatch.setattr(tokens, "RENEW_AFTER", 0.0)
    assert user_of(connect(kept)) == "keeper"
    assert user_of(connect(kept)) == "keeper"
    assert len(cloud.given) == 3


def test_a_consumer_goes_on_after_its_token_has_expired(cloud, checking, monkeypatch):
    monkeypatch.setattr(tokens, "RENEW_AFTER", 0.0)
    with psycopg.connect(checking.conninfo(TEMPLATE), autocommit=True) as admin:
        admin.execute(
            "create table ledger (id bigint generated always as identity primary key);"
            "select revision.track('ledger', branch_id => '0');"
            "insert into ledger select from generate_series(1, 4)"
        )
    kept, seen = PgChangeHook("airline").conninfo(), []
    for _ in range(2):
        cloud.expire()
        with ConsumerTransaction(CommitFeed("sums", 0), kept) as consumer:
            seen.append(consumer.claim(2).count)
            consumer.ack()
    assert seen == [2, 2]


def test_azure_gives_the_tokens_of_a_connection_that_names_one_of_azure(cloud, checking, monkeypatch):
    """Airflow's hook for PostgreSQL calls Azure's hook, which stands here for Azure's client."""

    def azure(connection):
        assert connection.conn_id == "azure_shop"
        return SimpleNamespace(
            get_token=lambda scope: SimpleNamespace(token=cloud.token("127.0.0.1", checking.port, "keeper"))
        )

    monkeypatch.setenv("AIRFLOW_CONN_AZURE_SHOP", "azure://")
    monkeypatch.setattr(type(PgChangeHook.get_connection("azure_shop")), "get_hook", azure)
    monkeypatch.setenv(
        "AIRFLOW_CONN_AIRLINE",
        f"postgres://keeper@127.0.0.1:{checking.port}/{TEMPLATE}?iam=true&azure_conn_id=azure_shop",
    )
    assert user_of(PgChangeHook("airline").get_conn()) == "keeper"
    assert len(cloud.given) == 1


def test_a_token_is_for_one_server(cloud, monkeypatch):
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", "postgres://keeper@one,two/airline?iam=true")
    with pytest.raises(
        InvalidArgument, match="a token is for one server, and the connection has several hosts"
    ):
        PgChangeHook("airline").conninfo()
