"""A sensor that waits for ready changes of a feed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from airflow.providers.common.compat.sdk import (
    AirflowException,
    AirflowFailException,
    BaseSensorOperator,
    PokeReturnValue,
    conf,
)

from airflow_pgchange.feeds.argument_checks import Seconds
from airflow_pgchange.feeds.consumer_state import lag
from airflow_pgchange.feeds.feed import progress_at
from airflow_pgchange.feeds.queries import ask
from airflow_pgchange.hooks.pgchange import PgChangeHook, both
from airflow_pgchange.triggers.backlog_alarm import Alarm
from airflow_pgchange.triggers.feed import POLL_INTERVAL, FeedTrigger
from airflow_pgchange.utils.arguments import CheckedArguments, FeedLike, Number, checks, watched, watched_of

if TYPE_CHECKING:
    from airflow.sdk import Context


class FeedSensor(CheckedArguments, BaseSensorOperator):
    """Waits until changes of a feed are ready and no consumer is at work on the feed.

    The sensor guarantees nothing about these changes, because another consumer may claim them first. An operator claims
    its batch from PostgreSQL, and its guarantee does not depend on the sensor.

    :param feed: the feed, or its JSON (templated)
    :param postgres_conn_id: the database that holds the consumer's progress
    :param source_conn_id: the database that holds the changes; default: the same
    :param min_changes: wait until this many changes are ready (templated)
    :param max_age: or until a ready change is this old (templated)
    :param deferrable: wait in the triggerer; default: the option ``[operators] default_deferrable``
    :param poll_interval: pause between two queries of the triggerer (templated). A worker uses ``poke_interval``
    """

    arguments = checks(
        "postgres_conn_id", "source_conn_id", "min_changes", "max_age", "poll_interval", feed=watched
    )
    template_fields: Sequence[str] = tuple(arguments)
    template_fields_renderers: ClassVar[dict[str, str]] = {"feed": "json"}

    def __init__(
        self,
        *,
        feed: FeedLike,
        postgres_conn_id: str = PgChangeHook.default_conn_name,
        source_conn_id: str | None = None,
        min_changes: Number = 1,
        max_age: Seconds | None = None,
        deferrable: bool = conf.getboolean("operators", "default_deferrable"),
        poke_interval: float = 5.0,
        poll_interval: Seconds = POLL_INTERVAL,
        **kwargs: Any,
    ) -> None:
        super().__init__(poke_interval=poke_interval, **kwargs)
        self.feed = feed
        self.postgres_conn_id = postgres_conn_id
        self.source_conn_id = source_conn_id
        self.min_changes: Any = min_changes
        self.max_age: Any = max_age
        self.deferrable = deferrable
        self.poll_interval = poll_interval

    def execute(self, context: Context) -> Any:
        """Return the lag that ended the wait, as plain JSON."""
        if not self.deferrable:
            return super().execute(context)
        result = self.poke(context)
        if not result:
            self._defer()
        return result.xcom_value

    def _defer(self) -> NoReturn:
        self.defer(
            trigger=FeedTrigger(
                self.feed,
                self.postgres_conn_id,
                self.source_conn_id,
                min_changes=self.min_changes,
                max_age=self.max_age,
                poll_interval=self.poll_interval,
                once=True,
            ),
            method_name="resume",
            timeout=whole_wait(self),
        )

    def poke(self, context: Context) -> PokeReturnValue:
        feed = watched_of(self.feed)
        with both(self.postgres_conn_id, self.source_conn_id, primary=False) as (results, source):
            current = lag(results, source, feed, self.min_changes)
            enough = Alarm(self.min_changes, self.max_age).due(None, current, 0.0)
            ready = enough and not ask(progress_at(feed, results, source), feed.locked())
        self.log.info("%s: %d ready, %d waiting", feed.name, current.ready, current.waiting)
        return PokeReturnValue(ready, {"feed": feed.name, **asdict(current)} if ready else None)

    def resume(self, context: Context, event: dict[str, Any]) -> dict[str, Any]:
        return unless_error(event)


def whole_wait(sensor: BaseSensorOperator) -> timedelta:
    """Return the timeout of a deferred sensor."""
    return timedelta(seconds=sensor.timeout)


def unless_error(event: dict[str, Any]) -> dict[str, Any]:
    """Return the event of a trigger, unless it reports an error.

    Raises AirflowFailException, which ends all retries, for a permanent error, and AirflowException for any other error.
    """
    if "error" in event:
        raise (AirflowFailException if event.get("permanent") else AirflowException)(event["error"])
    return event
