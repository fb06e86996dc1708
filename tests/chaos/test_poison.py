"""One change in a hundred is poison, and consumers are killed: each poison is a letter, the rest is processed once."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

from airflow_pgchange.feeds import CommitFeed, EventFeed, QueueFeed, TopologyFeed, TubeFeed
from airflow_pgchange.feeds.feed import Feed
from tests import commits, queues, tubes
from tests.chaos.harness import PROOF
from tests.chaos.poison import RIGHT, Campaign
from tests.events import publish, subscribe
from tests.ledger import Connect

Connection = psycopg.Connection[Any]
KEYS = 5


def _in_statements(write: Callable[[Connection, int], list[Any]], n: int, chance: random.Random) -> Any:
    """Write ``n`` changes by statements of different sizes, and return their ids in order."""

    def written(connection: Connection) -> list[Any]:
        ids: list[Any] = []
        while len(ids) < n:
            ids += write(connection, min(chance.choice((1, 1, 2, 7, 30)), n - len(ids)))
        return ids

    return written


def _topology(connection: Connection, n: int) -> list[str]:
    for _ in range(n):
        connection.execute(
            "select topology.add_replicaset('r' || count(*) + 1) from topology._pico_replicaset"
        )
    rows = connection.execute(
        "select term || '/' || index from topology.log order by term desc, index desc limit %s", [n]
    )
    return [row[0] for row in rows.fetchall()][::-1]


def _rows(connection: Connection, n: int) -> list[int]:
    """Insert rows by one statement, so that their ids are one pod."""
    query = "insert into public.item (n) select n from generate_series(1, %s) as n returning id"
    return [row[0] for row in connection.execute(query, [n]).fetchall()]


def _keyed(connection: Connection, n: int) -> list[str]:
    query = (
        f"select mbus.post('q', '', properties => hstore('key', (nextval('number') %% {KEYS})::text)) "
        "from generate_series(1, %s)"
    )
    return [row[0] for row in connection.execute(query, [n]).fetchall()]


def _tube(connection: Connection) -> None:
    connection.execute("create table public.item (id bigserial primary key, n integer)")
    tubes.make(connection)
    tubes.attach(connection)


def _ordered_queue(connection: Connection) -> None:
    queues.make(connection)
    connection.execute("select mbus.order_by('q', 'key')")
    connection.execute("create sequence public.number minvalue 0")


@dataclass(frozen=True)
class Kind:
    feed: Feed
    make: Callable[[Connection], Any]
    write: Callable[[Connection, int], list[Any]]


KINDS = {
    "commit": Kind(CommitFeed("c", 0), lambda connection: None, commits.commits),
    "event": Kind(EventFeed("g"), subscribe, lambda connection, n: publish(connection, *"t" * n)),
    "topology": Kind(TopologyFeed("c"), lambda connection: None, _topology),
    "tube": Kind(TubeFeed("q"), _tube, _rows),
    "queue": Kind(QueueFeed("q"), queues.make, lambda connection, n: queues.fill(connection, range(n))),
    "ordered queue": Kind(QueueFeed("q"), _ordered_queue, _keyed),
}
IN_EVERY_RUN = ("tube",)
FEWER = "every run has a campaign of a tube with few changes, and tests of how each feed splits a batch"
LARGER = pytest.mark.release(FEWER)


def campaign(name: str, connection: Connection, seed: int, n: int, **options: Any) -> Campaign:
    kind = KINDS[name]
    kind.make(connection)
    ids = list(map(str, _in_statements(kind.write, n, random.Random(f"{seed} writer"))(connection)))
    lines = {each: number % KEYS if name == "ordered queue" else 0 for number, each in enumerate(ids)}
    line_of = None if name in ("tube", "queue") else lines.__getitem__
    return Campaign(kind.feed, ids, line_of, seed, **options)


def _kinds(*marks: pytest.MarkDecorator, in_every_run: tuple[str, ...] = tuple(KINDS)) -> Any:
    return pytest.mark.parametrize(
        "name",
        [
            pytest.param(
                name,
                marks=[
                    *marks,
                    *([pytest.mark.hstore] if "queue" in name else []),
                    *([] if name in in_every_run else [LARGER]),
                ],
            )
            for name in KINDS
        ],
    )


@_kinds(in_every_run=IN_EVERY_RUN)
def test_each_poison_is_a_letter_and_each_other_change_is_processed_once(
    name: str, db: str, connect: Connect, tmp_path: Path
) -> None:
    connection = connect()
    small = campaign(name, connection, seed=1, n=8)
    verdict, kills = small.run(db, connection, tmp_path)
    assert verdict == RIGHT
    assert kills > 0


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(2, 6))
@_kinds(LARGER)
def test_of_hundreds_of_changes_too(name: str, seed: int, db: str, connect: Connect, tmp_path: Path) -> None:
    """Takes minutes: each poison takes up to 30 transactions, and each kill a process."""
    connection = connect()
    limit, attempts = ((100, 2), (64, 3), (30, 2), (300, 3))[seed - 2]
    whole = campaign(name, connection, seed, n=600, limit=limit, attempts=attempts)
    verdict, kills = whole.run(db, connection, tmp_path)
    assert verdict == RIGHT
    assert kills > 5


@pytest.mark.parametrize(
    ("fault", "wrong"),
    [
        pytest.param("whole letters", {"lost", "neighbours", "without_letter"}, marks=PROOF),
        pytest.param("loses a change", {"lost"}, marks=PROOF),
        pytest.param("doubles a change", {"doubled"}, marks=PROOF),
        pytest.param("fails in vain", {"attempts_too_many"}, marks=PROOF),
    ],
)
def test_the_campaign_catches_a_fault(
    fault: str, wrong: set[str], db: str, connect: Connect, tmp_path: Path
) -> None:
    connection = connect()
    faulty = campaign("commit", connection, seed=1, n=8, fault=fault)
    verdict, _ = faulty.run(db, connection, tmp_path)
    assert {name for name, n in asdict(verdict).items() if n} == wrong
