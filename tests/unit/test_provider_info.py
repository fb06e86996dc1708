"""The description of this provider, which Airflow reads, matches the package."""

from __future__ import annotations

import json
import pkgutil
import sys
from collections.abc import Iterator
from importlib import import_module, resources, util
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from airflow.cli import cli_parser
from airflow.plugins_manager import AirflowPlugin
from airflow.providers.common.messaging.providers.base_provider import BaseMessageQueueProvider
from airflow.providers_manager import ProvidersManager
from airflow.sdk import BaseHook, BaseNotifier, BaseOperator, BaseOperatorLink, BaseSensorOperator
from airflow.sdk.bases.decorator import DecoratedOperator
from airflow.triggers.base import BaseTrigger

import airflow_pgchange
from airflow_pgchange import decorators
from airflow_pgchange.cli.commands import get_pgchange_cli_commands
from airflow_pgchange.plugins import pgchange as plugin
from airflow_pgchange.plugins.page import files
from airflow_pgchange.plugins.pgchange import PgChangePlugin
from airflow_pgchange.provider_info import GUIDES, get_provider_info
from airflow_pgchange.utils.compat import moved

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


BASES = {
    "operators": BaseOperator,
    "sensors": BaseSensorOperator,
    "triggers": BaseTrigger,
    "hooks": BaseHook,
    "queues": BaseMessageQueueProvider,
    "extra-links": BaseOperatorLink,
    "plugins": AirflowPlugin,
    "notifications": BaseNotifier,
}
"""By kind: the base class by which Airflow recognises it.

A class that fits several kinds has the most specific kind.
"""


def classes() -> Iterator[tuple[str, type]]:
    """Each class of this package that Airflow must find, with its kind."""
    for module in pkgutil.walk_packages(airflow_pgchange.__path__, "airflow_pgchange."):
        for each in vars(import_module(module.name)).values():
            if not isinstance(each, type) or each.__module__ != module.name:
                continue
            kinds = [kind for kind, base in BASES.items() if issubclass(each, base)]
            if kinds and not issubclass(each, DecoratedOperator):
                yield kinds[-1], each


@pytest.mark.parametrize(("kind", "found"), [pytest.param(*each, id=each[1].__name__) for each in classes()])
def test_every_class_that_is_for_airflow_is_named(kind: str, found: type) -> None:
    listed = list(paths(INFO.get(kind, [])))
    name = f"{found.__module__}.{found.__qualname__}"
    assert any(name == one or name.startswith(f"{one}.") for one in listed)


def test_every_decorator_is_named() -> None:
    made = {
        f"{module.name}.{name}"
        for module in pkgutil.iter_modules(decorators.__path__, "airflow_pgchange.decorators.")
        for name in vars(import_module(module.name))
        if name.endswith("_task")
    }
    assert {one["class-name"] for one in INFO["task-decorators"]} == made


def test_every_guide_is_named() -> None:
    """The index leads to the guides, and is not a guide itself."""
    docs = Path(__file__).parents[2] / "docs"
    there = {path.relative_to(docs).with_suffix("").as_posix() for path in docs.rglob("*.md")}
    assert {*GUIDES, "README"} == there


def test_airflow_prints_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = cli_parser.get_parser().parse_args(
        ["providers", "get", "airflow-provider-pgchange", "--full", "-o", "json"]
    )
    arguments.func(arguments)
    (printed,) = json.loads(capsys.readouterr().out)
    assert set(printed) >= set(INFO)


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


def test_airflow_lists_the_trigger() -> None:
    found = {module for info in ProvidersManager().trigger for module in [info.trigger_class_name]}
    assert "airflow_pgchange.triggers.feed" in found


def test_airflow_lists_feeds_among_the_queues_of_messages() -> None:
    manager = ProvidersManager()
    manager.initialize_providers_queues()
    assert "airflow_pgchange.queues.feed.FeedQueueProvider" in manager.queue_class_names


def runtime_manager() -> Any:
    """Return the manager of providers that tasks use. Airflow before 3.2 has only one manager."""
    try:
        return moved("ProvidersManagerTaskRuntime", "airflow.sdk.providers_manager_runtime")()
    except ImportError:
        return ProvidersManager()


def test_airflow_lists_the_decorators() -> None:
    ours = {one["name"] for one in INFO["task-decorators"]}
    assert ours <= set(runtime_manager().taskflow_decorators)


def test_airflow_lists_the_link_to_spark() -> None:
    known = ProvidersManager().extra_links_class_names
    assert "airflow_pgchange.operators.spark_ui.SparkUiLink" in known
    assert "airflow_pgchange.operators.page_link.ConsumerLink" in known


def test_airflow_lists_the_uri_scheme() -> None:
    assert "pgchange" in runtime_manager().asset_uri_handlers


def test_airflow_lists_the_options() -> None:
    assert "pgchange" in dict(ProvidersManager().provider_configs)["airflow-provider-pgchange"]


def test_airflow_finds_the_plugin_by_its_entry_point_and_its_page_in_the_navigation() -> None:
    (found,) = entry_points(group="airflow.plugins", name="pgchange")
    (page,) = found.load()().react_apps
    assert (page["name"], page["destination"]) == ("PG feeds", "nav")
    for part in ("bundle_url", "icon", "icon_dark_mode"):
        assert page[part].rpartition("/")[2] in files()


def test_the_logo_is_in_the_package() -> None:
    (integration,) = INFO["integrations"]
    assert (Path(airflow_pgchange.__file__).parent.parent / integration["logo"].lstrip("/")).is_file()


def test_the_plugin_builds_its_api_only_where_it_is_asked_for() -> None:
    plugin = PgChangePlugin()
    assert "fastapi_apps" not in vars(plugin)
    (api,) = plugin.fastapi_apps
    assert api["url_prefix"] == "/pgchange"


def test_the_program_has_the_commands_where_airflow_takes_none_of_a_provider(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Airflow before 3.2 takes no commands from a provider."""
    commands = {name: one for name, one in cli_parser.ALL_COMMANDS_DICT.items() if name != "pgchange"}
    monkeypatch.setattr(cli_parser, "ALL_COMMANDS_DICT", commands)
    cli_parser.get_parser.cache_clear()
    (program,) = entry_points(group="console_scripts", name="airflow-pgchange")
    monkeypatch.setattr(sys, "argv", ["airflow-pgchange", "status", "--help"])
    with pytest.raises(SystemExit) as ended:
        program.load()()
    cli_parser.get_parser.cache_clear()
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("Usage: airflow-pgchange status")


def test_airflow_itself_has_the_commands() -> None:
    if not hasattr(ProvidersManager, "initialize_providers_cli_command"):
        pytest.skip("Airflow takes commands of providers from 3.2 on")
    assert "pgchange" in {command.name for command in cli_parser.airflow_commands}


def test_the_command_line_has_each_command() -> None:
    (group,) = get_pgchange_cli_commands()
    assert [command.name for command in group.subcommands] == [
        "install",
        "upgrade",
        "uninstall",
        "status",
        "check",
        "health",
        "skip",
        "release",
        "letters",
        "repair",
        "register",
        "move",
        "drop",
        "topology-relay",
        "maintain",
        "trim",
    ]


def test_a_triggerer_imports_triggers_with_its_plugins_and_not_on_its_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    imported: list[str] = []
    monkeypatch.setattr(plugin, "import_module", imported.append)
    monkeypatch.delitem(sys.modules, plugin.TRIGGERER, raising=False)
    PgChangePlugin.on_load()
    assert imported == []
    assert util.find_spec(plugin.TRIGGERER)
    monkeypatch.setitem(sys.modules, plugin.TRIGGERER, sys)
    PgChangePlugin.on_load()
    assert imported == INFO["triggers"][0]["python-modules"]
