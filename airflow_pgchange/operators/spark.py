"""A batch for Spark. Needs the extra ``spark``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg

from airflow_pgchange.errors import ExtraMissing, InvalidArgument, Stopped
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.checks import SPARK_LIMIT
from airflow_pgchange.feeds.transaction import PING_EVERY, ConsumerTransaction
from airflow_pgchange.hooks.pgchange import PgChangeHook
from airflow_pgchange.operators import spark_connect
from airflow_pgchange.operators.feed import CONSUMER, FeedOperator
from airflow_pgchange.operators.spark_arguments import SparkArguments
from airflow_pgchange.operators.spark_submission import Submission
from airflow_pgchange.operators.spark_ui import SparkUiLink, ui_of
from airflow_pgchange.results.merge import Staged, merge, read_manifest
from airflow_pgchange.spark import fork_client, submit
from airflow_pgchange.spark.installed import check_versions
from airflow_pgchange.spark.notes import Notes
from airflow_pgchange.spark.serving import Serving
from airflow_pgchange.topology.bucket_owners import Cluster
from airflow_pgchange.utils.arguments import Number, feed_of

try:
    from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
except ImportError as error:
    raise ExtraMissing(
        f"SparkBatchOperator needs {error.name}: pip install 'airflow-provider-pgchange[spark]'"
    ) from error

if TYPE_CHECKING:
    from airflow.sdk import Context


QUIET = {"spark.log.level": "WARN"}
"""Spark's own reports would bury the application's in the task's log."""
UI = SparkUiLink()


class SparkBatchOperator(FeedOperator, SparkSubmitOperator):
    """Runs a Spark application for the batches of a feed, and commits the results of each together with the progress.

    The application opens a batch with ``airflow_pgchange.spark.job.batch_job``, and is run for each; or it takes one
    after another, with ``batch_jobs``, as many as this task serves. What it stages is merged here, in the consumer's
    transaction, before the next batch is claimed. While Spark runs, that transaction holds the consumer's lock and
    nothing else. When the connection is lost, or this task ends, the job ends too; one that lived on could write to its
    own staging only.

    Where ``conn_id`` is a connection of type ``spark``, the application is submitted, by spark-submit, to a driver of its
    own; of type ``spark_connect``, it runs beside this task, in a process and a session of its own, on a server that is
    there already, and starts in a second.

    Guarantee: exactly once for results that the application merges; of commit queues, the event log and the
    topology also where the changes come from another PostgreSQL (``source_conn_id``; after a source that lost
    its latest transactions, at least once from the mark, and it is said), of tubes and message queues at least
    once then. At least once for results that it writes elsewhere, with the batch's id as the key.

    Takes the arguments of SparkSubmitOperator too; beside a server those that make no driver. Client mode only: the
    driver runs beside this task, on a local master or on a cluster. Our package goes along as a zip; the executors'
    Python needs what ``airflow_pgchange.spark.package.EXECUTOR_PACKAGES`` lists.

    :param limit: changes a batch, at most
    :param catalogue_conn_id: the catalogue of the cluster whose tables the application reads with ``job.routed``
        (templated)
    :param instances_conn_id: user, password and database of the cluster's instances, whose host and port the
        catalogue knows; default: the source's
    :param fast_start: start the driver's JVM, where there is one, from a class-data archive, made once in this user's
        cache: for batches of up to some hundred thousand changes
    """

    operator_extra_links = (UI, CONSUMER)
    ping_every = PING_EVERY
    """Seconds between two looks at the consumer's connection while Spark runs."""

    template_fields: Sequence[str] = (
        *SparkSubmitOperator.template_fields,
        *FeedOperator.template_fields,
        "catalogue_conn_id",
        "instances_conn_id",
    )

    def __init__(
        self,
        *,
        catalogue_conn_id: str | None = None,
        instances_conn_id: str | None = None,
        fast_start: bool = False,
        limit: Number = SPARK_LIMIT,
        name: str = "{{ dag.dag_id }}.{{ task.task_id }}",
        **kwargs: Any,
    ) -> None:
        if kwargs.pop("durable", False):
            raise InvalidArgument(
                "durable=True is not possible: the consumer's transaction ends with the try"
            )
        super().__init__(durable=False, limit=limit, name=name, **kwargs)
        self._arguments = SparkArguments(kwargs)
        self.conn_id = self._arguments.conn_id
        self.catalogue_conn_id = catalogue_conn_id
        self.instances_conn_id = instances_conn_id
        self.fast_start = fast_start
        self._serving: Serving | None = None
        self._running: fork_client.Running | None = None
        self._submission: Submission | None = None

    def execute(self, context: Context) -> dict[str, Any]:  # type: ignore[override]
        # Airflow itself keeps the link when the task has ended.
        if (ui := ui_of(self.conn_id)) and "ti" in context:
            context["ti"].xcom_push(UI.xcom_key, ui)
        try:
            done = FeedOperator.execute(self, context)
            self._finish_serving()
            return done
        finally:
            self._end_serving()

    def process_batch(self, transaction: ConsumerTransaction, batch: Batch, context: Context) -> None:
        check_versions()
        try:
            staged = self._staged = self._stage(transaction, batch, context)

            def write(connection: psycopg.Connection[Any]) -> None:
                transaction.progress.begin("merge")
                merge(connection, batch, staged, transaction.progress.at)

            transaction.ack(write)
        except BaseException:
            self._end_serving()
            raise

    def on_kill(self) -> None:
        """End the job, its JVM or its session on the server, and its Python; nothing of the batch is kept."""
        super().on_kill()
        self._end_job()

    def _stage(self, transaction: ConsumerTransaction, batch: Batch, context: Context) -> tuple[Staged, ...]:
        """Have the batch processed: by the application that waits for one, or else by a new one."""
        progress = transaction.progress
        progress.begin("start")
        if self._serving is None or not self._serving.wants_more:
            if self._serving is not None and self._serving.failure is not None:
                self.log.error(
                    "the application failed behind its batches, each of which is committed; another one is started: %s",
                    self._serving.failure,
                )
            self._end_serving()
            self._serving = Serving(self._kill)
        serving = self._serving
        manifest = serving.next_manifest()
        notes = Notes(manifest)
        progress.at("Spark", notes)
        environment = self._hand_over(batch, manifest)
        # Whoever ended the job before there was one did not see it.
        if self._stop():
            serving.stop()
        try:
            with transaction.kept_alive(self._end_job, self.ping_every):
                if not serving.has_begun:
                    server = spark_connect.server_of(self.conn_id)
                    serving.begin(lambda: self._run(server, environment, serving.folder, context))
                serving.wait()
        finally:
            if (began := notes.began) is not None:
                progress.begin("process", began)
        progress.at("Spark ended", notes)
        return read_manifest(manifest)

    def _run(self, server: str | None, environment: dict[str, str], folder: Path, context: Context) -> None:
        """Run the application until it ends."""
        application, arguments = self._application_in(folder)
        if server is None:
            self._submission = self._submission_of(arguments, environment, folder, context)
            self._submission.run(application)
        else:
            spark_connect.refuse_arguments(self.conn_id, self._arguments.given_for_a_driver(self))
            asked = spark_connect.application(self, application, arguments, server, environment)
            self._running = fork_client.start(asked, spark_connect.keeper())
            self._running.wait(self.log.info)

    def _application_in(self, folder: Path) -> tuple[str, list[Any] | None]:
        """What to run, with which arguments; what is written for it goes into the batch's folder."""
        return self.application, self.application_args

    def _hand_over(self, batch: Batch, manifest: Path) -> dict[str, str]:
        results = PgChangeHook(self.postgres_conn_id).conninfo()
        source = PgChangeHook(self.source_conn_id).conninfo() if self.source_conn_id else None
        handed = submit.environment(
            batch, feed_of(self.feed), results, source, manifest, cluster=self._cluster()
        )
        return {**os.environ, **(self.env_vars or {}), **handed}

    def _submission_of(
        self, arguments: list[Any] | None, environment: dict[str, str], folder: Path, context: Context
    ) -> Submission:
        properties = {**QUIET, **submit.startup_conf(fast_start=self.fast_start), **(self.conf or {})}
        py_files = ",".join(filter(None, (self.py_files, submit.py_files())))
        hook = self._arguments.hook(
            self, context, properties=properties, py_files=py_files, application_args=arguments
        )
        path = os.pathsep.join((environment.get("PATH", os.defpath), str(Path(sys.executable).parent)))
        # A job that is killed cannot clean up: what Spark keeps for its own time goes with the batch's folder.
        options = " ".join(
            filter(None, (environment.get("SPARK_SUBMIT_OPTS"), f'-Djava.io.tmpdir="{folder}"'))
        )
        return Submission(
            hook, {**self._arguments.python(), **environment, "PATH": path, "SPARK_SUBMIT_OPTS": options}
        )

    def _cluster(self) -> Cluster | None:
        if self.catalogue_conn_id is None:
            return None
        instances = self.instances_conn_id or self.source_conn_id or self.postgres_conn_id
        return Cluster(PgChangeHook(self.catalogue_conn_id).conninfo(), PgChangeHook(instances).conninfo())

    def _end_job(self) -> None:
        if self._serving is not None:
            self._serving.stop()
        if self._submission is not None:
            self._submission.end()

    def _finish_serving(self) -> None:
        """Let the application end. Its batches are committed: a task that failed on it now would lose what they gave, and
        its next try would find none."""
        if self._serving is None:
            return
        self._serving.finish()
        failure = self._serving.failure
        if failure is not None and self._stop():
            raise Stopped(
                "the task was killed while its application ended; every batch is committed"
            ) from failure
        if failure is not None:
            self.log.warning(
                "the application failed behind its last batch; every batch is committed, and the task succeeds: %s",
                failure,
            )

    def _end_serving(self) -> None:
        serving, self._serving = self._serving, None
        if serving is not None:
            serving.close()
        self._running = self._submission = None

    def _kill(self) -> None:
        if self._running is not None:
            self._running.stop()
        if self._submission is not None:
            self._submission.kill()
