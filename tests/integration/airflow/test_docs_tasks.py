"""The how-to pages by task, from top to bottom: their examples have the output that the pages show."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psycopg
import pytest

from demo.postgres import Cluster
from tests import dumps
from tests.airflow_home import uri
from tests.airflow_metadata import take_migrated
from tests.following import Reader, dags
from tests.lakes import HAS_SQL_CATALOG
from tests.ledger import Connect, run
from tests.readme import ROOT, blocks
from tests.web import serving

Follow = Callable[..., Reader]


@pytest.fixture
def follow(
    db: str,
    connect: Connect,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Follow:
    """Follows pages, in a database with our schemas that the connection ``shop`` leads to."""
    take_migrated()
    monkeypatch.setenv("AIRFLOW_CONN_SHOP", uri(db))
    monkeypatch.setenv("AIRFLOW__CORE__DAGS_FOLDER", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def follow(*pages: str, replaced: Sequence[tuple[str, str]] = ()) -> Reader:
        reader = Reader(connect(), tmp_path, lambda: capsys.readouterr().out, replaced)
        reader.attempts = 3
        for page in pages:
            reader.follow((ROOT / page).read_text())
        return reader

    return follow


@pytest.mark.parametrize(
    "page",
    [
        "docs/how-to/copy.md",
        "docs/how-to/report.md",
        "docs/how-to/totals.md",
        "docs/how-to/workers.md",
        "docs/how-to/retention.md",
    ],
    ids=lambda page: Path(page).stem,
)
def test_a_recipe_shows_what_its_reader_sees(page: str, follow: Follow) -> None:
    """Takes seconds if it is the first test of this file, because Airflow is imported."""
    assert follow(page).failures == []


def test_the_form_of_the_page_fills_the_copy(follow: Follow) -> None:
    """Takes seconds if it is the first test of this file, because Airflow is imported."""
    reader = follow("docs/how-to/copy.md", "docs/how-to/backfill.md")
    (line,) = re.findall(
        r"`(backfill \d+ of .*?)`", (ROOT / "docs/how-to/backfill.md").read_text(), flags=re.DOTALL
    )
    assert " ".join(line.split()) in reader.logged


def test_a_person_chooses_where_a_new_consumer_starts(follow: Follow) -> None:
    """Takes seconds if it is the first test of this file, because Airflow is imported."""
    reader = follow("docs/how-to/new-consumer.md")
    (by_hand,) = dags(reader.files[-1])
    (task,) = by_hand.tasks
    task.render_template_fields({"params": {"start": "beginning"}})
    assert run(task)["changes"] == 4


@pytest.mark.hstore
def test_uninstalling_removes_what_the_page_lists(follow: Follow) -> None:
    """Takes seconds if it is the first test of this file, because Airflow is imported."""
    follow("docs/how-to/uninstall.md")


@pytest.mark.hstore
def test_a_purchase_is_done_as_a_whole_or_undone(follow: Follow) -> None:
    """Takes seconds if it is the first test of this file, because Airflow is imported."""
    assert follow("docs/how-to/saga.md").failures == []


def test_batches_go_through_the_pooler_and_handlers_past_it(
    follow: Follow, db: str, pgbouncer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Takes seconds if it is the first test of this file, because Airflow is imported."""
    monkeypatch.setenv("AIRFLOW_CONN_SHOP", uri(pgbouncer))
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_DIRECT", uri(db))
    assert follow("docs/how-to/pgbouncer.md").failures == []


@pytest.mark.hstore
def test_a_restored_database_goes_on_as_the_page_shows(
    db: str,
    bare_db: str,
    cluster: Cluster,
    follow: Follow,
    connect_to: Callable[..., psycopg.Connection[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Takes seconds if it is the first test of this file, because Airflow is imported."""
    shell = Reader._sh

    def restore(reader: Reader, example: str) -> str:
        if "pg_restore" in example:
            dumps.load(cluster, bare_db, dumps.dump(cluster, db))
            monkeypatch.setenv("AIRFLOW_CONN_SHOP", uri(bare_db))
            reader.database = connect_to(bare_db)
        return shell(reader, example)

    monkeypatch.setattr(Reader, "_sh", restore)
    assert follow("docs/how-to/restore.md").failures == []


@pytest.mark.skipif(
    not HAS_SQL_CATALOG, reason="the page makes its table with SqlCatalog, which needs SQLAlchemy 2"
)
def test_each_payment_is_in_the_iceberg_table_of_the_page(follow: Follow, db: str, tmp_path: Path) -> None:
    """Takes seconds: PyIceberg is imported, and Airflow if it is the first test of this file."""
    address = uri(db).removeprefix("postgres://")
    reader = follow(
        "docs/how-to/to-iceberg.md", replaced=[("localhost/shop", address), ("/data/lake", str(tmp_path))]
    )
    assert reader.failures == []


@pytest.mark.hstore
def test_the_bad_message_of_the_page_is_set_aside(follow: Follow) -> None:
    """Takes seconds if it is the first test of this file, because Airflow is imported."""
    assert follow("docs/how-to/work-queue.md").failures == [KeyError] * 2


def test_the_service_of_the_page_gets_each_order(follow: Follow) -> None:
    """Takes seconds if it is the first test of this file, because Airflow is imported."""
    page = "docs/how-to/call.md"
    (server,) = [example for example in blocks("python", page) if "HTTPServer" in example]
    printed: list[tuple[dict[str, Any], str]] = []
    names: dict[str, Any] = {"__name__": "service", "print": lambda *call: printed.append(call)}
    exec(server, names)
    with serving(names["Service"]) as port:
        follow(page, replaced=[("127.0.0.1:8099", f"127.0.0.1:{port}"), ("(10, 60)", "(0.01, 0.01)")])
    (ann, *_), keys = printed[0], {key for _, key in printed}
    assert sorted(order["customer"] for order, _ in printed) == ["ann", "bob", "eve", "eve", "eve", "eve"]
    assert len(keys) == 3
    assert f"prints `{ann}`" in (ROOT / page).read_text()


def test_every_page_with_steps_is_followed() -> None:
    tests = Path(__file__).read_text()
    pages = [page for page in ROOT.glob("docs/how-to/*.md") if "\n## 1. " in page.read_text()]
    assert len(pages) > 10
    assert [page for page in pages if f'"{page.relative_to(ROOT)}"' not in tests] == []
