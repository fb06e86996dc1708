"""A real browser, with a user who is logged in to Airflow."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

from tests.page import token


@contextmanager
def started(home: Path) -> Iterator[Browser]:
    """Start a browser. Each context that is opened in it has its own cookies."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"], env={"HOME": str(home)}
        )
        yield chromium
        chromium.close()


@contextmanager
def opened(home: Path) -> Iterator[Page]:
    """Start a browser, and open a tab in it."""
    with started(home) as chromium:
        yield chromium.new_page()


def come_back(tab: Page, url: str, role: str = "op", view: str = "") -> None:
    """Open a view of the page with the cookie of an earlier login, so that Airflow's shell is loaded only once."""
    tab.context.add_cookies([{"name": "_token", "value": token(role), "url": url}])
    tab.goto(f"{url}/plugin/pgchange/{view}")


def log_in(tab: Page, url: str, password: str, role: str = "op") -> None:
    tab.goto(url)
    tab.locator("input[name=username]").fill(f"the_{role}")
    tab.locator("input[type=password]").fill(password)
    tab.keyboard.press("Enter")
    tab.get_by_role("link", name="PG feeds").wait_for()
