"""The README, the index of the pages, the pages about no single feed, and all links between our pages."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from airflow_pgchange.feeds.attempt_phases import PHASES
from airflow_pgchange.provider_info import GUIDES
from tests.pictures.concepts import CONCEPTS
from tests.readme import ROOT, TUTORIAL, anchors, blocks, in_code, links, statements, table, track_payments
from tests.suite.parsing import syntax

WORDS = 600
"""The README is read in three minutes."""
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
INDEX = ROOT / "docs" / "README.md"


def test_the_readme_has_at_most_600_words() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= WORDS


@pytest.mark.parametrize(
    "page", ["README.md", "docs/tutorial/demo.md", "docs/concepts/guarantees.md", "docs/performance.md"]
)
def test_each_make_command_of_a_page_is_a_target(page: str) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    named = re.findall(
        r"^ {4}make ([\w-]+)|`(?:\w+=\S+ )*make ([\w-]+)`", (ROOT / page).read_text(), re.MULTILINE
    )
    commands = {block or inline for block, inline in named}
    assert commands
    assert commands <= set(targets)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_of_a_page_resolves(page: Path) -> None:
    for target in links(page):
        if "://" in target:
            continue
        path, _, fragment = target.partition("#")
        found = page.parent / path if path else page
        assert found.exists(), target
        assert not fragment or fragment in anchors(found), target


def test_the_index_leads_to_every_page() -> None:
    assert {target.removesuffix(".md") for target in links(INDEX)} == set(GUIDES)


def test_each_guide_is_in_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    for path in (Path("docs", f"{name}.md") for name in GUIDES):
        assert {path.as_posix(), path.parent.as_posix()} & set(included), path


def test_each_extra_that_a_page_installs_is_one() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {
        name for page in PAGES for name in re.findall(r"pip install '[\w.-]*\[(\w+)\]'", page.read_text())
    }
    assert named == {"delta", "http", "iceberg", "openlineage", "spark"}
    assert named <= set(extras)


def test_the_page_of_metrics_names_all_phases() -> None:
    assert [in_code(row[0]) for row in table("docs/reference/metrics.md", "## Phases of a batch")] == [
        [phase] for phase in PHASES
    ]


def test_the_page_of_the_demo_names_all_its_settings() -> None:
    text = ast.get_docstring(syntax((ROOT / "demo" / "__main__.py").read_text())) or ""
    settings = set(re.findall(r"\b[A-Z]{3,}\b", text))
    named = [setting for row in table("docs/tutorial/demo.md", "# The demo") for setting in in_code(row[0])]
    assert {setting.partition("=")[0] for setting in named} == settings


def test_a_consumer_without_airflow(db, connect):
    connection = connect()
    track_payments(connection)
    branch = connection.execute("select branch_id from revision.tracked").fetchone()[0]
    assert branch == 1
    (example,) = blocks("python", "docs/how-to/commit-queue.md")
    keyed, by_hand = blocks("sql", "docs/how-to/commit-queue.md")
    placeholder = '"host=localhost dbname=shop"'
    assert placeholder in example
    for _ in range(2):
        exec(example.replace(placeholder, repr(db)), {})
    balances = connection.execute("select account, cents from public.balance order by account").fetchall()
    assert balances == [("ann", 70), ("bob", 50)]
    answers = [connection.execute(statement) for statement in statements(by_hand)]
    assert len(answers[2].fetchall()) == 3
    made, track = statements(keyed)
    connection.execute(made)
    assert connection.execute(track).fetchone() == (2,)
    connection.execute("insert into public.reading values (gen_random_uuid(), now(), 1)")
    connection.execute("select pubsub.lock_watermark('by hand', 2)")
    assert len(connection.execute("select id::text[] from pubsub.poll_keyed('by hand', 2)").fetchall()) == 1


def test_the_tutorial_and_the_guide_to_the_queue_have_one_statement() -> None:
    """The consumer of the guide and the DAG of the tutorial run the same SQL, so a reader can compare them."""
    (consumer,), (dag,) = blocks("python", "docs/how-to/commit-queue.md"), blocks("python", TUTORIAL)

    def written(example: str) -> str:
        return " ".join(example.split('"""')[1].split())

    assert written(consumer) == written(dag)


def test_the_pictures_of_the_concepts_are_those_that_the_script_draws() -> None:
    images = ROOT / "docs" / "images"
    assert {path.stem for path in images.glob("concept-*.svg")} == set(CONCEPTS)
    for name, svg in CONCEPTS.items():
        assert (images / f"{name}.svg").read_text() == svg, "run python -m tests.pictures.diagrams"
