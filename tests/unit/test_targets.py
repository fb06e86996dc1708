"""Tables as assets, by the URI that Airflow's own provider gives them."""

from __future__ import annotations

import re

import pytest
from airflow.providers.postgres.assets import postgres
from airflow.sdk import AssetAlias
from airflow.sdk.execution_time.context import OutletEventAccessors

from airflow_pgchange.assets.targets import add_events, aliases, table_asset, target_tables
from airflow_pgchange.feeds import CommitFeed
from airflow_pgchange.feeds.outputs import Output
from airflow_pgchange.utils.outcome import Outcome
from tests.hard_names import HARD

SHOP = "host=db port=5433 dbname=shop password=hunter2"
OF_THE_PROVIDER = pytest.mark.skipif(
    not hasattr(postgres, "create_asset"), reason="Airflow's provider of PostgreSQL makes assets from 7.0 on"
)


@OF_THE_PROVIDER
def test_a_table_is_the_asset_that_airflows_provider_makes_of_it() -> None:
    theirs = postgres.create_asset(host="db", port=5433, database="shop", schema="public", table="balance")
    assert table_asset(SHOP, "shop", "public", "balance") == theirs


@pytest.mark.parametrize(
    ("conninfo", "where"),
    [
        ("dbname=shop", "localhost:5432"),
        ("host=/var/run/postgresql", "localhost:5432"),
        ("host=db", "db:5432"),
        ("host=db1,db2 port=5433,5434", "db1:5433"),
        ("host=db1,db2 port=5433", "db1:5433"),
        ("host=::1 port=5433", "[::1]:5433"),
        ("hostaddr=10.0.0.1", "10.0.0.1:5432"),
    ],
)
def test_a_table_is_one_asset_whichever_server_of_its_group_answers(conninfo: str, where: str) -> None:
    assert table_asset(conninfo, "shop", "public", "t").uri == f"postgres://{where}/shop/public/t"


@OF_THE_PROVIDER
@pytest.mark.parametrize("name", ["order$items", "my table", "Größe", "a:b", "a%2Gb", "ends ", *HARD])
def test_a_table_of_any_name_is_the_same_asset_as_in_airflows_provider(name: str) -> None:
    """Characters that end a part of a path, or that a URI drops, must be escaped in the asset."""
    escaped = re.sub(r"[/?#\n\t]", lambda found: f"%{ord(found[0]):02X}", name)
    theirs = postgres.create_asset(host="db", port=5433, database=escaped, schema=escaped, table=escaped)
    assert table_asset(SHOP, name, name, name) == theirs


def test_tables_of_different_names_are_different_assets() -> None:
    names = [*HARD, "newline", "tab", "tab\r", "tab/", "tab?", "tab#"]
    assert len({table_asset(SHOP, "shop", "public", name).uri for name in names}) == len(names)


def test_where_airflow_takes_ascii_alone_a_name_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("airflow.sdk.definitions.asset.SQL_ALCHEMY_CONN", "mysql://db")
    assert table_asset(SHOP, "shop", "a b", "Größe%").uri == "postgres://db:5433/shop/a b/Gr%C3%B6%C3%9Fe%"


def test_a_table_that_airflow_refuses_as_an_asset_gets_a_warning_and_fails_no_task(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outcome, outlet, events = Outcome(CommitFeed("a", 0)), target_tables("all"), OutletEventAccessors()
    outcome.targets = {("shop", "public", "balance")}
    outcome.lake = {where: Output("lake.sales.t", 1, "7", where) for where in ("s3://lake/t", "s" * 1501)}
    add_events({"outlet_events": events}, [outlet], SHOP, outcome)
    found = [event.dest_asset_key.uri for event in events[outlet].asset_alias_events]
    assert found == ["postgres://db:5433/shop/public/balance", "s3://lake/t"]
    assert "sss has no event, so DAGs that wait for it do not run" in caplog.text


def test_of_a_tasks_outlets_only_those_for_targets_stand_for_its_tables() -> None:
    ours = target_tables("balances")
    assert aliases([ours, AssetAlias("others"), table_asset(SHOP, "shop", "public", "t")]) == [ours]
