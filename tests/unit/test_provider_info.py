"""What Airflow is told about this provider is true."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module, resources
from importlib.metadata import entry_points
from typing import Any

import jsonschema
import pytest
from airflow.cli.cli_parser import airflow_commands
from airflow.providers_manager import ProvidersManager
from airflow.sdk.providers_manager_runtime import ProvidersManagerTaskRuntime

from airflow_pgchange.provider_info import get_provider_info

INFO = get_provider_info()


def test_it_fits_airflows_schema() -> None:
    schema = json.loads(resources.files("airflow").joinpath("provider_info.schema.json").read_text())
    jsonschema.validate(INFO, schema)


def paths(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for item in value.values():
            yield from paths(item)
    elif isinstance(value, list):
        for item in value:
            yield from paths(item)
    elif isinstance(value, str) and value.startswith("airflow_pgchange."):
        yield value


@pytest.mark.parametrize("path", list(paths(INFO)))
def test_everything_that_it_names_is_there(path: str) -> None:
    try:
        import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        assert callable(getattr(import_module(module), name))


def test_airflow_finds_it_by_its_entry_point() -> None:
    (found,) = entry_points(group="apache_airflow_provider", module="airflow_pgchange.provider_info")
    assert found.load()() == INFO


def test_airflow_lists_the_provider() -> None:
    assert "airflow-provider-pgchange" in ProvidersManager().providers


def test_airflow_lists_the_hook_and_its_form() -> None:
    manager = ProvidersManager()
    assert "pgchange" in ProvidersManagerTaskRuntime().hooks
    assert "extra__pgchange__sslmode" in manager.connection_form_widgets
    assert "pgchange" in manager.field_behaviours


def test_airflow_lists_the_trigger() -> None:
    found = {module for info in ProvidersManager().trigger for module in [info.trigger_class_name]}
    assert "airflow_pgchange.triggers.feed" in found


def test_airflow_lists_the_decorator() -> None:
    assert "pgchange_batch" in dict(ProvidersManagerTaskRuntime().taskflow_decorators)


def test_airflow_lists_the_uri_scheme() -> None:
    assert "pgchange" in ProvidersManagerTaskRuntime().asset_uri_handlers


def test_airflow_lists_the_options() -> None:
    assert "pgchange" in dict(ProvidersManager().provider_configs)["airflow-provider-pgchange"]


def test_the_command_line_has_each_command() -> None:
    (group,) = [command for command in airflow_commands if command.name == "pgchange"]
    assert [command.name for command in group.subcommands] == [
        "install",
        "upgrade",
        "uninstall",
        "status",
        "health",
        "skip",
        "letters",
        "repair",
        "move",
        "drop",
        "topology-relay",
        "trim",
    ]
