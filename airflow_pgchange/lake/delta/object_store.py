"""Access to the log and the files of a Delta table, by the object store of ``deltalake``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import quote, urlsplit

import pyarrow.fs
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError
from deltalake.fs import DeltaStorageHandler

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.lake.tables import Delta

VARIABLES = {
    "s3": "AWS_",
    "s3a": "AWS_",
    "gs": "GOOGLE_",
    "az": "AZURE_",
    "abfs": "AZURE_",
    "abfss": "AZURE_",
}
"""The prefix of the environment variables that configure a store, by the scheme of its locations."""

CONDITIONAL_PUT = "AWS_CONDITIONAL_PUT"
PATIENCE = {"timeout": "30s", "connect_timeout": "5s", "max_retries": "2", "retry_timeout": "60s"}
"""Timeouts for a store that does not answer. By default, it would be asked eleven times in three minutes."""


def options(lake: Delta) -> dict[str, str]:
    """Return the settings of the table's object store in this process. They may have secrets.

    Raises InvalidArgument if they turn off conditional writes, because two writers could then commit the same version.
    """
    beginning = VARIABLES.get(urlsplit(lake.location).scheme)
    if beginning is None:
        return {}
    variables = {name: value for name, value in os.environ.items() if name.startswith(beginning)}
    if variables.get(CONDITIONAL_PUT, "").lower() == "disabled":
        raise InvalidArgument(
            f"{lake}: {CONDITIONAL_PUT} turns off conditional writes, so two writers could commit the same version. "
            f"Remove the variable, and use a store that has conditional writes"
        )
    return {**PATIENCE, **variables}


def opened(lake: Delta) -> DeltaTable:
    """Return the table at its latest version. Raises InvalidArgument if there is none."""
    try:
        return DeltaTable(lake.location, storage_options=options(lake))
    except TableNotFoundError as error:
        raise InvalidArgument(f"{lake}: there is no Delta table at this location: make it first") from error


def uri(lake: Delta) -> str:
    """Return the location of the table as a URI."""
    return lake.location if urlsplit(lake.location).scheme else f"file://{quote(lake.location)}"


def files(location: str, settings: Mapping[str, str]) -> pyarrow.fs.FileSystem:
    """Return a file system whose root is the table's location."""
    return pyarrow.fs.PyFileSystem(DeltaStorageHandler(location, dict(settings)))
