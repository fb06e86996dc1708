"""``airflow-pgchange status`` and ``health``: the state of all consumers, and the problems that need attention."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from airflow_pgchange.admin import consumers, watch_checks
from airflow_pgchange.admin.health import explained, findings, findings_of_both
from airflow_pgchange.admin.new_consumers import with_new
from airflow_pgchange.cli.common import Rows, both, command
from airflow_pgchange.cli.dag_consumers import named_by_dags
from airflow_pgchange.errors import PgChangeError
from airflow_pgchange.plugins.dag_reasons import DagReason

SHOWN_REASON = 300
"""Maximum characters of a reason in a table; JSON output has all. Spark's errors name their cause after about 150."""


@command("No consumer has begun here yet: a consumer's first claim registers it.")
def status(args: Namespace) -> Rows:
    named = named_by_dags(args, _warn)
    with both(args) as (results, source):
        rows = explained(results, source, consumers.status(results, source, _warn))
        rows = with_new(results, source, rows, named.consumers)
        for connection in dict.fromkeys((results, source)):
            for line in watch_checks.blind(connection):
                _warn(line)
    reasons = named.reasons({_key(row) for row in rows if row["why"] or row["new"]})
    if args.output == "json":
        return [row | {"dag_reasons": [str(reason) for reason in reasons.get(_key(row), ())]} for row in rows]
    return [_brief(row, reasons.get(_key(row), ())) for row in rows]


@command("Nothing needs attention.", bad=bool, failure=2)
def health(args: Namespace) -> Rows:
    left_out: list[str] = []
    named = named_by_dags(args, _warn)
    with both(args) as (results, source):
        if source is results:
            problems = findings(results, left_out.append)
        else:
            standing = consumers.status(results, source, left_out.append)
            problems = findings_of_both(results, source, left_out.append, standing)
        rows = [asdict(finding) for finding in problems]
    reasons = named.reasons({_key(row) for row in rows if row["consumer"] is not None})
    rows = [row | {"told": "; ".join([row["told"], *map(str, reasons.get(_key(row), ()))])} for row in rows]
    for line in left_out:
        _warn(line)
    if left_out and not rows:
        raise PgChangeError("nothing was found, but the lines above say what could not be looked at")
    return rows if args.output == "json" else [{key: cell or "" for key, cell in row.items()} for row in rows]


def _key(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["kind"], row["consumer"]


def _warn(text: str) -> None:
    print(text, file=sys.stderr)


def _brief(row: Mapping[str, Any], reasons: Iterable[DagReason]) -> dict[str, Any]:
    """Return a consumer as one line of a table."""
    number = str(row["ready"]) if row["ready_exact"] in (True, None) else f"~{row['ready']}"
    return {
        "consumer": row["consumer"],
        "ready": "?" if row["ready"] is None else number,
        "oldest": "" if row["oldest_seconds"] is None else f"{row['oldest_seconds']:.0f} s",
        "waiting": "?" if row["waiting"] is None else row["waiting"],
        "faults": "?" if row["faults"] is None else row["faults"],
        "at work": _at_work(row),
        "batch": _batch(row),
        "progress": "" if row["updated_at"] is None else f"{row['updated_at']:%Y-%m-%d %H:%M:%S}",
        "held back by": row.get("held_back_by") or "",
        "why behind": "; ".join(
            filter(None, [row["new"] or _short(row), *(reason.told for reason in reasons)])
        ),
    }


def _at_work(row: Mapping[str, Any]) -> str:
    if row["leased_until"] is not None:
        return f"{row['leased_by']}, until {row['leased_until']:%Y-%m-%d %H:%M:%S}"
    return "yes" if row["at_work"] else ""


def _batch(row: Mapping[str, Any]) -> str:
    if row["batch_id"] is None:
        return ""
    part = "" if row["part_of"] is None else f", part of {row['part_of']}"
    return f"{row['batch_id']}, attempt {row['attempt']}{part}"


def _short(row: Mapping[str, Any]) -> str:
    """Return the first line of the reason why a consumer is behind, shortened for a table.

    ``--output json`` and ``health`` show the whole reason.
    """
    first = (row["why"] or "").replace(f" at batch {row['batch_id']}", "").partition("\n")[0]
    return first if len(first) <= SHOWN_REASON else f"{first[:SHOWN_REASON]}..."
