"""The state of all consumers, reduced to the parts that a user may see."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from airflow.utils.session import create_session
from fastapi import HTTPException

from airflow_pgchange.admin import consumers
from airflow_pgchange.errors import InvalidArgument, PgChangeError, UnknownConsumer
from airflow_pgchange.plugins import datamodels, sagas
from airflow_pgchange.plugins.access import Rights
from airflow_pgchange.plugins.dag_reasons import ConsumerAt, DagReason, dag_reasons
from airflow_pgchange.plugins.databases import Key, Place, Places
from airflow_pgchange.plugins.history import Trend, history
from airflow_pgchange.plugins.page_queries import EMPTY_STATE, DatabaseState, QueryCache, Row
from airflow_pgchange.plugins.query_threads import NO_ANSWER, CachedAnswer, failure_of
from airflow_pgchange.plugins.views import M, View

OF_SOURCE = ("ready", "ready_exact", "waiting", "oldest_seconds", "faults", "held_back_by", "why", "new")
"""The columns of a consumer's row that come from the database of its changes."""
Reasons = Mapping[ConsumerAt, Sequence[DagReason]]


def overview(query_cache: QueryCache, places: Places, rights: Rights) -> datamodels.Overview:
    """Return everything that a user may see."""
    seen = rights.seen()
    shown = {name: [Place(name), *_seen_elsewhere(name, places, rights)] for name in seen}
    statuses = {
        place: query_cache.status(place, places.consumers[place]) for each in shown.values() for place in each
    }
    for query in statuses.values():
        query.ask()
    cached = {place: query.latest() for place, query in statuses.items()}
    reasons = _reasons(cached, places)
    result = datamodels.Overview(
        databases=[], consumers=[], findings=[], watchers=[], paused=rights.readable(places.paused)
    )
    for name in seen:
        answer = cached[Place(name)]
        result.databases.append(_database(name, answer, rights))
        others = {place: cached[place] for place in shown[name] if place.source is not None}
        result.consumers += _consumers(name, answer, others, places, rights, reasons=reasons)
        result.findings += _clashes(name, places, rights)
        if answer.answer is not None:
            result.findings += _findings(name, answer.answer, places, rights, reasons)
            result.watchers += _watchers(name, answer.answer, places, rights)
    return result


def consumer(
    query_cache: QueryCache, places: Places, place: Place, kind: str, name: str, *, rights: Rights
) -> datamodels.History:
    """Return the history of a consumer. Raises UnknownConsumer for an unknown name, before that fills the cache."""
    status = query_cache.status(place, places.consumers[place])
    status.ask()
    standing = status.latest()
    answer = datamodels.History(samples=[], attempts=[], failure=None)
    failure = failure_of(standing)
    if standing.answer is not None:
        if (kind, name) not in {(row["kind"], row["consumer"]) for row in standing.answer.rows}:
            raise UnknownConsumer(f"the database has no consumer {name} of kind {kind}")
        cached = query_cache.answer(place, history, kind, name)
        answer, failure = cached.answer or answer, failure_of(cached)
    if place.source is None and (kind, name) in _hidden(place.connection, places, rights):
        answer = answer.model_copy(update={"samples": []})
    may_read = rights.may("GET", place.connections)
    dags = rights.readable({attempt.run.dag_id for attempt in answer.attempts if attempt.run is not None})
    attempts = [
        attempt.model_copy(
            update={
                "error": attempt.error if may_read else None,
                "run": attempt.run if attempt.run is not None and attempt.run.dag_id in dags else None,
            }
        )
        for attempt in answer.attempts
    ]
    return datamodels.History(
        samples=answer.samples, attempts=attempts, failure=failure if may_read else failure and NO_ANSWER
    )


def view(
    query_cache: QueryCache, connection: str, rights: Rights, database_view: View[M], *arguments: Any
) -> M:
    """Return the answer of a database to a view, reduced to the parts that a user may see."""
    return _shown(
        query_cache.answer(Place(connection), database_view.question, *arguments),
        connection,
        rights,
        database_view,
    )


def saga(
    query_cache: QueryCache, connection: str, rights: Rights, number: int, *, with_data: bool
) -> sagas.Steps:
    """Return the steps of a saga. Raises HTTPException 404 for an unknown number, which is dropped from the cache."""
    query = Place(connection), sagas.steps, number, with_data and rights.may("GET", [connection])
    cached = query_cache.answer(*query)
    if cached.answer is not None and not cached.answer.steps:
        query_cache.forget(*query)
        raise HTTPException(404, f"there is no saga {number}")
    return _shown(cached, connection, rights, sagas.STEPS)


def _shown(cached: CachedAnswer[M], connection: str, rights: Rights, database_view: View[M]) -> M:
    """Return the answer of a view, reduced to the parts that a user may see."""
    answer, failure = cached.answer or database_view.nothing, failure_of(cached)
    if rights.may("GET", [connection]):
        return answer.model_copy(update={"failure": failure})
    return database_view.hidden(answer).model_copy(update={"failure": failure and NO_ANSWER})


def _database(name: str, cached: CachedAnswer[DatabaseState], rights: Rights) -> datamodels.Database:
    may_read = rights.may("GET", [name])
    return datamodels.Database(
        connection=name,
        state=_answering(cached),
        age=cached.age,
        failure=cached.failure if may_read else None,
        left_out=cached.answer.left_out if may_read and cached.answer is not None else [],
        dags=rights.dags(name),
        may_read=may_read,
        may_edit=rights.may("PUT", [name]),
    )


def _answering(cached: CachedAnswer[DatabaseState]) -> datamodels.Answering:
    if cached.failure is not None:
        return "down"
    if cached.late:
        return "late"
    return "asked" if cached.answer is None else "answers"


def _reasons(cached: Mapping[Place, CachedAnswer[DatabaseState]], places: Places) -> Reasons:
    """Return, for consumers that are behind, new or with findings, the reasons why their DAGs do not process the
    changes."""
    examined = set()
    for place, answer in cached.items():
        state = answer.answer or EMPTY_STATE
        examined |= {
            (place, (row["kind"], row["consumer"])) for row in state.rows if row.get("why") or row["new"]
        }
        keys = [
            (finding.kind, finding.consumer) for finding in state.findings if finding.consumer is not None
        ]
        examined |= {(places.home(place.connection, key), key) for key in keys}
    if not examined:
        return {}
    with create_session() as session:
        return dag_reasons(session, places, examined)


def _told_reasons(place: Place, key: Key, rights: Rights, reasons: Reasons) -> list[datamodels.DagReason]:
    of_key = reasons.get((place, key), [])
    readable = rights.readable({reason.dag_id for reason in of_key})
    shown = [reason for reason in of_key if reason.dag_id in readable]
    return [datamodels.DagReason(told=reason.told, run=reason.run) for reason in shown]


def _consumers(
    name: str,
    cached: CachedAnswer[DatabaseState],
    others: Mapping[Place, CachedAnswer[DatabaseState]],
    places: Places,
    rights: Rights,
    *,
    reasons: Reasons,
) -> Iterator[datamodels.Consumer]:
    """Yield the consumers of a database. If the changes are in another database, the place with both has the row."""
    state = cached.answer or EMPTY_STATE
    hidden = _hidden(name, places, rights)
    rows = {
        (row["kind"], row["consumer"]): (
            hidden.get((row["kind"], row["consumer"]), Place(name)),
            row,
            state.trends,
        )
        for row in state.rows
    }
    for place, other in others.items():
        for row in (other.answer or EMPTY_STATE).rows:
            if (row["kind"], row["consumer"]) in rows or not row["registered"]:
                rows[row["kind"], row["consumer"]] = place, row, (other.answer or EMPTY_STATE).trends
        for consumer in places.consumers[place].keys() & rows.keys():
            rows[consumer] = place, *rows[consumer][1:]
    for place, row, trends in rows.values():
        trend = trends.get((row["kind"], row["consumer"]), Trend())
        key = row["kind"], row["consumer"]
        dags = rights.readable(places.naming(place, *key))
        naming = places.consumers[place].get(key)
        targets = set() if naming is None else {name for dag_id, name in naming.targets if dag_id in dags}
        yield _consumer(
            place,
            row,
            trend,
            rights,
            dags=dags,
            targets=sorted(targets),
            dag_reasons=_told_reasons(place, key, rights, reasons),
        )


def _seen_elsewhere(name: str, places: Places, rights: Rights) -> list[Place]:
    """Return the places whose results are in this database and whose changes are in another, if the user may see both."""
    return [place for place in places.elsewhere(name) if rights.sees(place.connections)]


def _hidden(name: str, places: Places, rights: Rights) -> dict[Key, Place]:
    """Return the consumers with their results in this database and their changes in one that the user may not see."""
    seen = _seen_elsewhere(name, places, rights)
    others = [place for place in places.elsewhere(name) if place not in seen]
    hidden = {consumer: place for place in others for consumer in places.consumers[place]}
    return {
        consumer: place
        for consumer, place in hidden.items()
        if not any(consumer in places.consumers[each] for each in seen)
    }


def _consumer(place: Place, row: Row, trend: Trend, rights: Rights, **by_dags: Any) -> datamodels.Consumer:
    """Return a consumer from a row of status. ``by_dags``: the fields that come from DAGs."""
    may_read, is_seen = rights.may("GET", place.connections), rights.sees(place.connections)
    if not is_seen:
        # The samples of the last hour are stored with the results, but show the lag at the source: hide them too.
        row, trend = row | dict.fromkeys(OF_SOURCE), Trend()
    return datamodels.Consumer(
        connection=place.connection,
        source=place.source if is_seen else None,
        state=datamodels.standing(row),
        batch=None if row["batch_id"] is None else str(row["batch_id"]),
        rate_in=trend.rate_in,
        rate_out=trend.rate_out,
        trend=trend.ready,
        movable=row["registered"] and _is_movable(row["consumer"]),
        may_edit=is_seen and rights.may("PUT", place.connections),
        **by_dags,
        **{key: row[key] for key in datamodels.Consumer.model_fields if key in row}
        | {name: row.get(name) if may_read else None for name in ("error", "why", "leased_by")}
        | {"part_of": None if row["part_of"] is None else str(row["part_of"])},
    )


@lru_cache(10_000)
def _is_movable(consumer: str) -> bool:
    """Whether a consumer can be moved, by its name. Cached, because the page asks for every consumer every 3 s."""
    with suppress(InvalidArgument, PgChangeError):
        consumers.movable(consumer)
        return True
    return False


def _findings(
    name: str, state: DatabaseState, places: Places, rights: Rights, reasons: Reasons
) -> Iterator[datamodels.Finding]:
    may_read = rights.may("GET", [name])
    for finding in state.findings:
        key = finding.kind, finding.consumer or ""
        yield datamodels.Finding(
            connection=name,
            kind=finding.kind,
            severity=finding.severity,
            consumer=finding.consumer,
            told=finding.told if may_read else None,
            call=finding.call if may_read else None,
            dag_reasons=_told_reasons(places.home(name, key), key, rights, reasons),
        )


def _clashes(name: str, places: Places, rights: Rights) -> Iterator[datamodels.Finding]:
    """Yield a finding for each asset of a connection to which DAGs give different watchers."""
    may_read = rights.may("GET", [name])
    for clash in places.clashes:
        if clash.is_of(name):
            description = clash.description(rights.readable(clash.dags)) if may_read else None
            yield datamodels.Finding(
                connection=name,
                kind="asset",
                severity="error",
                consumer=None,
                told=description,
                call=None,
                dag_reasons=[],
            )


def _watchers(
    name: str, state: DatabaseState, places: Places, rights: Rights
) -> Iterator[datamodels.Watcher]:
    may_read, hidden = rights.may("GET", [name]), _hidden(name, places, rights)
    dags = {
        consumer: naming.dags
        for place in (Place(name), *places.elsewhere(name))
        for consumer, naming in places.consumers[place].items()
    }
    for row in state.watchers:
        yield datamodels.Watcher(
            connection=name,
            feed=row["feed"],
            kind=row["kind"],
            watched_by=row["watched_by"],
            since=row["since"],
            looked_at=row["looked_at"],
            ready=None if (row["kind"], row["feed"]) in hidden else row["ready"],
            woke_at=row["woke_at"],
            sees=row["error"] is None,
            error=row["error"] if may_read and (row["kind"], row["feed"]) not in hidden else None,
            dags=rights.readable(dags.get((row["kind"], row["feed"]), ())),
        )
