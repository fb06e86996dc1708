"""Message queues: posting, asking and waiting for the answer, clearing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseOperator, conf
from airflow.sdk.exceptions import AirflowException

from airflow_pgchange import queues
from airflow_pgchange.arguments import Seconds, names, seconds
from airflow_pgchange.feeds.errors import InvalidArgument
from airflow_pgchange.hooks.pgchange import PgChangeHook
from airflow_pgchange.queues import Message, Texts
from airflow_pgchange.triggers.feed import POLL_INTERVAL, ReplyTrigger

if TYPE_CHECKING:
    from airflow.sdk import Context


class PostMessageOperator(BaseOperator):
    """Posts a message to a queue.

    Guarantee: at least once. A task that is tried again after it had committed posts again.

    :param queue: the queue (templated)
    :param data: what the message says: texts or None by name (templated)
    :param properties: more of them, for selectors and handlers (templated)
    :param after: iids of messages that must be received before it, such as the XComs of other tasks that post (templated)
    :param delay: deliver it only after this time
    :param lifetime: do not deliver it once this time has passed
    :param postgres_conn_id: the database of the queue
    """

    template_fields: Sequence[str] = ("queue", "data", "properties", "after", "postgres_conn_id")
    template_fields_renderers: ClassVar[dict[str, str]] = {"data": "json", "properties": "json"}

    def __init__(
        self,
        *,
        queue: str,
        data: Texts,
        properties: Texts | None = None,
        after: Sequence[str] | str = (),
        delay: timedelta | None = None,
        lifetime: timedelta | None = None,
        postgres_conn_id: str = PgChangeHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.queue = queue
        self.data = data
        self.properties = properties
        self.after = after
        self.delay = delay
        self.lifetime = lifetime
        self.postgres_conn_id = postgres_conn_id

    def execute(self, context: Context) -> Any:
        """Returns the iid of the message."""
        with PgChangeHook(self.postgres_conn_id).get_conn(primary=True) as connection:
            iid = queues.post(connection, self.queue, self.message())
        self.log.info("posted message %s", iid)
        return iid

    def message(self) -> Message:
        if not isinstance(self.data, Mapping):
            raise InvalidArgument(
                f"{self.task_id}: data must be texts by name, not {self.data!r}: with render_template_as_native_obj "
                "a template can be a mapping"
            )
        after = names("after", self.after) if self.after else ()
        return Message(self.data, self.properties, after=after, delay=self.delay, lifetime=self.lifetime)


class RequestOperator(PostMessageOperator):
    """Posts a request and waits for the answer, which a handler posts with ``airflow_pgchange.queues.answer``.

    Without ``reply_queue`` the answer goes to a temporary queue, which ends with this task's session: so it cannot be
    deferred. A named reply queue serves any number of requests; nobody may consume from it.

    Guarantee: the request at least once, the answer to the request of the try that waits for it. An answer to a named
    reply queue that comes too late goes after its lifetime, a day unless its handler says otherwise.

    :param reply_queue: the queue of the answers (templated)
    :param within: how long to wait for the answer: seconds, or a timedelta; then the task fails
    :param deferrable: wait in the triggerer; default: what ``[operators] default_deferrable`` says, with a reply_queue
    :param poll_interval: seconds, or a timedelta, between two looks
    """

    template_fields: Sequence[str] = (*PostMessageOperator.template_fields, "reply_queue")

    def __init__(
        self,
        *,
        reply_queue: str | None = None,
        within: Seconds = timedelta(minutes=10),
        deferrable: bool | None = None,
        poll_interval: Seconds = POLL_INTERVAL,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if deferrable is None:
            wanted = conf.getboolean("operators", "default_deferrable", fallback=False)
            deferrable = wanted and reply_queue is not None
        if deferrable and reply_queue is None:
            raise InvalidArgument(
                f"{self.task_id}: a temporary queue ends with its session: name a reply_queue, or say deferrable=False"
            )
        self.reply_queue = reply_queue
        self.within = timedelta(seconds=seconds("within", within))
        self.deferrable = deferrable
        self.poll_interval = seconds("poll_interval", poll_interval)

    def execute(self, context: Context) -> Any:
        """Returns the data of the answer."""
        with PgChangeHook(self.postgres_conn_id).get_conn(primary=True) as connection:
            if self.reply_queue is None:
                queue = queues.temporary(connection)
                queues.request(connection, self.queue, self.message(), queue)
                return self._wait(lambda: queues.consume(connection, queue))
            iid = queues.new_iid(connection, self.reply_queue)
            queues.request(connection, self.queue, self.message(), self.reply_queue, iid)
            if not self.deferrable:
                return self._wait(lambda: queues.take(connection, iid))
        trigger = ReplyTrigger(self.reply_queue, iid, self.postgres_conn_id, poll_interval=self.poll_interval)
        return self.defer(trigger=trigger, method_name="resume", timeout=self.within)

    def resume(self, context: Context, event: dict[str, Any]) -> dict[str, str | None]:
        """Take the answer that is there."""
        if "error" in event:
            raise AirflowException(event["error"])
        with PgChangeHook(self.postgres_conn_id).get_conn(primary=True) as connection:
            found = queues.take(connection, event["iid"])
        if found is None:
            raise AirflowException(
                f"the answer {event['iid']} is gone: nobody may consume from queue {self.reply_queue}"
            )
        return found

    def _wait(self, look: Callable[[], dict[str, str | None] | None]) -> dict[str, str | None]:
        deadline = time.monotonic() + self.within.total_seconds()
        while (found := look()) is None:
            if time.monotonic() > deadline:
                raise AirflowException(f"no answer came from queue {self.queue} within {self.within}")
            time.sleep(self.poll_interval)
        return found


class ClearQueuesOperator(BaseOperator):
    """Deletes from queues what expired, what no consumer's selector matches, and what all consumers have received.

    What a consumer is still to receive stays. Safe to run at any time, and again.

    :param queues: the queues, a list or a text with commas between; default: all (templated)
    :param postgres_conn_id: the database of the queues; with a role that may clear them
    """

    template_fields: Sequence[str] = ("queues", "postgres_conn_id")

    def __init__(
        self,
        *,
        queues: Sequence[str] | str | None = None,
        postgres_conn_id: str = PgChangeHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.queues = queues
        self.postgres_conn_id = postgres_conn_id

    def execute(self, context: Context) -> dict[str, int]:
        """Returns how many messages are left in each queue, an estimate above ten thousand."""
        chosen = None if self.queues is None else names("queues", self.queues)
        with PgChangeHook(self.postgres_conn_id).get_conn(primary=True) as connection:
            left = queues.clear(connection, chosen)
        for queue, count in left.items():
            self.log.info("queue %s: %d messages are left", queue, count)
        return left
