"""The examples of the guide to tubes, run unchanged in their order."""

from __future__ import annotations

from pathlib import Path

import pytest
from airflow.sdk import DAG

from airflow_pgchange.feeds import TubeFeed
from tests import airflow_home
from tests.readme import Guide
from tests.spark_session import batch_of

airflow_home.prepare()

DATABASE = '"host=localhost dbname=airline"'


@pytest.fixture
def guide(db, connect):
    guide = Guide("docs/how-to/tubes.md", db, connect())
    guide.run("A copy of a table")
    return guide


def test_a_copy_of_a_table_follows_what_touches_its_tube(guide, db, connect):
    connection = connect()
    connection.execute("insert into public.customer values (1, 'ann'), (2, 'bob')")
    assert connection.execute("select op, shard, ids from public.copies").fetchall() == [("I", 0, [1, 2])]
    with batch_of(TubeFeed("copies"), db) as job:
        for attached in job.attached():
            job.mirror(attached, into="{tube}.{table}")
    assert connection.execute("select * from copies.customer").fetchall() == [(1, "ann"), (2, "bob")]


def test_a_copy_of_one_table_becomes_one_of_several(guide, db, connect):
    """Takes seconds if this test starts the worker's Spark session."""
    (add,) = [part for part in guide.sections["Shards and predicates"].split("`") if part.startswith("alter")]
    connection = connect()
    connection.execute(" ".join(add.split()))
    connection.execute("""
        alter table copies.customer drop constraint customer_pkey, add primary key (shard, id);
        create schema shop_1;
        create table shop_1.customer (like public.customer, primary key (id));
        select tube.tube_table_ensure_attached('copies', 'shop_1.customer');
        insert into public.customer values (1, 'ann');
        insert into shop_1.customer values (1, 'bob')
    """)
    with batch_of(TubeFeed("copies"), db) as job:
        for attached in job.attached():
            job.mirror(attached, into="{tube}.{table}")
    copied = connection.execute("select shard, id, name from copies.customer order by 1").fetchall()
    assert copied == [(0, 1, "ann"), (1, 1, "bob")]


def test_control_pods_are_worked_off_behind_a_replay(guide):
    with DAG("copying"):
        guide.run("In your own DAG")
    assert guide.names["replay"].downstream_task_ids == {"collect"}


def test_ids_of_several_columns_are_touched_as_the_guide_writes_them(guide, connect):
    guide.run("Ids of other types")
    connection = connect()
    connection.execute("insert into public.session values ('acme', 7)")
    call = guide.sections["Ids of other types"].partition("By hand: `")[2].partition("`")[0]
    connection.execute(f"select public.{call}")
    assert connection.execute("select ids from sessions order by seq").fetchall() == [(["{acme,7}"],)] * 2


def test_pods_are_made_and_read_by_hand(guide, db, connect, capsys):
    connection = connect()
    connection.execute("insert into public.customer values (7, 'eve')")
    guide.run("By hand", [(DATABASE, repr(db))])
    assert capsys.readouterr().out.splitlines() == [
        "I 0 [7] None",
        "T 0 [1, 2] None",
        "T 0 [3, 4] None",
        "T 0 [] {'type': 'mine'}",
        "B 0 [7] None",
    ]
    assert connection.execute("select count(*) from public.copies").fetchone() == (0,)


def test_every_section_with_an_example_is_run(guide):
    text = Path(__file__).read_text()
    for name in [name for name, body in guide.sections.items() if "```" in body]:
        assert f'"{name}"' in text, name
