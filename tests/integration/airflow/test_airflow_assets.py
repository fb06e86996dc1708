"""The watchers of feeds in Airflow's metadata database, while DAG files are parsed again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from airflow_pgchange.triggers.feed import FeedTrigger
from tests.dag_bags import stored
from tests.watching import FEED, first

DAG = """
from airflow.sdk import DAG, task
from airflow_pgchange.assets.pgchange import feed_asset
from airflow_pgchange.feeds import CommitFeed

F = CommitFeed("delays", 0)
with DAG("{name}", schedule=[feed_asset(F, "airline"{conditions})], is_paused_upon_creation=False):
    @task(inlets=[{inlet}])
    def work():
        pass

    work()
"""
OFTEN, SELDOM = "", ", min_changes=1000, max_age='10 min'"

pytestmark = pytest.mark.usefixtures("metadata")


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Remove the DAGs after the test, because tests of the page in this process read all of Airflow's DAGs."""
    from airflow.api.common.delete_dag import delete_dag

    yield
    for dag_id in ("often", "seldom"):
        delete_dag(dag_id)


def parse(file: Path, conditions: str, inlet: str) -> None:
    """Parse a DAG file as Airflow's DAG processor does."""
    file.write_text(DAG.format(name=file.stem, conditions=conditions, inlet=inlet))
    stored(file)


def watched() -> dict[str, int]:
    """Return our assets that have a watcher, each with the id of its trigger."""
    from airflow.models.asset import AssetModel
    from airflow.utils.session import create_session
    from sqlalchemy import select

    query = select(AssetModel).where(AssetModel.name.startswith("airline/delays"))
    with create_session() as session:
        return {asset.name: trigger.id for asset in session.scalars(query) for trigger in asset.triggers}


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("inlet", ["", "feed_asset(F, 'airline')"], ids=["alone", "with an inlet"])
def test_two_dags_on_a_feed_keep_their_watchers_however_often_they_are_parsed(
    tmp_path: Path, inlet: str
) -> None:
    """Takes seconds if it is the first test of this file, because Airflow is imported."""
    files = [(tmp_path / "often.py", OFTEN), (tmp_path / "seldom.py", SELDOM)]
    for file, conditions in files * 2:
        parse(file, conditions, inlet)
    before = watched()
    assert sorted(before) == [
        "airline/delays/0",
        "airline/delays/0 (min_changes=1000, max_age=600.0)",
    ]
    for file, conditions in files:
        parse(file, conditions, inlet)
        assert watched() == before


async def test_each_of_two_watchers_of_a_feed_fires_by_its_own_conditions(
    conn_id: str, write: Callable[[int], None]
) -> None:
    often, seldom = FeedTrigger(FEED, conn_id), FeedTrigger(FEED, conn_id, min_changes=5)
    waits = asyncio.create_task(first(seldom))
    write(1)
    assert (await first(often))["ready"] == 1
    assert not waits.done()
    write(4)
    assert (await waits)["ready"] == 5
