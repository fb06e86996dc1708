"""The names of consumers: what they say, and of which kind they are."""

from __future__ import annotations

import pytest

from airflow_pgchange.admin import consumers
from airflow_pgchange.feeds import CommitFeed, EventFeed, Feed, QueueFeed, TopologyFeed, TubeFeed
from airflow_pgchange.feeds.errors import InvalidArgument
from airflow_pgchange.feeds.feed import kinds
from airflow_pgchange.feeds.names import Names


@pytest.mark.parametrize(
    "feed",
    [
        CommitFeed("delays", 0),
        CommitFeed("a/b: {}\nc", 7),
        EventFeed("mails"),
        QueueFeed("a/b", "reader"),
        TopologyFeed("router"),
        TubeFeed("copies/old", 2, 3),
    ],
)
def test_a_name_that_status_shows_means_that_consumer(feed: Feed) -> None:
    parts = feed.names.read(feed.name)
    assert parts is not None
    assert type(feed).named(lambda query: 3, *parts) == feed


@pytest.mark.parametrize(
    "name", ["delays", "tube:/0", "tube:copies/x", "queue:/orders", "topology:", "/0", ""]
)
def test_what_begins_as_the_names_of_a_kind_is_not_taken_for_one_of_another(name: str) -> None:
    with pytest.raises(InvalidArgument, match="is not a consumer: write it as .* such as .*delays/0"):
        consumers.named(name)


def test_the_names_of_two_kinds_never_begin_alike() -> None:
    prefixes = sorted(kind.names.prefix for kind in kinds().values() if hasattr(kind, "names"))
    assert len(set(prefixes)) == len(prefixes)


def test_a_form_may_hold_what_means_something_in_a_pattern() -> None:
    names = Names("a.b+{}", (".+",), "a.b+x")
    assert names.read("a.b+c") == ("c",)
    assert names.read("axb+c") is None
