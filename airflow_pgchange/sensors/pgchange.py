"""Sensors: something is ready, or a consumer has come far enough."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import psycopg
from airflow.sdk import BaseSensorOperator, PokeReturnValue, conf
from airflow.sdk.exceptions import AirflowException

from airflow_pgchange.arguments import FeedLike, feed_of, json_of, wake_rule, watched_of
from airflow_pgchange.feeds import points
from airflow_pgchange.feeds.errors import InvalidArgument
from airflow_pgchange.feeds.feed import Goal, progress_at
from airflow_pgchange.feeds.lag import lag
from airflow_pgchange.feeds.queries import ask
from airflow_pgchange.hooks.pgchange import PgChangeHook
from airflow_pgchange.triggers.alarm import Alarm
from airflow_pgchange.triggers.feed import POLL_INTERVAL, FeedTrigger, PointTrigger

if TYPE_CHECKING:
    from airflow.sdk import Context

POINT = "pgchange_point"
"""The key of the point in the task's state, which outlives reschedules, deferrals and retries; XComs do not.
"""


class FeedSensor(BaseSensorOperator):
    """Waits until changes are ready that nobody works on.

    It guarantees nothing about them: an operator claims its batch from PostgreSQL, exactly once whatever woke
    it.

    :param feed: the feed, or its JSON (templated)
    :param postgres_conn_id: the database that holds the consumer's progress
    :param source_conn_id: the database that holds the changes; default: the same
    :param min_changes: as many must be ready
    :param max_wait: or one that is this old, in seconds or as a timedelta
    :param deferrable: wait in the triggerer; default: what ``[operators] default_deferrable`` says
    :param poll_interval: seconds between two questions of the triggerer; ``poke_interval`` is the one of a worker
    """

    template_fields: Sequence[str] = ("feed", "postgres_conn_id", "source_conn_id")
    template_fields_renderers: ClassVar[dict[str, str]] = {"feed": "json"}

    def __init__(
        self,
        *,
        feed: FeedLike,
        postgres_conn_id: str = PgChangeHook.default_conn_name,
        source_conn_id: str | None = None,
        min_changes: int = 1,
        max_wait: float | timedelta | None = None,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        poke_interval: float = 5.0,
        poll_interval: float = POLL_INTERVAL,
        **kwargs: Any,
    ) -> None:
        super().__init__(poke_interval=poke_interval, **kwargs)
        self.feed = json_of(feed)
        self.postgres_conn_id = postgres_conn_id
        self.source_conn_id = source_conn_id
        # The base class has a max_wait of its own: the longest pause between two pokes.
        self.min_changes, self.oldest = wake_rule(min_changes, max_wait)
        self.deferrable = deferrable
        self.poll_interval = poll_interval

    def execute(self, context: Context) -> Any:
        """Returns the lag that ended the wait, as plain JSON."""
        if not self.deferrable:
            return super().execute(context)
        found = self.poke(context)
        if not found:
            self._defer()
        return found.xcom_value

    def _defer(self) -> NoReturn:
        self.defer(
            trigger=FeedTrigger(
                self.feed,
                self.postgres_conn_id,
                self.source_conn_id,
                min_changes=self.min_changes,
                max_wait=self.oldest,
                poll_interval=self.poll_interval,
                once=True,
            ),
            method_name="resume",
            timeout=_timeout(self),
        )

    def poke(self, context: Context) -> PokeReturnValue:
        feed = watched_of(self.feed)
        with ExitStack() as opened:
            results, source = _open(opened, self.postgres_conn_id, self.source_conn_id)
            found = lag(results, source, feed, self.min_changes)
            enough = Alarm(self.min_changes, self.oldest).due(None, found, 0.0)
            ready = enough and not ask(progress_at(feed, results, source), feed.locked())
        self.log.info("%s: %d ready, %d waiting", feed.name, found.ready, found.waiting)
        return PokeReturnValue(ready, {"feed": feed.name, **asdict(found)} if ready else None)

    def resume(self, context: Context, event: dict[str, Any]) -> dict[str, Any]:
        return _unless_error(event)


class WatermarkSensor(BaseSensorOperator):
    """Waits until a consumer has processed everything that was committed when this sensor first ran, or a
    given commit.

    So another DAG waits for it. The point is taken once, and outlives reschedules, deferrals, retries and
    restarts of the triggerer; a commit in a transaction that was open at that moment is not waited for. What
    the consumer processed is as the guarantee of its operator says.

    :param feed: the consumer's feed, or its JSON (templated)
    :param postgres_conn_id: the database that holds the consumer's progress
    :param source_conn_id: the database that holds the changes; default: the same. Its primary is asked
    :param commit_id: wait for this commit instead (templated); it may come later
    :param deferrable: wait in the triggerer; default: what ``[operators] default_deferrable`` says
    :param poll_interval: seconds between two questions of the triggerer; ``poke_interval`` is the one of a worker
    """

    template_fields: Sequence[str] = ("feed", "postgres_conn_id", "source_conn_id", "commit_id")
    template_fields_renderers: ClassVar[dict[str, str]] = {"feed": "json"}

    def __init__(
        self,
        *,
        feed: FeedLike,
        postgres_conn_id: str = PgChangeHook.default_conn_name,
        source_conn_id: str | None = None,
        commit_id: int | str | None = None,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        poke_interval: float = 5.0,
        poll_interval: float = POLL_INTERVAL,
        **kwargs: Any,
    ) -> None:
        super().__init__(poke_interval=poke_interval, **kwargs)
        self.feed = json_of(feed)
        self.postgres_conn_id = postgres_conn_id
        self.source_conn_id = source_conn_id
        self.commit_id = commit_id
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
                timeout=_timeout(self),
            )
        self._forget(context)

    def poke(self, context: Context) -> bool:
        feed = feed_of(self.feed)
        goal = self._goal(context)
        with ExitStack() as opened:
            results, source = _open(opened, self.postgres_conn_id, self.source_conn_id, primary=True)
            passed, goal, begun = points.has_passed(results, source, feed, goal)
        self._remember(context, goal)
        if passed or begun:
            self.log.info("%s has %sprocessed %s", feed.name, "" if passed else "not yet ", _shown(goal))
        else:
            self.log.info("%s has not begun; `airflow pgchange status` lists the consumers", feed.name)
        return passed

    def resume(self, context: Context, event: dict[str, Any]) -> None:
        _unless_error(event)
        self._forget(context)

    def _goal(self, context: Context) -> Goal:
        state: Any = context.get("task_state_store")
        if self._point is None and state is not None:
            self._point = state.get(POINT)
        wanted = _commit_id(self.commit_id)
        if self._point is None or self._point.get("commit_id") != wanted:
            self._remember(context, self._new_point() if wanted is None else {"commit_id": wanted})
        return self._point or {}

    def _new_point(self) -> Goal:
        with PgChangeHook(self.source_conn_id or self.postgres_conn_id).get_conn(primary=True) as source:
            return points.point(source, feed_of(self.feed))

    def _remember(self, context: Context, goal: Goal) -> None:
        state: Any = context.get("task_state_store")
        if state is not None and goal != self._point:
            state.set(POINT, goal)
        self._point = goal

    def _forget(self, context: Context) -> None:
        """A task that succeeded and is cleared waits for a new point."""
        state: Any = context.get("task_state_store")
        if state is not None:
            state.delete(POINT)


def _commit_id(given: int | str | None) -> int | None:
    """The commit that a rendered template means; None for none."""
    try:
        return None if given is None or given == "" else int(given)
    except ValueError as error:
        raise InvalidArgument(
            f"commit_id must be the id of a commit, a whole number, and is {given!r}"
        ) from error


def _open(
    opened: ExitStack, postgres_conn_id: str, source_conn_id: str | None, *, primary: bool = False
) -> tuple[psycopg.Connection[Any], psycopg.Connection[Any]]:
    results = opened.enter_context(PgChangeHook(postgres_conn_id).get_conn(primary=True))
    if source_conn_id is None:
        return results, results
    return results, opened.enter_context(PgChangeHook(source_conn_id).get_conn(primary=primary))


def _shown(goal: Goal) -> str:
    if "commit_id" in goal:
        return f"commit {goal['commit_id']}"
    return f"what was committed until {goal.get('until')}"


def _timeout(sensor: BaseSensorOperator) -> timedelta:
    return timedelta(seconds=sensor.timeout)


def _unless_error(event: dict[str, Any]) -> dict[str, Any]:
    if "error" in event:
        raise AirflowException(event["error"])
    return event
