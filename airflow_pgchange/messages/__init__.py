"""Messages: posting and asking, and sagas, long sequences of transactions that are all done, or all undone."""

from airflow_pgchange.messages.saga import Saga, Step, create_queues, start
from airflow_pgchange.messages.saga_handling import RollBack, TryAgain, Work, handle

__all__ = ["RollBack", "Saga", "Step", "TryAgain", "Work", "create_queues", "handle", "start"]
