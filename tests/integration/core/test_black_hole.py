"""A network that drops every byte from some moment on, without an error on either side."""

from __future__ import annotations

import sys
import time

import pytest
from psycopg.conninfo import make_conninfo

from tests.commits import commits
from tests.namespaces import namespace
from tests.silence import impatient
from tests.suite import clusters
from tests.suite.clusters import TEMPLATE
from tests.waiting import until

CONSUMER = """
import sys
from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction
try:
    with ConsumerTransaction(CommitFeed("test", 0), sys.argv[1]) as consumer:
        consumer.claim(10)
        print("claimed", flush=True)
        input()
        {work}
        consumer.ack()
except Exception as error:
    print(type(error).__name__, error, flush=True)
"""
FREE = "select not exists (select from pg_locks where locktype = 'advisory' and database <> 0)"


@pytest.fixture
def reachable(server):
    """A cluster that other network namespaces can reach."""
    cluster = clusters.new_cluster(server, {"listen_addresses": "'*'"})
    with (cluster.data / "pg_hba.conf").open("a") as rules:
        rules.write("host all all 10.211.0.0/16 trust\n")
    cluster.stop()
    cluster.start()
    yield cluster
    cluster.remove()


@pytest.mark.parametrize("work", ["pass", "consumer.connection.execute('select pg_sleep(60)')"])
def test_both_sides_of_a_batch_notice_a_network_that_loses_every_byte(reachable, connect_to, work):
    """Takes seconds: it starts its own cluster and its own Python process."""
    connection = connect_to(reachable.conninfo(TEMPLATE))
    commits(connection, 3)
    with namespace() as there:
        conninfo = impatient(make_conninfo(reachable.conninfo(TEMPLATE), host=there.here))
        consumer = there.run(sys.executable, "-c", CONSUMER.format(work=work), conninfo)
        try:
            assert consumer.stdout.readline() == "claimed\n"
            consumer.stdin.write("\n")
            if work == "pass":
                there.cut_off()
            consumer.stdin.flush()
            if work != "pass":
                until(connection, "select exists (select from pg_stat_activity where wait_event = 'PgSleep')")
                there.cut_off()
            cut_at = time.monotonic()
            said = consumer.stdout.readline()
            assert "no answer from" in said
            assert time.monotonic() - cut_at < 10
            until(connection, FREE, patience=10)
        finally:
            consumer.kill()
            consumer.communicate()
