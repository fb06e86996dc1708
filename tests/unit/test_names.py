"""The names of consumers: their parts, and the kind of feed that they belong to."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_pgchange.admin import consumers
from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds import CommitFeed, EventFeed, Feed, QueueFeed, TopologyFeed, TubeFeed
from airflow_pgchange.feeds.consumer_names import TEXT, WORD, Names
from airflow_pgchange.feeds.feed_kinds import kind_of_feed, kinds

ODD = st.text(st.sampled_from("aZ0/%:{}2F5 \n'\"\\é日"), min_size=1, max_size=12)
WORKERS = st.integers(1, 999).flatmap(lambda n: st.tuples(st.integers(0, n - 1), st.just(n)))


def of_tube(tube: str, shared: tuple[int, int]) -> TubeFeed:
    return TubeFeed(tube, *shared)


def starting_alike(name: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Generate names with the prefix of some kind of feed, and names without any prefix."""
    prefixes = ["", "commits:", "tube:", "events:", "queue:", "topology:"]
    return st.builds(str.__add__, st.sampled_from(prefixes), name)


NAME = starting_alike(ODD)
GROUP = starting_alike(ODD).map(lambda name: name.replace("/", "|"))
FEEDS: st.SearchStrategy[Feed] = st.one_of(
    st.builds(CommitFeed, NAME, st.integers(0, 2**63 - 1)),
    st.builds(EventFeed, GROUP),
    st.builds(QueueFeed, NAME, NAME),
    st.builds(TopologyFeed, NAME),
    st.builds(of_tube, NAME, WORKERS),
)


def read_back(feed: Any) -> Feed:
    """Return the feed that is made from the name of a feed. Its number of workers, which a name lacks, is passed on."""
    workers = getattr(feed, "workers", 0)
    kind, parts = consumers._read(feed.name)
    return kind.named(lambda query: workers, *parts)


@given(FEEDS)
def test_a_name_means_the_consumer_that_has_it(feed: Feed) -> None:
    assert read_back(feed) == feed


@given(FEEDS, FEEDS)
def test_two_consumers_have_two_names(one: Feed, other: Feed) -> None:
    same = (one.kind, one.parts) == (other.kind, other.parts)  # type: ignore[attr-defined]
    assert (one.name == other.name) == same


@pytest.mark.parametrize("name", ["commits:delays/00", "commits:delays/٣", "tube:copies/01", "queue:a/%2f"])
def test_a_consumer_has_one_name(name: str) -> None:
    with pytest.raises(InvalidArgument, match="is not a consumer"):
        consumers.named(name)


@pytest.mark.parametrize("form", ["{}/{}", "tube {}", ":{}", "tube:{}"])
def test_a_kind_whose_names_could_be_those_of_another_is_refused(form: str) -> None:
    other = type("Other", (), {"kind": "other", "names": Names(form, (TEXT, WORD), "x")})
    with pytest.raises(InvalidArgument, match=r"such as other:"):
        kind_of_feed(other)
    assert "other" not in kinds()


@pytest.mark.parametrize(
    "name",
    ["delays", "delays/0", "tube:/0", "tube:copies/x", "queue:/orders", "topology:", "commits:/0", ""],
)
def test_a_name_with_the_prefix_of_a_kind_is_never_that_of_another_kind(name: str) -> None:
    with pytest.raises(InvalidArgument, match="is not a consumer: write it as .* such as .*commits:delays/0"):
        consumers.named(name)


def test_a_form_may_hold_what_means_something_in_a_pattern() -> None:
    names = Names("a.b+{}", (TEXT,), "a.b+x")
    assert names.read("a.b+c") == ("c",)
    assert names.read("axb+c") is None
