"""Rows of a cluster in Spark: each range of buckets from the instance that owns it, also over a failover."""

from __future__ import annotations

import threading
from dataclasses import replace

import psycopg
import pytest
from psycopg import sql

from airflow_pgchange.errors import BatchIncomplete, InvalidArgument, PermissionDenied, ServerUnavailable
from airflow_pgchange.spark import adbc, routing
from airflow_pgchange.spark.read_options import ReadOptions, Rule
from airflow_pgchange.topology.bucket_owners import Cluster
from tests.given_keys import given, job_of
from tests.replicasets import RULE, replicasets, standbys_of, two_primaries
from tests.spark_session import batch_of, track
from tests.waiting import sleeps, until

IDS = [*range(1, 101), *range(1951, 2051), *range(3001, 3101)]
"""Ids whose buckets are in both replicasets.

Some ids have two rows. Some are in no bucket if the id itself is used as the bucket.
"""


@pytest.fixture(scope="module")
def primaries(server):
    """Two clusters, shared by tests that do not harm them."""
    with two_primaries(server) as found:
        yield found


@pytest.fixture
def spread(db, primaries):
    """Accounts spread over two replicasets."""
    found = replicasets(db, primaries, {})
    found.put(IDS)
    return found


@pytest.fixture
def followed(db, primaries):
    """The same accounts, and a standby of r1 that a test may promote."""
    with standbys_of(primaries, "r1") as standbys:
        found = replicasets(db, primaries, standbys)
        found.put(IDS)
        yield found


@pytest.fixture
def mortal(server, db):
    """The same accounts and a standby of r1, on new clusters that a test may destroy."""
    with two_primaries(server) as primaries, standbys_of(primaries, "r1") as standbys:
        found = replicasets(db, primaries, standbys)
        found.put(IDS)
        yield found


@pytest.fixture
def feed(connect):
    """A feed whose changes name the accounts."""
    connection = connect()
    connection.execute("create table movement (id bigint primary key)")
    feed = track(connection, "movement")
    connection.execute("insert into movement select unnest(%s::bigint[])", [IDS])
    return feed


def accounts(job, rule=RULE, **arguments):
    rows = job.routed("public.account", "id", rule, **arguments)
    return sorted((row["id"], row["cents"]) for row in rows.collect())


def test_rows_come_from_the_instances_that_own_them(db, spread, feed, path):
    with batch_of(feed, db, cluster=spread.reached) as job:
        assert accounts(job) == [(n, 100 * n) for n in IDS]


@pytest.mark.parametrize("key", [["code"], ["code", "id"]])
def test_rows_come_by_keys_of_text_and_of_several_columns(db, spread, connection, key):
    for primary in spread.primaries.values():
        with psycopg.connect(primary.conninfo(), autocommit=True) as instance:
            instance.execute(
                "create view seat as select 'é, ' || id::varchar as code, id::int as id, cents from account"
            )
    codes = [f"é, {n}" for n in [*IDS, 7]]
    given(connection, codes if len(key) == 1 else list(zip(codes, [*IDS, 7], strict=True)))
    with job_of(db, ["text", "bigint"][: len(key)], len(codes), spread.reached) as job:
        rows = job.routed("public.seat", key, RULE, columns=["id"]).collect()
    assert sorted((row["code"], row["id"]) for row in rows) == sorted((f"é, {n}", n) for n in [*IDS, 7])


def test_a_role_that_may_only_read_the_catalogue_is_enough(db, spread, feed, role):
    reader = role("reader")
    spread.run("select topology.grant_reader(%s)", reader.name)
    with batch_of(feed, db, cluster=replace(spread.reached, catalogue=reader.conninfo)) as job:
        assert accounts(job) == [(n, 100 * n) for n in IDS]


def test_only_rows_that_changes_name_come_once_for_each_change(db, spread, feed, connect):
    with batch_of(feed, db):
        pass
    connection = connect()
    for number in (7, 7, 2000, 9999):
        connection.execute(
            "insert into revision.commit_queue (commit_id, branch_id) values (%s, %s)",
            [number, feed.branch],
        )
    with batch_of(feed, db, cluster=spread.reached) as job:
        assert [number for number, _ in accounts(job)] == [7, 7, 2000]
        assert job.routed("public.account", "id", RULE, columns=["cents"]).columns == ["id", "cents"]


def test_rows_of_buckets_that_an_instance_has_lost_are_not_read(db, spread, feed, path):
    with psycopg.connect(spread.primaries["r2"].conninfo(), autocommit=True) as connection:
        connection.execute("insert into account values (1, 0)")
    with batch_of(feed, db, cluster=spread.reached) as job:
        assert accounts(job) == [(n, 100 * n) for n in IDS]


class Reads:
    """Counts the reads of instances that ended early, and calls a function before and after each read."""

    def __init__(self, monkeypatch, before=lambda number: None, after=lambda number: None):
        self.begun, self.lost = 0, 0
        read_whole = adbc.read_whole

        def read(*arguments, **named):
            self.begun += 1
            before(self.begun)
            number = self.begun
            try:
                found = read_whole(*arguments, **named)
                after(number)
                return found
            except ServerUnavailable:
                self.lost += 1
                raise

        monkeypatch.setattr(adbc, "read_whole", read)


def test_a_primary_that_is_killed_in_the_middle_of_a_read_costs_no_row_and_doubles_none(
    db, mortal, feed, monkeypatch
):
    """Takes seconds: a standby is made and becomes the primary while a job reads."""
    reads = Reads(monkeypatch)
    for primary in mortal.primaries.values():
        with psycopg.connect(primary.conninfo(), autocommit=True) as connection:
            connection.execute(
                "create view slow as select id, cents, pg_sleep(0.01)::text as slept from account"
            )
    mortal.standbys["r1"].wait_for_replay(mortal.primaries["r1"])
    found = []

    def read():
        with batch_of(feed, db, cluster=mortal.reached) as job:
            rows = job.routed("public.slow", "id", RULE, columns=["cents"]).collect()
            found.extend((row["id"], row["cents"]) for row in rows)

    reader = threading.Thread(target=read)
    reader.start()
    with psycopg.connect(mortal.primaries["r1"].conninfo(), autocommit=True) as connection:
        until(connection, sleeps(), patience=60)
    mortal.primaries["r1"].kill()
    mortal.fail_over("r1")
    reader.join()
    assert reads.lost >= 1, "the fault did not fire"
    assert sorted(found) == [(n, 100 * n) for n in IDS]


def move_all(spread, source, target):
    """Move buckets 0 to 1499 with their rows from one replicaset to the other."""
    first, second = (psycopg.connect(spread.primaries[name].conninfo()) for name in (source, target))
    with first, second:
        second.cursor().executemany(
            "insert into account values (%s, %s)",
            first.execute("delete from account where id % 3000 < 1500 returning *").fetchall(),
        )
    for state, goal in (("copying", target), ("copied", None), ("active", None)):
        spread.run("select topology.move_buckets('default', 0, 1499, %s, %s)", state, goal)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_range_that_moves_while_it_is_read_is_read_from_its_new_owner(db, spread, feed, monkeypatch, when):
    def move(number):
        """The first read finds that its rows are gone, or that it must discard rows that it has read."""
        if number == 1:
            move_all(spread, "r1", "r2")

    reads = Reads(monkeypatch, **{when: move})
    with batch_of(feed, db, cluster=spread.reached) as job:
        assert accounts(job) == [(n, 100 * n) for n in IDS]
    assert reads.begun > 2, "the fault did not fire"


def test_of_what_was_read_only_a_range_that_moved_is_read_again(db, spread, feed, monkeypatch):
    def move(number):
        """During each read another bucket of r1 moves away with its row."""
        if number < 1000:
            row = "delete from account where id % 3000 = {} returning id, cents"
            with (
                psycopg.connect(spread.primaries["r1"].conninfo()) as first,
                psycopg.connect(spread.primaries["r2"].conninfo()) as second,
            ):
                gone = first.execute(sql.SQL(row).format(number)).fetchall()
                second.cursor().executemany("insert into account values (%s, %s)", gone)
            for state, goal in (("copying", "r2"), ("copied", None)):
                spread.run(
                    "select topology.move_buckets('default', %s, %s, %s, %s)", number, number, state, goal
                )

    reads = Reads(monkeypatch, move)
    with batch_of(feed, db, cluster=spread.reached) as job:
        assert accounts(job, timeout=10) == [(n, 100 * n) for n in IDS]
    assert reads.begun > 2, "the fault did not fire"


def test_a_range_that_moves_away_and_back_while_it_is_read_loses_no_row(db, spread, feed, monkeypatch):
    def away(number):
        if number == 1:
            move_all(spread, "r1", "r2")

    def back(number):
        if number == 1:
            move_all(spread, "r2", "r1")

    reads = Reads(monkeypatch, away, back)
    with batch_of(feed, db, cluster=spread.reached) as job:
        assert accounts(job) == [(n, 100 * n) for n in IDS]
    assert reads.begun > 2, "the fault did not fire"


def test_a_catalogue_whose_log_was_trimmed_meanwhile_is_asked_anew(db, spread, feed, monkeypatch):
    def trim(number):
        if number == 1:
            spread.run("select topology.set_state('r1-1', 'Offline'), topology.set_state('r1-1', 'Online')")
            spread.run("select topology.trim_log('0')")

    reads = Reads(monkeypatch, trim)
    with batch_of(feed, db, cluster=spread.reached) as job:
        assert accounts(job) == [(n, 100 * n) for n in IDS]
    assert reads.begun > 2, "the fault did not fire"


def test_a_master_that_is_still_a_standby_is_waited_for(db, followed, feed, monkeypatch):
    followed.standbys["r1"].wait_for_replay(followed.primaries["r1"])
    followed.run("select topology.set_master('r1', 'r1-2')")
    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == 2:
            followed.standbys["r1"].promote()

    monkeypatch.setattr(routing.time, "sleep", pause)
    with batch_of(feed, db, cluster=followed.reached) as job:
        assert accounts(job) == [(n, 100 * n) for n in IDS]
    assert len(pauses) >= 2, "the fault did not fire"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (
            "update topology._pico_replicaset set current_master_name = ''",
            "r1 has no master: topology.set_master",
        ),
        ("select topology.set_state('r1-1', 'Offline')", "r1-1, the master of replicaset r1, is Offline"),
        ("delete from topology._pico_peer_address", "has no address"),
    ],
)
def test_a_range_that_stays_without_a_master_ends_with_what_is_wrong(db, spread, feed, fault, reason):
    spread.run(fault)
    with pytest.raises(BatchIncomplete, match=reason), batch_of(feed, db, cluster=spread.reached) as job:
        accounts(job, timeout=0.2)


def test_buckets_that_nobody_owns_are_named(db, spread, feed):
    spread.run("delete from topology._pico_bucket where bucket_id_start = 0")
    spread.run("select topology.assign_buckets('default', 0, 999, 'r1')")
    with (
        pytest.raises(InvalidArgument, match=r"\[1000,1500\)\}.*assign_buckets"),
        batch_of(feed, db, cluster=spread.reached) as job,
    ):
        accounts(job)


def test_a_row_in_a_bucket_that_does_not_exist_is_refused_and_not_lost(db, spread, feed, path):
    with (
        pytest.raises(Exception, match=r"is in bucket 3\d\d\d, which nobody owns"),
        batch_of(feed, db, cluster=spread.reached) as job,
    ):
        accounts(job, "id")


def test_a_key_that_is_not_unique_is_refused_though_each_instance_has_but_a_part(db, spread, feed, path):
    for primary in spread.primaries.values():
        with psycopg.connect(primary.conninfo(), autocommit=True) as connection:
            connection.execute("create view leg as select id as account_id from account union all select 7")
    with (
        pytest.raises(Exception, match='"account_id" is not unique in public.leg'),
        batch_of(feed, db, cluster=spread.reached) as job,
    ):
        job.routed("public.leg", "account_id", "account_id % 3000").collect()


def test_a_tier_without_buckets_is_named(db, spread, feed):
    with (
        pytest.raises(InvalidArgument, match="no buckets of tier 'cold'"),
        batch_of(feed, db, cluster=spread.reached) as job,
    ):
        accounts(job, tier="cold")


def test_a_rule_that_is_no_sql_of_the_row_is_refused_at_once(db, spread, feed):
    with pytest.raises(InvalidArgument, match="color"), batch_of(feed, db, cluster=spread.reached) as job:
        accounts(job, "color % 3000")


def test_a_role_that_may_not_read_the_table_of_an_instance_is_told_that_it_is_that_of_the_instances(
    db, spread, feed
):
    with psycopg.connect(spread.primaries["r1"].conninfo(), autocommit=True) as connection:
        connection.execute("create role stranger login")
        try:
            cluster = replace(spread.reached, instances="dbname=postgres user=stranger")
            with (
                pytest.raises(
                    PermissionDenied, match="(?s)role of the instances' connection.*grant select on"
                ),
                batch_of(feed, db, cluster=cluster) as job,
            ):
                accounts(job)
        finally:
            connection.execute("drop role stranger")


def test_a_catalogue_that_cannot_be_reached_is_said(db, feed):
    nowhere = Cluster("host=127.0.0.1 port=1 dbname=none", "dbname=postgres")
    with pytest.raises(ServerUnavailable, match="port 1"), batch_of(feed, db, cluster=nowhere) as job:
        accounts(job)


def test_an_application_without_a_catalogue_is_told_what_to_give(db, feed):
    with pytest.raises(InvalidArgument, match="catalogue_conn_id"), batch_of(feed, db) as job:
        accounts(job)


def test_a_rule_survives_as_options_and_shows_no_secret():
    wanted = ReadOptions("public.account", ("tenant", "no"), rule=Rule("id % 3000", "hot", 5.0))
    assert ReadOptions.from_options(wanted.options()) == wanted
    assert "hunter2" not in repr(Cluster("password=hunter2", "password=hunter2"))


@pytest.mark.parametrize("arguments", [{}, {"table": "t", "key": ("id",), "which": "gone"}])
def test_a_rule_without_rows_that_are_there_is_refused(arguments):
    with pytest.raises(InvalidArgument, match="bucket"):
        ReadOptions(**arguments, rule=Rule("id"))
