"""Relay a cluster's topology to clients over the PostgreSQL protocol. Needs psycopg and cryptography only."""

from airflow_pgchange.topology.client import TopologyClient
from airflow_pgchange.topology.client_state import Topology
from airflow_pgchange.topology.events import BucketEvent, InstanceEvent, ReplicasetEvent, UnknownEvent
from airflow_pgchange.topology.raft import Raft

__all__ = [
    "BucketEvent",
    "InstanceEvent",
    "Raft",
    "ReplicasetEvent",
    "Topology",
    "TopologyClient",
    "UnknownEvent",
]
