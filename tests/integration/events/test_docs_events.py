"""The examples of the guide to the event log, run unchanged in their order."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from standardwebhooks import Webhook

from airflow_pgchange.feeds import EventFeed
from tests import airflow_home
from tests.event_keeping import dispatch
from tests.readme import ROOT, Guide
from tests.spark_session import batch_of
from tests.web import listening, receiving, served

airflow_home.prepare()

GUIDE = (ROOT / "docs" / "how-to" / "events.md").read_text()
RECEIVER = "http://127.0.0.1:8000/"


@pytest.fixture
def guide(db, connect):
    guide = Guide("docs/how-to/events.md", db, connect())
    for section in ("Install", "Subscribe", "Publish"):
        guide.run(section)
    yield guide
    guide.names["connection"].close()


def test_a_batch_is_summed_once_and_in_a_dag_and_in_spark(guide, db, connect, monkeypatch):
    @contextmanager
    def batch_job():
        with batch_of(EventFeed("large"), db) as job:
            yield job

    monkeypatch.setattr("airflow_pgchange.batch_job", batch_job)
    guide.run("Read exactly once")
    connection = connect()
    paid, refunded = sum(range(1, 201)) * 100 + 500, 100
    assert connection.execute("select * from turnover order by 1").fetchall() == [
        ("order.paid", paid),
        ("order.refunded", refunded),
    ]
    assert guide.names["billing_dag"].task_ids == ["add"]
    assert connection.execute("select count(*), min(cents) from large_order").fetchone() == (101, 10_000)


def test_handlers_get_every_event_whose_time_has_come(guide, capsys):
    assert guide.run("Handlers and dead letters") == [[]]
    orders = [event.payload["order"] for delivery in guide.names["mailed"] for event in delivery.events]
    assert sorted(orders) == [*range(1, 201), 202]
    assert "Handled(batches=1, events=201, failed=0, retried=0, given_up=0)" in capsys.readouterr().out


def test_changes_of_a_table_are_events(guide):
    *_, events = guide.run("Changes of a table as events")
    assert events == [
        ("public.flight.insert", {"id": 1, "gate": "A1"}, {}),
        ("public.flight.update", {"gate": None}, {"old": {"id": 1, "gate": "A1"}}),
    ]


def test_a_mounted_router_streams_to_who_may_read(guide, connect):
    guide.run("Server-sent events")
    event, publish = guide.names["Event"], guide.names["publish"]
    # A stream gets events that are dispatched after it began. So dispatch the events of the guide first.
    dispatch(connect())
    with served(guide.names["app"]) as address:
        assert httpx.get(f"{address}/events/paid").status_code == 403
        with listening(f"{address}/events/paid", authorization="Bearer open sesame") as client:
            publish(connect(), [event("order.refunded", 1), event("order.paid", 2)])
            [message] = client.events(1)
    assert json.loads(message.data)["payload"] == 2


def test_a_webhook_gets_a_signed_event(guide, capsys):
    guide.run("Handlers and dead letters")
    with receiving() as (port, requests):
        guide.run("Webhooks", [(RECEIVER, f"http://127.0.0.1:{port}/")])
    [request] = requests
    assert (request.path, request.events[0]["payload"]) == ("/orders", {"order": 7})
    secret = re.search(r"whsec_[^\"]+", GUIDE)[0]
    Webhook(secret).verify(request.body, request.headers)


def test_by_hand_and_maintenance(guide):
    dispatched, read, released, _, status, groups, unread, held, troubles = guide.run(
        "By hand, and maintenance"
    )
    assert dispatched[0][0] > 0
    assert (len(read), released, troubles) == (100, [(True,)], [])
    assert {consumer for _, consumer, *_ in status} == {
        "events:billing",
        "events:mails",
        "events:large",
        "events:audit",
    }
    assert {f"events:{group}" for group, *_ in groups} == {consumer for _, consumer, *_ in status}
    assert {"billing", "mails", "large"} <= {group for _, _, group, *_ in unread}
    assert {"billing", "mails", "large"} <= {holder for _, _, holder, *_ in held}


def test_an_event_is_emptied_and_its_readers_go_on(guide, connect):
    [empty] = re.findall(r"`(update pgmb.events .*?)`", GUIDE)
    connection = connect()
    [(event_id,)] = connection.execute(
        "select id from pgmb.events where payload ->> 'order' = '202'"
    ).fetchall()
    connection.execute(empty.replace("'...'", f"'{event_id}'"))
    dispatch(connection)
    read = connection.execute("select id, payload from pgmb.read_next_events('billing')").fetchall()
    assert (event_id, None) in read


def test_every_section_with_an_example_is_run():
    sections = re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", GUIDE, flags=re.DOTALL | re.MULTILINE)
    text = Path(__file__).read_text()
    for name in [name for name, body in sections if "```" in body]:
        assert f'"{name}"' in text, name


def test_every_file_that_the_guide_links_to_is_there():
    for target in re.findall(r"\]\(([^)#]+)\)", GUIDE):
        assert target.startswith("https://") or (ROOT / "docs" / "how-to" / target).exists(), target
