"""The time until the page shows a thousand consumers, and the cost of its queries for the database."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

import psycopg
from fastapi import FastAPI
from playwright.sync_api import Page

from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction
from demo.postgres import free_port
from tests import airflow_home
from tests import page as pages
from tests.airflow_metadata import take_migrated
from tests.benchmarks.measure import Report, cpu_of, section
from tests.browser import log_in, opened
from tests.web import served

CONSUMERS = 1_000
ROUNDS = 5
LOOKS = 20
BACKLOGS = (2_000, 20_000)
FEW = 50


def run(conninfo: str, report: Report) -> None:
    airflow_home.prepare()
    os.environ["AIRFLOW_CONN_AIRLINE"] = airflow_home.uri(conninfo)
    with section(f"{CONSUMERS} consumers, each with changes to come"):
        costs = {}
        with psycopg.connect(conninfo, autocommit=True) as connection:
            prepare(conninfo, connection)
            commit(connection, FEW)
            report.say(f"a look behind {FEW} commits", look(connection) * 1000, "ms of CPU")
            views = first_views()
            report.say("from the click to the table, first", views[0], "s")
            report.say("from the click to the table, median", statistics.median(views), "s", most=1.0)
            for before, backlog in zip((FEW, *BACKLOGS), BACKLOGS, strict=False):
                commit(connection, backlog - before)
                costs[backlog] = look(connection)
                report.say(f"a look behind {backlog} commits", costs[backlog] * 1000, "ms of CPU")
        small, large = BACKLOGS
        report.say(f"{large} / {small} commits", costs[large] / costs[small], "x", most=1.2)


def prepare(conninfo: str, connection: psycopg.Connection) -> None:
    connection.execute("insert into revision.commit default values")
    for number in range(CONSUMERS):
        with ConsumerTransaction(CommitFeed(f"delays {number:04}", 0), conninfo) as consumer:
            consumer.claim(1)
            consumer.ack()


def commit(connection: psycopg.Connection, count: int) -> None:
    connection.execute(
        f"do $$ begin for n in 1..{count} loop insert into revision.commit default values; commit; end loop; end $$"
    )
    connection.execute("analyze revision.commit")


def look(connection: psycopg.Connection) -> float:
    """Return the CPU seconds of the server for the queries of the page."""
    from airflow_pgchange.plugins.page_queries import Status

    status = Status()
    return statistics.median(cpu_of(connection, lambda: status([connection])) for _ in range(LOOKS))


def first_views() -> list[float]:
    """Return the seconds from a click in the browser to the table, each time with an API server that has not queried
    yet."""
    with tempfile.TemporaryDirectory() as made:
        folder, port = Path(made), free_port()
        pages.prepare(folder, f"http://127.0.0.1:{port}")
        take_migrated()
        pages.parse(folder)
        airflow = pages.served()
        with served(airflow, port=port) as url, opened(folder) as browser:
            log_in(browser, url, pages.password(folder, "op"))
            return [first_view(airflow, browser, url) for _ in range(ROUNDS)]


def first_view(airflow: FastAPI, browser: Page, url: str) -> float:
    pages.afresh(airflow)
    browser.goto(url)
    link = browser.get_by_role("link", name="PG feeds")
    link.wait_for()
    browser.wait_for_load_state("networkidle")
    began = time.perf_counter()
    link.click()
    browser.get_by_role("table", name="Consumers").get_by_role("row").nth(20).wait_for()
    return time.perf_counter() - began
