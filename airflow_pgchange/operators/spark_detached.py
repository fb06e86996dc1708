"""SparkBatchOperator with ``detached``: a driver on the cluster works on the batch while the task is deferred."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn
from urllib.parse import urlsplit

import psycopg

from airflow_pgchange import detached
from airflow_pgchange.detached import Handle
from airflow_pgchange.errors import ApplicationFailed, InvalidArgument, StaleClaim
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.draining import Drained
from airflow_pgchange.feeds.error_text import described
from airflow_pgchange.feeds.error_translation import is_of_the_batch
from airflow_pgchange.operators.feed import FeedOperator
from airflow_pgchange.operators.lease import LeasingOperator, ack_batch
from airflow_pgchange.operators.spark_arguments import SparkArguments
from airflow_pgchange.operators.spark_checks import master_of
from airflow_pgchange.results.manifests import merge_kept
from airflow_pgchange.results.staging import Result
from airflow_pgchange.spark.detached import HANDLE
from airflow_pgchange.triggers import spark_standalone
from airflow_pgchange.triggers.spark_driver import DriverTrigger
from airflow_pgchange.triggers.spark_standalone import FINISHED, Driver
from airflow_pgchange.utils.arguments import Check, feed_of

if TYPE_CHECKING:
    from airflow.sdk import Context

PROPERTIES = {
    "archives": "spark.archives",
    "driver_class_path": "spark.driver.extraClassPath",
    "driver_memory": "spark.driver.memory",
    "exclude_packages": "spark.jars.excludes",
    "executor_cores": "spark.executor.cores",
    "executor_memory": "spark.executor.memory",
    "files": "spark.files",
    "jars": "spark.jars",
    "packages": "spark.jars.packages",
    "py_files": "spark.submit.pyFiles",
    "repositories": "spark.jars.repositories",
    "total_executor_cores": "spark.cores.max",
}
"""The arguments of SparkSubmitOperator that a driver on the cluster can use, as Spark properties."""
OF_A_TASK = (
    "keytab",
    "principal",
    "proxy_user",
    "properties_file",
    "post_submit_commands",
    "java_class",
    "num_executors",
)
"""Those that have no effect, because no spark-submit runs beside the task."""
REST_PORT = 6066
"""The default of spark.master.rest.port."""


class DetachedSpark(LeasingOperator, FeedOperator):
    """A task that claims a batch with a lease, starts a driver for it, is deferred while the driver runs, and acks."""

    arguments: ClassVar[Mapping[str, Check]] = {**FeedOperator.arguments, **LeasingOperator.arguments}
    template_fields: Sequence[str] = tuple(arguments)

    _arguments: SparkArguments
    application: str
    application_args: list[Any] | None
    conf: dict[Any, Any] | None
    env_vars: dict[str, Any] | None
    name: str

    def resume_job(self, context: Context, event: dict[str, Any]) -> dict[str, Any]:
        """Ack the batch if the driver has succeeded, else release it."""
        handle = Handle.from_text(event["handle"])
        try:
            _check_end(event)
            ack_batch(self, handle, context, _merge)
        except Exception as error:
            self._release(handle, error)
            raise
        return self._conclude(handle.feed, Drained(1, handle.count, (handle.batch_id,)))

    def _start(self, context: Context) -> dict[str, Any]:
        """Claim a batch and start its driver; the task continues in ``resume_job``."""
        masters = self._masters()
        feed = feed_of(self.feed)
        handle, done = self._claim(feed, context)
        if handle is not None:
            self._defer(handle, self._driver_for(handle, masters))
        return self._conclude(feed, done)

    def _driver_for(self, handle: Handle, masters: Sequence[str]) -> Driver:
        try:
            driver = spark_standalone.submit(masters, *self._submitted(handle))
        except Exception as error:
            self._release(handle, error)
            raise
        self.log.info(
            "%s: driver %s processes batch %s on a worker of the cluster",
            handle.feed.name,
            driver.id,
            handle.batch_id,
        )
        return driver

    def _defer(self, handle: Handle, driver: Driver) -> NoReturn:
        self.defer(
            trigger=DriverTrigger(
                str(handle),
                self.source_conn_id or self.postgres_conn_id,
                driver.id,
                driver.masters,
                poll_interval=self._arguments.value(self, "status_poll_interval"),
            ),
            method_name="resume_job",
            timeout=self.execution_timeout,
        )

    def _submitted(self, handle: Handle) -> tuple[list[str], dict[str, str], dict[str, str]]:
        """Return the arguments of spark-submit, the Spark properties, and the environment of the driver."""
        values = {prop: self._arguments.value(self, name) for name, prop in PROPERTIES.items()}
        properties = {
            "spark.master": master_of(self._arguments.connection()),
            "spark.app.name": self.name,
            **{name: str(value) for name, value in values.items() if value},
            **{str(name): str(value) for name, value in (self.conf or {}).items()},
        }
        options = [part for name, value in properties.items() for part in ("--conf", f"{name}={value}")]
        environment = {str(name): str(value) for name, value in (self.env_vars or {}).items()}
        arguments = [*options, self.application, *map(str, self.application_args or ())]
        return arguments, properties, {**environment, HANDLE: str(handle)}

    def _release(self, handle: Handle, error: Exception) -> None:
        """End the lease with the error, so that the batch can be claimed again. If the application has stored an error
        itself, that error is kept."""
        results, source = self._conninfos()
        text = described(error, (results, source or ""))
        of_batch = None if isinstance(error, ApplicationFailed) else is_of_the_batch(error)
        detached.release(handle, results, source, error=text, of_batch=of_batch)

    def _masters(self) -> list[str]:
        """Return the addresses of the REST API of the cluster's masters. Raises InvalidArgument if the application
        cannot run detached."""
        connection = self._arguments.connection()
        master = master_of(connection)
        if connection is None or not master.startswith("spark://"):
            raise InvalidArgument(
                f"{self.task_id}: detached=True needs a standalone cluster, spark://HOST, but connection "
                f"{self._arguments.conn_id} has the master {master}. Use claimed_batch around an operator for that "
                f"cluster, such as SparkKubernetesOperator, or for YARN SparkSubmitOperator with deploy_mode='cluster'"
            )
        unfit = [name for name in OF_A_TASK if self._arguments.value(self, name)]
        if unfit:
            raise InvalidArgument(
                f"{self.task_id}: {', '.join(unfit)} cannot be used with detached=True: leave it out"
            )
        extra = connection.extra_dejson
        scheme, port = extra.get("rest-scheme") or "http", extra.get("rest-port") or REST_PORT
        return [f"{scheme}://{host}:{port}" for host in _hosts(master)]


def _hosts(master: str) -> Iterator[str]:
    for address in master.removeprefix("spark://").split(","):
        host = urlsplit(f"//{address}").hostname or ""
        yield f"[{host}]" if ":" in host else host


def _check_end(event: dict[str, Any]) -> None:
    """Raise the error of a driver that did not succeed."""
    if "stale" in event:
        raise StaleClaim(event["stale"])
    if event["state"] != FINISHED:
        raise ApplicationFailed(
            f"{event['driver']} ended as {event['state']}: its output is on its worker, which the Spark master's page "
            "names"
        )


def _merge(batch: Batch, connection: psycopg.Connection[Any]) -> tuple[Result, ...]:
    return merge_kept(connection, batch)
