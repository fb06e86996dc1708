"""Check that the installed packages fit each other and write values correctly."""

from __future__ import annotations

import logging
import re
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

from airflow_pgchange.errors import VersionsDiffer
from airflow_pgchange.feeds.argument_checks import OLDEST_SPARK

log = logging.getLogger(__name__)

FILES_OF = "pyspark"
"""The package that has Spark's archives of Java classes. pyspark-client installs the same Python files without them."""
TESTED_PAIRS = frozenset(
    {
        ("4.0", "4.0"),
        ("4.0", "4.2"),
        ("4.1", "4.1"),
        ("4.1", "4.2"),
        ("4.2", "4.0"),
        ("4.2", "4.1"),
        ("4.2", "4.2"),
        ("4.3", "4.3"),
    }
)
"""The versions of a Spark Connect client and its server that were tested together: docs/how-to/spark.md lists them."""
ARROW_DRIVER = "adbc-driver-postgresql"
OLDEST_ARROW_DRIVER = "1.13"
"""Older versions silently write wrong values. Up to 1.10 they write a decimal of 0.10 as 10.00, and up to 1.12 nulls in
an array as zeros."""


def check_versions() -> None:
    """Raise VersionsDiffer if Spark's Python files are not of the minor version of its Java classes.

    This happens if pyspark-client of another version was installed after pyspark.
    """
    try:
        spark = metadata.distribution(FILES_OF)
    except metadata.PackageNotFoundError:
        return
    file = Path(str(spark.locate_file("pyspark/version.py")))
    written = re.search(
        r"^__version__\b.*= *['\"](.+)['\"]", file.read_text() if file.exists() else "", re.MULTILINE
    )
    if written is not None and _minor(written[1]) != _minor(spark.version):
        raise VersionsDiffer(
            f"pyspark {spark.version} is installed, but its Python files are of {written[1]}: pyspark-client, which has "
            "the same files, was installed after it; `pip install --force-reinstall --no-deps "
            f"pyspark=={spark.version}` brings them back"
        )


def check_pair(client: str, server: str) -> None:
    """Warn if a Spark Connect client of this version was not tested with this server, and raise VersionsDiffer if they
    cannot work together."""
    for version in (client, server):
        if _order(version) < [(part, "") for part in OLDEST_SPARK]:
            raise VersionsDiffer(
                f"the Spark Connect server has version {server} and pyspark here {client}: install "
                f"{'.'.join(map(str, OLDEST_SPARK))} or newer on both sides. Older versions have no data sources in "
                f"Python"
            )
    if (_minor(client), _minor(server)) not in TESTED_PAIRS:
        log.warning(
            "the Spark Connect server has version %s and pyspark here %s. This pair was not tested; if an application "
            "fails, install pyspark-client %s here",
            server,
            client,
            _minor(server),
        )


def sends_rows(client: str, server: str) -> bool:
    """Whether a Spark Connect client of this version can send rows to this server, as ``createDataFrame`` does.

    To do so, the client asks for settings that an older server does not have, or has in another form.
    """
    return _order(client)[:2] <= _order(server)[:2]


@cache
def check_arrow_driver() -> None:
    """Raise VersionsDiffer if the ADBC driver has a version that writes wrong values."""
    version = _version(ARROW_DRIVER)
    if version is not None and _order(version) < _order(OLDEST_ARROW_DRIVER):
        raise VersionsDiffer(
            f"{ARROW_DRIVER} {version} is installed for {sys.executable}, which writes decimals below 1 and nulls in "
            f"arrays wrong: `pip install '{ARROW_DRIVER}>={OLDEST_ARROW_DRIVER}'` there, and on each executor"
        )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _order(version: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in version.split(".")]
