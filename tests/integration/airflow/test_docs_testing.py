"""The examples of the guide to testing, run unchanged."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import psycopg
import pytest

from airflow_pgchange.feeds import CommitFeed, EventFeed, QueueFeed, TopologyFeed, TubeFeed
from airflow_pgchange.testing.changes import DEFAULTS
from tests.ledger import Connect
from tests.readme import ROOT, Guide, track_payments

PAGE = "docs/how-to/testing.md"
WITHOUT_PYTEST = [("@pytest.fixture\n", "@fixture\n")]
"""Remove the decorator from the guide's fixture: here the function is called directly, which pytest would refuse."""


@pytest.fixture
def guide(connect: Connect) -> Guide:
    """The guide, in a database with the tables of the tutorial."""
    connection: psycopg.Connection[Any] = connect()
    track_payments(connection)
    made = Guide(PAGE, "unused", connection)
    made.names["fixture"] = contextlib.contextmanager
    return made


def examples(guide: Guide, section: str) -> list[str]:
    """Run a section, and return the names of the tests that it defines."""
    before = set(guide.names)
    guide.run(section, WITHOUT_PYTEST)
    found = [name for name in guide.names if name not in before and name.startswith("test_")]
    assert found
    return found


@pytest.mark.usefixtures("no_server")
@pytest.mark.parametrize("section", ["Arguments of other tasks", "Handlers of events", "Steps of sagas"])
def test_examples_that_need_no_server_run_without_one(section: str) -> None:
    """Takes seconds: Airflow is imported."""
    guide = Guide(PAGE, "unused", None)
    first = examples(guide, "A batch without a server")
    for name in (*first, *examples(guide, section)):
        guide.names[name]()


@pytest.fixture
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the example connects to a server")

    monkeypatch.setattr(psycopg.Connection, "connect", refuse)


def test_what_a_function_writes_is_in_the_database_until_the_fixture_rolls_it_back(
    guide: Guide, db: str, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Takes seconds if it is the first test of this file, because Airflow is imported."""
    monkeypatch.setenv("TEST_DATABASE", db)
    examples(guide, "A batch without a server")
    (name,) = examples(guide, "Results on a real server")
    with guide.names["shop"]() as connection:
        guide.names[name](connection)
    assert connect().execute("select count(*) from balance").fetchone() == (0,)


def test_the_guide_names_the_columns_of_each_kind_that_have_no_defaults() -> None:
    told = dict(re.findall(r"^\| `(\w+Feed)` \| (.*) \|$", (ROOT / PAGE).read_text(), flags=re.MULTILINE))
    feeds = (CommitFeed("c", 0), TubeFeed("t"), EventFeed("g"), QueueFeed("q"), TopologyFeed("c"))
    assert set(told) == {type(feed).__name__ for feed in feeds}
    for feed in feeds:
        columns = {name for name, _ in feed.columns}
        named = set(re.findall(r"`(\w+)`", told[type(feed).__name__])) - {"Event"}
        assert columns - DEFAULTS[feed.kind](1).keys() <= named <= columns
