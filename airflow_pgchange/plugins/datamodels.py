"""What the API answers."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, Field

Answering = Literal["answers", "asked", "late", "down"]
SHOWN = 20_000
"""Characters of what a letter or a saga holds."""
Standing = Literal["failing", "held back", "working", "new", "ready", "idle", "unknown"]


class Database(BaseModel):
    """A database that DAGs name by its connection, and what the user may do there."""

    connection: str
    state: Answering = Field(
        description="asked: for the first time, and has not answered yet; late: its latest answer is old"
    )
    age: float | None = Field(description="Seconds since its latest answer")
    trouble: str | None = Field(description="Why it does not answer, for who may read the connection")
    left_out: list[str] = Field(description="What it could not tell, for who may read the connection")
    dags: list[str] = Field(description="Those that use it and that the user may read")
    may_read: bool
    may_edit: bool


class Run(BaseModel):
    """A try of a task in Airflow. ``map_index``: -1 where the task is not mapped."""

    dag_id: str
    run_id: str
    task_id: str
    map_index: int
    try_number: int


class DagReason(BaseModel):
    """Why a DAG of a consumer does not process its changes, for who may read the DAG."""

    told: str
    run: Run | None = Field(description="The try that failed: Airflow has its log")


class Consumer(BaseModel):
    """A row of ``pgchange.status()``, or of state ``new`` a consumer that DAGs name and that is not registered."""

    connection: str
    source: str | None = Field(description="The connection of the changes, where these are elsewhere")
    kind: str
    consumer: str
    feed: dict[str, Any] = Field(description="What the consumer reads, and as whom, in the words of its kind")
    state: Standing
    ready: int | None
    ready_exact: bool | None
    waiting: int | None
    oldest_seconds: float | None
    faults: int | None
    at_work: bool | None
    batch: str | None
    attempt: int | None
    part_of: str | None = Field(description="The batch that was split, if its batch is a part of it")
    error: str | None = Field(description="For who may read the connection")
    claimed_at: datetime | None
    updated_at: datetime | None
    leased_by: str | None = Field(
        default=None, description="Who has a lease of its batch, for who may read the connection"
    )
    leased_until: datetime | None = None
    held_back_by: str | None
    why: str | None = Field(default=None, description="Why it is behind, for who may read the connection")
    new: str | None = Field(description="Where it starts, if DAGs name it and it has not claimed yet")
    dag_reasons: list[DagReason]
    rate_in: float | None = Field(
        description="Changes a second that came in the last minutes, where that is known"
    )
    rate_out: float | None = Field(description="Changes a second that were processed in the last minutes")
    trend: list[int | None] = Field(description="What was ready every two minutes of the last hour")
    movable: bool
    dags: list[str]
    targets: list[str] = Field(description="What the tasks of these DAGs say that they write")
    may_edit: bool


class Finding(BaseModel):
    """A row of ``pgchange.health()``, or of kind ``asset`` an asset that DAGs give different watchers.

    ``told`` and ``call`` are for who may read the connection.
    """

    connection: str
    kind: str
    severity: str
    consumer: str | None
    told: str | None
    call: str | None
    dag_reasons: list[DagReason]


class Watcher(BaseModel):
    """A row of ``pgchange.watchers()``: since when it can look or, where it does not see, cannot."""

    connection: str
    feed: str
    kind: str
    watched_by: str
    since: datetime
    looked_at: datetime
    ready: int | None = Field(description="How much was ready when it saw last")
    woke_at: datetime | None = Field(description="When it last woke anybody")
    sees: bool
    error: str | None = Field(description="Why it cannot look, for who may read the connection")
    dags: list[str]


class Overview(BaseModel):
    """Everything that the user may see; ``paused``: those of the DAGs that do not run."""

    databases: list[Database]
    consumers: list[Consumer]
    findings: list[Finding]
    watchers: list[Watcher]
    paused: list[str]


class Sample(BaseModel):
    """What ``pgchange.status()`` said of a consumer at a time."""

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
    """An attempt on a batch, as ``pgchange.batches()`` tells of it."""

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
    run: Run | None = Field(
        description="Which task made it, where that is known and the user may read its DAG"
    )
    error: str | None = Field(description="For who may read the connection")


class History(BaseModel):
    """The last hour of a consumer in samples, and the attempts on its batches in the last day, the last first."""

    samples: list[Sample]
    attempts: list[Attempt]
    trouble: str | None


class Letter(BaseModel):
    """A batch, an event or a message that a consumer gave up."""

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
    """Dead letters that failed on the same: the first line of their error without numbers and ids, or of the reason if no
    error is known. ``error`` is that line of the latest of them."""

    group: str
    letters: int
    changes: int
    oldest: datetime
    newest: datetime
    error: str
    consumers: list[str] = Field(description="The first of their consumers")
    more_consumers: int


POSITIONS = {"lsn", "bounds", "slices"}
"""What no person reads first."""


class Content(BaseModel):
    """What a dead letter or a saga holds, as JSON for people; ``cut``: only its beginning."""

    content: str
    cut: bool

    @classmethod
    def of(cls, held: Any) -> Content:
        if isinstance(held, dict):
            held = {key: held[key] for key in sorted(held, key=lambda key: key in POSITIONS)}
        text = json.dumps(held, indent=2, ensure_ascii=False)
        return cls(content=text[:SHOWN], cut=len(text) > SHOWN)


class Held(BaseModel):
    """What a dead letter holds; ``content`` is None until the database has answered."""

    content: str | None = None
    cut: bool = False
    trouble: str | None = None


class Letters(BaseModel):
    """The dead letters of a database: their groups, and the latest of each group. ``all``: how many there are."""

    letters: list[Letter]
    groups: list[LetterGroup]
    all: int
    trouble: str | None


class Backfill(BaseModel):
    """A row of ``tube.backfills()``: rows looked at of about how many, ids touched, rows a second."""

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
    message: str | None = Field(description="For who may read the connection")
    started_by: str
    started_at: datetime
    updated_at: datetime
    finished_at: datetime | None


class Table(BaseModel):
    """A table that is attached to a tube."""

    tube: str
    table: str


class Backfills(BaseModel):
    """The latest backfills of a database; ``tables``, which can be backfilled, are for who may read the connection."""

    backfills: list[Backfill]
    tables: list[Table]
    trouble: str | None


class Done(BaseModel):
    """What was done, a line for each thing."""

    done: list[str]


def standing(row: dict[str, Any]) -> Standing:
    """One word for how a consumer stands: what a person should look at comes first."""
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
