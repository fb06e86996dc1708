"""What the maintenance DAG does and reports, run as the role that the guide describes."""

from __future__ import annotations

import re

import psycopg
import pytest

from airflow_pgchange.admin import manual_operations
from airflow_pgchange.admin.maintenance import maintain
from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction, TopologyFeed, TubeFeed
from airflow_pgchange.tubes import work_off
from tests.commits import claim_and_fail, commits, drain
from tests.event_keeping import (
    configure,
    dispatch,
    fill_default,
    kept,
    narrow,
    partitions,
    publish,
    read,
    subscribe,
)
from tests.readme import ROOT
from tests.schemas import possible
from tests.topology import make_catalogue
from tests.tubes import attach, make, one, touched
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("few_sessions")


def held(connection):
    """The schemas that this server can have."""
    return [system.schema for system in possible(connection)]


def test_maintenance_runs_as_the_role_that_the_guide_describes(db, connect, role):
    connection, keeper = connect(), role("maintenance")
    connection.execute("create table ledger (id bigint primary key); select revision.track('ledger')")
    guide = (ROOT / "docs" / "reference" / "roles.md").read_text()
    described = guide.partition("\n## The maintenance DAG\n")[2].partition("\n## ")[0]
    grants = re.findall(r"`(\w+)\.(\w+)\(role\)`", described)
    assert len(grants) == 7
    for name, function in grants:
        if name in held(connection):
            connection.execute(f"select {name}.{function}(%s::regrole)", [keeper.name])
    drain(db)
    with psycopg.connect(keeper.conninfo, autocommit=True) as as_keeper:
        report = maintain(as_keeper, retention="30 days", saga_retention="30 days")
    assert (report.failed, report.attention) == ([], [])


@pytest.mark.parametrize("schema", ["pgchange", "revision", "pgmb", "mbus"])
def test_a_role_that_maintains_one_schema_may_maintain_the_core(connect, role, schema):
    connection, keeper = connect(), role("maintenance")
    if schema not in held(connection):
        return
    connection.execute(f"select {schema}.grant_maintainer(%s::regrole)", [keeper.name])
    with psycopg.connect(keeper.conninfo, autocommit=True) as as_keeper:
        for step in ("trim_batches", "trim_watchers"):
            assert as_keeper.execute(f"select pgchange.{step}()").fetchall() == []


OLD_ROWS = {
    "trim_batches": "insert into pgchange.batch (kind, consumer, batch_id, attempt, count, number, noted_at) "
    "values ('commit', 'c', gen_random_uuid(), 1, 1, 1, now() - interval '30 days')",
    "trim_watchers": "insert into pgchange.watcher (kind, feed, looked_at) "
    "values ('commit', 'c', now() - interval '30 days')",
}
"""For each step of maintenance: a statement that inserts a row that the step deletes."""


@pytest.mark.parametrize(("step", "table"), [("trim_batches", "batch"), ("trim_watchers", "watcher")])
def test_rows_that_a_session_is_writing_are_trimmed_by_the_next_run(connect, step, table):
    connection, writer = connect(), connect(autocommit=False)
    connection.execute(OLD_ROWS[step])
    writer.execute(f"update pgchange.{table} set kind = 'commit'")
    connection.execute("set statement_timeout = '10s'")
    assert connection.execute(f"select pgchange.{step}()").fetchall() == []
    writer.rollback()
    assert len(connection.execute(f"select pgchange.{step}()").fetchall()) == 1


def test_a_step_of_maintenance_that_fails_stops_no_other(db, connect, role):
    connection, keeper = connect(), role("maintenance")
    connection.execute("select revision.grant_maintainer(%s::regrole)", [keeper.name])
    for name in held(connection):
        connection.execute(f"grant usage on schema {name} to {keeper.name}")
        connection.execute(f"grant select on {name}.installed to {keeper.name}")
    with psycopg.connect(keeper.conninfo, autocommit=True) as as_keeper:
        report = maintain(as_keeper)
    assert len(report.failed) == (26 if "mbus" in held(connection) else 22)


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
    assert "public.item: its capture for tube q was repaired" in report.done
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
    assert any(line.startswith("public.item: 1 statements") for line in attention)
    assert any("airflow-pgchange skip tube:q/0" in line for line in attention)


def test_maintenance_names_a_dropped_table_that_touched_a_tube_until_it_is_detached(connect):
    connection = connect()
    connection.execute("create table item (id bigint primary key)")
    make(connection, "joe's")
    attach(connection, tube="joe's")
    assert maintain(connection).attention == []
    connection.execute("drop table item")
    (line,) = maintain(connection).attention
    assert line.startswith("tube joe's: a table that touched it was dropped")
    connection.execute("select " + line.split(": select ")[1])
    assert maintain(connection).attention == []


def test_maintenance_names_a_worker_whose_control_pods_fail_as_long_as_there_are_any(db, connect):
    connection = connect()
    make(connection)
    connection.execute("""select tube.touch('q', 0, '{}', 'T', '{"type": "mine"}')""")

    def fail(control):
        raise RuntimeError("the search index is down")

    for _ in range(3):
        assert maintain(connection).attention == []
        with pytest.raises(RuntimeError, match="search index"):
            work_off(TubeFeed("q"), db, fail)
    (line,) = maintain(connection).attention
    assert line.startswith("tube:q/0: its control pods have failed 3 times")
    connection.execute("delete from q")
    assert maintain(connection).attention == []


def test_commands_that_maintenance_advises_are_quoted_for_any_name(db, connect):
    connection, feed = connect(), CommitFeed("yearly audit", 0)
    connection.execute("""create table "it's" (id bigint primary key, n int)""")
    connection.execute("""select revision.track('"it''s"', branch_id => '1 / n')""")
    make(connection, "joe's", predicate="1 / n > 0")
    attach(connection, '"it\'s"', "joe's")
    connection.execute("""insert into "it's" values (1, 0)""")
    commits(connection)
    for _ in range(3):
        claim_and_fail(db, feed=feed)
    attention = "\n".join(maintain(connection).attention)
    assert """revision.replay_faults('public."it''s"')""" in attention
    assert "tube.clear_faults('joe''s')" in attention
    assert "airflow-pgchange skip 'commits:yearly audit/0'" in attention
    manual_operations.skip_batch(connection, connection, feed, "cannot be parsed")
    attention = "\n".join(maintain(connection).attention)
    assert "letters list --consumer 'commits:yearly audit/0'" in attention


def test_maintenance_names_a_consumer_of_a_topology_whose_batch_fails_and_what_holds_it_back(db, connect):
    connection, feed = connect(), TopologyFeed("the router")
    make_catalogue(connection)
    for _ in range(3):
        assert maintain(connection).attention == []
        claim_and_fail(db, feed=feed)
    (line,) = maintain(connection).attention
    assert line.startswith("topology:the router: batch ")
    assert line.endswith(
        " has failed 3 times: tests.commits.Failed; to give it up: airflow-pgchange skip 'topology:the router'"
        " --reason '...'"
    )
    manual_operations.skip_batch(connection, connection, feed, "cannot be parsed")
    connection.execute("update topology.consumer set source = 'elsewhere'")
    (letter, line) = maintain(connection).attention
    assert letter.startswith("topology:the router: 1 dead letter since ")
    assert line.startswith("topology:the router: ")
    assert "airflow-pgchange repair" in line


def test_maintenance_does_not_blame_a_consumer_whose_catalogue_is_elsewhere(db, other_db, connect_to):
    results, catalogue = connect_to(db), connect_to(other_db)
    make_catalogue(catalogue)
    with ConsumerTransaction(TopologyFeed("router"), db, other_db) as consumer:
        assert consumer.claim(2) is not None
        consumer.ack()
    assert maintain(results).attention == maintain(catalogue).attention == []


@pytest.fixture
def log(connect):
    """An event log whose partitions are a second long, with a group that reads everything."""
    connection = connect()
    narrow(connection)
    subscribe(connection)
    return connection


def attention(connection, text):
    return [line for line in maintain(connection).attention if text in line]


def until_old(connection):
    """Wait until the retention of the partition with the present events has passed."""
    until(
        connection,
        "select now() > '{}'::timestamptz + interval '2 seconds'".format(one(connection, "select now()")),
    )


def test_maintenance_dispatches_events_and_makes_their_partitions(log):
    publish(log, 3)
    report = maintain(log)
    assert report.failed == []
    assert "dispatched 3 events" in report.done
    assert any("added pgmb.events" in line for line in report.done)
    assert any("added pgmb.dispatched" in line for line in report.done)
    assert len(read(log)) == 3


def test_maintenance_names_who_holds_an_old_partition_and_lets_it_go_when_it_is_read(log):
    maintain(log)
    publish(log)
    until_old(log)
    (line,) = attention(log, "is old and kept")
    assert "group g has not read it" in line
    read(log)
    assert attention(log, "is old and kept") == []
    assert kept(log) == []


def test_maintenance_names_a_log_whose_partitions_are_made_only_while_publishers_are_stopped(connect):
    connection = connect()
    for name, _, _ in partitions(connection):
        connection.execute(f"drop table {name}")
    fill_default(connection, 3000, "now()")
    (line,) = attention(connection, "needs partitions")
    assert line.startswith("pgmb.events needs partitions")
    (advised,) = re.findall("select .*", line)
    assert connection.execute(advised).fetchall() != []
    assert attention(connection, "needs partitions") == []


def test_maintenance_expires_subscriptions(log):
    subscribe(log, "passing", expiry_interval="1 minute")
    log.execute(
        "update pgmb.subscriptions set last_active_at = now() - interval '1 hour' where group_id = 'passing'"
    )
    assert any("group passing expired" in line for line in maintain(log).done)


def test_maintenance_names_a_condition_that_fails(log):
    subscribe(log, "h", conditions_sql="1 / (length(e.topic) - 1) > 0")
    publish(log, topic="t")
    (line,) = attention(log, "events:h")
    assert "pgmb.replay_faults('h')" in line


def test_maintenance_names_a_group_whose_batch_fails(log):
    publish(log)
    for _ in range(3):
        log.execute("select pgmb.claim('g', pgmb.position('g'), 10)")
    (line,) = attention(log, "has failed 3 times")
    assert line.endswith("to give it up: airflow-pgchange skip events:g --reason '...'")


def test_maintenance_names_rows_that_could_not_be_made_an_event(log):
    log.execute("create table item (id int)")
    log.execute("select pgmb.push_table_mutations('item')")
    log.execute(
        "insert into pgmb.push_fault (tbl, op, message) values ('item'::regclass, 'INSERT', 'planted')"
    )
    (line,) = attention(log, "item")
    assert "pgmb.replay_push_faults('public.item')" in line


def test_maintenance_mends_the_capture_of_mutations_and_names_a_disabled_one(log):
    log.execute("create table item (id int) partition by range (id)")
    log.execute("select pgmb.push_table_mutations('item')")
    log.execute("create table item_1 partition of item for values from (0) to (10)")
    assert "public.item: the capture of its mutations was repaired" in maintain(log).done
    log.execute("insert into item_1 values (1)")
    assert one(log, "select topic from pgmb.events") == "public.item.insert"
    log.execute("alter table item_1 disable trigger user")
    assert attention(log, "is disabled on public.item_1") != []


def test_maintenance_of_a_quiet_log_says_nothing(log):
    configure(log, partition_interval="1 day", partition_retention_period="1 day")
    configure(log, future_intervals_to_create="1 day")
    publish(log)
    dispatch(log)
    maintain(log)
    report = maintain(log)
    assert (report.done, report.attention, report.failed) == ([], [], [])


def test_maintenance_forgets_what_failed_for_a_subscription_that_is_gone(log):
    log.execute(
        "insert into pgmb.events (topic, payload, subscription_id) values ('t', '{}', 'su0000000000000000000000')"
    )
    dispatch(log)
    until_old(log)
    assert "deleted 1 faults of deleted subscriptions" in maintain(log).done
