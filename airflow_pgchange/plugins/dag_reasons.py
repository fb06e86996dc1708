"""Reasons why DAGs do not process the changes of a consumer, from Airflow's metadata: for the page, ``status`` and
``health``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from airflow.configuration import conf
from airflow.models.dag import DagModel
from airflow.models.dagrun import DagRun
from airflow.models.taskinstance import TaskInstance
from airflow.utils.state import TaskInstanceState
from sqlalchemy import and_, select
from sqlalchemy.orm import Session

from airflow_pgchange.plugins.databases import Key, Place, Places
from airflow_pgchange.plugins.datamodels import Run

MOST = 1000
"""Maximum number of failed task instances read. A mapped task can have many."""
ConsumerAt = tuple[Place, Key]
"""A consumer, by its place and its key."""


@dataclass(frozen=True)
class DagReason:
    """A DAG that does not process the changes of its consumer, with the reason. ``run``: the failed try of a task."""

    told: str
    dag_id: str
    run: Run | None = None

    def __str__(self) -> str:
        return self.told if self.run is None else f"{self.told}: {log_url(self.run)}"


def log_url(run: Run) -> str:
    """Return the address of Airflow's page with the log of a try."""
    base = conf.get("api", "base_url", fallback="http://localhost:8080").rstrip("/")
    mapped = "" if run.map_index < 0 else f"/mapped/{run.map_index}"
    path = "/".join(
        quote(part, safe="") for part in ("dags", run.dag_id, "runs", run.run_id, "tasks", run.task_id)
    )
    return f"{base}/{path}{mapped}?try_number={run.try_number}"


def dag_reasons(
    session: Session, places: Places, consumers: Iterable[ConsumerAt]
) -> dict[ConsumerAt, list[DagReason]]:
    """Return the reasons of each of these consumers that has any.

    The DAGs whose tasks claim the consumer's batches are examined. If there are none, each DAG that names the consumer
    is examined. Paused DAGs are a reason only if all these DAGs are paused.
    """
    dags = {consumer: _dags(places, *consumer) for consumer in consumers}
    failed = _failed(session, set().union(*dags.values()))
    reasons = {}
    for (place, key), of_consumer in dags.items():
        naming = places.consumers[place].get(key)
        tasks = set() if naming is None else naming.tasks
        of_key = [*_paused(places, of_consumer), *last_runs(failed, of_consumer, tasks)]
        if of_key:
            reasons[place, key] = of_key
    return reasons


def _dags(places: Places, place: Place, key: Key) -> set[str]:
    naming = places.consumers[place].get(key)
    claiming = set() if naming is None else {dag_id for dag_id, _ in naming.tasks}
    return claiming or places.naming(place, *key)


def _paused(places: Places, dags: set[str]) -> list[DagReason]:
    if not dags <= places.paused:
        return []
    return [DagReason(f"its DAG {dag_id} is paused", dag_id) for dag_id in sorted(dags)]


def last_runs(
    failed: Mapping[str, list[tuple[Run, str]]], dags: set[str], tasks: set[tuple[str, str]]
) -> list[DagReason]:
    """Return the failure of the last run of each DAG: of the task that claims, or of a failed task upstream of it."""
    reasons = []
    for dag_id in sorted(dags):
        own = {task_id for of_dag, task_id in tasks if of_dag == dag_id}
        of_dag = failed.get(dag_id, [])
        concerns = [state for run, state in of_dag if not own or run.task_id in own]
        failures = [run for run, state in of_dag if state == TaskInstanceState.FAILED]
        if concerns and failures:
            run = next((run for run in failures if run.task_id in own), failures[0])
            reasons.append(
                DagReason(f"the last run of its DAG {dag_id} failed at task {run.task_id}", dag_id, run)
            )
    return reasons


def _failed(session: Session, dags: set[str]) -> dict[str, list[tuple[Run, str]]]:
    """Return the task instances of the last run of each DAG that failed, or that an upstream failure kept from
    starting, each with its state."""
    latest: Any = (
        select(DagRun.id)
        .where(DagRun.dag_id == DagModel.dag_id)
        .order_by(DagRun.id.desc())
        .limit(1)
        .correlate(DagModel)
        .scalar_subquery()
    )
    ti = TaskInstance
    query = (
        select(ti.dag_id, ti.run_id, ti.task_id, ti.map_index, ti.try_number, ti.state)
        .join(DagRun, and_(DagRun.dag_id == ti.dag_id, DagRun.run_id == ti.run_id))
        .join(DagModel, DagModel.dag_id == DagRun.dag_id)
        .where(DagModel.dag_id.in_(dags), DagRun.id == latest)
        .where(ti.state.in_([TaskInstanceState.FAILED, TaskInstanceState.UPSTREAM_FAILED]))
        .order_by(ti.dag_id, ti.task_id, ti.map_index)
        .limit(MOST)
    )
    tries: dict[str, list[tuple[Run, str]]] = {}
    for *parts, state in session.execute(query) if dags else ():
        run = Run.model_validate(dict(zip(Run.model_fields, parts, strict=True)))
        tries.setdefault(run.dag_id, []).append((run, str(state)))
    return tries
