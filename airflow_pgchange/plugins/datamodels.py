"""The models of the API's responses."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, Field

Answering = Literal["answers", "asked", "late", "down"]
SHOWN = 20_000
"""Maximum number of characters shown of the content of a dead letter or a saga."""
Standing = Literal["failing", "held back", "working", "new", "ready", "idle", "unknown"]


class Database(BaseModel):
    """A database that DAGs name by its connection, and the user's rights to the connection."""

    connection: str
    state: Answering = Field(description="asked: it has not answered yet. late: its latest answer is old")
    age: float | None = Field(description="Seconds since its latest answer")
    failure: str | None = Field(description="Reason why it does not answer, for readers of the connection")
    left_out: list[str] = Field(description="Missing parts of the answer, for readers of the connection")
    dags: list[str] = Field(description="DAGs that use the connection and that the user may read")
    may_read: bool
    may_edit: bool


class Run(BaseModel):
    """A try of a task in Airflow. ``map_index``: -1 if the task is not mapped."""

    dag_id: str
    run_id: str
    task_id: str
    map_index: int
    try_number: int


class DagReason(BaseModel):
    """The reason why a DAG does not process the changes of its consumer; visible to users who may read the DAG."""

    told: str
    run: Run | None = Field(description="The failed try. Airflow has its log")


class Consumer(BaseModel):
    """A row of ``pgchange.status()``, or a consumer of state ``new`` that DAGs name and that is not registered yet."""

    connection: str
    source: str | None = Field(description="The connection of the changes, if they are in another database")
    kind: str
    consumer: str
    feed: dict[str, Any] = Field(description="The fields of the consumer's feed, which depend on its kind")
    state: Standing
    ready: int | None
    ready_exact: bool | None
    waiting: int | None
    oldest_seconds: float | None
    faults: int | None
    at_work: bool | None
    batch: str | None
    attempt: int | None
    part_of: str | None = Field(description="The split batch of which the consumer's batch is a part")
    error: str | None = Field(description="For readers of the connection")
    claimed_at: datetime | None
    updated_at: datetime | None
    leased_by: str | None = Field(default=None, description="Lease holder, for readers of the connection")
    leased_until: datetime | None = None
    held_back_by: str | None
    why: str | None = Field(default=None, description="Reason of its lag, for readers of the connection")
    new: str | None = Field(description="Its start, if DAGs name it and it has not claimed a batch yet")
    dag_reasons: list[DagReason]
    rate_in: float | None = Field(description="Changes a second that were written in the last minutes")
    rate_out: float | None = Field(description="Changes a second that were processed in the last minutes")
    trend: list[int | None] = Field(description="Number of ready changes every two minutes of the last hour")
    movable: bool
    dags: list[str]
    targets: list[str] = Field(description="Names of the outlets of these DAGs' tasks")
    may_edit: bool


class Finding(BaseModel):
    """A row of ``pgchange.health()``, or a finding of kind ``asset``: DAGs give an asset different watchers.

    ``told`` and ``call`` are visible to users who may read the connection.
    """

    connection: str
    kind: str
    severity: str
    consumer: str | None
    told: str | None
    call: str | None
    dag_reasons: list[DagReason]


class Watcher(BaseModel):
    """A row of ``pgchange.watchers()``. ``since``: the time since which its queries succeed or, if not ``sees``, fail."""

    connection: str
    feed: str
    kind: str
    watched_by: str
    since: datetime
    looked_at: datetime
    ready: int | None = Field(description="Number of ready changes at its last successful query")
    woke_at: datetime | None = Field(description="Time at which it last woke a subscriber")
    sees: bool
    error: str | None = Field(description="Reason why its queries fail, for readers of the connection")
    dags: list[str]


class Overview(BaseModel):
    """Everything that the user may see. ``paused``: the paused DAGs among those that the user may read."""

    databases: list[Database]
    consumers: list[Consumer]
    findings: list[Finding]
    watchers: list[Watcher]
    paused: list[str]


class Sample(BaseModel):
    """A sample of ``pgchange.status()``: the lag of a consumer at a time."""

    at: datetime
    ready: int | None
    ready_exact: bool | None
    waiting: int | None
    oldest_seconds: float | None


class Output(BaseModel):
    """Rows of a batch in a table. A table of a lake has a location, and the version with these rows."""

    target: str
    rows: int
    version: str | None = None
    location: str | None = None


class Attempt(BaseModel):
    """An attempt on a batch, from ``pgchange.batches()``."""

    batch: str
    attempt: int
    changes: int
    noted_at: datetime
    claimed_at: datetime | None
    acked_at: datetime | None
    failed_at: datetime | None
    skipped_at: datetime | None
    split_at: datetime | None
    seconds: dict[str, float]
    outputs: list[Output]
    run: Run | None = Field(description="The try of a task, if known and the user may read its DAG")
    error: str | None = Field(description="For readers of the connection")


class History(BaseModel):
    """Samples of a consumer in the last hour, and the attempts on its batches in the last day, the latest first."""

    samples: list[Sample]
    attempts: list[Attempt]
    failure: str | None


class Letter(BaseModel):
    """A dead letter: a batch, an event or a message that a consumer gave up."""

    id: int
    kind: str
    consumer: str
    batch: str | None
    changes: int
    reason: str
    error: str | None
    attempts: int
    given_up_by: str
    given_up_at: datetime
    sent_at: datetime | None
    on_its_way: bool
    hindrance: str | None
    group: str = Field(description="The group that it belongs to")


class LetterGroup(BaseModel):
    """Dead letters with the same error: the same first line without numbers and ids. The reason is used if no error is
    known. ``error`` is the first line of the latest letter."""

    group: str
    letters: int
    changes: int
    oldest: datetime
    newest: datetime
    error: str
    consumers: list[str] = Field(description="Some of their consumers")
    more_consumers: int


POSITIONS = {"lsn", "bounds", "slices"}
"""Fields of a letter that are of least interest to people, so they are shown last."""


class Content(BaseModel):
    """The content of a dead letter or a saga, as formatted JSON. ``cut``: only its beginning is shown."""

    content: str
    cut: bool

    @classmethod
    def of(cls, held: Any) -> Content:
        if isinstance(held, dict):
            held = {key: held[key] for key in sorted(held, key=lambda key: key in POSITIONS)}
        text = json.dumps(held, indent=2, ensure_ascii=False)
        return cls(content=text[:SHOWN], cut=len(text) > SHOWN)


class Held(BaseModel):
    """The content of a dead letter. ``content`` is None until the database has answered."""

    content: str | None = None
    cut: bool = False
    failure: str | None = None


class Letters(BaseModel):
    """The dead letters of a database: their groups, and the latest letters of each group. ``all``: the number of
    letters."""

    letters: list[Letter]
    groups: list[LetterGroup]
    all: int
    failure: str | None


class Backfill(BaseModel):
    """A row of ``tube.backfills()``.

    ``looked_at`` is the number of rows read so far, ``total`` an estimate of all rows. ``touched`` is the number of ids,
    and ``rate`` is in rows a second.
    """

    id: int
    tube: str
    table: str
    order: str
    state: str
    looked_at: int
    total: int
    percent: float
    touched: int
    rate: float | None
    remaining_seconds: float | None
    message: str | None = Field(description="For readers of the connection")
    started_by: str
    started_at: datetime
    updated_at: datetime
    finished_at: datetime | None


class Table(BaseModel):
    """A table that is attached to a tube."""

    tube: str
    table: str


class Backfills(BaseModel):
    """The latest backfills of a database. ``tables``: the tables that can be backfilled; visible to users who may read
    the connection."""

    backfills: list[Backfill]
    tables: list[Table]
    failure: str | None


class Done(BaseModel):
    """The result of an action, in lines of text."""

    done: list[str]


def standing(row: dict[str, Any]) -> Standing:
    """Return the state of a consumer in a word. If several apply, the state that needs most attention is returned."""
    if not row["registered"]:
        return "new"
    if row["error"] and not row["at_work"]:
        return "failing"
    if row["held_back_by"]:
        return "held back"
    if row["at_work"]:
        return "working"
    if row["ready"] is None:
        return "unknown"
    return "ready" if row["ready"] else "idle"
