"""A batch for Spark. Needs the extra ``spark``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from airflow_pgchange.arguments import feed_of
from airflow_pgchange.feeds.batch import Batch
from airflow_pgchange.feeds.bucket_owners import Cluster
from airflow_pgchange.feeds.errors import ExtraMissing, InvalidArgument
from airflow_pgchange.feeds.merge import merge, read_manifest
from airflow_pgchange.feeds.transaction import PING_EVERY, ConsumerTransaction
from airflow_pgchange.hooks.pgchange import PgChangeHook
from airflow_pgchange.operators.draining import DrainingOperator
from airflow_pgchange.spark import submit
from airflow_pgchange.spark.installed import check_versions

try:
    from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook
    from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
except ImportError as error:
    raise ExtraMissing(
        f"SparkBatchOperator needs {error.name}: pip install 'airflow-provider-pgchange[spark]'"
    ) from error

if TYPE_CHECKING:
    from airflow.sdk import Context


QUIET = {"spark.log.level": "WARN"}
"""Spark's own reports would bury the application's in the task's log."""


class SparkBatchOperator(DrainingOperator, SparkSubmitOperator):  # type: ignore[misc]
    """Submits a Spark application for each batch of a feed, and commits its results together with the
    progress.

    The application opens the batch with ``airflow_pgchange.spark.job.batch_job``; what it stages is merged
    here, in the consumer's transaction. While Spark runs, that transaction holds the consumer's lock and
    nothing else. When the connection is lost, or this task ends, the job ends too; one that lived on could
    write to its own staging only.

    Guarantee: exactly once for results that the application merges; of commit queues, the event log and the
    topology also where the changes come from another PostgreSQL (``source_conn_id``; after a source that lost
    its latest transactions, at least once from the mark, and it is said), of tubes and message queues at least
    once then. At least once for results that it writes elsewhere, with the batch's id as the key.

    Takes the arguments of SparkSubmitOperator too. Client mode only: the driver runs beside this task, on a
    local master or on a cluster. Our package goes along as a zip; the executors' Python needs what
    ``airflow_pgchange.spark.package.EXECUTOR_PACKAGES`` lists.

    :param catalogue_conn_id: the catalogue of the cluster whose tables the application reads with ``job.routed``
        (templated)
    :param instances_conn_id: user, password and database of the cluster's instances, whose host and port the
        catalogue knows; default: the source's
    :param fast_start: start the driver's JVM from a class-data archive, made once in this user's cache: for
        batches of up to some hundred thousand changes
    """

    ping_every = PING_EVERY
    """Seconds between two looks at the consumer's connection while Spark runs."""

    template_fields: Sequence[str] = (
        *SparkSubmitOperator.template_fields,
        *DrainingOperator.template_fields,
        "catalogue_conn_id",
        "instances_conn_id",
    )

    def __init__(
        self,
        *,
        catalogue_conn_id: str | None = None,
        instances_conn_id: str | None = None,
        fast_start: bool = False,
        limit: int = 1_000_000,
        name: str = "{{ dag.dag_id }}.{{ task.task_id }}",
        **kwargs: Any,
    ) -> None:
        if kwargs.pop("durable", False):
            raise InvalidArgument(
                "durable=True is not possible: the consumer's transaction ends with the try"
            )
        super().__init__(durable=False, limit=limit, name=name, **kwargs)
        self.catalogue_conn_id = catalogue_conn_id
        self.instances_conn_id = instances_conn_id
        self.fast_start = fast_start

    def process_batch(self, transaction: ConsumerTransaction, batch: Batch, context: Context) -> None:
        check_versions()
        given = self.conf, self.py_files, self.env_vars
        with TemporaryDirectory(prefix="pgchange-", ignore_cleanup_errors=True) as folder:
            manifest = Path(folder) / "manifest.json"
            try:
                self._prepare(batch, manifest)
                with transaction.kept_alive(self._end_job, self.ping_every):
                    SparkSubmitOperator.execute(self, context)
            finally:
                self.conf, self.py_files, self.env_vars = given
            staged = read_manifest(manifest)
        transaction.ack(lambda connection: merge(connection, batch, staged))

    def on_kill(self) -> None:
        """End the job, its JVM and its Python; nothing of the batch is kept."""
        super().on_kill()
        self._end_job()

    def _prepare(self, batch: Batch, manifest: Path) -> None:
        results = PgChangeHook(self.postgres_conn_id).conninfo()
        source = PgChangeHook(self.source_conn_id).conninfo() if self.source_conn_id else None
        handed = submit.environment(
            batch, feed_of(self.feed), results, source, manifest, cluster=self._cluster()
        )
        self.conf = {**QUIET, **submit.startup_conf(fast_start=self.fast_start), **(self.conf or {})}
        self.py_files = ",".join(filter(None, (self.py_files, submit.py_files())))
        environment = {**os.environ, **(self.env_vars or {}), **handed}
        environment["PATH"] = os.pathsep.join(
            (environment.get("PATH", os.defpath), str(Path(sys.executable).parent))
        )
        # A job that is killed cannot clean up: what Spark keeps for its own time goes with the batch's folder.
        environment["SPARK_SUBMIT_OPTS"] = " ".join(
            filter(None, (environment.get("SPARK_SUBMIT_OPTS"), f'-Djava.io.tmpdir="{manifest.parent}"'))
        )
        # Not through the Spark hook: on YARN and Kubernetes it writes the variables on the command line.
        self.env_vars, self._environment = None, environment
        self._hook = None

    def _cluster(self) -> Cluster | None:
        if self.catalogue_conn_id is None:
            return None
        instances = self.instances_conn_id or self.source_conn_id or self.postgres_conn_id
        return Cluster(PgChangeHook(self.catalogue_conn_id).conninfo(), PgChangeHook(instances).conninfo())

    def _get_hook(self) -> SparkSubmitHook:
        hook: SparkSubmitHook = super()._get_hook()
        _refuse_cluster_mode(hook, self.conf or {})
        hook.submit = partial(  # type: ignore[method-assign]
            hook.submit,
            env={**_python(hook), **self._environment},
            preexec_fn=submit.die_with_parent,
            start_new_session=True,
        )
        return hook

    def _end_job(self) -> None:
        hook = self._hook
        if hook is None:
            return
        job = hook._submit_sp
        # Of a job that has ended the number may be somebody else's by now.
        if job is not None and job.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
        hook.on_kill()


def _python(hook: SparkSubmitHook) -> dict[str, str]:
    """What runs on this machine runs with this Python, unless the environment says otherwise."""
    local = hook._connection["master"].startswith("local")
    return {"PYSPARK_DRIVER_PYTHON": sys.executable, **({"PYSPARK_PYTHON": sys.executable} if local else {})}


def _refuse_cluster_mode(hook: SparkSubmitHook, conf: dict[Any, Any]) -> None:
    mode = hook._connection["deploy_mode"] or conf.get("spark.submit.deployMode")
    if mode == "cluster":
        raise InvalidArgument(
            "deploy mode 'cluster' is not supported: the driver must run beside the operator, whose "
            "transaction it ends with; set the Spark connection's deploy-mode to 'client'"
        )
