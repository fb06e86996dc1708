"""The dead letters of a place, in groups of the same error, as the page shows them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import psycopg
from fastapi import HTTPException

from airflow_pgchange.admin import dead_letters
from airflow_pgchange.errors import UnknownLetter
from airflow_pgchange.plugins import datamodels
from airflow_pgchange.plugins.databases import Place
from airflow_pgchange.plugins.page_queries import QueryCache
from airflow_pgchange.plugins.query_threads import failure_of

LETTERS = 200
"""Maximum numbers of dead letters and of groups shown: the latest."""
NAMED = 3
"""Maximum number of consumers of a group that are named."""
IDS = re.compile(
    r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}|\b(?=[0-9a-f]*[0-9])[0-9a-f]{8,}\b|[0-9]+(?:[.,:/-][0-9]+)*",
    re.I,
)
"""Ids and numbers. Errors with the same cause differ only in these."""
LONGEST = 200
"""The number of characters of an error by which letters are grouped."""

Connections = Sequence[psycopg.Connection[Any]]


def letters(query_cache: QueryCache, place: Place) -> datamodels.Letters:
    """Return the dead letters of a place in groups. The group with the latest letter comes first."""
    cached = query_cache.answer(place, _letters)
    found = cached.answer or []
    groups = grouped(found)
    shown = list(groups.items())[:LETTERS]
    each = max(1, LETTERS // max(1, len(shown)))
    return datamodels.Letters(
        letters=[_letter(dead, group) for group, in_group in shown for dead in in_group[:each]],
        groups=[_group(group, in_group) for group, in_group in shown],
        all=len(found),
        failure=failure_of(cached),
    )


def letter(query_cache: QueryCache, place: Place, number: int) -> datamodels.Held:
    """Return the content of a dead letter. Raises HTTPException 404 if there is no such letter.

    The query for a missing letter is dropped, so that made-up numbers do not fill the cache.
    """
    cached = query_cache.answer(place, _held, number)
    if cached.answer is not None and cached.answer.content is None:
        query_cache.forget(place, _held, number)
        raise HTTPException(404, f"there is no dead letter {number}: it was sent again or dropped")
    return (cached.answer or datamodels.Held()).model_copy(update={"failure": failure_of(cached)})


def grouped(dead_letters_: Iterable[dead_letters.Letter]) -> dict[str, list[dead_letters.Letter]]:
    """Return letters by the first line of their error without ids and numbers. Letters and groups are in descending
    order of the letters' ids."""
    groups: dict[str, list[dead_letters.Letter]] = defaultdict(list)
    for dead in sorted(dead_letters_, key=lambda dead: dead.id, reverse=True):
        groups[IDS.sub("…", first_line(dead))[:LONGEST]].append(dead)
    return groups


def first_line(dead: dead_letters.Letter) -> str:
    """Return the first line of the error of a letter, or of its reason if no error is known."""
    return (dead.error or dead.reason).strip().partition("\n")[0]


def _letter(dead: dead_letters.Letter, group: str) -> datamodels.Letter:
    batch = None if dead.batch_id is None else str(dead.batch_id)
    return datamodels.Letter(**{**asdict(dead), "batch": batch, "group": group})


def _group(group: str, in_group: Sequence[dead_letters.Letter]) -> datamodels.LetterGroup:
    consumers = list(dict.fromkeys(dead.consumer for dead in in_group))
    return datamodels.LetterGroup(
        group=group,
        letters=len(in_group),
        changes=sum(dead.changes for dead in in_group),
        oldest=min(dead.given_up_at for dead in in_group),
        newest=max(dead.given_up_at for dead in in_group),
        error=first_line(in_group[0]),
        consumers=consumers[:NAMED],
        more_consumers=len(consumers[NAMED:]),
    )


def _letters(connections: Connections) -> list[dead_letters.Letter]:
    return dead_letters.letters(*connections)


def _held(number: int, connections: Connections) -> datamodels.Held:
    try:
        content = datamodels.Content.of(dead_letters.letter_content(connections[0], number))
    except UnknownLetter:
        return datamodels.Held()
    return datamodels.Held(content=content.content, cut=content.cut)
