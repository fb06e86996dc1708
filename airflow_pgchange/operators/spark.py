"""The operator that processes batches with Spark. Needs the extra ``spark``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg

from airflow_pgchange.errors import ExtraMissing, InvalidArgument, Stopped
from airflow_pgchange.feeds.argument_checks import SPARK_LIMIT
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.transaction import PING_EVERY, ConsumerTransaction
from airflow_pgchange.hooks.pgchange import PgChangeHook
from airflow_pgchange.operators import spark_connect
from airflow_pgchange.operators.claim import CONSUMER
from airflow_pgchange.operators.spark_arguments import SparkArguments
from airflow_pgchange.operators.spark_checks import environment_of
from airflow_pgchange.operators.spark_detached import DetachedSpark
from airflow_pgchange.operators.spark_submission import Submission
from airflow_pgchange.operators.spark_ui import SparkUiLink, ui_of
from airflow_pgchange.results.merge import Result, merge, read_manifest
from airflow_pgchange.spark import fork_client, poison_batch, submit
from airflow_pgchange.spark.progress_notes import Notes
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
"""Without this, Spark's log lines would bury those of the application in the task's log."""
UI = SparkUiLink()


class SparkBatchOperator(DetachedSpark, SparkSubmitOperator):
    """Runs a Spark application for the batches of a feed, and commits the results of each together with the progress.

    An application that uses ``airflow_pgchange.spark.batch_job`` is started for each batch. An application that uses
    ``batch_jobs`` processes all batches of the task, one after another. It stages its results. This operator merges them
    in the consumer's transaction, before it claims the next batch. While Spark runs, that transaction holds only the
    consumer's lock. If the connection is lost, or this task ends, the job is ended, too. A job that survives can write
    only to its own staging tables.

    If ``conn_id`` is a connection of type ``spark``, spark-submit starts the application with a driver of its own. If it
    is of type ``spark_connect``, the application runs on that server, in a session of its own, from a process beside this
    task. It then starts in a second.

    Guarantee for results that the application merges: exactly once, in PostgreSQL and in tables of a lake. If the
    changes come from another PostgreSQL (``source_conn_id``), this holds for commit queues, the event log and the
    topology. For tubes and message queues it is then at least once in PostgreSQL. If such a source lost its latest
    transactions, an error says so, and the changes after the mark are processed at least once. For results that the
    application writes to other systems the guarantee is at least once; use the batch's id as their key.

    With ``detached`` the driver runs on a worker of a standalone cluster. The task claims a batch with a lease, starts
    the driver, and is deferred until it has ended. Meanwhile it holds no worker slot, no connection and no transaction.
    Then the task acks the batch, or releases it if the driver failed. The guarantees are the same.

    The operator takes the arguments of SparkSubmitOperator, too. With a Spark Connect server it takes only those that do
    not concern a driver. Only client mode is supported: the driver runs beside this task, with a local master or a
    cluster. Our package is sent along as a zip file. The executors' Python needs the packages in
    ``airflow_pgchange.spark.package.EXECUTOR_PACKAGES``.

    :param limit: the maximum of changes in a batch
    :param catalogue_conn_id: the catalogue of the cluster whose tables the application reads with ``job.routed``
        (templated)
    :param instances_conn_id: the user, password and database for the cluster's instances, whose hosts and ports are in
        the catalogue; default: those of the source
    :param fast_start: start the driver's JVM from a class-data archive, which is made once in this user's cache. It pays
        for batches of up to some hundred thousand changes, and has no effect with a Spark Connect server
    :param detached: start the driver on the cluster, and wait for it deferred; see the guide of detached batches
    :param lease: with ``detached``, how long the batch is not claimed again, unless the lease is renewed (templated)
    """

    operator_extra_links = (UI, CONSUMER)
    ping_every = PING_EVERY
    """Seconds between two checks of the consumer's connection while Spark runs."""

    template_fields: Sequence[str] = (
        *SparkSubmitOperator.template_fields,
        *DetachedSpark.template_fields,
        "catalogue_conn_id",
        "instances_conn_id",
    )

    def __init__(
        self,
        *,
        catalogue_conn_id: str | None = None,
        instances_conn_id: str | None = None,
        fast_start: bool = False,
        detached: bool = False,
        limit: Number = SPARK_LIMIT,
        name: str = "{{ dag.dag_id }}.{{ task.task_id }}",
        **kwargs: Any,
    ) -> None:
        if kwargs.pop("durable", False):
            raise InvalidArgument(
                "durable=True is not possible: the consumer's transaction ends with each try of the task; leave it out"
            )
        super().__init__(limit=limit, name=name, **{"deferrable": detached, **kwargs})
        # Set here, because before Airflow 3.3 Airflow's operator warns of each durable that it is given.
        self.durable = False
        self._arguments = SparkArguments(kwargs)
        self.conn_id = self._arguments.conn_id
        self.catalogue_conn_id = catalogue_conn_id
        self.instances_conn_id = instances_conn_id
        self.fast_start = fast_start
        self.detached = detached
        self._serving: Serving | None = None
        self._running: fork_client.Running | None = None
        self._submission: Submission | None = None

    @classmethod
    def get_serialized_fields(cls) -> frozenset[str]:
        fields = super().get_serialized_fields()  # type: ignore[no-untyped-call]
        return frozenset({*fields, "spark_needs"})

    @property
    def spark_needs(self) -> str:
        """The task's requirements for Spark, as JSON. Airflow stores them with the DAG."""
        return self._arguments.needs(self)

    def execute(self, context: Context) -> dict[str, Any]:  # type: ignore[override]
        # Airflow pushes the link only when the task ends. Push it now, so that it works while Spark runs.
        if (ui := ui_of(self.conn_id)) and "ti" in context:
            context["ti"].xcom_push(UI.xcom_key, ui)
        if self.detached:
            self._check_detached()
            return self._start(context)
        self._arguments.check(self, self._environment())
        try:
            done = super().execute(context)
            self._finish_serving()
            return done
        finally:
            self._end_serving()

    def _check_detached(self) -> None:
        """Raise an error for arguments that need a transaction or a process beside the driver."""
        if self.catalogue_conn_id is not None or self.max_batches != 1 or self.until != "empty":
            raise InvalidArgument(
                f"{self.task_id}: with detached=True a task processes one batch, and job.routed() cannot be used: leave "
                "out max_batches, until and catalogue_conn_id"
            )

    def process_batch(self, transaction: ConsumerTransaction, batch: Batch, context: Context) -> None:
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
        """End the job: its JVM or its session on the server, and its Python process. The batch is rolled back."""
        super().on_kill()
        self._end_job()

    def _stage(self, transaction: ConsumerTransaction, batch: Batch, context: Context) -> tuple[Result, ...]:
        """Have the batch processed by the application that waits for a batch, or by a new application."""
        progress = transaction.progress
        progress.begin("start")
        if self._serving is None or not self._serving.wants_more:
            if self._serving is not None and self._serving.failure is not None:
                self.log.error(
                    "the application failed after its batches, which are all committed; starting it again: %s",
                    self._serving.failure,
                )
            self._end_serving()
            self._serving = Serving(self._kill)
        serving = self._serving
        manifest = serving.next_manifest()
        notes = Notes(manifest)
        progress.at("Spark", notes)
        environment = self._hand_over(batch, manifest)
        # An application that ends in any other way than by an error of its batch may have lost a server.
        transaction.is_outage = True
        # on_kill may have been called before self._serving was set.
        if self._stop():
            serving.stop()
        try:
            with transaction.kept_alive(self._end_job, self.ping_every):
                if not serving.has_begun:
                    server = spark_connect.server_of(self._arguments.connection())
                    serving.begin(lambda: self._run(server, environment, serving.folder, context))
                serving.wait()
            transaction.is_outage = False
        except Exception:
            transaction.is_outage = not poison_batch.is_noted(manifest)
            raise
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
            request = spark_connect.application(self, application, arguments, server, environment)
            self._running = fork_client.start(request, spark_connect.keeper())
            self._running.wait(self.log.info)

    def _application_in(self, folder: Path) -> tuple[str, list[Any] | None]:
        """Return the path of the application and its arguments. A file that is made for it goes into ``folder``."""
        return self.application, self.application_args

    def _hand_over(self, batch: Batch, manifest: Path) -> dict[str, str]:
        results = PgChangeHook(self.postgres_conn_id).conninfo()
        source = PgChangeHook(self.source_conn_id).conninfo() if self.source_conn_id else None
        handed = submit.environment(
            batch, feed_of(self.feed), results, source, manifest, cluster=self._cluster()
        )
        return {**self._environment(), **handed}

    def _environment(self) -> dict[str, str]:
        """The environment of the application."""
        return environment_of(self.env_vars or {})

    def _submission_of(
        self, arguments: list[Any] | None, environment: dict[str, str], folder: Path, context: Context
    ) -> Submission:
        properties = {**QUIET, **submit.startup_conf(fast_start=self.fast_start), **(self.conf or {})}
        py_files = ",".join(filter(None, (self.py_files, submit.py_files())))
        hook = self._arguments.hook(
            self, context, properties=properties, py_files=py_files, application_args=arguments
        )
        # A job that is killed cannot clean up, so its temporary files go into the batch's folder, which is deleted.
        options = " ".join(
            filter(None, (environment.get("SPARK_SUBMIT_OPTS"), f'-Djava.io.tmpdir="{folder}"'))
        )
        return Submission(hook, {**self._arguments.python(), **environment, "SPARK_SUBMIT_OPTS": options})

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
        """Wait for the end of the application. If it fails now, the task does not fail: all batches are committed, and a
        retry would find none and report nothing."""
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
                "the application failed after its last batch; every batch is committed, and the task succeeds: %s",
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
