"""The arguments of SparkSubmitOperator that the Spark operator needs, but cannot read from it.

Airflow's provider stores many arguments in private attributes, which any release may rename. Therefore they are stored
here a second time, and the hook is created by its public constructor.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import BaseOperator, conf

from airflow_pgchange.errors import ExtraMissing, InvalidArgument
from airflow_pgchange.operators.spark_checks import check_spark, connection_of, master_of
from airflow_pgchange.spark.installed_versions import check_versions
from airflow_pgchange.utils.compat import supported

try:
    from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook
    from airflow.providers.common.compat.openlineage.utils.spark import (
        inject_parent_job_information_into_spark_properties,
        inject_transport_information_into_spark_properties,
    )
except ImportError as error:
    raise ExtraMissing(
        f"SparkBatchOperator needs {error.name}: pip install 'airflow-provider-pgchange[spark]'"
    ) from error

if TYPE_CHECKING:
    from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
    from airflow.sdk import Connection, Context

OF_THE_HOOK = supported(
    SparkSubmitHook.__init__,
    conn_id="spark_default",
    archives=None,
    java_class=None,
    repositories=None,
    total_executor_cores=None,
    executor_cores=None,
    executor_memory=None,
    driver_memory=None,
    num_executors=None,
    status_poll_interval=1,
    verbose=False,
    spark_binary=None,
    yarn_queue=None,
    deploy_mode=None,
    use_krb5ccache=False,
    track_driver_via_k8s_api=False,
    yarn_track_via_rm_api=False,
    yarn_rm_auth=None,
)
"""The hook's arguments that the operator keeps in private attributes, with their defaults. Older providers lack some."""
OF_NEWER_PROVIDERS = tuple(supported(SparkSubmitHook.__init__, post_submit_commands=None))
"""The public attributes of SparkSubmitOperator that older providers lack."""
PARENT_JOB, TRANSPORT = "openlineage_inject_parent_job_info", "openlineage_inject_transport_info"
OF_OPENLINEAGE: Mapping[str, bool] = {
    PARENT_JOB: conf.getboolean("openlineage", "spark_inject_parent_job_info", fallback=False),
    TRANSPORT: conf.getboolean("openlineage", "spark_inject_transport_info", fallback=False),
}
OF_A_DRIVER = (
    "files",
    "archives",
    "driver_class_path",
    "jars",
    "java_class",
    "packages",
    "exclude_packages",
    "repositories",
    "total_executor_cores",
    "executor_cores",
    "executor_memory",
    "driver_memory",
    "num_executors",
    "keytab",
    "principal",
    "proxy_user",
    "properties_file",
    "post_submit_commands",
)
"""The arguments that concern a driver. They have no effect with a Spark Connect server."""
OF_CLUSTER_MODE = ("track_driver_via_k8s_api", "yarn_track_via_rm_api")


class SparkArguments:
    """The values of the arguments in ``OF_THE_HOOK`` and ``OF_OPENLINEAGE`` of one operator."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """``arguments``: the keyword arguments of the operator's constructor, with Airflow's ``default_args``."""
        every = {**(arguments.get("default_args") or {}), **arguments}
        self._of_the_hook = {name: every.get(name, default) for name, default in OF_THE_HOOK.items()}
        self._of_openlineage = {name: every.get(name, default) for name, default in OF_OPENLINEAGE.items()}

    @property
    def conn_id(self) -> str:
        """The Airflow connection to Spark."""
        return str(self._of_the_hook["conn_id"])

    def _given_for_a_driver(self, operator: SparkSubmitOperator) -> list[str]:
        """Return the names of the operator's arguments that have no effect with a Spark Connect server."""
        return [name for name in OF_A_DRIVER if self.value(operator, name)]

    def value(self, operator: BaseOperator, name: str) -> Any:
        """Return an argument of SparkSubmitOperator; None if it was not given."""
        values = self._of_the_hook
        return values[name] if name in values else getattr(operator, name, None)

    def needs(self, operator: SparkSubmitOperator) -> str:
        """Return the facts about a task that `airflow-pgchange check` needs, as JSON."""
        binary, of_a_driver = self._of_the_hook["spark_binary"], self._given_for_a_driver(operator)
        detached = getattr(operator, "detached", False)
        return json.dumps(
            {"conn_id": self.conn_id, "binary": binary, "of_a_driver": of_a_driver, "detached": detached}
        )

    def hook(
        self,
        operator: SparkSubmitOperator,
        context: Context,
        *,
        properties: Mapping[Any, Any],
        py_files: str,
        application_args: Sequence[Any] | None,
    ) -> SparkSubmitHook:
        """Make the hook that submits an application with these Spark properties, files and arguments.

        It gets no ``env_vars``: on YARN and Kubernetes the hook writes them on the command line. Raises InvalidArgument
        for cluster mode.
        """
        conf = dict(properties)
        self._check_client_mode(conf)
        if self._of_openlineage[PARENT_JOB]:
            conf = inject_parent_job_information_into_spark_properties(conf, context)
        if self._of_openlineage[TRANSPORT]:
            conf = inject_transport_information_into_spark_properties(conf, context)
        return SparkSubmitHook(
            conf=conf,
            files=operator.files,
            py_files=py_files,
            driver_class_path=operator.driver_class_path,
            jars=operator.jars,
            packages=operator.packages,
            exclude_packages=operator.exclude_packages,
            keytab=operator.keytab,
            principal=operator.principal,
            proxy_user=operator.proxy_user,
            name=operator.name,
            application_args=None if application_args is None else list(application_args),
            properties_file=operator.properties_file,
            **{name: getattr(operator, name) for name in OF_NEWER_PROVIDERS},
            **self._of_the_hook,
        )

    def python(self) -> dict[str, str]:
        """Return the environment variables that make the driver, and local executors, use this Python."""
        own = {"PYSPARK_DRIVER_PYTHON": sys.executable}
        is_local = master_of(self.connection()).startswith("local")
        return {**own, "PYSPARK_PYTHON": sys.executable} if is_local else own

    def _check_client_mode(self, properties: Mapping[Any, Any]) -> None:
        connection = self.connection()
        extra = {} if connection is None else connection.extra_dejson
        mode = (
            self._of_the_hook["deploy_mode"]
            or extra.get("deploy-mode")
            or properties.get("spark.submit.deployMode")
        )
        if mode == "cluster":
            raise InvalidArgument(
                "deploy mode 'cluster' is not supported: the driver must run beside the operator, whose "
                "transaction it ends with; set the Spark connection's deploy-mode to 'client'"
            )
        if names := [name for name in OF_CLUSTER_MODE if self._of_the_hook.get(name)]:
            raise InvalidArgument(
                f"{' and '.join(names)} needs deploy mode 'cluster', which is not supported: leave it out"
            )

    def check(self, operator: SparkSubmitOperator, environment: Mapping[str, str]) -> None:
        """Check, before a batch is claimed, that Spark can run an application.

        Raises InvalidArgument if a person must correct the task or this worker, and VersionsDiffer if Spark is
        installed in two versions. Raises ServerUnavailable if no server accepts a connection.
        """
        check_versions()
        check_spark(
            self.conn_id, self._of_the_hook["spark_binary"], self._given_for_a_driver(operator), environment
        )

    def connection(self) -> Connection | None:
        """The connection to Spark; None if Airflow has none of this name."""
        return connection_of(self.conn_id)
