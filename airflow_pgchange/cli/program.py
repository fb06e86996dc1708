"""The program ``airflow-pgchange``: the same commands as ``airflow pgchange``, which needs Airflow 3.2 or later."""

from __future__ import annotations

import argparse
import sys

from airflow.__main__ import main as airflow
from airflow.cli import cli_parser

from airflow_pgchange.cli.commands import get_pgchange_cli_commands


def main() -> None:
    """Run the command that the arguments of this process name."""
    add_commands()
    sys.argv[:1] = ["airflow", "pgchange"]
    _rename(cli_parser.get_parser(), "airflow pgchange")
    airflow()  # type: ignore[no-untyped-call]


def add_commands() -> None:
    """Add the commands to Airflow's parser, because Airflow 3.1 does not load commands of providers."""
    for group in get_pgchange_cli_commands():
        cli_parser.ALL_COMMANDS_DICT.setdefault(group.name, group)


def _rename(parser: argparse.ArgumentParser, old: str) -> None:
    """Replace ``old`` by ``airflow-pgchange`` in help and errors, because Airflow 3.1 has no such command."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                if each.prog.startswith(old):
                    each.prog = each.prog.replace(old, "airflow-pgchange", 1)
                    _rename(each, old)
