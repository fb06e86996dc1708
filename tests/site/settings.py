"""The commands of ``airflow-pgchange`` and the options of Airflow's configuration, as the package defines them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from airflow_pgchange.provider_info import get_provider_info


def commands() -> str:
    """Return a section for each command, with its arguments."""
    from airflow_pgchange.cli.commands import COMMON, get_pgchange_cli_commands

    (group,) = get_pgchange_cli_commands()
    lines = (_command(command, "airflow-pgchange", COMMON) for command in group.subcommands)
    return "\n".join(line for command in lines for line in command)


def _command(command: Any, before: str, common: Sequence[Any]) -> Iterator[str]:
    name = f"{before} {command.name}"
    for inner in getattr(command, "subcommands", ()):
        yield from _command(inner, name, common)
    if hasattr(command, "args"):
        parser = argparse.ArgumentParser(prog=name, add_help=False)
        for arg in command.args:
            if arg not in common:
                arg.add_to_parser(parser)
        usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
        yield f"### {name}\n\n{command.help}.\n\n```sh\n{usage}\n```\n"
        yield from (f"- `{_flags(action)}`: {_help(action)}" for action in parser._actions)
        yield ""


def _flags(action: argparse.Action) -> str:
    if not action.option_strings:
        return str(action.metavar or action.dest)
    return ", ".join(action.option_strings) + ("" if action.nargs == 0 else f" {action.dest.upper()}")


def _help(action: argparse.Action) -> str:
    text = (action.help or "") % {"default": action.default, "prog": ""}
    return " ".join(text.split())


def configuration() -> str:
    """Return a section for each option of the provider in ``airflow.cfg``."""
    lines = []
    for section, told in get_provider_info()["config"].items():
        for name, option in told["options"].items():
            variable = f"AIRFLOW__{section.upper()}__{name.upper()}"
            example = f"\n- Example: `{option['example']}`" if option["example"] else ""
            lines.append(
                f"### {name}\n\n{option['description']}\n\n- Section `[{section}]`, variable `{variable}`\n"
                f"- Type: {option['type']}\n- Default: `{option['default'] or 'empty'}`{example}\n"
            )
    return "\n".join(lines)
