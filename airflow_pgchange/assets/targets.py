"""The tables that batches write, as assets, so that other DAGs can be scheduled on them."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from airflow.sdk import Asset, AssetAlias

from airflow_pgchange.utils.server_uri import server_uri

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_pgchange.utils.outcome import Outcome

GROUP = "pgchange"
log = logging.getLogger(__name__)

BREAKS_A_URI = r"[/?#\t\n\r]"
"""Characters that would end a part of a URI's path, or that a URI drops."""


def target_tables(name: str) -> AssetAlias:
    """Return an outlet that stands for all tables that a task's batches write: ``outlets=[target_tables("balances")]``.

    The operator finds out which tables its batches write. Each table is an asset with the URI
    ``postgres://<host>:<port>/<database>/<schema>/<table>``. It gets an event when the task that wrote it succeeds. A
    table of a lake is an asset by its location, such as ``s3://bucket/sales/payment``. The extra of its event has the
    table's name as ``table`` and its snapshot as ``version``.

    A DAG can be scheduled on the asset of a table, or on the outlet's ``name``, which stands for all tables.
    """
    return AssetAlias(name, group=GROUP)


def aliases(outlets: Sequence[Any]) -> list[AssetAlias]:
    """Return the outlets of a task that ``target_tables`` has made."""
    return [outlet for outlet in outlets if isinstance(outlet, AssetAlias) and outlet.group == GROUP]


def add_events(context: Context, outlets: Sequence[AssetAlias], conninfo: str, outcome: Outcome) -> None:
    """Add an event for each table that committed batches wrote, in the database of a connection string or in a lake.

    A table that Airflow refuses as an asset only gets a warning. The task must not fail, because its batches are
    committed.
    """
    summary = outcome.summary()
    written = {
        **{_table_uri(conninfo, *target): summary for target in sorted(outcome.targets)},
        **{
            location: {**summary, "table": output.target, "version": output.version}
            for location, output in sorted(outcome.lake.items())
        },
    }
    for uri, extra in written.items() if outlets else ():
        try:
            asset = _asset(uri)
        except ValueError as error:
            log.warning(
                "%s has no event, so DAGs that wait for it do not run: not a valid asset: %s", uri, error
            )
            continue
        for outlet in outlets:
            context["outlet_events"][outlet].add(asset, extra)


def table_asset(conninfo: str, database: str, schema: str, table: str) -> Asset:
    """Return the asset of a table, with the URI that Airflow's PostgreSQL provider uses. ``conninfo`` gives the server.

    Names are not escaped, as in the provider's ``create_asset``, except characters that would break the URI.
    """
    return _asset(_table_uri(conninfo, database, schema, table))


def _table_uri(conninfo: str, *names: str) -> str:
    return "/".join([server_uri(conninfo), *(_escaped(BREAKS_A_URI, name) for name in names)])


def _asset(uri: str) -> Asset:
    """Return an asset by its URI. Raises ValueError if Airflow refuses the URI."""
    try:
        return Asset(uri)
    except ValueError:
        # Airflow accepts only ASCII if its metadata database is MySQL.
        return Asset(_escaped(r"[^\x00-\x7f]", uri))


def _escaped(pattern: str, text: str) -> str:
    return re.sub(pattern, lambda match: quote(match[0], safe=""), text)
