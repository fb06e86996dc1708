"""Whether the packages that are installed fit each other, and write what they were given."""

from __future__ import annotations

import sys
from functools import cache
from importlib import metadata

from airflow_pgchange.errors import VersionsDiffer

PACKAGES = ("pyspark", "pyspark-client")
"""They install the same files, and that which comes last overwrites the other's."""
ARROW_DRIVER = "adbc-driver-postgresql"
OLDEST_ARROW_DRIVER = "1.13"
"""Older ones write other values than they are given, without a word: up to 1.10 a decimal of 0.10 as 10.00, up to 1.12
the nulls in an array as zeros."""


def check_versions() -> None:
    """Raise VersionsDiffer where Spark is installed in two versions over each other. Where it is no package it is one."""
    found = {name: version for name in PACKAGES if (version := _version(name)) is not None}
    if len(set(found.values())) > 1:
        told = " and ".join(f"{name} {version}" for name, version in found.items())
        oldest = min(found.values(), key=_order)
        same = " ".join(f"{name}=={oldest}" for name in PACKAGES)
        raise VersionsDiffer(
            f"{told} are installed, whose files overwrite each other: make them of one version, by "
            f"`pip install --force-reinstall --no-deps {same}`"
        )


@cache
def check_arrow_driver() -> None:
    """Raise VersionsDiffer where the driver that reads and writes for Spark is one that writes wrong values."""
    found = _version(ARROW_DRIVER)
    if found is not None and _order(found) < _order(OLDEST_ARROW_DRIVER):
        raise VersionsDiffer(
            f"{ARROW_DRIVER} {found} is installed for {sys.executable}, which writes decimals below 1 and nulls in "
            f"arrays wrong: `pip install '{ARROW_DRIVER}>={OLDEST_ARROW_DRIVER}'` there, and on each executor"
        )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _order(version: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in version.split(".")]
