"""Turn the changes that a test gives into the changes and batches of a feed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.events.event import Event, event_id
from airflow_pgchange.feeds.batch import Batch, Change, Slice
from airflow_pgchange.feeds.feed import Feed
from airflow_pgchange.feeds.keys import BIGINT, Key
from airflow_pgchange.feeds.tube import TubeFeed

BATCH_ID = "00000000-0000-4000-8000-000000000001"
BEGAN = datetime(2030, 1, 1, tzinfo=UTC)
"""The base of the default times of changes: change n is n seconds later."""

Given = Event | Mapping[str, Any] | Key
"""A change in a test: a mapping with some columns of its feed, an ``Event``, or the id alone. An id is an int, a str, or
a tuple for a key of several columns, as in ``Change.id``."""

Row = dict[str, Any]


def _at(number: int) -> datetime:
    return BEGAN + timedelta(seconds=number)


DEFAULTS: Mapping[str, Callable[[int], Row]] = {
    "commit": lambda n: {"queue_id": n, "txid": 1000 + n, "created_at": _at(n)},
    "tube": lambda n: {"shard": 0, "seq": n, "backfill": False, "payload": None, "touched_at": _at(n)},
    "event": lambda n: {
        "id": event_id(_at(n), n),
        "payload": {},
        "metadata": {},
        "subscription_ids": [],
        "dispatch": event_id(_at(n), 0),
        "rank": n,
    },
    "queue": lambda n: {
        "id": f"00000000-0000-4000-9000-{n:012}",
        "number": n,
        "data": {},
        "properties": {},
        "headers": {},
        "added": _at(n),
    },
    "topology": lambda n: {"id": f"1/{n}", "term": 1, "index": n, "written_at": _at(n)},
}
"""The default values of a feed's columns, by the kind of feed. Each function takes the number of the change, from 1."""


def _nothing(number: int) -> Row:
    """The defaults for a feed of another package: none, so a test must give all columns."""
    return {}


def rows_of(feed: Feed, given: Sequence[Given]) -> list[Row]:
    """Return the changes as rows with all columns of the feed.

    Raises InvalidArgument for a column that the feed lacks, and for a missing column without a default.
    """
    names = [name for name, _ in feed.columns]
    made = DEFAULTS.get(feed.kind, _nothing)
    rows = []
    for number, change in enumerate(given, 1):
        row = {**made(number), **_columns(change)}
        if unknown := sorted(row.keys() - set(names)):
            raise InvalidArgument(
                f"change {number} has {', '.join(unknown)}, but the columns of a {feed.kind} feed are {', '.join(names)}"
            )
        if missing := [name for name in names if name not in row]:
            raise InvalidArgument(
                f"change {number} of a {feed.kind} feed lacks {', '.join(missing)}: add these columns"
            )
        rows.append({name: row[name] for name in names})
    return rows


def changes_of(feed: Feed, given: Sequence[Given]) -> list[Change]:
    """Return the changes in the form in which a callable gets them from this feed."""
    return [feed.change(row) for row in rows_of(feed, given)]


def batch_of(
    feed: Feed,
    given: Sequence[Given],
    *,
    key: Sequence[str] | None = None,
    attempt: int = 1,
    batch_id: str = BATCH_ID,
) -> Batch:
    """Return the batch of these changes in the form in which a callable gets it. No server has claimed it.

    ``key`` is the types of the columns of the ids, such as ``["uuid"]``. By default an int is a ``bigint`` and a str a
    ``text``.
    """
    return batch_of_rows(feed, rows_of(feed, given), attempt, batch_id, key)


def batch_of_rows(
    feed: Feed, rows: Sequence[Row], attempt: int, batch_id: str, key: Sequence[str] | None = None
) -> Batch:
    if not rows:
        raise InvalidArgument(f"{feed.name}: a feed never has an empty batch: give at least one change")
    types = _key_types(feed, rows, key)
    return Batch(
        id=batch_id,
        feed=feed.name,
        version=1,
        attempt=attempt,
        count=len(rows),
        slices=tuple(_slices(feed, rows)),
        bounds={} if types == BIGINT else {"key": list(types)},
        oldest=min(feed.change(row).created_at for row in rows).isoformat(),
        atomic=True,
    )


def _key_types(feed: Feed, rows: Sequence[Row], key: Sequence[str] | None) -> tuple[str, ...]:
    """Return the types of the columns of the ids. Raises InvalidArgument if the ids have not all the same columns."""
    if dict(feed.columns)["id"] != "bigint":
        return BIGINT
    columns = [row["id"] if isinstance(row["id"], tuple) else (row["id"],) for row in rows]
    types = (
        tuple("bigint" if isinstance(part, int) else "text" for part in columns[0])
        if key is None
        else tuple(key)
    )
    for number, parts in enumerate(columns, 1):
        if [isinstance(part, int) for part in parts] != [kind == "bigint" for kind in types]:
            raise InvalidArgument(
                f"change {number} has the id {rows[number - 1]['id']!r:.300}, and ids of this batch have the columns "
                f"{', '.join(types)}: give ids of one shape"
            )
    return types


def _slices(feed: Feed, rows: Sequence[Row]) -> Iterator[Slice]:
    """Return a slice for each shard. For a feed with shards, ``after`` and ``upto`` begin with the shard."""
    shard = [row["shard"] if isinstance(feed, TubeFeed) else 0 for row in rows]
    for number, same in groupby(sorted(shard)):
        count = len(list(same))
        yield Slice(count, [number, 0], [number, count])


def _columns(change: Any) -> Row:
    if isinstance(change, Event):
        row = {"topic": change.topic, "payload": change.payload, "metadata": dict(change.metadata)}
        columns = {
            "id": change.id or (change.at and event_id(change.at, 0)),
            "subscription_ids": change.subscriptions,
        }
        return row | {name: value for name, value in columns.items() if value}
    if isinstance(change, Mapping):
        return dict(change)
    if isinstance(change, int | str | tuple) and not isinstance(change, bool):
        return {"id": change}
    raise InvalidArgument(
        f"a change must be an id, a mapping of columns to values, or an Event, not {change!r:.300}"
    )
