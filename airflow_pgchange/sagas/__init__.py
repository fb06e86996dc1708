"""Sagas: long sequences of transactions on message queues that are all done, or all undone."""

from airflow_pgchange.sagas.handling import RollBack, TryAgain, Work, handle
from airflow_pgchange.sagas.saga import Saga, Step, create_queues, start

__all__ = ["RollBack", "Saga", "Step", "TryAgain", "Work", "create_queues", "handle", "start"]
