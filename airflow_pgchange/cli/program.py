"""The program ``airflow-pgchange``: the commands of ``airflow pgchange``, which Airflow has from version 3.2 on."""

from __future__ import annotations

import sys

from airflow.__main__ import main as airflow
from airflow.cli import cli_parser

from airflow_pgchange.cli.definition import get_pgchange_cli_commands


def main() -> None:
    """Run the command that the arguments of this process name."""
    for group in get_pgchange_cli_commands():
        cli_parser.ALL_COMMANDS_DICT.setdefault(group.name, group)
    sys.argv[:1] = ["airflow", "pgchange"]
    airflow()  # type: ignore[no-untyped-call]
