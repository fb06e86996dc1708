"""The topology of a cluster, told to its clients over the PostgreSQL protocol: psycopg and cryptography."""

from airflow_pgchange.topology.client import TopologyClient
from airflow_pgchange.topology.events import BucketEvent, InstanceEvent, ReplicasetEvent, UnknownEvent
from airflow_pgchange.topology.raft import Raft
from airflow_pgchange.topology.state import Topology

__all__ = [
    "BucketEvent",
    "InstanceEvent",
    "Raft",
    "ReplicasetEvent",
    "Topology",
    "TopologyClient",
    "UnknownEvent",
]
