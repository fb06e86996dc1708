"""Sensors that wait for a condition of a cluster, as a worker and as the triggerer run them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from airflow.providers.common.compat.sdk import TaskDeferred

from airflow_pgchange.assets.pgchange import feed_asset
from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds import TopologyCondition
from airflow_pgchange.feeds.feed import Watched
from airflow_pgchange.feeds.feed_kinds import from_uri, to_uri
from airflow_pgchange.sensors.feed import FeedSensor
from tests.airflow_home import uri
from tests.topology import make_catalogue

Connect = Callable[..., psycopg.Connection[Any]]
MASTERS, ONLINE, ACTIVE = (
    "every replicaset has a master",
    "every instance is online",
    "every bucket is active",
)


@pytest.fixture
def catalogue(db: str, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> psycopg.Connection[Any]:
    """A catalogue in which every condition is true, and Airflow's connection to it."""
    connection = connect()
    make_catalogue(connection)
    monkeypatch.setenv("AIRFLOW_CONN_CATALOGUE", uri(db))
    return connection


def sensor(condition: str, *, deferrable: bool = False) -> FeedSensor:
    return FeedSensor(
        task_id="wait",
        feed=TopologyCondition(condition),
        postgres_conn_id="catalogue",
        deferrable=deferrable,
    )


FAULTS = [
    (MASTERS, "select topology.set_state('r1-i1', 'Offline')", "select topology.set_master('r1', 'r1-i2')"),
    (MASTERS, "select topology.add_replicaset('r3')", "select topology.remove_replicaset('r3')"),
    (
        ONLINE,
        "select topology.set_state('r1-i2', 'Offline')",
        "select topology.set_state('r1-i2', 'Expelled')",
    ),
    (
        ACTIVE,
        "select topology.move_buckets('default', 0, 9, 'copying', 'r2')",
        "select topology.move_buckets('default', 0, 9, s) from unnest(array['aborting-copy', 'active']) s",
    ),
]


@pytest.mark.parametrize(("condition", "fault", "cure"), FAULTS)
def test_a_condition_ends_the_wait_while_it_holds(
    catalogue: psycopg.Connection[Any], condition: str, fault: str, cure: str
) -> None:
    catalogue.execute(fault)
    assert not sensor(condition).poke({})  # type: ignore[arg-type]
    catalogue.execute(cure)
    assert sensor(condition).poke({})  # type: ignore[arg-type]


async def test_a_condition_is_waited_for_in_the_triggerer(catalogue: psycopg.Connection[Any]) -> None:
    catalogue.execute(FAULTS[0][1])
    with pytest.raises(TaskDeferred) as deferred:
        sensor(MASTERS, deferrable=True).execute({})  # type: ignore[arg-type]
    events = deferred.value.trigger.run()
    waiting = asyncio.ensure_future(anext(events))
    asked = "select count(*) from pg_stat_activity where query like '%lacking%' and pid <> pg_backend_pid()"
    while catalogue.execute(asked).fetchone() == (0,):
        await asyncio.sleep(0)
        assert not waiting.done()
    catalogue.execute(FAULTS[0][2])
    assert (await waiting).payload["ready"] == 1
    await events.aclose()


def test_a_condition_wakes_dags_as_any_feed_does() -> None:
    condition = TopologyCondition(MASTERS)
    assert isinstance(condition, Watched)
    assert from_uri(to_uri(condition, "catalogue")) == (condition, "catalogue")
    assert feed_asset(condition, "catalogue").uri == to_uri(condition, "catalogue")


def test_an_unknown_condition_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(InvalidArgument, match=f"'{MASTERS}', '{ONLINE}', '{ACTIVE}'"):
        sensor("all is well")
