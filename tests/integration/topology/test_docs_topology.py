"""The examples of docs/how-to/topology.md, run unchanged."""

from __future__ import annotations

import re
import shlex
import subprocess
import threading
from pathlib import Path

import pytest
import yaml

from airflow_pgchange.topology import TopologyClient
from tests.relay_process import relay_process

ROOT = Path(__file__).parents[3]
DOCS = (ROOT / "docs" / "how-to" / "topology.md").read_text()
PLACE = '"host=relay port=4327 user=ann password=secret"'


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", DOCS, flags=re.DOTALL)


@pytest.fixture
def relay(db, connect):
    connect().execute(blocks("sql")[0])
    with relay_process(db) as process:
        yield process


def test_a_failover_and_a_move_are_what_the_page_shows(relay, connect):
    with TopologyClient(relay.conninfo()) as client:
        assert client.topology.master("default", 0).address == "10.0.0.1:5432"
        connect().execute(blocks("sql")[1])
        heard = []
        while len(heard) < 3:
            heard += client.receive(30)
        client.topology.rebuild()
        assert [client.topology.master("default", n).address for n in (0, 1000)] == [
            "10.0.0.3:5432",
            "10.0.0.2:5432",
        ]


def test_the_first_example_prints_the_master(relay, capsys):
    exec(blocks("python")[0].replace(PLACE, repr(relay.conninfo())), {})
    assert capsys.readouterr().out.splitlines()[0] == "10.0.0.1:5432"


def test_the_second_example_follows_and_stops(relay):
    before, after = blocks("python")[1].replace(PLACE, repr(relay.conninfo())).split("...\n")
    snapshot = threading.Event()
    names = {"print": lambda events: snapshot.set()}
    exec(before, names)
    try:
        assert snapshot.wait(30)
    finally:
        exec(after, names)
    assert not names["thread"].is_alive()
    assert names["client"].topology.master("default", 1500).address == "10.0.0.1:5432"


def test_the_sensor_of_the_third_example_waits_for_a_condition_that_there_is():
    shown = blocks("python")[2].replace("FeedSensor(\n", "sensor = FeedSensor(\n")
    exec(shown, names := {})
    assert names["sensor"].feed["condition"] == "every replicaset has a master"


@pytest.mark.parametrize("event", ["on_start", "on_role_change"])
def test_the_callback_that_patroni_is_configured_with_records_the_master(db, connect, event):
    connection = connect()
    connection.execute(blocks("sql")[0])
    connection.execute("select topology.set_master('r1', 'i2')")
    callbacks = yaml.safe_load(blocks("yaml")[0])["postgresql"]["callbacks"]
    script, catalogue, instance = shlex.split(callbacks[event])
    assert catalogue == "service=catalogue"
    command = [ROOT / "dags" / "patroni" / Path(script).name, db, instance]
    # Patroni calls it in this way.
    subprocess.run([*command, event, "primary", "r1"], check=True, timeout=60)
    query = "select current_master_name from topology._pico_replicaset where name = 'r1'"
    assert connection.execute(query).fetchone() == (instance,) == ("i1",)
