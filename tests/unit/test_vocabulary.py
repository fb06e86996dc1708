"""One word for each thing in operators, sensors, decorators, assets, the command line and the library."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from airflow.cli.cli_config import ActionCommand, Arg, GroupCommand

from airflow_pgchange.cli.commands import get_pgchange_cli_commands
from tests.suite.parsing import syntax

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "airflow_pgchange"
LENGTH, NUMBER, NAME, SIZE = "a length of time", "a number", "a name", "a size, such as `10 GB`"


@dataclass(frozen=True)
class Word:
    """A word for an argument. ``instead_of`` are other words for the same thing, which must not be used."""

    meaning: str
    kind: str
    instead_of: tuple[str, ...] = ()


WORDS = {
    "timeout": Word(
        "how long something may take, or is waited for", LENGTH, ("within", "patience", "deadline_in")
    ),
    "busy_timeout": Word(
        "how long to wait for another who is at work on the same; None: as long as it takes",
        LENGTH,
        ("wait", "wait_for"),
    ),
    "idle_timeout": Word("end once nothing has come for so long", LENGTH, ("linger", "quiet_for")),
    "poll_interval": Word("between two looks", LENGTH, ("poll_every", "poll_seconds")),
    "every": Word("from one run to the next", LENGTH, ("period", "run_every")),
    "pause": Word("rest between two pieces of work", LENGTH, ("rest_for",)),
    "delay": Word("not before this has passed", LENGTH, ("delay_for", "not_before")),
    "expiry": Word("it goes by itself when this has passed", LENGTH, ("lifetime", "ttl", "expires_in")),
    "lease": Word(
        "how long a batch that is processed elsewhere is not claimed again",
        LENGTH,
        ("lease_for", "leased_for"),
    ),
    "retention": Word("how long what is done with is kept", LENGTH, ("keep", "replay_age", "keep_for")),
    "retention_bytes": Word("how much of what is done with is kept", SIZE, ("keep_bytes", "max_bytes")),
    "retention_count": Word("how many of what is done with are kept", NUMBER, ("keep_count",)),
    "max_age": Word("act once the oldest has waited for so long", LENGTH, ("max_wait", "flush_after")),
    "max_lag": Word(
        "from this age of the oldest ready change on, health reports the consumer", LENGTH, ("lag_limit",)
    ),
    "max_backlog": Word(
        "from so many changes on, health reports the consumer", NUMBER, ("backlog_limit", "max_ready")
    ),
    "min_changes": Word("act once there are so many", NUMBER, ("min_ready", "at_least")),
    "older_than": Word("only what is older", LENGTH, ("min_age", "age")),
    "until": Word("`empty`: work until nothing is ready; or how long", LENGTH, ("run_for", "duration")),
    "limit": Word("at most so many in one go", NUMBER, ("most", "max_events", "flush_events", "max_changes")),
    "chunk_size": Word("rows of one transaction of a backfill", NUMBER, ("chunk", "rows_per_chunk")),
    "max_batches": Word(
        "at most so many batches in a run; None: as many as there are", NUMBER, ("batches_at_most",)
    ),
    "max_attempts": Word(
        "the last time that it is tried", NUMBER, ("max_tries", "attempts_at_most", "max_retries")
    ),
    "key": Word(
        "the column, or columns, by which a row is found; where something is erased, the id or the value that it has",
        NAME,
        ("id_column", "key_column", "id_col"),
    ),
    "tube": Word("a tube", NAME, ("tube_name",)),
    "queue_name": Word("a message queue: `queue` is Airflow's own, of its executor", NAME, ("queue",)),
    "consumer": Word(
        "a consumer: of a feed by its own name, else as `airflow-pgchange status` names it",
        NAME,
        ("consumer_name", "consumer_id"),
    ),
    "branch": Word("the id of a branch of the commit queue", NUMBER, ("branch_id",)),
    "group": Word("a group of the event log", NAME, ("group_name", "group_id", "gid")),
    "postgres_conn_id": Word("the database of the results", NAME, ("conn_id", "results_conn_id")),
    "source_conn_id": Word(
        "the database of the changes; default: the same", NAME, ("changes_conn_id", "feed_conn_id")
    ),
}

AS_STORED = {
    ("results/attached_tables.py", "Attached"),
}
"""Classes whose fields have the names that SQL stores."""

INSIDE = (
    "cli/",
    "events/group.py",
    "events/handler_",
    "events/http.py: EventResponse(",
    "events/stream.py",
    "events/stream_log.py",
    "events/webhooks.py: Webhook(",
    "feeds/argument_checks.py",
    "feeds/watched_socket.py",
    "feeds/retries.py",
    "feeds/liveness.py",
    "lake/iceberg/",
    "plugins/",
    "spark/adbc.py",
    "spark/parent_process.py",
    "spark/read_options.py",
    "spark/routing.py",
    "spark/sink.py",
    "triggers/backlog_alarm.py",
    "triggers/shared_connection.py",
    "triggers/connection_lookup.py",
    "triggers/poller.py",
    "triggers/subscription.py",
    "triggers/watch_queries.py",
    "utils/retry_policy.py",
)
"""Modules whose arguments come only from our own code, which has checked them, or from Airflow, which chooses their
names."""


AIRFLOWS = "poke_interval"
"""The argument of Airflow's own sensors for the time between two checks of a worker.

Its name and types are Airflow's.
"""


@dataclass(frozen=True)
class Argument:
    file: str
    of: str
    name: str
    type: str
    default: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {self.of}({self.name})"


def arguments() -> Iterator[Argument]:
    """The arguments of every public function, method and dataclass."""
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        yield from _of(syntax(path.read_text()).body, file, "")


def _of(body: list[ast.stmt], file: str, owner: str) -> Iterator[Argument]:
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _of(node.body, file, node.name)
            if any("dataclass" in ast.unparse(each) for each in node.decorator_list):
                for one in node.body:
                    if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                        default = ast.unparse(one.value) if one.value else ""
                        yield Argument(file, node.name, one.target.id, ast.unparse(one.annotation), default)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name != "__init__" and node.name.startswith("_"):
                continue
            name = owner if node.name == "__init__" else f"{owner}.{node.name}".strip(".")
            args = node.args
            positional = [*args.posonlyargs, *args.args]
            defaults = [None] * (len(positional) - len(args.defaults)) + [*args.defaults, *args.kw_defaults]
            for arg, default in zip((*positional, *args.kwonlyargs), defaults, strict=True):
                kind = ast.unparse(arg.annotation) if arg.annotation else ""
                yield Argument(file, name, arg.arg, kind, ast.unparse(default) if default else "")


def word_of(name: str) -> str | None:
    """Return the word of the vocabulary with which a name ends: ``saga_retention`` has the word retention."""
    parts = name.split("_")
    return next((word for at in range(len(parts)) if (word := "_".join(parts[at:])) in WORDS), None)


def is_length(name: str) -> bool:
    word = word_of(name)
    return word is not None and WORDS[word].kind == LENGTH


def options() -> Iterator[str]:
    def of(commands: Iterator[ActionCommand | GroupCommand]) -> Iterator[Arg]:
        for command in commands:
            if isinstance(command, GroupCommand):
                yield from of(iter(command.subcommands))
            else:
                yield from command.args

    for arg in of(iter(get_pgchange_cli_commands())):
        yield from (flag.lstrip("-").replace("-", "_") for flag in arg.flags if flag.startswith("--"))


PUBLIC = [one for one in arguments() if not str(one).startswith(INSIDE)]
FOREIGN = {other: word for word, each in WORDS.items() for other in each.instead_of}


def test_no_argument_has_another_word_for_what_has_one() -> None:
    strange = {
        f"{one}: say {FOREIGN[one.name]}"
        for one in PUBLIC
        if one.name in FOREIGN and (one.file, one.of) not in AS_STORED
    }
    assert not strange


def test_no_option_of_the_command_line_has_another_word_either() -> None:
    given = set(options())
    assert {"postgres_conn_id", "source_conn_id", "retention", "older_than"} <= given
    assert not given & set(FOREIGN)


def test_every_word_is_one_that_is_used() -> None:
    assert set(WORDS) <= {word_of(one.name) for one in PUBLIC}


def test_every_length_of_time_may_be_seconds_a_span_or_a_timedelta() -> None:
    lengths = [
        one
        for one in PUBLIC
        if is_length(one.name)
        or "timedelta" in one.type
        or (one.name.endswith("_interval") and one.name != AIRFLOWS)
    ]
    assert len(lengths) > 50
    narrow = {f"{one}: {one.type}" for one in lengths if not ("Seconds" in one.type or "Until" in one.type)}
    assert not narrow


def test_no_name_of_an_argument_says_that_it_is_in_seconds() -> None:
    assert not {str(one) for one in PUBLIC if one.name.endswith("_seconds")}


def test_a_limit_is_one_of_three_by_default() -> None:
    limits = {"BATCH_LIMIT", "SPARK_LIMIT", "EVENTS_LIMIT"}
    defaults = {one.default for one in PUBLIC if one.name == "limit" and one.default}
    assert defaults == limits


@pytest.mark.parametrize("word", WORDS)
def test_the_house_has_the_table_of_words(word: str) -> None:
    row = f"| `{word}` | {WORDS[word].meaning} | {WORDS[word].kind} |"
    assert row in (ROOT / "CONTRIBUTING.md").read_text().splitlines()


def test_the_table_of_the_house_has_no_other_words() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text[text.index("| word |") :].split("\n\n")[0].splitlines()[2:]
    assert [row.split("`")[1] for row in table] == list(WORDS)


def test_texts_name_the_program_that_each_airflow_has() -> None:
    """Airflow 3.1 has no commands of providers: there ``airflow-pgchange`` is the only command."""
    places = {"airflow_pgchange": "**/*.*", "sql": "*/*.sql", "dags": "*.py", "docs": "**/*.md"}
    files = [path for folder, files in places.items() for path in (ROOT / folder).glob(files)]
    texts = [path for path in files if path.suffix in (".py", ".js", ".yml", ".sql", ".md")]
    other = {path.name for path in texts if "airflow pgchange" in path.read_text()}
    assert other == {"program.py", "command-line.md"}, "they say that later versions have it"
