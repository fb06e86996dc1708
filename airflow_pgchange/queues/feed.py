"""Feeds for ``MessageQueueTrigger``, Airflow's one trigger for queues of every kind."""

from __future__ import annotations

from airflow.providers.common.messaging.providers.base_provider import BaseMessageQueueProvider

from airflow_pgchange.triggers.feed import FeedTrigger


class FeedQueueProvider(BaseMessageQueueProvider):
    """``MessageQueueTrigger(scheme="pgchange", ...)`` is a FeedTrigger with the same arguments.

    Its event is a wake-up, not a message: the task claims its batch, with the guarantee of its operator.
    """

    scheme = "pgchange"

    def trigger_class(self) -> type[FeedTrigger]:
        return FeedTrigger
