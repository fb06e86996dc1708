"""Feeds, batches and the consumer transaction: psycopg only, no Airflow and no Spark."""

from airflow_pgchange.feeds.batch import Batch, Change, Lag
from airflow_pgchange.feeds.commit_queue import CommitFeed
from airflow_pgchange.feeds.conditions import TopologyCondition
from airflow_pgchange.feeds.connections import connect
from airflow_pgchange.feeds.consumer_names import Names
from airflow_pgchange.feeds.consumer_state import lag
from airflow_pgchange.feeds.event_log import EventFeed
from airflow_pgchange.feeds.feed import Feed, Watched
from airflow_pgchange.feeds.feed_kinds import from_json, kind_of_feed, to_json
from airflow_pgchange.feeds.message_queue import QueueFeed
from airflow_pgchange.feeds.schema_feed import OfferedFeed
from airflow_pgchange.feeds.topology import TopologyFeed
from airflow_pgchange.feeds.transaction import ConsumerTransaction
from airflow_pgchange.feeds.tube import AllTubes, TubeFeed

__all__ = [
    "AllTubes",
    "Batch",
    "Change",
    "CommitFeed",
    "ConsumerTransaction",
    "EventFeed",
    "Feed",
    "Lag",
    "Names",
    "OfferedFeed",
    "QueueFeed",
    "TopologyCondition",
    "TopologyFeed",
    "TubeFeed",
    "Watched",
    "connect",
    "from_json",
    "kind_of_feed",
    "lag",
    "to_json",
]
