"""The verdict about the campaign over all feeds: whether each change was processed exactly once, by feed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psycopg

from tests.chaos import event_log, harness, mirror
from tests.chaos.event_log import EXPECTED
from tests.chaos.harness import one
from tests.chaos.mixed import ALL
from tests.chaos.mixed_consumers import HANDLED
from tests.chaos.mixed_place import Notes, Place
from tests.sagas import is_right, refused_step


@dataclass(frozen=True)
class Count:
    """The errors in the changes of a feed.

    Counted are the changes that were committed, lost, processed twice, or processed without a commit. If the feed has
    an order, changes out of order are counted, too.
    """

    expected: int
    lost: int = 0
    twice: int = 0
    strayed: int = 0
    disordered: int = 0

    @property
    def is_right(self) -> bool:
        return self.expected > 0 and (self.lost, self.twice, self.strayed, self.disordered) == (0, 0, 0, 0)


def compared(expected: Iterable[Hashable], processed: Iterable[Hashable]) -> Count:
    wanted, got = Counter(expected), Counter(processed)
    return Count(
        sum(wanted.values()),
        lost=(wanted - got).total(),
        twice=sum(got[each] - 1 for each in got if each in wanted),
        strayed=sum(got[each] for each in got if each not in wanted),
    )


def judge(place: Place, feeds: Sequence[str] = ALL) -> dict[str, Count]:
    """Return the counts of each feed."""
    counts: dict[str, Count] = {}
    for feed in feeds:
        counts |= JUDGES[feed](place)
    return counts


def _commits(place: Place) -> dict[str, Count]:
    found = harness.judge(place.results, place.source)
    backwards = int(place.in_order and not found.in_order and not found.lost and not found.doubled)
    return {"commit queue": Count(found.written, found.lost, found.doubled, disordered=backwards)}


def _tubes(place: Place) -> dict[str, Count]:
    """Each touched id must be replayed in the transaction that deletes its pod.

    In the end each mirror must equal its source.
    """
    touched = one(place.source, f"select count(*) from ({TOUCHED}) as t")
    lost, extra = map(int, one(place.source, REPLAYED_NOT_AS_TOUCHED))
    found = mirror.judge(place.source, place.source)
    rows = one(place.source, "select count(*) from mirror")
    return {
        "tubes": Count(touched, lost + found.pods, extra + found.overlaps),
        "mirrors": Count(rows, len(found.differing)),
    }


TOUCHED = "select t.tube, t.seq, t.shard, i.id from touched as t cross join lateral unnest(t.ids) as i(id)"
REPLAYED_NOT_AS_TOUCHED = f"""
with due as (
    select distinct t.tube, o.xid, t.shard, t.id, o.xid is null as is_left
    from ({TOUCHED}) as t left join taken_off as o using (tube, seq)
), done as (
    select tube, xid, shard, id, count(*) as times from replayed group by tube, xid, shard, id
)
select array[
    count(*) filter (where due.is_left or done.id is null),
    coalesce(sum(done.times), 0) - count(*) filter (where due.id is not null and done.id is not null)
]
from due full join done using (tube, xid, shard, id)
"""


def _groups(place: Place) -> dict[str, Count]:
    found = event_log.judge(place.source, place.results, [])
    expected = one(place.results, "select count(distinct (group_id, event_id)) from effect")
    return {
        "event groups": Count(
            expected + found.lost - found.strayed, found.lost, found.doubled, found.strayed, found.disordered
        )
    }


def _handlers(place: Place) -> dict[str, Count]:
    """A handler must get each event once in the runs that were completed.

    A run that ended early may have called it, too, and may have scheduled a retry of a failed call.
    """
    with psycopg.connect(place.source) as connection:
        sid, conditions = connection.execute(
            "select id, conditions_sql from pgmb.subscriptions where group_id = %s", [HANDLED]
        ).fetchall()[0]
        events = connection.execute(EXPECTED.format(conditions=conditions), [sid]).fetchall()
    expected = {(handler, id) for handler in ("all", "keyed") for (id,) in events}
    got, finished, retried = Counter[Any](), Counter[Any](), Counter[Any]()
    for noted in Notes.read(Path(place.folder), "handlers"):
        complete = {line["run"] for line in noted if "finished" in line}
        for line in noted:
            calls = Counter((line.get("handler"), id) for id in line.get("ids", ()))
            got += calls
            if line["run"] in complete:
                finished += calls
            else:
                retried += Counter((line["handler"], id) for id in line.get("failed", ()))
    twice = sum(max(0, finished[call] - 1 - retried[call]) for call in finished)
    return {
        "event handlers": Count(len(expected), len(expected - got.keys()), twice, len(got.keys() - expected))
    }


def _messages(place: Place) -> dict[str, Count]:
    with psycopg.connect(place.source) as connection:
        posted = connection.execute("select iid, kind from posted").fetchall()
        received = connection.execute("select consumer, iid from received").fetchall()
    expected = [("default", iid) for iid, _ in posted] + [
        ("even", iid) for iid, kind in posted if kind == "even"
    ]
    return {"queues": compared(expected, received)}


def _sagas(place: Place) -> dict[str, Count]:
    """Each saga must be done or compensated completely.

    The counts are lost steps, repeated steps, and sagas out of order.
    """
    acts: dict[int, list[tuple[str, str | None]]] = defaultdict(list)
    with psycopg.connect(place.source) as connection:
        started = [saga for (saga,) in connection.execute("select saga from started")]
        states = dict(connection.execute("select id, state from mbus.sagas where stuck is null").fetchall())
        for saga, kind, step in connection.execute("select saga, kind, step from act order by n"):
            acts[saga].append((kind, step))
    found = Counter()
    for saga in started:
        refused, state = refused_step(saga), states.get(saga, "stuck")
        if not is_right(state, acts[saga], refused):
            twice = sum(times - 1 for times in Counter(acts[saga]).values())
            found["twice" if twice else "lost"] += 1
    return {"sagas": Count(len(started), found["lost"], found["twice"], len(acts.keys() - set(started)))}


def _topology(place: Place) -> dict[str, Count]:
    with psycopg.connect(place.source) as connection:
        logged = connection.execute("select term, index from topology.log order by term, index").fetchall()
    with psycopg.connect(place.results) as connection:
        heard = [id for (id,) in connection.execute("select id from heard order by n")]
    expected = [f"{term}/{index}" for term, index in logged]
    count = compared(expected, heard)
    backwards = int(heard != expected and not (count.lost or count.twice or count.strayed))
    return {"topology feed": replace(count, disordered=backwards)}


JUDGES: Mapping[str, Callable[[Place], dict[str, Count]]] = {
    "commits": _commits,
    "tubes": _tubes,
    "events": _groups,
    "handlers": _handlers,
    "messages": _messages,
    "sagas": _sagas,
    "topology": _topology,
}


def judge_clients(place: Place, known: Any) -> dict[str, Count]:
    """A client must receive each change after its snapshot once and in order.

    In the end its state must equal that of a new client.
    """
    with psycopg.connect(place.source) as connection:
        logged = connection.execute("select term, index from topology.log order by term, index").fetchall()
    total, pictures = Count(0), 0
    for noted in Notes.read(Path(place.folder), "client"):
        for at, heard in _connections(noted):
            last = max(heard, default=at)
            found = compared([each for each in logged if at < each <= last], heard)
            total = Count(
                total.expected + found.expected,
                total.lost + found.lost,
                total.twice + found.twice,
                total.strayed + found.strayed,
                total.disordered + int(heard != sorted(heard)),
            )
        for line in noted:
            if "picture" in line:
                pictures += 1
                total = replace(total, lost=total.lost + int(line["picture"] != known))
    assert pictures > 0
    return {"topology clients": total}


def _connections(noted: Sequence[dict[str, Any]]) -> list[tuple[tuple[int, int], list[tuple[int, int]]]]:
    """Return by connection of a client the position of its snapshot, and the events after the snapshot."""
    found: list[tuple[tuple[int, int], list[tuple[int, int]]]] = []
    for line in noted:
        if "snapshot" in line:
            found.append(((line["snapshot"][0], line["snapshot"][1]), []))
        elif "event" in line:
            found[-1][1].append((line["event"][0], line["event"][1]))
    return found
