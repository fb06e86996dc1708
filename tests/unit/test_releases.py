"""The kept releases, and the upgrades from them that the SQL of this package needs."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace

import pytest

from airflow_pgchange.admin import versions
from airflow_pgchange.feeds import CommitFeed, EventFeed, QueueFeed, TopologyFeed, TubeFeed
from tests.releases import kept


def test_the_files_of_each_kept_release_are_those_that_were_kept():
    for name in kept.names():
        for file, digest in kept.manifest(name)["files"].items():
            assert hashlib.sha256((kept.FOLDER / name / file).read_bytes()).hexdigest() == digest


def test_each_change_of_the_sql_since_a_kept_release_has_an_upgrade_file():
    assert [line for name in kept.names() for line in kept.overdue(kept.manifest(name))] == []


@pytest.fixture
def told():
    """The manifest that this state would have as a release."""
    return kept.described("1.0")


def test_a_changed_file_without_an_upgrade_is_found(told):
    assert kept.overdue(told) == []
    told["checksums"]["tube"] = "another"
    (line,) = kept.overdue(told)
    assert line.startswith("sql/tube differs from release 1.0: raise its version to 2 in versions.py")


def test_a_higher_version_without_a_file_is_found(told, monkeypatch):
    systems = tuple(
        replace(system, version=system.version + 1) if system.folder == "pgmb" else system
        for system in versions.SYSTEMS
    )
    monkeypatch.setattr(versions, "SYSTEMS", systems)
    assert kept.overdue(told) == ["sql/pgmb/upgrade lacks 0002, since release 1.0"]


def test_the_version_of_a_schema_is_the_same_in_its_sql_and_in_its_feed():
    feeds = {
        feed.schema: feed.schema_version
        for feed in (CommitFeed, EventFeed, QueueFeed, TopologyFeed, TubeFeed)
    }
    for system in versions.SYSTEMS:
        (written,) = re.findall(
            r"keep_versions\('\w+', version => (\d+)\)", versions.scripts(system)[0].read_text()
        )
        assert int(written) == system.version
        assert feeds.get(system.schema, system.version) == system.version
