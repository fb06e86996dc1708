"""Feeds as assets of Airflow: their URIs, their watchers, and their names."""

from __future__ import annotations

from dataclasses import make_dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import pytest
from airflow.providers.common.messaging.triggers.msg_queue import MessageQueueTrigger
from airflow.sdk import Asset, AssetWatcher
from airflow.triggers.base import BaseEventTrigger

from airflow_pgchange.assets.pgchange import feed_asset, sanitize_uri
from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds import AllTubes, CommitFeed, TopologyCondition, TubeFeed
from airflow_pgchange.feeds.feed import Watched
from airflow_pgchange.feeds.feed_kinds import from_uri, kind_of_feed, to_uri
from airflow_pgchange.utils.arguments import feed_of

FEED = CommitFeed("route_delay", 7, in_order=True)


def trigger_hash(asset: Asset) -> int:
    return BaseEventTrigger.hash(*asset.watchers[0].trigger.serialize())


def test_the_uri_of_an_asset_names_its_feed() -> None:
    assert feed_of(feed_asset(FEED, "airline").uri) == FEED


def test_the_uri_of_an_asset_names_its_connection() -> None:
    assert urlsplit(feed_asset(FEED, "airline").uri).netloc == "airline"


@pytest.mark.parametrize(
    ("feed", "name"),
    [
        (CommitFeed("delays", 0), "airline/delays/0"),
        (CommitFeed("team:delays", 0), "airline/team:delays/0"),
        (CommitFeed("tube:copies", 0), "airline/commits:tube:copies/0"),
        (TubeFeed("copies"), "airline/tube:copies/0"),
        (TopologyCondition("every bucket is active"), "airline/topology: every bucket is active"),
        (AllTubes(), "airline/all tubes"),
    ],
)
def test_an_asset_is_called_as_assets_were_before_commit_queues_had_a_prefix(
    feed: Watched, name: str
) -> None:
    asset = feed_asset(feed, "airline")
    assert (asset.name, asset.watchers[0].name) == (name, name)
    assert asset.uri == to_uri(feed, "airline").rstrip("?")


def test_an_asset_brings_one_watcher_of_its_feed() -> None:
    (watcher,) = feed_asset(FEED, "airline", min_changes=5, max_age=timedelta(minutes=1)).watchers
    _, kwargs = watcher.trigger.serialize()
    assert (feed_of(kwargs["feed"]), kwargs["min_changes"], kwargs["max_age"]) == (FEED, 5, 60.0)


def test_a_watcher_has_no_dict_among_its_arguments() -> None:
    """The triggerer of Airflow 3.2 cannot read back a dict that is an argument of a trigger."""
    (watcher,) = feed_asset(FEED, "airline").watchers
    assert not [value for value in watcher.trigger.serialize()[1].values() if isinstance(value, dict)]


@pytest.mark.parametrize(
    ("conditions", "told"),
    [
        ({"min_changes": 1000}, " (min_changes=1000)"),
        ({"max_age": "10 min"}, " (max_age=600.0)"),
        ({"min_changes": 1000, "max_age": "10 min"}, " (min_changes=1000, max_age=600.0)"),
    ],
)
def test_conditions_make_another_asset_of_the_same_feed(conditions: dict[str, Any], told: str) -> None:
    plain, conditional = feed_asset(FEED, "airline"), feed_asset(FEED, "airline", **conditions)
    assert conditional.name == plain.name + told
    assert conditional.uri != plain.uri
    assert from_uri(conditional.uri) == from_uri(plain.uri) == (FEED, "airline")


@pytest.mark.parametrize("given", [600, "600", "10 min", timedelta(minutes=10)])
def test_the_same_conditions_make_the_same_asset_however_they_are_written(given: Any) -> None:
    asset = feed_asset(FEED, "airline", min_changes="5", max_age=given)
    assert asset == feed_asset(FEED, "airline", min_changes=5, max_age=600.0)


@pytest.mark.parametrize(
    "given",
    [{"min_changes": 1, "max_age": None}, {"poll_interval": 5}, {"max_lag": "1 day", "max_backlog": 9}],
)
def test_defaults_how_often_is_looked_and_limits_make_no_other_asset(given: dict[str, Any]) -> None:
    plain, other = feed_asset(FEED, "airline"), feed_asset(FEED, "airline", **given)
    assert (other.name, other.uri) == (plain.name, plain.uri)


@pytest.mark.parametrize("given", [{"max_lag": 0}, {"max_backlog": 0}])
def test_a_limit_of_nothing_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(given))):
        feed_asset(FEED, "airline", **given)


def test_limits_are_of_one_consumer() -> None:
    with pytest.raises(InvalidArgument, match=r"this feed has several: .* pgchange\.limit_lag"):
        feed_asset(AllTubes(), "airline", max_lag="1 day")


def test_an_asset_with_a_name_of_the_users_has_its_conditions_in_the_uri() -> None:
    asset = feed_asset(FEED, "airline", min_changes=5, name="delays")
    assert (asset.name, asset.watchers[0].name) == ("delays", "delays")
    assert asset.uri == feed_asset(FEED, "airline", min_changes=5).uri


def test_a_name_that_is_given_two_sets_of_conditions_is_told_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    feed_asset(FEED, "airline", name="twice", min_changes=5)
    feed_asset(FEED, "airline", name="twice", min_changes=5)
    assert caplog.messages == []
    feed_asset(FEED, "airline", name="twice", min_changes=6)
    (told,) = caplog.messages
    assert told.startswith("asset 'twice' cannot have two watchers")


def test_a_feed_whose_field_is_called_as_a_condition_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="cannot have the field max_age"):
        kind_of_feed(make_dataclass("Old", ["max_age"], namespace={"kind": "old"}))


def test_the_watcher_is_the_same_at_every_parse() -> None:
    assert trigger_hash(feed_asset(FEED, "airline")) == trigger_hash(feed_asset(FEED, "airline"))


def test_a_watcher_can_be_made_again_from_what_it_serializes() -> None:
    trigger = feed_asset(FEED, "airline", "source", min_changes=3).watchers[0].trigger
    assert type(trigger)(**trigger.serialize()[1]).serialize() == trigger.serialize()


def test_airflows_trigger_for_queues_is_the_trigger_that_feed_asset_makes() -> None:
    trigger = MessageQueueTrigger(scheme="pgchange", feed=FEED, postgres_conn_id="airline")
    asset = Asset("delays", watchers=[AssetWatcher(name="delays", trigger=trigger)])
    assert trigger_hash(asset) == trigger_hash(feed_asset(FEED, "airline"))


def test_the_same_consumer_on_two_servers_is_two_assets() -> None:
    assert feed_asset(FEED, "airline") != feed_asset(FEED, "railway")


@pytest.mark.parametrize(
    "uri", ["pgchange://", "pgchange://airline/pigeon?consumer=1", "pgchange://airline/commit?colour=1"]
)
def test_a_uri_that_names_no_feed_is_refused(uri: str) -> None:
    with pytest.raises(ValueError, match=r"pgchange://|feed"):
        sanitize_uri(urlsplit(uri))


def test_a_uri_without_a_connection_is_told_what_it_lacks() -> None:
    with pytest.raises(ValueError, match="names a connection"):
        sanitize_uri(urlsplit('pgchange:///commit?{"consumer": "a", "branch": 0}'))


@pytest.mark.parametrize("arguments", [{"min_changes": 0}, {"max_age": -1}])
def test_limits_that_make_no_sense_are_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument):
        feed_asset(FEED, "airline", **arguments)


@pytest.mark.parametrize(
    "given",
    [
        FEED,
        {"kind": "commit", "consumer": "route_delay", "branch": 7, "in_order": True},
        {"kind": "commit", "consumer": "route_delay", "branch": "7", "in_order": "True"},
        '{"kind": "commit", "consumer": "route_delay", "branch": 7, "in_order": true}',
    ],
)
def test_a_feed_is_understood_in_each_form_that_airflow_hands_over(given: object) -> None:
    assert feed_of(given) == FEED  # type: ignore[arg-type]


def test_a_consumer_with_a_number_for_a_name_stays_text() -> None:
    assert feed_of({"kind": "commit", "consumer": "7", "branch": 0}) == CommitFeed("7", 0)


@pytest.mark.parametrize("given", ["route_delay", "[]", 7])
def test_a_value_that_is_no_feed_is_refused(given: object) -> None:
    with pytest.raises(InvalidArgument, match="is not a feed"):
        feed_of(given)  # type: ignore[arg-type]


def test_an_asset_takes_the_extra_that_lineage_hands_to_every_factory() -> None:
    assert feed_asset(FEED, "airline", extra=None).extra == {}
    assert feed_asset(FEED, "airline", extra={"owner": "ann"}).extra == {"owner": "ann"}


@pytest.mark.parametrize("name", ["eu/airline", "air#line", "air%2Fline", "luft f\u00fcr alle"])
def test_a_connection_of_any_name_comes_back_from_its_uri(name: str) -> None:
    assert from_uri(to_uri(FEED, name)) == (FEED, name)


def test_a_uri_whose_fields_are_no_json_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="not JSON"):
        feed_of("pgchange://airline/commit?consumer=x&branch=0")
