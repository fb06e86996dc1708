"""The tables that batches write, as assets: other DAGs are scheduled on them."""

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
"""What ends a part of a path, and what a URI loses."""


def target_tables(name: str) -> AssetAlias:
    """An outlet that stands for all tables that a task's batches write: ``outlets=[target_tables("balances")]``.

    The operator of the batches finds out which these are. Each is an asset by its URI alone,
    ``postgres://<host>:<port>/<database>/<schema>/<table>``, and has an event once the task that wrote it has succeeded.
    A table of a lake is an asset by its location, such as ``s3://bucket/sales/payment``. The extra of its event has the
    table's name as ``table`` and its snapshot as ``version``.
    A DAG can be scheduled on one of them, or, by the outlet's ``name``, on all that it stands for.
    """
    return AssetAlias(name, group=GROUP)


def aliases(outlets: Sequence[Any]) -> list[AssetAlias]:
    """Those of a task's outlets that ``target_tables`` made."""
    return [each for each in outlets if isinstance(each, AssetAlias) and each.group == GROUP]


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
            log.warning("%s has no event, so DAGs that wait for it do not run: no asset: %s", uri, error)
            continue
        for outlet in outlets:
            context["outlet_events"][outlet].add(asset, extra)


def table_asset(conninfo: str, database: str, schema: str, table: str) -> Asset:
    """A table in a database of the server of a connection string, as Airflow's own asset of a PostgreSQL table.

    Names stand in its URI as they are, as in what ``create_asset`` makes, but for what would break it: that is escaped.
    """
    return _asset(_table_uri(conninfo, database, schema, table))


def _table_uri(conninfo: str, *names: str) -> str:
    return "/".join([server_uri(conninfo), *(_escaped(BREAKS_A_URI, name) for name in names)])


def _asset(uri: str) -> Asset:
    """Return an asset by its URI. Raises ValueError if Airflow refuses the URI."""
    try:
        return Asset(uri)
    except ValueError:
        # Airflow on MySQL takes ASCII alone.
        return Asset(_escaped(r"[^\x00-\x7f]", uri))


def _escaped(pattern: str, text: str) -> str:
    return re.sub(pattern, lambda found: quote(found[0], safe=""), text)
