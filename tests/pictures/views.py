"""The pictures of the page, and how a browser takes each of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlencode

from playwright.sync_api import Browser, BrowserContext, Page, expect

from tests.browser import come_back

Theme = Literal["light", "dark"]
THEMES: tuple[Theme, ...] = ("light", "dark")
WIDTH = 1240
"""The width of a window in pixels. The guide shows pictures at about this width."""
PATIENCE = 60_000
"""The milliseconds within which a view must show its content."""
LOOKS = 4_000
"""The milliseconds to wait before a picture. By then the page has queried twice, so its numbers are current."""
SCROLLED = "document.querySelector('[data-page=pgchange]').scrollTo(0, 0)"
CUT = """
() => [...document.querySelectorAll('[data-page=pgchange] tbody button')].filter((button) => {
    const box = button.getBoundingClientRect();
    const table = button.closest('[role=region]')?.getBoundingClientRect();
    return table && (box.right > table.right || box.left < table.left);
}).map((button) => button.getAttribute('aria-label') ?? button.textContent)
"""


@dataclass(frozen=True)
class Picture:
    """A picture to take. ``view`` is the address behind ``/plugin/pgchange/``.

    The tables that ``shown`` names must be there. The button ``pressed`` is pressed before the picture is taken. The
    picture is of the whole view, or of its region ``part``. With ``form`` it is of the form of the DAG ``view``, filled
    in with these values of its parameters.
    """

    name: str
    height: int
    view: str
    shown: tuple[str, ...]
    pressed: str | None = None
    part: str | None = None
    theme: Theme = "light"
    form: tuple[tuple[str, str], ...] = ()


AUDIT = urlencode({"connection": "airline", "kind": "commit", "consumer": "commits:movement_audit/0"})
ZERO = "psycopg.errors.DivisionByZero: division by zero"
PICTURES = (
    Picture("page-light", 1000, "", ("Needs attention", "Consumers")),
    Picture("page-dark", 1000, "", ("Needs attention", "Consumers"), theme="dark"),
    Picture("page-flow-light", 1000, "", ("Consumers",), part="How changes flow"),
    Picture(
        "page-letters-light",
        560,
        "letters",
        ("Dead letters in airline",),
        pressed=f"Show the letters that failed on: {ZERO}",
    ),
    Picture("page-consumer-light", 1110, f"consumer?{AUDIT}", ("Batches of the last day",)),
    Picture("page-backfills-dark", 424, "backfills", ("Backfills in airline",), theme="dark"),
    Picture("page-queues-light", 830, "queues", ("Queues in airline",)),
    Picture("page-saga-light", 910, "sagas", ("Sagas in airline",), pressed="Show saga 3"),
    Picture("page-events-light", 830, "events", ("Groups in airline", "Partitions in airline")),
    Picture("page-topology-light", 1165, "topology", ("Instances in catalogue",)),
    Picture(
        "form-backfill-light",
        1400,
        "tube_backfill",
        (),
        form=(("database", "shop"), ("tube", "copies"), ("tables", "public.customer")),
    ),
)


def warm_up(context: BrowserContext, url: str) -> None:
    """Keep the overview open until it shows the samples of the last minutes.

    After that the server takes samples for an hour.
    """
    tab = context.new_page()
    tab.set_default_timeout(PATIENCE)
    come_back(tab, url)
    tab.get_by_role("img", name="Ready for commits:movement_audit/0 in the last hour").wait_for()
    tab.close()


@contextmanager
def opened(browser: Browser) -> Iterator[dict[Theme, BrowserContext]]:
    """Yield a browser context for each theme. A context loads the files of the page only once."""
    with ExitStack() as open_contexts:
        yield {
            theme: open_contexts.enter_context(
                browser.new_context(color_scheme=theme, locale="en-US", timezone_id="UTC")
            )
            for theme in THEMES
        }


def take(context: BrowserContext, url: str, picture: Picture) -> bytes:
    """Return the PNG of a picture. Raise AssertionError if the edge of a table cuts off a button."""
    tab = context.new_page()
    tab.set_default_timeout(PATIENCE)
    expect.set_options(timeout=PATIENCE)
    tab.set_viewport_size({"width": WIDTH, "height": picture.height})
    if picture.form:
        return _filled_in(tab, url, picture)
    come_back(tab, url, view=picture.view)
    for table in picture.shown:
        expect(tab.get_by_role("table", name=table, exact=True)).to_be_visible()
    if picture.pressed is not None:
        tab.get_by_role("button", name=picture.pressed, exact=True).click()
    tab.wait_for_timeout(LOOKS)
    _settle(tab)
    cut = tab.evaluate(CUT)
    assert cut == [], f"{picture.name}: these buttons are cut: {cut}"
    seen = tab if picture.part is None else tab.get_by_role("region", name=picture.part, exact=True)
    image = seen.screenshot(animations="disabled")
    tab.close()
    return image


def _filled_in(tab: Page, url: str, picture: Picture) -> bytes:
    """Return the PNG of a DAG's form in Airflow."""
    come_back(tab, url)
    tab.goto(f"{url}/dags/{picture.view}")
    tab.get_by_role("button", name="Trigger").first.click()
    form = tab.get_by_role("dialog")
    for name, value in picture.form:
        form.locator(f"[name=element_{name}]").fill(value)
    tab.keyboard.press("Tab")
    tab.mouse.move(0, 0)
    tab.wait_for_timeout(LOOKS)
    image = form.screenshot(animations="disabled")
    tab.close()
    return image


def _settle(tab: Page) -> None:
    """Take the focus and the pointer away, and wait for the end of animations."""
    tab.mouse.move(0, 0)
    tab.evaluate("document.activeElement.blur()")
    tab.evaluate(SCROLLED)
    tab.wait_for_function("document.getAnimations().every((one) => one.playState !== 'running')")
