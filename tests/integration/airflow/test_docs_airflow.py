"""The examples of the guide to Airflow, run unchanged."""

from __future__ import annotations

import inspect
import re
import shlex
from dataclasses import fields
from typing import Any

import psycopg
import pytest
from airflow.cli.cli_config import GroupCommand
from airflow.cli.cli_parser import get_parser
from airflow.providers.postgres.assets import postgres
from airflow.sdk import Asset

from airflow_pgchange.assets.targets import table_asset, target_tables
from airflow_pgchange.cli.commands import get_pgchange_cli_commands
from airflow_pgchange.decorators.batch import BatchDecoratedOperator
from airflow_pgchange.decorators.handlers import HandlerDecoratedOperator
from airflow_pgchange.decorators.sagas import SagaDecoratedOperator
from airflow_pgchange.decorators.spark import JOB
from airflow_pgchange.decorators.tube import CollectDecoratedOperator
from airflow_pgchange.feeds.batch import Lag
from airflow_pgchange.provider_info import get_provider_info
from airflow_pgchange.utils import metrics
from airflow_pgchange.utils.arguments import feed_of
from tests.airflow_home import uri
from tests.ledger import Connect, run
from tests.readme import Guide, in_code, table, track_payments

PAGE = "docs/how-to/airflow.md"


@pytest.fixture
def guide(db: str, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> Guide:
    """The guide, in a database with the tables of the tutorial."""
    connection: psycopg.Connection[Any] = connect()
    track_payments(connection)
    monkeypatch.setenv("AIRFLOW_CONN_SHOP", uri(db))
    return Guide(PAGE, db, connection)


def test_a_dag_on_a_feed_says_what_woke_it_and_adds_its_batch(guide: Guide, connect: Connect) -> None:
    """Takes seconds: Airflow is imported."""
    guide.run("When a DAG runs")
    dag, waiting = guide.names["balances"](), guide.names["waiting"]
    (trigger,) = [watcher.trigger for watcher in waiting.watchers]
    assert (trigger.min_changes, trigger.max_age) == (1000, 30.0)
    assert run(dag.get_task("add"))["changes"] == 3
    assert connect().execute("select * from balance order by account").fetchall() == [
        ("ann", 70),
        ("bob", 50),
    ]


def test_a_sensor_of_each_kind_waits_for_the_payments(guide: Guide) -> None:
    """Takes seconds if it is the first test of this file, because Airflow is imported."""
    guide.run("Sensors")
    assert guide.names["ready"].poke({})
    assert not guide.names["processed"].poke({})


def test_the_guide_names_all_that_a_payload_has(guide: Guide) -> None:
    """Takes seconds if it is the first test of this file, because Airflow is imported."""
    (told,) = re.findall(r"The payload is the name.*?\n\n", guide.text, flags=re.DOTALL)
    assert set(re.findall(r"`(\w+)`", told)) == {
        *(field.name for field in fields(Lag)),
        "feed",
        "min_changes",
    }


@pytest.mark.skipif(
    not hasattr(postgres, "create_asset"), reason="Airflow's provider of PostgreSQL makes assets from 7.0 on"
)
def test_a_dag_on_a_table_reads_the_asset_that_a_batch_writes(guide: Guide) -> None:
    """Takes seconds if it is the first test of this file, because Airflow is imported."""
    guide.run("Tables that wake other DAGs")
    (writing,) = guide.names["write_balances"]().tasks
    assert writing.outlets == [target_tables("balances")]
    ours = table_asset("host=db1,db2 port=5432 dbname=shop", "shop", "public", "balance")
    assert guide.names["balance"] == ours == Asset(ours.uri)
    assert guide.names["send_statements"]().timetable.asset_condition.objects == (ours,)


def test_a_function_of_the_guide_is_the_handler_of_its_group(guide: Guide) -> None:
    guide.run("Functions as tasks")
    (sending,) = guide.names["mails"]().tasks
    (handler,) = sending.handlers
    assert (handler.name, handler.retries, sending.group) == ("send", (5, 60), "mails")


def test_the_guide_names_every_decorator_with_what_it_gives(guide: Guide) -> None:
    told = re.findall(
        r"^\| `(pgchange_\w+)` \| (.*?) \|", guide.sections["Functions as tasks"], flags=re.MULTILINE
    )
    given = {name: set(re.findall(r"`(\w+)`", names)) for name, names in told}
    assert given == {
        "pgchange_batch": set(BatchDecoratedOperator.runtime_arguments),
        "pgchange_spark": {JOB},
        "pgchange_saga": set(SagaDecoratedOperator.runtime_arguments),
        "pgchange_handler": set(HandlerDecoratedOperator.runtime_arguments),
        "pgchange_collect": set(CollectDecoratedOperator.runtime_arguments),
    }
    assert set(given) == {one["name"] for one in get_provider_info()["task-decorators"]}


def test_an_asset_of_ones_own_has_a_watcher_of_a_feed(guide: Guide) -> None:
    guide.run("Watchers")
    ((_, watched),) = [watcher.trigger.serialize() for watcher in guide.names["paid"].watchers]
    assert (feed_of(watched["feed"]).consumer, watched["min_changes"]) == ("balance", 10)


def test_the_dag_of_the_guide_to_detached_batches_has_its_tasks_in_order() -> None:
    """Takes seconds if it is the first test of this file, because Airflow is imported."""
    guide = Guide("docs/how-to/detached.md", "unused", None)
    guide.run("In a DAG")
    tasks = guide.names["dag"].task_dict
    assert {name: sorted(task.upstream_task_ids) for name, task in tasks.items()} == {
        "batch.claim": [],
        "batch.start_job": ["batch.claim"],
        "batch.ack": ["batch.claim", "batch.start_job"],
        "batch.release": ["batch.ack", "batch.claim", "batch.start_job"],
    }


def test_the_command_that_adds_a_connection_is_one_of_airflows(guide: Guide) -> None:
    """Takes seconds if it is the first test of this file, because Airflow is imported."""
    (command,) = re.findall(r"^    airflow (connections .*)$", guide.text, flags=re.MULTILINE)
    added = get_parser().parse_args(shlex.split(command))
    assert (added.conn_id, added.conn_type, added.conn_host) == ("spark_default", "spark", "local[2]")


def test_the_page_of_the_command_line_names_every_command() -> None:
    """Takes seconds if it is the first test of this file, because Airflow is imported."""
    (group,) = get_pgchange_cli_commands()
    commands = {
        f"{command.name} {inner.name}" if isinstance(command, GroupCommand) else command.name
        for command in group.subcommands
        for inner in (command.subcommands if isinstance(command, GroupCommand) else [command])
    }
    named = [
        name
        for row in table("docs/reference/command-line.md", "# The command line")
        for name in in_code(row[0])
    ]
    assert sorted(named) == sorted(commands)


def test_the_page_of_metrics_names_every_metric() -> None:
    reported = re.findall(r'"pgchange\.(\w+)"', inspect.getsource(metrics))
    gauges = [field.name for field in fields(Lag) if not field.name.endswith("_exact")]
    named = [name for row in table("docs/reference/metrics.md", "# Metrics") for name in in_code(row[0])]
    assert sorted(named) == sorted({*reported, *gauges})
