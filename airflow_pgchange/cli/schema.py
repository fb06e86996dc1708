"""Commands for the schemas of a database: ``install``, ``upgrade`` and ``uninstall``."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any

from airflow_pgchange.admin import schema, upgrades
from airflow_pgchange.admin.versions import Installed
from airflow_pgchange.cli.common import Rows, command, confirm, database


@command("This database has no schemas of this package: install them with `airflow-pgchange install`.")
def install(args: Namespace) -> Rows:
    with database(args) as connection:
        return [
            _loaded(state) for state in schema.install(connection, args.systems, without=args.without or ())
        ]


@command("This database has no schemas of this package: install them with `airflow-pgchange install`.")
def upgrade(args: Namespace) -> Rows:
    with database(args) as connection:
        return [_loaded(state) for state in upgrades.upgrade(connection, _say)]


@command("This database has no schemas of this package: nothing was removed.")
def uninstall(args: Namespace) -> Rows:
    confirm(args, "Queues, watermarks and all waiting changes will be deleted; your own tables stay.")
    with database(args) as connection:
        return [{"removed": name} for name in schema.uninstall(connection, args.systems)]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _loaded(state: Installed) -> dict[str, Any]:
    files = {True: "this package", False: "other files of this version", None: "psql"}
    return {
        "system": state.system,
        "version": state.version,
        "needed": state.needed,
        "loaded from": f"left out: {state.left_out}" if state.left_out else files[state.intact],
    }
