"""The examples of the guide to the message queues, run unchanged in their order."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import airflow_home
from tests.readme import Guide

pytestmark = pytest.mark.hstore

airflow_home.prepare()


@pytest.fixture
def guide(db, connect):
    guide = Guide("docs/how-to/queues.md", db, connect())
    guide.run("Queues and parts")
    yield guide
    guide.names["connection"].close()


@pytest.fixture
def posted(guide):
    guide.run("Post")
    return guide


def test_posted_messages_are_received_when_due_and_by_selectors(posted):
    _, retail, all_due = posted.run("Consumers and selectors")
    assert retail == [("orders.1", "42")]
    assert [sku for _, sku in all_due] == ["42", "44", "45", "46", "47"]


def test_a_message_that_waits_comes_in_a_separate_answer(guide, connect):
    guide.run("Post")
    guide.run("Order")
    due = "select data -> 'do' from mbus.consumen_orders_by_default(100) where data ? 'do'"
    assert connect().execute(due).fetchall() == [("create",)]
    assert connect().execute(due).fetchall() == [("limit",)]
    of_one_part = "select count(*), count(distinct mod(id, 16)) from mbus.log$moves"
    assert connect().execute(of_one_part).fetchone() == (2, 1)


def test_a_message_is_taken_and_put_back_to_come_later(posted, connect):
    taken, put_back, looked = posted.run("Take, peek, put back, give up")
    assert (taken, put_back) == ([('"sku"=>"42", "pieces"=>"3"',)], [("orders.1",)])
    assert looked == [(True, False, "2")]
    assert "42" not in [
        row[0] for row in connect().execute("select data -> 'sku' from mbus.consumen_orders_by_default(9)")
    ]


def test_a_request_is_answered(guide, capsys):
    guide.run("Request and reply")
    assert capsys.readouterr().out == "{'cents': '995'}\n"


def test_a_trigger_copies_what_a_view_posts(guide):
    *_, copied = guide.run("Triggers and views")
    assert copied == [('"sku"=>"49", "pieces"=>"500"',)]


def test_a_batch_is_counted_once_and_in_a_dag(posted, connect):
    posted.run("In batches")
    sold = connect().execute("select sku, pieces from sold order by sku").fetchall()
    assert sold == [(sku, 1) for sku in ("42", "44", "45", "46", "47")]
    assert posted.names["selling"].task_ids == ["sell"]


def test_a_saga_is_started(guide, connect):
    guide.run("Sagas")
    assert connect().execute("select name, state, to_do from mbus.sagas").fetchall() == [
        ("tour", "forward", ["flight", "room"])
    ]


def test_every_section_with_an_example_is_run(guide):
    text = Path(__file__).read_text()
    for name in [name for name, body in guide.sections.items() if "```" in body]:
        assert f'"{name}"' in text, name
