"""Run ``airflow-pgchange`` in the process of a test."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from airflow.cli.cli_parser import get_parser

from airflow_pgchange.cli.program import add_commands

Command = Callable[..., Any]


def parsed(*arguments: str) -> argparse.Namespace:
    """Parse arguments of ``airflow-pgchange`` with Airflow's parser."""
    return _parser().parse_args(["pgchange", *arguments])


@cache
def _parser() -> argparse.ArgumentParser:
    """Airflow caches its parser. An earlier test may have created it without our commands."""
    add_commands()
    get_parser.cache_clear()
    return get_parser()


def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command and returns what it prints, read as JSON."""

    def run(*arguments: str) -> Any:
        args = parsed(*arguments, "--output", "json")
        capsys.readouterr()
        args.func(args)
        return json.loads(capsys.readouterr().out)

    return run


def ended(command: Command, *arguments: str) -> int:
    """Run a command, and return its exit code."""
    try:
        command(*arguments)
    except SystemExit as exit:
        return exit.code if isinstance(exit.code, int) else 1
    return 0


def failed(caught: pytest.ExceptionInfo[SystemExit]) -> str:
    """Return the output of a failed command."""
    return str(caught.value.code)
