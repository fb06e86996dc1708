"""The examples of the README and of the guides, run as they stand, and links between our pages."""

from __future__ import annotations

import re

import pytest

from tests.readme import ROOT, blocks

PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_dag_is_the_one_in_dags():
    assert blocks("python")[0].strip() == (ROOT / "dags" / "flight_delays.py").read_text().strip()


def test_your_own_table_in_ten_minutes(db, connect):
    connection = connect()
    (tables,), (by_hand,) = blocks("sql"), blocks("sql", "docs/commit-queue.md")
    for statement in tables.split(";"):
        if statement.strip():
            connection.execute(statement)
    branch = connection.execute("select branch_id from revision.tracked").fetchone()[0]
    assert branch == 1
    example, placeholder = blocks("python")[1], '"host=localhost dbname=shop"'
    assert placeholder in example
    for _ in range(2):
        exec(example.replace(placeholder, repr(db)), {})
    balances = connection.execute("select account, cents from public.balance order by account").fetchall()
    assert balances == [("ann", 70), ("bob", 50)]
    answers = [connection.execute(s) for s in by_hand.split(";") if re.sub("--.*", "", s).strip()]
    assert len(answers[2].fetchall()) == 3


def test_an_asset_of_ones_own_has_a_watcher_of_a_feed():
    found = {}
    exec(blocks("python")[2], found)
    ((_, watched),) = [watcher.trigger.serialize() for watcher in found["paid"].watchers]
    assert (watched["feed"]["consumer"], watched["min_changes"]) == ("balance", 10)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_links_to_is_there(page):
    for target in re.findall(r"\]\((?!https:)([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target
