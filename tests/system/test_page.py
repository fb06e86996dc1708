"""The page in a real browser, in the shell of a real API server, on a real PostgreSQL."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import psycopg
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page, expect

from airflow_pgchange.admin import dead_letters, manual_operations
from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction, QueueFeed
from airflow_pgchange.messages import (
    RollBack,
    Saga,
    Step,
    TryAgain,
    create_saga_queues,
    handle_saga,
    start_saga,
)
from airflow_pgchange.messages.saga_handling import Answer
from demo.postgres import free_port
from tests import events, queues
from tests import page as pages
from tests.airflow_home import uri
from tests.browser import come_back, log_in, started
from tests.pictures.views import CUT
from tests.topology import make_catalogue
from tests.web import served

FEED = CommitFeed("delays", 0)
RUN = "flight_delays/manual__2026-01-01T00%3A00%3A00%2B00%3A00/look_after/-1/2"
"""A run of a task: the text that an operator stores with an attempt."""
TOUR = Saga(
    "tour",
    (
        Step("room", "rooms", "no_rooms"),
        Step("seat", "seats", "no_seats", after=("room",)),
        Step("meal", "meals", "no_meals", after=("room",)),
        Step("taxi", "taxis", "no_taxis", after=("seat", "meal")),
    ),
)
PATIENCE = 60_000
"""Milliseconds."""
SCROLLING = """
() => [...document.querySelectorAll('[data-page=pgchange] table')]
    .flatMap((table) => [table.closest('[data-page=pgchange]'), table.closest('[role=region]')])
    .filter((box) => box.scrollWidth > box.clientWidth)
    .map((box) => box.getAttribute('aria-label') ?? 'the page')
"""
"""A script that returns the parts of the page, and the tables, that scroll sideways."""
LINES = """
(code) => {
    const word = document.createTreeWalker(code, NodeFilter.SHOW_TEXT);
    while (word.nextNode() && word.currentNode.data.indexOf('--consumer') < 0);
    const range = document.createRange();
    const at = word.currentNode.data.indexOf('--consumer');
    range.setStart(word.currentNode, at);
    range.setEnd(word.currentNode, at + '--consumer'.length);
    return range.getClientRects().length;
}
"""
"""A script that returns the number of lines over which the option of a command breaks."""
Theme = Literal["light", "dark"]
THEMES: tuple[Theme, ...] = ("light", "dark")


@pytest.fixture
def ledger(db: str) -> str:
    """A database with three commits. A consumer has failed on the first of them."""
    with psycopg.connect(db, autocommit=True) as connection:
        connection.execute(
            "create table ledger (id bigint generated always as identity primary key);"
            "select revision.track('ledger', branch_id => '0');"
            "insert into ledger select from generate_series(1, 3);"
            "select tube.tube_ensure_exists('copies'), tube.tube_table_ensure_attached('copies', 'ledger', 0)"
        )
        with pytest.raises(ZeroDivisionError), ConsumerTransaction(FEED, db) as transaction:
            transaction.claim(1)
            raise ZeroDivisionError
        connection.execute("update pgchange.claim set error = 'no such carrier'")
    return db


@pytest.fixture
def url(ledger: str, metadata: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Airflow's address."""
    port = free_port()
    pages.prepare(tmp_path, f"http://127.0.0.1:{port}")
    pages.parse(tmp_path)
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", uri(ledger))
    monkeypatch.setenv("AIRFLOW_CONN_UNREACHABLE", "postgres://somebody@127.0.0.1:1/nowhere")
    with served(pages.served(), port=port) as address:
        yield address


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """The browser that all tests share, because its start is expensive."""
    with started(tmp_path_factory.mktemp("chromium")) as chromium:
        yield chromium


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Page]:
    """A tab with cookies of its own. An error on its page fails the test."""
    with chromium.new_context() as context:
        tab = context.new_page()
        tab.set_default_timeout(PATIENCE)
        expect.set_options(timeout=PATIENCE)
        failed: list[str] = []
        tab.on("pageerror", lambda error: failed.append(str(error)))
        yield tab
    assert failed == []


def row(tab: Page, table: str, text: str) -> Locator:
    return tab.get_by_role("table", name=table).get_by_role("row").filter(has_text=text)


def consumer(tab: Page, name: str) -> Locator:
    """Return the row of a consumer.

    The row of another consumer may contain the name, too, because the names are similar.
    """
    link = tab.get_by_role("link", name=name, exact=True)
    return tab.get_by_role("table", name="Consumers").get_by_role("row").filter(has=link)


def open_view(tab: Page, name: str) -> None:
    """Follow a link of the page.

    Loading the address instead takes seconds of CPU, because Airflow's shell is compiled again.
    """
    tab.locator("[data-page=pgchange]").get_by_role("link", name=name, exact=True).first.click()


def hindrances(tab: Page, part: str, themes: Sequence[Theme] = THEMES) -> list[str]:
    """Return the serious accessibility findings of axe in a part of the page, in each theme."""
    return [f"{theme} {hindrance}" for theme in themes for hindrance in _hindrances(tab, part, theme)]


def _hindrances(tab: Page, part: str, theme: Theme) -> list[str]:
    tab.emulate_media(color_scheme=theme)
    expect(tab.locator(f"html.{theme}")).to_be_attached()
    tab.wait_for_function("document.getAnimations().every((one) => one.playState !== 'running')")
    found = Axe().run(tab, context=part).response["violations"]
    return [
        f"{one['id']}: {node['html']}"
        for one in found
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]


def work_off(db: str) -> int:
    """Process the next batch of the consumer, and return the number of its changes."""
    with ConsumerTransaction(FEED, db, run=RUN) as transaction:
        batch = transaction.claim(100)
        if batch is None:
            return 0
        transaction.ack()
        return batch.count


def test_a_person_sees_why_a_consumer_fails_skips_its_batch_and_sees_it_go_on(
    ledger: str, url: str, browser: Page, tmp_path: Path
) -> None:
    """Takes seconds: a server and a browser are started, and the page refreshes its numbers every three seconds."""
    log_in(browser, url, pages.password(tmp_path, "op"))
    browser.get_by_role("link", name="PG feeds").click()
    delays = consumer(browser, "commits:delays/0")
    expect(delays).to_contain_text("failing")
    expect(delays).to_contain_text("no such carrier")
    expect(row(browser, "Needs attention", "unreachable")).to_contain_text("connection failed")

    delays.get_by_role("button", name="Actions for commits:delays/0").click()
    browser.get_by_role("menuitem", name="Skip").click()
    dialog = browser.get_by_role("alertdialog")
    expect(dialog).to_contain_text("is given up and kept as a dead letter in airline")
    expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
    dialog.get_by_label("Why it is given up").fill("the carrier is gone")
    browser.keyboard.press("Enter")
    expect(browser.get_by_role("status")).to_contain_text("is a dead letter now")
    expect(delays).to_contain_text("ready")
    assert work_off(ledger) == 2
    expect(delays).to_contain_text("idle")

    browser.get_by_role("link", name="Dead letters").click()
    letter = row(browser, "Dead letters in airline", "the carrier is gone")
    expect(letter).to_contain_text("no such carrier")
    letter.get_by_role("button", name="Show letter").click()
    expect(browser.get_by_role("region", name="Content of letter")).to_contain_text('"bounds"')
    letter.get_by_role("checkbox").check()
    browser.get_by_role("button", name="Send the selected letters in airline again").click()
    dialog.get_by_role("button", name="Send again").click()
    expect(letter).to_contain_text("on its way")
    assert work_off(ledger) == 1
    expect(letter).to_have_count(0)


def test_a_person_finds_a_consumers_last_hour_and_batches_and_the_address_bar_keeps_what_is_looked_at(
    ledger: str, url: str, browser: Page
) -> None:
    """Takes seconds: a server and a browser are started, and samples are five seconds apart."""
    come_back(browser, url)
    browser.get_by_role("button", name="Ready", exact=True).click()
    flow = browser.get_by_role("region", name="How changes flow")
    expect(flow.get_by_role("link", name="commits:delays/0, failing: behind by 3,")).to_be_visible()
    expect(flow.get_by_role("link", name="DAG flight_delays, paused")).to_have_attribute(
        "href", "/dags/flight_delays"
    )
    consumer(browser, "commits:delays/0").get_by_role("link", name="commits:delays/0").click()
    plot = browser.get_by_role("img", name="Changes in the last hour. ready: 3 now")
    expect(plot).to_be_visible()
    attempt = row(browser, "Batches of the last day", "failed")
    expect(attempt).to_contain_text("ZeroDivisionError")
    # With the next sample the plot has two points, and so a line.
    expect(plot.locator("path").first).to_have_attribute("d", re.compile("M.*L"))
    work_off(ledger)
    browser.reload()
    expect(row(browser, "Batches of the last day", "committed")).to_have_count(1)
    run = row(browser, "Batches of the last day", "try 2").get_by_role("link", name="look_after")
    address = (
        "/dags/flight_delays/runs/manual__2026-01-01T00%3A00%3A00%2B00%3A00/tasks/look_after?try_number=2"
    )
    expect(run).to_have_attribute("href", address)
    browser.go_back()
    expect(browser.get_by_role("columnheader", name="Ready")).to_have_attribute("aria-sort", "ascending")


def test_no_action_is_cut_at_any_width_however_long_names_are(ledger: str, url: str, browser: Page) -> None:
    """Takes seconds: a server and a browser are started."""
    name = "delays of flights that were long " * 8
    with psycopg.connect(ledger, autocommit=True) as connection:
        with ConsumerTransaction(CommitFeed(name, 0), ledger) as transaction:
            assert transaction.claim(1)
            transaction.ack()
        connection.execute("select tube.backfill_begin('copies', 'ledger', null)")
        manual_operations.skip_batch(connection, connection, FEED, "no use " * 200)
    come_back(browser, url)
    expect(row(browser, "Consumers", name.strip()).get_by_role("link").first).to_have_attribute(
        "title", f"commits:{name}/0"
    )
    for width in (1240, 1030, 400):
        browser.set_viewport_size({"width": width, "height": 900})
        for view in ("Overview", "Backfills", "Dead letters"):
            open_view(browser, view)
            expect(browser.locator("[data-page=pgchange] tbody button").first).to_be_visible()
            assert browser.evaluate(CUT) == [], (width, view)
            assert browser.evaluate(SCROLLING) == [], (width, view)
        open_view(browser, "Overview")
        command = row(browser, "Needs attention", "dead letter").get_by_role("code")
        expect(command).to_have_text("airflow-pgchange letters list --consumer commits:delays/0")
        assert command.evaluate(LINES) == 1, width
    browser.get_by_role("button", name="Actions for commits:delays/0").click()
    browser.get_by_role("menuitem", name="Move").click()
    expect(browser.get_by_role("alertdialog")).to_be_visible()


def test_a_user_who_may_only_look_sees_lag_and_state_and_no_buttons(url: str, browser: Page) -> None:
    """Takes seconds: a server and a browser are started."""
    come_back(browser, url, "viewer")
    delays = consumer(browser, "commits:delays/0")
    expect(delays).to_contain_text("failing")
    expect(delays.get_by_role("button")).to_have_count(0)
    delays.get_by_role("link", name="commits:delays/0").click()
    expect(row(browser, "Batches of the last day", "failed")).not_to_contain_text("ZeroDivisionError")
    browser.get_by_role("link", name="Dead letters").click()
    expect(browser.get_by_text("so no dead letters are shown")).to_be_visible()


def test_where_nothing_is_it_is_said_and_a_person_starts_pauses_and_cancels_a_backfill(
    ledger: str, url: str, browser: Page
) -> None:
    """Takes seconds: a server and a browser are started."""
    come_back(browser, url)
    for view, words in (
        ("Dead letters", "There are no dead letters here."),
        ("Watchers", "No watcher was active here in the last days."),
        ("Queues", "There is no message queue here"),
        ("Sagas", "There is no recent saga here"),
        ("Event log", "No group has subscribed to events here yet."),
        ("Topology", "No cluster is described in this catalogue."),
        ("Backfills", "No table has been backfilled here."),
    ):
        open_view(browser, view)
        expect(browser.get_by_text(words)).to_be_visible()
    browser.get_by_role("button", name="Start a backfill in airline").click()
    dialog = browser.get_by_role("alertdialog")
    expect(dialog.get_by_label("Table to backfill")).to_have_value("0")
    dialog.get_by_role("button", name="Start it").click()
    backfill = row(browser, "Backfills in airline", "ledger")
    for verb, state in (("Pause", "paused"), ("Resume", "scheduled"), ("Cancel", "cancelled")):
        backfill.get_by_role("button", name=verb).click()
        dialog.get_by_role("button", name=f"{verb} it").click()
        expect(backfill).to_contain_text(state)
    with psycopg.connect(ledger) as connection:
        states = connection.execute("select state from tube.backfills()").fetchall()
    assert states == [("cancelled",)]


def test_a_link_to_a_dead_letter_shows_it_to_whoever_follows_it(ledger: str, url: str, browser: Page) -> None:
    """Takes seconds: a server and a browser are started."""
    with psycopg.connect(ledger, autocommit=True) as connection:
        manual_operations.skip_batch(connection, connection, FEED, "the carrier is gone")
        (number,) = [letter.id for letter in dead_letters.letters(connection)]
    view = f"{url}/plugin/pgchange/letters"
    come_back(browser, url, view="letters")
    group = row(browser, "Dead letters in airline", "1 letter with 1 change of commits:delays/0")
    expect(group).to_contain_text("no such carrier")
    letter = row(browser, "Dead letters in airline", "the carrier is gone")
    group.get_by_role("button", name="Hide the letters").click()
    expect(letter).to_have_count(0)
    group.get_by_role("button", name="Show the letters").click()
    letter.get_by_role("button", name="Show letter").click()
    held = browser.get_by_role("region", name="Content of letter")
    expect(held).to_be_visible()
    link = f"{view}?connection=airline&letter={number}"
    expect(browser).to_have_url(link)
    browser.reload()
    expect(held).to_be_visible()
    letter.get_by_role("button", name="Hide letter").click()
    expect(held).to_have_count(0)
    expect(browser).to_have_url(view)
    browser.goto(link)
    expect(held).to_be_visible()
    with psycopg.connect(ledger, autocommit=True) as connection:
        dead_letters.drop_letters(connection, ids=[number])
    expect(browser.get_by_text(f"Letter {number} is not listed")).to_be_visible()


def answered(db: str, queue: str, answer: Answer) -> None:
    """Give this answer to the next message of a saga in a queue."""
    with ConsumerTransaction(QueueFeed(queue), db) as transaction:
        assert transaction.claim(1)
        (change,) = transaction.changes()
        transaction.ack(lambda kept: handle_saga(kept, change, lambda *_: answer))


@pytest.mark.hstore
def test_a_person_sees_how_long_queues_are_and_follows_a_saga_step_by_step(
    ledger: str, url: str, browser: Page
) -> None:
    """Takes seconds: a server and a browser are started, and the page refreshes its numbers every three seconds."""
    with psycopg.connect(ledger, autocommit=True) as connection:
        queues.make(connection, "orders", parts=12)
        queues.consumer(connection, "retail", "(t.properties->'kind') = 'retail'", queue="orders")
        first = queues.fill(connection, range(1200), "orders")[0]
        queues.post(connection, 1, "orders", delay="1 hour", kind="retail")
        queues.post(connection, 2, "orders", after=[first], kind="retail")
        connection.execute("select mbus.post_dmq('n=>3', iid => mbus.get_iid('orders'))")
        create_saga_queues(connection, TOUR)
        number = start_saga(connection, TOUR, {"tour_id": "7"})
    come_back(browser, url, view="queues")
    # More than a thousand messages are not counted but estimated.
    expect(row(browser, "Queues in airline", "12 parts")).to_contain_text("~1,2")
    retail = row(browser, "Queues in airline", "where (t.properties->'kind') = 'retail'")
    expect(retail.get_by_role("cell").nth(1)).to_have_text("2")
    assert hindrances(browser, "[data-page=pgchange]") == []
    retail.get_by_role("link", name="retail").click()
    expect(browser.get_by_role("heading", name="queue:orders/retail")).to_be_visible()

    browser.get_by_role("link", name="Sagas").click()
    tour = row(browser, "Sagas in airline", f"number {number}")
    expect(tour).to_contain_text("0 of 4 done")
    tour.get_by_role("button", name="Show saga").click()
    drawing = browser.get_by_role("img", name="4 steps of tour")
    expect(drawing).to_have_accessible_name(re.compile("room: ready. meal, after room: waiting."))
    answered(ledger, "rooms", None)
    answered(ledger, "seats", TryAgain("no seat yet"))
    expect(drawing).to_have_accessible_name(re.compile("seat, after room: waiting, retry in"))
    expect(row(browser, f"Steps of tour {number}", "no seat yet")).to_contain_text("retry in")
    answered(ledger, "meals", RollBack("no meal at all"))
    expect(drawing).to_have_accessible_name(re.compile("room: to compensate. meal, after room: refused."))
    expect(row(browser, f"Steps of tour {number}", "no meal at all")).to_contain_text("refused")
    expect(tour).to_contain_text("rolled back because: no meal at all")
    expect(browser.get_by_role("region", name="Start data of")).to_contain_text('"tour_id": "7"')
    answered(ledger, "no_rooms", None)
    expect(drawing).to_have_accessible_name(re.compile("room: compensated."))
    assert hindrances(browser, "[data-page=pgchange]") == []


def test_a_person_sees_who_reads_the_groups_of_an_event_log_and_what_stands_still(
    ledger: str, url: str, browser: Page
) -> None:
    """Takes seconds: a server and a browser are started, and the page refreshes its numbers every three seconds."""
    come_back(browser, url, view="events")
    guide = browser.get_by_role("link", name="The guide to the event log")
    assert browser.request.get(str(guide.get_attribute("href"))).text().startswith("# The event log")
    with psycopg.connect(ledger, autocommit=True, application_name="bookkeeper") as connection:
        events.subscribe(connection, "billing", params={"topic": "order.paid"})
        events.publish(connection, *["order.paid"] * 1200)
        events.poll_all(connection)
        connection.execute(
            "update pgmb.subscription_groups set updated_at = now() - interval '2 hours' where id = 'billing'"
        )
        billing = row(browser, "Groups in airline", "billing")
        expect(billing).to_contain_text("1 subscription, to order.paid")
        expect(billing).to_contain_text("No process reads it: it has not advanced for 2 h.")
        expect(row(browser, "Partitions in airline", "billing")).to_contain_text("1,200")
        assert events.read(connection, "billing", 1, peek=False)
        expect(billing).to_contain_text(f"bookkeeper, process {connection.info.backend_pid}")
        expect(billing).to_contain_text("reads it, but it has not advanced for")
        events.take(connection, "billing", 2000)
        expect(row(browser, "Partitions in airline", "all dispatched events are read").first).to_be_visible()
    billing.get_by_role("link", name="billing").click()
    expect(browser.get_by_role("heading", name="events:billing")).to_be_visible()


def test_a_person_sees_who_is_a_master_and_who_owns_which_buckets(
    ledger: str, url: str, browser: Page
) -> None:
    """Takes seconds: a server and a browser are started, and the page refreshes its numbers every three seconds."""
    come_back(browser, url, view="topology")
    guide = browser.get_by_role("link", name="The guide to the topology")
    assert browser.request.get(str(guide.get_attribute("href"))).text().startswith("# Topology")
    with psycopg.connect(ledger, autocommit=True) as connection:
        make_catalogue(connection)
        connection.execute("select topology.assign_buckets('default', 4000, 4999, 'r2')")
        master = row(browser, "Instances in airline", "r1-i1")
        expect(master).to_contain_text("Online")
        expect(master).to_contain_text("127.0.0.1:11")
        expect(master.get_by_role("cell", name="master", exact=True)).to_be_visible()
        owners = browser.get_by_role("img", name="Owners of the buckets of tier default.")
        expect(owners).to_have_accessible_name(
            re.compile("0 to 2,999: r1; 3,000 to 3,999: no owner; 4,000 to 4,999: r2")
        )
        expect(browser.get_by_text("1,000 buckets of tier default have no owner")).to_be_visible()
        connection.execute("select topology.set_state('r1-i1', 'Offline')")
        expect(browser.get_by_text("r1-i1, the master of replicaset r1, is Offline.")).to_be_visible()
        connection.execute("select topology.set_master('r1', 'r1-i2')")
        connection.execute("select topology.move_buckets('default', 0, 999, 'copying', 'r2')")
        moving = row(browser, "Buckets of tier default in airline", "copying")
        expect(moving).to_contain_text("r1, going to r2")
        expect(moving).to_contain_text("r1-i2")


@pytest.mark.release(
    "every run opens these views, and what makes them readable is in the parts that all views share"
)
def test_each_view_can_be_read_by_all(ledger: str, url: str, browser: Page) -> None:
    """Takes seconds: a server and a browser are started, and each view is gone through."""
    with psycopg.connect(ledger, autocommit=True) as connection:
        manual_operations.skip_batch(connection, connection, FEED, "the carrier is gone")
        connection.execute("select tube.backfill_begin('copies', 'ledger', null)")
        connection.execute(
            "select pgchange.note_watchers(%s)",
            ['[{"feed": "commits:delays/0", "kind": "commit", "error": "no right"}]'],
        )
        events.subscribe(connection, "billing")
        events.publish(connection, "order.paid")
        events.poll_all(connection)
        make_catalogue(connection)
        connection.execute("select topology.move_buckets('default', 0, 999, 'copying', 'r2')")
    come_back(browser, url)
    shown = {
        "Overview": "Consumers",
        "commits:delays/0": "Batches of the last day",
        "Backfills": "Backfills in airline",
        "Watchers": "Watchers",
        "Event log": "Groups in airline",
        "Topology": "Instances in airline",
        "Dead letters": "Dead letters in airline",
    }
    for view, table in shown.items():
        open_view(browser, view)
        expect(browser.get_by_role("table", name=table)).to_be_visible()
        assert hindrances(browser, "[data-page=pgchange]") == [], view
    browser.get_by_role("button", name="Show letter").click()
    expect(browser.get_by_role("region", name="Content of letter")).to_be_visible()
    assert hindrances(browser, "[data-page=pgchange]") == []
    browser.get_by_role("button", name="Drop letter").click()
    expect(browser.get_by_role("alertdialog")).to_be_visible()
    assert hindrances(browser, "[role=alertdialog]") == []
    browser.evaluate("document.querySelector('[role=alertdialog]').append(document.createElement('img'))")
    assert hindrances(browser, "[role=alertdialog]", ["light"]) == ["light image-alt: <img>"]
