"""Feeds and batches are plain values."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds.batch import Batch, Slice, grouped
from airflow_pgchange.feeds.commit_queue import CommitFeed
from airflow_pgchange.feeds.feed import Feed
from airflow_pgchange.feeds.feed_kinds import from_json, from_uri, to_json, to_uri

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1)
FEEDS = st.builds(CommitFeed, NAMES, st.integers(0, 2**63 - 1), st.booleans(), st.booleans())


@given(FEEDS)
def test_a_feed_survives_json_and_an_asset_uri(feed):
    assert from_json(json.loads(json.dumps(to_json(feed)))) == feed
    assert from_uri(to_uri(feed, "airline")) == (feed, "airline")


def test_a_commit_feed_keeps_the_contract():
    assert isinstance(CommitFeed("a", 0), Feed)


@pytest.mark.parametrize(
    "given",
    [
        {"kind": "river"},
        {"kind": ["commit"]},
        {"consumer": "a"},
        {"kind": "commit", "consumer": "a", "topic": 1},
        {"kind": "commit", "consumer": "a\0", "branch": 0},
        {"kind": "topology", "consumer": "\ud800"},
        {"kind": "tube", "tube": "a\0"},
        {"kind": "queue", "queue_name": "a\0", "consumer": "default"},
    ],
)
def test_a_value_that_is_no_feed_is_refused(given):
    with pytest.raises(InvalidArgument):
        from_json(given)


@pytest.mark.parametrize("uri", ["pgchange://[/commit", "pgchange://airline/commit?consumer=a"])
def test_a_text_that_is_no_uri_of_a_feed_is_refused(uri):
    with pytest.raises(InvalidArgument):
        from_uri(uri)


@pytest.mark.parametrize("arguments", [("", 0), ("a", -1), ("a", "0"), ("a", True)])
def test_a_feed_of_nonsense_is_refused(arguments):
    with pytest.raises(InvalidArgument):
        CommitFeed(*arguments)


def test_a_consumers_name_is_quoted_never_pasted():
    query = CommitFeed("x'); drop table t; --", 0).position().as_string(None)
    assert "'x''); drop table t; --'" in query


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=50), st.integers(1, 20))
def test_grouped_slices_are_the_same_changes_in_the_same_order(counts, n):
    slices = [Slice(count, (i, 0), (i + 1, 0)) for i, count in enumerate(counts)]
    groups = grouped(slices, n)
    assert len(groups) <= n
    assert sum(group.count for group in groups) == sum(counts)
    assert groups[0].after == slices[0].after
    assert groups[-1].upto == slices[-1].upto
    assert all(left.upto == right.after for left, right in pairwise(groups))


def test_a_batch_survives_json():
    batch = Batch("id", "a/0", 3, 1, 5, (Slice(5, [0, 0], [7, 7]),), {"after": "1:1:"}, "0/1")
    assert Batch.from_json(json.loads(json.dumps(batch.to_json()))) == batch
