"""Operators of message queues: post a message, or post a request and wait for the answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.providers.common.compat.sdk import AirflowException, BaseOperator, conf

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds.argument_checks import Seconds
from airflow_pgchange.hooks.pgchange import PgChangeHook
from airflow_pgchange.messages import queues
from airflow_pgchange.messages.queues import Message, Texts
from airflow_pgchange.sensors.feed import unless_error
from airflow_pgchange.triggers.feed import POLL_INTERVAL, ReplyTrigger
from airflow_pgchange.utils.arguments import CheckedArguments, checks

if TYPE_CHECKING:
    from airflow.sdk import Context


class PostMessageOperator(CheckedArguments, BaseOperator):
    """Posts a message to a queue.

    Guarantee: at least once. A task that is retried after its commit posts again.

    :param queue_name: the queue (templated). The argument ``queue`` is Airflow's own: the queue of its executor
    :param data: the content of the message, a mapping of names to texts or None (templated)
    :param properties: a mapping like ``data``, for selectors and handlers (templated)
    :param after: iids of messages that must be received before it, such as the XComs of other tasks that post (templated)
    :param delay: deliver it only after this time (templated)
    :param expiry: do not deliver it once this time has passed (templated)
    :param postgres_conn_id: the database of the queue
    """

    arguments = checks("queue_name", "data", "properties", "after", "delay", "expiry", "postgres_conn_id")
    template_fields: Sequence[str] = tuple(arguments)
    template_fields_renderers: ClassVar[dict[str, str]] = {"data": "json", "properties": "json"}

    def __init__(
        self,
        *,
        queue_name: str,
        data: Texts,
        properties: Texts | None = None,
        after: Sequence[str] | str | None = None,
        delay: Seconds | None = None,
        expiry: Seconds | None = None,
        postgres_conn_id: str = PgChangeHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.queue_name = queue_name
        self.data = data
        self.properties = properties
        self.after: Any = after
        self.delay = delay
        self.expiry = expiry
        self.postgres_conn_id = postgres_conn_id

    def execute(self, context: Context) -> Any:
        """Return the iid of the message."""
        with PgChangeHook(self.postgres_conn_id).get_conn(primary=True) as connection:
            iid = queues.post(connection, self.queue_name, self.message())
        self.log.info("posted message %s", iid)
        return iid

    def message(self) -> Message:
        return Message(
            self.data, self.properties, after=self.after or (), delay=self.delay, expiry=self.expiry
        )


class RequestMessageOperator(PostMessageOperator):
    """Posts a request and waits for the answer, which a handler posts with ``airflow_pgchange.messages.answer``.

    Without ``reply_queue`` the answer goes to a temporary queue. That queue ends with this task's session, so the task
    cannot be deferred. A named reply queue serves any number of requests; nobody may consume from it.

    Guarantee: the request is posted at least once. The task returns the answer to the request of its own try. An answer
    in a named reply queue that comes too late is deleted after its expiry, which is a day unless the handler sets
    another.

    :param reply_queue: the queue of the answers (templated)
    :param timeout: how long to wait for the answer before the task fails (templated)
    :param deferrable: wait in the triggerer; default: ``[operators] default_deferrable``, if there is a ``reply_queue``
    :param poll_interval: the pause between two queries for the answer (templated)
    """

    arguments = checks("reply_queue", "timeout", "poll_interval", **PostMessageOperator.arguments)
    template_fields: Sequence[str] = tuple(arguments)

    def __init__(
        self,
        *,
        reply_queue: str | None = None,
        timeout: Seconds = timedelta(minutes=10),
        deferrable: bool | None = None,
        poll_interval: Seconds = POLL_INTERVAL,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if deferrable is None:
            default_deferrable = conf.getboolean("operators", "default_deferrable")
            deferrable = default_deferrable and reply_queue is not None
        if deferrable and reply_queue is None:
            raise InvalidArgument(
                f"{self.task_id}: a temporary queue ends with its session: name a reply_queue, or say deferrable=False"
            )
        self.reply_queue = reply_queue
        self.timeout: Any = timeout
        self.deferrable = deferrable
        self.poll_interval: Any = poll_interval

    def execute(self, context: Context) -> Any:
        """Return the data of the answer."""
        with PgChangeHook(self.postgres_conn_id).get_conn(primary=True) as connection:
            if self.reply_queue is None:
                queue = queues.temporary_queue(connection)
                queues.request(connection, self.queue_name, self.message(), queue)
                return self._wait(lambda: queues.consume(connection, queue))
            iid = queues.new_iid(connection, self.reply_queue)
            queues.request(connection, self.queue_name, self.message(), self.reply_queue, iid)
            if not self.deferrable:
                return self._wait(lambda: queues.take(connection, iid))
        trigger = ReplyTrigger(self.reply_queue, iid, self.postgres_conn_id, poll_interval=self.poll_interval)
        return self.defer(trigger=trigger, method_name="resume", timeout=timedelta(seconds=self.timeout))

    def resume(self, context: Context, event: dict[str, Any]) -> dict[str, str | None]:
        """Receive the answer that the trigger has found."""
        unless_error(event)
        with PgChangeHook(self.postgres_conn_id).get_conn(primary=True) as connection:
            answer = queues.take(connection, event["iid"])
        if answer is None:
            raise AirflowException(
                f"the answer {event['iid']} is gone: nobody may consume from queue {self.reply_queue}"
            )
        return answer

    def _wait(self, take: Callable[[], dict[str, str | None] | None]) -> dict[str, str | None]:
        deadline = time.monotonic() + self.timeout
        while (answer := take()) is None:
            if time.monotonic() > deadline:
                raise AirflowException(
                    f"no answer came from queue {self.queue_name} within {self.timeout:g} s"
                )
            time.sleep(self.poll_interval)
        return answer
