"""The actions of the page. They call the same functions as the command line, each over its own connection."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from typing import Any, Literal

import psycopg
from fastapi import APIRouter
from pydantic import BaseModel, Field

from airflow_pgchange.admin import consumers, dead_letters, manual_operations
from airflow_pgchange.admin.maintenance import maintain
from airflow_pgchange.feeds.error_text import without_secrets
from airflow_pgchange.plugins.access import Source, acting
from airflow_pgchange.plugins.databases import Place
from airflow_pgchange.plugins.datamodels import Done
from airflow_pgchange.plugins.page_queries import conninfos
from airflow_pgchange.plugins.query_threads import opened
from airflow_pgchange.plugins.request_fields import Name, Number, Reason

LIMITS = {"statement_timeout": "60s", "lock_timeout": "10s"}

router = APIRouter(tags=["actions"])


class One(BaseModel):
    """A consumer, by its name in status."""

    consumer: Name


class Skip(One):
    """The consumer whose batch becomes a dead letter, and the reason."""

    reason: Reason


class Move(One):
    """The consumer to move, and its new position."""

    to: Literal["beginning", "now"] | datetime


class Numbers(BaseModel):
    """The numbers of dead letters. The action applies to all or to none of them."""

    ids: list[Number] = Field(min_length=1, max_length=1000)


class Key(BaseModel):
    """The key to erase from the dead letters of a consumer, or of all consumers: an id, or the value of a field."""

    key: Name
    field: Name | None = None
    consumer: Name | None = None


@contextmanager
def both(connection_id: str, source: str | None) -> Iterator[tuple[psycopg.Connection[Any], ...]]:
    """Yield connections to the databases of the results and of the changes, which are the same without ``source``.

    Errors are raised without the passwords of the connections.
    """
    addresses = conninfos(Place(connection_id, source))
    with ExitStack() as stack:
        try:
            connections = [stack.enter_context(opened(conninfo, **LIMITS)) for conninfo in addresses]
            yield connections[0], connections[-1]
        except Exception as error:
            error.args = tuple(
                without_secrets(part, addresses) if isinstance(part, str) else part for part in error.args
            )
            raise


@router.post("/connections/{connection_id:path}/consumers/skip", dependencies=acting("pgchange_skip", Skip))
def skip(connection_id: str, payload: Skip, source: Source = None) -> Done:
    """Skip the batch that a consumer cannot finish. The batch becomes a dead letter."""
    feed = consumers.named(payload.consumer)
    with both(connection_id, source) as (results, changes):
        batch = manual_operations.skip_batch(results, changes, feed(changes), payload.reason)
    return Done(done=[f"{payload.consumer}: batch {batch} is a dead letter now"])


@router.post(
    "/connections/{connection_id:path}/consumers/release", dependencies=acting("pgchange_release", One)
)
def release(connection_id: str, payload: One, source: Source = None) -> Done:
    """End the leases of a consumer. Its batches can be claimed again, and the former holders can no longer ack them."""
    feed = consumers.named(payload.consumer)
    with both(connection_id, source) as (_, changes):
        ended = manual_operations.end_leases(changes, feed(changes))
    return Done(done=[f"{payload.consumer}: leases ended: {ended}"])


@router.post("/connections/{connection_id:path}/consumers/move", dependencies=acting("pgchange_move", Move))
def move(connection_id: str, payload: Move, source: Source = None) -> Done:
    """Move a consumer to the beginning, to now or to a time. It then skips changes, or gets changes again."""
    feed = consumers.movable(payload.consumer)
    with both(connection_id, source) as (results, changes):
        manual_operations.move_consumer(results, changes, feed, payload.to)
    return Done(done=[f"{feed.name} has moved to: {payload.to}"])


@router.post(
    "/connections/{connection_id:path}/consumers/repair", dependencies=acting("pgchange_repair", One)
)
def repair(connection_id: str, payload: One, source: Source = None) -> Done:
    """Let a consumer go on after its source lost its latest changes, or was restored. Batches may come again."""
    feed = consumers.movable(payload.consumer)
    with both(connection_id, source) as (results, changes):
        guarantee = manual_operations.repair_consumer(results, changes, feed)
    return Done(done=[f"{feed.name} continues, {guarantee} from here on"])


@router.post("/connections/{connection_id:path}/consumers/drop", dependencies=acting("pgchange_drop", One))
def drop(connection_id: str, payload: One, source: Source = None) -> Done:
    """Drop a consumer. A consumer of the same name would begin anew."""
    feed = consumers.movable(payload.consumer)
    with both(connection_id, source) as (results, changes):
        manual_operations.drop_consumer(results, changes, feed)
    return Done(done=[f"{feed.name} is dropped"])


@router.post(
    "/connections/{connection_id:path}/letters/redrive",
    dependencies=acting("pgchange_letters_redrive", Numbers),
)
def redrive(connection_id: str, payload: Numbers, source: Source = None) -> Done:
    """Send dead letters again, each to its own consumer only."""
    with both(connection_id, source) as (results, changes):
        sent = dead_letters.redrive(results, changes, ids=payload.ids)
    return Done(done=[f"letter {number} is sent again" for number in sent])


@router.post(
    "/connections/{connection_id:path}/letters/drop", dependencies=acting("pgchange_letters_drop", Numbers)
)
def drop_letters(connection_id: str, payload: Numbers) -> Done:
    """Delete dead letters. Their changes are lost."""
    with both(connection_id, None) as (results, _):
        dropped = dead_letters.drop_letters(results, ids=payload.ids)
    return Done(done=[f"letter {number} is dropped" for number in dropped])


@router.post(
    "/connections/{connection_id:path}/letters/erase", dependencies=acting("pgchange_letters_erase", Key)
)
def erase_letters(connection_id: str, payload: Key) -> Done:
    """Erase the changes of one key from dead letters, and keep their other changes."""
    with both(connection_id, None) as (results, _):
        letters = dead_letters.erase_letters(
            results, payload.key, field=payload.field, consumer=payload.consumer
        )
    erased = [f"letter {letter.id}: changes erased: {letter.erased}" for letter in letters]
    return Done(done=erased or ["no letter contained this key"])


@router.post("/connections/{connection_id:path}/maintenance", dependencies=acting("pgchange_maintenance"))
def maintenance(connection_id: str) -> Done:
    """Run maintenance on a database as the maintenance DAG does, but without trimming."""
    with both(connection_id, None) as (results, _):
        report = maintain(results)
    return Done(done=report.done + [f"failed: {line}" for line in report.failed])
