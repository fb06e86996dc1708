"""Message queues, requests with answers, and sagas: sequences of transactions that are either all done or all undone."""

from airflow_pgchange.messages.queues import (
    Message,
    answer,
    consume,
    new_iid,
    post,
    request,
    take,
    temporary_queue,
)
from airflow_pgchange.messages.saga import Saga, Step, create_saga_queues, start_saga
from airflow_pgchange.messages.saga_handling import RollBack, TryAgain, Work, handle_saga

__all__ = [
    "Message",
    "RollBack",
    "Saga",
    "Step",
    "TryAgain",
    "Work",
    "answer",
    "consume",
    "create_saga_queues",
    "handle_saga",
    "new_iid",
    "post",
    "request",
    "start_saga",
    "take",
    "temporary_queue",
]
