"""A real browser in which somebody has Airflow before them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

from tests.page import token


@contextmanager
def started(home: Path) -> Iterator[Browser]:
    """A browser, which a person opens contexts of: each has cookies of its own."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"], env={"HOME": str(home)}
        )
        yield chromium
        chromium.close()


@contextmanager
def opened(home: Path) -> Iterator[Page]:
    """A tab of a browser of its own."""
    with started(home) as chromium:
        yield chromium.new_page()


def come_back(tab: Page, url: str, role: str = "op", view: str = "") -> None:
    """Open a view of the page as a person who has logged in before: Airflow's shell is loaded once, not three times."""
    tab.context.add_cookies([{"name": "_token", "value": token(role), "url": url}])
    tab.goto(f"{url}/plugin/pgchange/{view}")


def log_in(tab: Page, url: str, password: str, role: str = "op") -> None:
    tab.goto(url)
    tab.locator("input[name=username]").fill(f"the_{role}")
    tab.locator("input[type=password]").fill(password)
    tab.keyboard.press("Enter")
    tab.get_by_role("link", name="PG feeds").wait_for()
