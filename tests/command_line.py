"""``airflow-pgchange`` run in the process of a test."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from airflow.cli.cli_parser import get_parser

Command = Callable[..., Any]


def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command and returns what it prints, read as JSON."""

    def run(*arguments: str) -> Any:
        args = get_parser().parse_args(["pgchange", *arguments, "--output", "json"])
        capsys.readouterr()
        args.func(args)
        return json.loads(capsys.readouterr().out)

    return run


def ended(command: Command, *arguments: str) -> int:
    """The code with which a command ends."""
    try:
        command(*arguments)
    except SystemExit as exit:
        return exit.code if isinstance(exit.code, int) else 1
    return 0


def failed(caught: pytest.ExceptionInfo[SystemExit]) -> str:
    """What a command that failed says."""
    return str(caught.value.code)
