"""The commands of ``airflow-pgchange letters``."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict
from typing import Any

from airflow_pgchange.admin import dead_letters
from airflow_pgchange.cli.common import Rows, both, command, confirm, database
from airflow_pgchange.feeds.argument_checks import seconds

SHOWN_ERROR = 200
"""Maximum characters of an error in a table. JSON output has the whole error."""


@command("There are no dead letters.")
def show(args: Namespace) -> Rows:
    with both(args) as (connection, source):
        letters = dead_letters.letters(connection, source, consumer=args.consumer, older_than=args.older_than)
    return [asdict(letter) if args.output == "json" else _brief(letter) for letter in letters]


@command("No letter can be sent again: `airflow-pgchange letters list` says why.")
def redrive(args: Namespace) -> Rows:
    with both(args) as (connection, source):
        return [
            {"letter": number, "state": "sent again"}
            for number in dead_letters.redrive(connection, source, **_chosen(args))
        ]


@command("There is no such letter: nothing was deleted.")
def drop(args: Namespace) -> Rows:
    with database(args) as connection:
        if args.older_than is not None:
            seconds("--older-than", args.older_than)
        confirm(args, "The changes in these letters will be lost.")
        return [
            {"letter": number, "state": "dropped"}
            for number in dead_letters.drop_letters(connection, **_chosen(args))
        ]


@command("No letter contains this key.")
def erase(args: Namespace) -> Rows:
    with database(args) as connection:
        confirm(
            args,
            "The data of this key will be deleted from the letters, and will not be sent again with them.",
        )
        return [
            {"letter": letter.id, "erased": letter.erased}
            for letter in dead_letters.erase_letters(
                connection, args.key, field=args.field, consumer=args.consumer
            )
        ]


def _chosen(args: Namespace) -> dict[str, Any]:
    return {"ids": args.ids, "consumer": args.consumer, "older_than": args.older_than}


def _brief(letter: dead_letters.Letter) -> dict[str, Any]:
    """Return a letter as one line of a table."""
    return {
        "letter": letter.id,
        "consumer": letter.consumer,
        "changes": letter.changes,
        "given up": f"{letter.given_up_at:%Y-%m-%d %H:%M:%S} by {letter.given_up_by}",
        "reason": letter.reason,
        "attempts": letter.attempts,
        "error": (letter.error or "")[:SHOWN_ERROR],
        "sent again": "" if letter.sent_at is None else f"{letter.sent_at:%Y-%m-%d %H:%M:%S}",
        "state": "on its way" if letter.on_its_way else letter.hindrance or "",
    }
