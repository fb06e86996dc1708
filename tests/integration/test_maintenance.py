"""What the maintenance DAG does, as the role that runs it."""

from __future__ import annotations

import psycopg
import pytest

from airflow_pgchange.feeds import ConsumerTransaction, TubeFeed
from airflow_pgchange.maintenance import maintain
from tests.commits import drain
from tests.tubes import attach, make, touched


def test_maintenance_runs_as_the_role_that_the_readme_describes(db, connect, role):
    connection, keeper = connect(), role("maintenance")
    connection.execute("create table ledger (id bigint primary key); select revision.track('ledger')")
    for grant in (
        "revision.grant_maintainer",
        "pubsub.grant_keeper",
        "pgchange_staging.grant_keeper",
        "tube.grant_use",
    ):
        connection.execute(f"select {grant}(%s::regrole)", [keeper.name])
    drain(db)
    with psycopg.connect(keeper.conninfo, autocommit=True) as as_keeper:
        report = maintain(as_keeper, keep="30 days")
    assert (report.failed, report.attention) == ([], [])


def test_a_step_of_maintenance_that_fails_stops_no_other(db, connect, role):
    keeper = role("maintenance")
    connect().execute("select revision.grant_maintainer(%s::regrole)", [keeper.name])
    connect().execute(f"grant usage on schema dead_letter, pubsub, pgchange_staging, tube to {keeper.name}")
    connect().execute(
        "grant select on dead_letter.installed, pubsub.installed, pgchange_staging.installed, tube.installed "
        f"to {keeper.name}"
    )
    with psycopg.connect(keeper.conninfo, autocommit=True) as as_keeper:
        report = maintain(as_keeper)
    assert len(report.failed) == 5


def test_maintenance_mends_the_capture_of_partitions_that_came_later(db, connect):
    connection = connect()
    connection.execute(
        "create table item (id bigint primary key) partition by range (id);"
        "create table item_1 partition of item for values from (0) to (10)"
    )
    make(connection)
    attach(connection)
    connection.execute("create table item_2 partition of item for values from (10) to (20)")
    report = maintain(connection)
    assert "public.item: its capture for tube q was mended" in report.done
    connection.execute("insert into item_2 values (15)")
    assert touched(connection) == [15]


def test_maintenance_names_a_tube_whose_batch_fails_and_statements_it_could_not_judge(db, connect):
    connection = connect()
    connection.execute("create table item (id bigint primary key, n int)")
    make(connection, predicate="1 / n > 0")
    attach(connection)
    connection.execute("insert into item values (1, 0)")
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), ConsumerTransaction(TubeFeed("q"), db) as consumer:
            consumer.claim(10)
            raise ZeroDivisionError
    attention = maintain(connection).attention
    assert any(line.startswith("item: 1 statements") for line in attention)
    assert any("airflow pgchange skip tube:q/0" in line for line in attention)
