"""Feeds, batches and the consumer transaction: psycopg only, no Airflow and no Spark."""

from airflow_pgchange.feeds.batch import Batch, Change
from airflow_pgchange.feeds.commit_queue import CommitFeed
from airflow_pgchange.feeds.conditions import TopologyCondition
from airflow_pgchange.feeds.event import EventFeed
from airflow_pgchange.feeds.feed import Feed
from airflow_pgchange.feeds.queue import QueueFeed
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
    "QueueFeed",
    "TopologyCondition",
    "TopologyFeed",
    "TubeFeed",
]
