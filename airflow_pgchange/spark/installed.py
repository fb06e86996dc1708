"""Whether the packages that Spark comes in fit each other."""

from __future__ import annotations

from importlib import metadata

from airflow_pgchange.feeds.errors import VersionsDiffer

PACKAGES = ("pyspark", "pyspark-client")
"""They install the same files, and that which comes last overwrites the other's."""


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


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _order(version: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in version.split(".")]
