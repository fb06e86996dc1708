"""A sensor that waits until a consumer has processed everything up to a point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.providers.common.compat.sdk import BaseSensorOperator, conf

from airflow_pgchange.feeds import end_position
from airflow_pgchange.feeds.argument_checks import Seconds
from airflow_pgchange.feeds.feed import Goal
from airflow_pgchange.hooks.pgchange import PgChangeHook, both
from airflow_pgchange.sensors.feed import unless_error, whole_wait
from airflow_pgchange.triggers.feed import POLL_INTERVAL, PointTrigger
from airflow_pgchange.utils.arguments import CheckedArguments, FeedLike, checks, feed_of

if TYPE_CHECKING:
    from airflow.sdk import Context

POINT = "pgchange_point"
"""The key of the point in the task's state. The state survives reschedules, deferrals and retries; XComs do not."""


class ConsumerSensor(CheckedArguments, BaseSensorOperator):
    """Waits until a consumer has processed everything that was committed when this sensor first ran.

    Use it to make a DAG wait for a consumer of another DAG. The point is taken once. It survives reschedules, deferrals,
    retries and restarts of the triggerer. The sensor does not wait for transactions that were open at that moment. The
    guarantee of the processing is that of the consumer's operator.

    :param feed: the consumer's feed, or its JSON (templated)
    :param postgres_conn_id: the database that holds the consumer's progress
    :param source_conn_id: the database that holds the changes; default: the same. The sensor connects to its primary
    :param deferrable: wait in the triggerer; default: the option ``[operators] default_deferrable``
    :param poll_interval: pause between two queries of the triggerer (templated). A worker uses ``poke_interval``
    """

    arguments = checks("feed", "postgres_conn_id", "source_conn_id", "poll_interval")
    template_fields: Sequence[str] = tuple(arguments)
    template_fields_renderers: ClassVar[dict[str, str]] = {"feed": "json"}

    def __init__(
        self,
        *,
        feed: FeedLike,
        postgres_conn_id: str = PgChangeHook.default_conn_name,
        source_conn_id: str | None = None,
        deferrable: bool = conf.getboolean("operators", "default_deferrable"),
        poke_interval: float = 5.0,
        poll_interval: Seconds = POLL_INTERVAL,
        **kwargs: Any,
    ) -> None:
        super().__init__(poke_interval=poke_interval, **kwargs)
        self.feed = feed
        self.postgres_conn_id = postgres_conn_id
        self.source_conn_id = source_conn_id
        self.deferrable = deferrable
        self.poll_interval = poll_interval
        self._point: Mapping[str, Any] | None = None

    def execute(self, context: Context) -> None:
        if not self.deferrable:
            super().execute(context)
        elif not self.poke(context):
            self.defer(
                trigger=PointTrigger(
                    self.feed,
                    self.postgres_conn_id,
                    self.source_conn_id,
                    self._goal(context),
                    poll_interval=self.poll_interval,
                ),
                method_name="resume",
                timeout=whole_wait(self),
            )
        self._forget(context)

    def poke(self, context: Context) -> bool:
        feed = feed_of(self.feed)
        goal = self._goal(context)
        with both(self.postgres_conn_id, self.source_conn_id) as (results, source):
            passed, goal, begun = end_position.has_passed(results, source, feed, goal)
        self._remember(context, goal)
        if passed or begun:
            state = "has" if passed else "has not yet"
            self.log.info("%s %s processed all commits until %s", feed.name, state, goal.get("until"))
        else:
            self.log.info("%s has not begun; `airflow-pgchange status` lists the consumers", feed.name)
        return passed

    def resume(self, context: Context, event: dict[str, Any]) -> None:
        unless_error(event)
        self._forget(context)

    def _goal(self, context: Context) -> Goal:
        state: Any = context.get("task_state_store")
        if self._point is None and state is not None:
            self._point = state.get(POINT)
        if self._point is None:
            self._remember(context, self._new_point())
        return self._point or {}

    def _new_point(self) -> Goal:
        with PgChangeHook(self.source_conn_id or self.postgres_conn_id).get_conn(primary=True) as source:
            return end_position.point(source, feed_of(self.feed))

    def _remember(self, context: Context, goal: Goal) -> None:
        state: Any = context.get("task_state_store")
        if state is not None and goal != self._point:
            state.set(POINT, goal)
        self._point = goal

    def _forget(self, context: Context) -> None:
        """Delete the point, so that a task that succeeded waits for a new point after it is cleared."""
        state: Any = context.get("task_state_store")
        if state is not None:
            state.delete(POINT)
