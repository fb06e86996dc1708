"""Commands for the maintenance of a database: ``maintain`` and ``trim``."""

from __future__ import annotations

import logging
import signal
import sys
from argparse import Namespace
from typing import Any

import psycopg
from airflow.utils.providers_configuration_loader import providers_configuration_loaded

from airflow_pgchange.admin.maintenance import trim as trim_history
from airflow_pgchange.admin.maintenance_loop import maintain_every, maintain_once
from airflow_pgchange.admin.manual_operations import limits_of
from airflow_pgchange.cli.common import Rows, command, confirm, conninfo, database
from airflow_pgchange.errors import InvalidArgument, PgChangeError


@providers_configuration_loaded
def maintain(args: Namespace) -> None:
    """Maintain a database once, or every so often until SIGTERM or SIGINT. Log a line to standard error for each run."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.DEBUG if args.verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(message)s",
        force=True,
    )
    options = _limits(args) | {
        name: value
        for name in ("width", "ahead", "saga_retention", "letter_retention")
        if (value := getattr(args, name)) is not None
    }
    # psycopg cancels the running statement on KeyboardInterrupt, so its transaction is rolled back.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if args.every is None:
            maintain_once(conninfo(args), **options)
        else:
            maintain_every(conninfo(args), args.every, **options)
    except KeyboardInterrupt:
        logging.getLogger(__name__).info("stopped")
    except (PgChangeError, psycopg.Error) as error:
        raise SystemExit(f"{type(error).__name__}: {str(error).strip()}") from error


@command("No history is both beyond the limits and processed by every consumer: nothing was deleted.")
def trim(args: Namespace) -> Rows:
    limits = _limits(args)
    if not limits:
        raise InvalidArgument(
            "no limit of the history is given: add --retention, --retention-bytes or --retention-count"
        )
    limits_of(args.retention, args.retention_bytes, args.retention_count)
    with database(args) as connection:
        shown = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in limits.items())
        confirm(args, f"History beyond {shown} will be deleted; later consumers will not get it.")
        report = trim_history(connection, **limits)
    if report.failed:
        raise PgChangeError("; ".join(report.failed))
    return [{"trimmed": line} for line in report.done]


def _limits(args: Namespace) -> dict[str, Any]:
    names = ("retention", "retention_bytes", "retention_count")
    return {name: value for name in names if (value := getattr(args, name)) is not None}
