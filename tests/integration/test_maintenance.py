"""What the maintenance DAG does, as the role that runs it."""

from __future__ import annotations

import psycopg

from airflow_pgchange.maintenance import maintain
from tests.commits import drain


def test_maintenance_runs_as_the_role_that_the_readme_describes(db, connect, role):
    connection, keeper = connect(), role("maintenance")
    connection.execute("create table ledger (id bigint primary key); select revision.track('ledger')")
    for grant in ("revision.grant_maintainer", "pubsub.grant_keeper", "pgchange_staging.grant_keeper"):
        connection.execute(f"select {grant}(%s::regrole)", [keeper.name])
    drain(db)
    with psycopg.connect(keeper.conninfo, autocommit=True) as as_keeper:
        report = maintain(as_keeper, keep="30 days")
    assert (report.failed, report.attention) == ([], [])


def test_a_step_of_maintenance_that_fails_stops_no_other(db, connect, role):
    keeper = role("maintenance")
    connect().execute("select revision.grant_maintainer(%s::regrole)", [keeper.name])
    connect().execute(f"grant usage on schema pubsub, pgchange_staging to {keeper.name}")
    connect().execute(f"grant select on pubsub.installed, pgchange_staging.installed to {keeper.name}")
    with psycopg.connect(keeper.conninfo, autocommit=True) as as_keeper:
        report = maintain(as_keeper)
    assert len(report.failed) == 2
