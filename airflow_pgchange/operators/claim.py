"""The base of the operators that claim batches: the arguments of a claim."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote

from airflow.providers.common.compat.sdk import BaseOperator, BaseOperatorLink, conf, redact

from airflow_pgchange.feeds.argument_checks import BATCH_LIMIT, OnBusy, OnGiveUp, Seconds, check_give_up
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.draining import Plan
from airflow_pgchange.feeds.feed import Feed
from airflow_pgchange.feeds.stopping import Stop
from airflow_pgchange.feeds.transaction import ConsumerTransaction
from airflow_pgchange.hooks.pgchange import PgChangeHook
from airflow_pgchange.operators.page_link import ConsumerLink
from airflow_pgchange.utils.arguments import Check, CheckedArguments, FeedLike, Number, checks

if TYPE_CHECKING:
    from airflow.sdk import Context

CONSUMER = ConsumerLink()


def task_of(context: Context) -> tuple[str, ...]:
    """Return the DAG, the run, the task and the map index, each percent-encoded; empty outside of Airflow."""
    ti = context.get("ti")
    if ti is None:
        return ()
    return tuple(quote(str(part), safe="") for part in (ti.dag_id, ti.run_id, ti.task_id, ti.map_index))


def run_of(context: Context) -> str | None:
    """Return the try of the task as a text that the page can parse; None outside of Airflow."""
    task = task_of(context)
    return "/".join((*task, str(context["ti"].try_number))) if task else None


class ConsumerOperator(CheckedArguments, BaseOperator):
    """A task of one consumer, between the database of its results and the database of its changes."""

    arguments: ClassVar[Mapping[str, Check]] = checks("feed", "postgres_conn_id", "source_conn_id")
    template_fields: Sequence[str] = tuple(arguments)
    operator_extra_links: Collection[BaseOperatorLink] = (CONSUMER,)
    template_fields_renderers: ClassVar[dict[str, str]] = {"feed": "json"}

    def __init__(
        self,
        *,
        feed: FeedLike,
        postgres_conn_id: str = PgChangeHook.default_conn_name,
        source_conn_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.feed = feed
        self.postgres_conn_id = postgres_conn_id
        self.source_conn_id = source_conn_id
        self._stop = Stop()

    def _conninfos(self) -> tuple[str, str | None]:
        """Return the connection strings of the results and of the changes; None for the changes if they are the same."""
        source = PgChangeHook(self.source_conn_id).conninfo() if self.source_conn_id else None
        return PgChangeHook(self.postgres_conn_id).conninfo(), source


class ClaimingOperator(ConsumerOperator):
    """Claims batches of a feed. A subclass defines what is done with a batch.

    :param limit: the maximum of changes in a batch
    :param on_busy: if another run works on this feed: ``wait`` for it, ``skip`` the task, or ``fail``
    :param busy_timeout: how long ``wait`` waits for the other run; None: as long as it takes
    :param max_attempts: the number of failures after which a batch is not tried again; None: always try again
    :param on_give_up: what is done with such a batch: ``bisect``, ``fail`` or ``dead_letter``
    """

    arguments: ClassVar[Mapping[str, Check]] = {
        **ConsumerOperator.arguments,
        **checks("limit", "on_busy", "busy_timeout", "max_attempts", "on_give_up"),
    }
    template_fields: Sequence[str] = tuple(arguments)

    def __init__(
        self,
        *,
        limit: Number = BATCH_LIMIT,
        on_busy: OnBusy = "wait",
        busy_timeout: Seconds | None = None,
        max_attempts: Number | None = None,
        on_give_up: OnGiveUp = "bisect",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_give_up(on_give_up, max_attempts)
        self.limit: Any = limit
        self.on_busy = on_busy
        self.busy_timeout = busy_timeout
        self.max_attempts: Any = max_attempts
        self.on_give_up = on_give_up
        self._transaction: ConsumerTransaction | None = None

    def on_kill(self) -> None:
        """Cancel the statement on the consumer's connection. The batch is rolled back."""
        self._stop.ask()
        if self._transaction is not None:
            self._transaction.cancel()

    def _plan(self, feed: Feed, context: Context) -> Plan:
        results, source = self._conninfos()
        return Plan(
            feed,
            results,
            source,
            limit=self.limit,
            on_busy=self.on_busy,
            busy_timeout=self.busy_timeout,
            max_attempts=self.max_attempts,
            on_give_up=self.on_give_up,
            hide=lambda text: str(redact(text)),
            run=run_of(context),
            register=conf.getboolean("pgchange", "register_consumers", fallback=True),
        )

    def _tell_of_batch(self, feed: Feed, batch: Batch) -> None:
        self.log.info(
            "%s: batch %s, attempt %d, %d changes since %s%s",
            feed.name,
            batch.id,
            batch.attempt,
            batch.count,
            batch.oldest,
            f", part of batch {batch.parts_of[0]}" if batch.is_part else "",
        )

    def _tell_of_letter(self, feed: Feed, letter: int) -> None:
        self.log.error(
            "%s: a batch was given up, and is now dead letter %d. When the cause is corrected, send it again with: "
            "airflow-pgchange letters redrive %d --postgres-conn-id %s%s",
            feed.name,
            letter,
            letter,
            *self._letters_at(feed),
        )

    @property
    def _source_option(self) -> str:
        """Return the option ``--source-conn-id`` for commands that a log line recommends. Empty if results and changes
        are in one database."""
        return f" --source-conn-id {self.source_conn_id}" if self.source_conn_id else ""

    def _letters_at(self, feed: Feed) -> tuple[str, str]:
        """Return the connection to the database of the feed's dead letters, and a further option for the command line."""
        if feed.progress == "source":
            return self.source_conn_id or self.postgres_conn_id, ""
        return self.postgres_conn_id, self._source_option
