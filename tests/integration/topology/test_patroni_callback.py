"""The callback that Patroni calls, ``dags/patroni/set_master.sh``, run by psql against a catalogue."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.topology import last, since

SCRIPT = Path(__file__).parents[3] / "dags" / "patroni" / "set_master.sh"
MASTER = "select current_master_name from topology._pico_replicaset where name = %s"


def started(*arguments, tries):
    return subprocess.Popen(
        [SCRIPT, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TRIES": str(tries), "PAUSE": "0.1"},
    )


def ended(*arguments, tries=1):
    """Run the callback. Return its exit code and its output."""
    process = started(*arguments, tries=tries)
    out, err = process.communicate(timeout=60)
    return process.returncode, out + err


def master(catalogue, replicaset="r1"):
    return catalogue.execute(MASTER, [replicaset]).fetchone()[0]


@pytest.mark.parametrize("event", ["on_role_change", "on_start"])
@pytest.mark.parametrize("role", ["primary", "master"])
def test_an_instance_that_became_primary_is_recorded_as_the_master(db, catalogue, event, role):
    before = last(catalogue)
    code, told = ended(db, "r1-i2", event, role, "r1")
    assert (code, told) == (0, "set_master.sh: r1-i2 is recorded as the master of replicaset r1\n")
    assert master(catalogue) == "r1-i2"
    assert [told["current_master_uuid"] for told in since(catalogue, before)] == ["uuid-r1-i2"]


@pytest.mark.parametrize(
    ("event", "role"),
    [
        ("on_role_change", "replica"),
        ("on_start", "replica"),
        ("on_stop", "primary"),
        ("on_start", "standby_leader"),
    ],
)
def test_any_other_event_records_nothing(db, catalogue, event, role):
    assert ended(db, "r1-i2", event, role, "r1") == (0, "")
    assert master(catalogue) == "r1-i1"


@pytest.mark.parametrize(
    "name", ["it's", "a'); drop schema topology cascade; --", '"$(false)" `false`', r"\q :x"]
)
def test_names_are_quoted(db, catalogue, name):
    catalogue.execute("select topology.add_replicaset(%s)", [name])
    for number in (1, 2):
        address = f"127.0.0.1:9{number}"
        catalogue.execute("select topology.add_instance(%s, %s, %s)", [f"{name}{number}", name, address])
    catalogue.execute("select topology.set_master(%s, %s)", [name, f"{name}1"])
    assert ended(db, f"{name}2", "on_role_change", "primary", name)[0] == 0
    assert master(catalogue, name) == f"{name}2"


def test_a_call_that_the_catalogue_refuses_is_told_with_its_reason(db, catalogue):
    code, told = ended(db, "r2-i2", "on_role_change", "primary", "r1", tries=2)
    assert code == 1
    assert told.count("instance 'r2-i2' belongs to replicaset 'r2', not 'r1'") == 2
    assert "call topology.set_master() by hand" in told
    assert master(catalogue) == "r1-i1"


def test_a_catalogue_that_cannot_be_reached_is_told():
    code, told = ended("host=127.0.0.1 port=1", "r1-i2", "on_role_change", "primary", "r1")
    assert code == 1
    assert "connection to server at" in told


def test_a_call_is_repeated_until_the_catalogue_takes_it(db, catalogue):
    catalogue.execute("select topology.set_state('r1-i2', 'Offline')")
    process = started(db, "r1-i2", "on_role_change", "primary", "r1", tries=1000)
    assert "instance 'r1-i2' is Offline" in process.stderr.readline()
    catalogue.execute("select topology.set_state('r1-i2', 'Online')")
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert master(catalogue) == "r1-i2"


def test_a_configuration_without_catalogue_and_instance_is_told():
    assert ended("on_role_change", "primary", "r1") == (
        2,
        "usage: set_master.sh <catalogue> <instance> <event> <role> <replicaset>\n",
    )
