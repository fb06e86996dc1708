"""The choice of the tests that a change concerns, in a made-up repository for each rule and in this repository."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.suite.choosing.changes import Change, changes
from tests.suite.choosing.concern import concerned
from tests.suite.choosing.feeds import FEEDS, of_feed
from tests.suite.choosing.graph import Graph, read_graph
from tests.suite.choosing.ranking import Choice, rank, within
from tests.suite.parsing import syntax

ROOT = Path(__file__).parents[2]
CLAIM = """create function tube.rank_of(id text) returns bigint language sql as $$ select 1; $$;
create function tube.claim(id text) returns bigint language sql as $$
    select tube.rank_of(id);
$$;
comment on function tube.claim(text) is 'Claim; once.';
"""
Repository = Callable[..., Path]


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    def make(files: dict[str, str]) -> Path:
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return tmp_path

    return make


@pytest.fixture(scope="module")
def graph() -> Graph:
    return read_graph(ROOT)


def choose(repo: Path, changed: Sequence[Change]) -> list[Choice]:
    return rank(read_graph(repo), changed)


def chosen(repo: Path, path: str, *lines: int) -> list[str]:
    choices = choose(repo, [Change(path, frozenset(lines) or None)])
    return list(dict.fromkeys(choice.path.removeprefix("tests/") for choice in choices))


def test_only_tests_that_import_a_changed_module_are_chosen(repository):
    repo = repository({
        "pack/a.py": "def f(): ...\ndef g(): ...\n",
        "tests/test_a.py": "from pack.a import f\ndef test_it():\n    f()\n",
        "tests/test_b.py": "def test_it(): ...\n",
    })  # fmt: skip
    assert chosen(repo, "pack/a.py") == ["test_a.py"]


def test_tests_of_the_changed_function_come_before_tests_of_its_neighbour(repository):
    repo = repository({
        "pack/a.py": "def f(): ...\n\n\ndef g(): ...\n",
        "tests/test_f.py": "from pack import a\ndef test_it():\n    a.f()\n",
        "tests/test_g.py": "from pack.a import g\ndef test_it():\n    g()\n",
    })  # fmt: skip
    assert chosen(repo, "pack/a.py", 1) == ["test_f.py", "test_g.py"]
    assert chosen(repo, "pack/a.py", 4) == ["test_g.py", "test_f.py"]


def test_a_package_hands_on_what_its_modules_define(repository):
    repo = repository({
        "pack/__init__.py": "from pack.a import Feed\n",
        "pack/a.py": "class Feed:\n    def claim(self): ...\n",
        "tests/test_it.py": "from pack import Feed\ndef test_it():\n    Feed().claim()\n",
    })  # fmt: skip
    assert chosen(repo, "pack/a.py", 2) == ["test_it.py"]


def test_a_package_that_imports_a_name_when_it_is_used_hands_it_on_and_uses_nothing_itself(repository):
    names = "from pack.a import f\n    from pack.b import g"
    repo = repository({
        "pack/__init__.py": f"if TYPE_CHECKING:\n    {names}\nelse:\n    __getattr__ = lazily()\n",
        "pack/a.py": "def f(): ...\n",
        "pack/b.py": "def g(): ...\n",
        "tests/test_f.py": "from pack import f\ndef test_it():\n    f()\n",
        "tests/test_g.py": "from pack import g\ndef test_it():\n    g()\n",
    })  # fmt: skip
    assert chosen(repo, "pack/a.py") == ["test_f.py"]
    assert chosen(repo, "pack/b.py") == ["test_g.py"]
    assert chosen(repo, "pack/__init__.py", 5) == ["test_f.py", "test_g.py"]


def test_a_test_reaches_what_its_helpers_and_fixtures_use(repository):
    repo = repository({
        "pack/a.py": "def f(): ...\n",
        "tests/helper.py": "from pack.a import f\ndef help():\n    f()\n",
        "tests/conftest.py": "from tests.helper import help\ndef helped():\n    help()\n",
        "tests/unit/test_it.py": "def test_it(helped): ...\n",
    })  # fmt: skip
    assert chosen(repo, "pack/a.py") == ["unit/test_it.py"]
    assert chosen(repo, "tests/helper.py") == ["unit/test_it.py"]


def test_a_query_calls_the_file_that_makes_a_function(repository):
    repo = repository({
        "sql/tube/13_claim.sql": CLAIM,
        "tests/test_it.py": 'def test_it(c):\n    c.execute(f"select tube.claim({c})")\n',
        "tests/test_no.py": "def test_it(tube):\n    tube.claim()\n",
    })  # fmt: skip
    assert chosen(repo, "sql/tube/13_claim.sql", 2) == ["test_it.py"]


def test_sql_that_sql_uses_is_reached_too(repository):
    repo = repository({
        "sql/tube/13_claim.sql": CLAIM,
        "sql/tube/14_ack.sql": "create procedure tube.ack() language sql as $$ select tube.claim('') $$;\n",
        "tests/test_it.py": 'def test_it(c):\n    c.execute("call tube.ack()")\n',
    })  # fmt: skip
    assert chosen(repo, "sql/tube/13_claim.sql", 1) == ["test_it.py"]


def test_a_trigger_belongs_to_its_table_and_a_grant_to_its_function(repository):
    repo = repository({
        "sql/tube/01_t.sql": "create table tube.pod (id int);\ncreate function tube.f() returns trigger as '';\n"
        "create trigger t after insert on tube.pod execute function tube.f();\n",
        "sql/tube/02_roles.sql": "grant select on tube.pod to public;\n",
        "tests/test_it.py": 'def test_it(c):\n    c.execute("insert into tube.pod values (1)")\n',
    })  # fmt: skip
    assert chosen(repo, "sql/tube/01_t.sql", 2) == ["test_it.py"]
    assert chosen(repo, "sql/tube/02_roles.sql") == ["test_it.py"]


def test_a_function_whose_name_is_put_together_is_of_who_makes_it(repository):
    repo = repository({
        "sql/mbus/01_make.sql": "create function mbus.make(q text) returns void language plpgsql as $$ begin\n"
        "    execute format('create function mbus.%I() ...', 'consume_' || q); end $$;\n",
        "tests/test_it.py": 'def test_it(c, q):\n    c.execute(f"select mbus.consume_{q}()")\n',
    })  # fmt: skip
    assert chosen(repo, "sql/mbus/01_make.sql") == ["test_it.py"]


def test_of_two_that_call_the_same_the_one_with_the_name_comes_first(repository):
    call = 'def test_it(c):\n    c.execute("select tube.claim(1)")\n'
    repo = repository(
        {"sql/tube/13_claim.sql": CLAIM, "tests/test_a.py": call, "tests/test_tube_claims.py": call}
    )
    assert chosen(repo, "sql/tube/13_claim.sql") == ["test_tube_claims.py", "test_a.py"]


def test_a_page_and_an_example_are_reached_by_their_names(repository):
    repo = repository({
        "docs/a.md": "", "docs/b.md": "", "dags/daily.py": "import datetime\n",
        "tests/test_a.py": 'def test_it(read):\n    read("a.md")\n',
        "tests/test_every.py": 'def test_it(read):\n    read("docs")\n',
        "tests/test_daily.py": 'def test_it(dag):\n    dag("daily")\n',
    })  # fmt: skip
    assert chosen(repo, "docs/a.md") == ["test_a.py"]
    assert chosen(repo, "docs/b.md") == ["test_every.py"]
    assert chosen(repo, "dags/daily.py") == ["test_daily.py"]


def test_a_changed_test_file_chooses_itself_first(repository):
    repo = repository({"tests/test_a.py": "def test_it(): ...\n"})
    [choice] = choose(repo, [Change("tests/test_a.py", frozenset({1}))])
    assert (choice.test, choice.why) == ("tests/test_a.py::test_it", "changed itself")


def test_a_function_that_all_feeds_call_comes_with_a_test_of_each_before_any_feed_has_two(repository):
    feed = "create function {0}.claim() returns int language sql as $$ select core.take(); $$;\n"
    call = '    c.execute("select {0}.claim()")\n'
    test = f"def test_one(c):\n{call}def test_two(c):\n{call}"
    feeds = ["tube", "pgmb", "mbus"]
    repo = repository({
        "sql/core/01_take.sql": "create function core.take() returns int language sql as $$ select 1; $$;\n",
        **{f"sql/{name}/01_claim.sql": feed.format(name) for name in feeds},
        **{f"tests/test_{name}.py": test.format(name) for name in feeds},
    })  # fmt: skip
    choices = choose(repo, [Change("sql/core/01_take.sql", frozenset({1}))])
    assert sorted(choice.path for choice in choices[:3]) == sorted(f"tests/test_{name}.py" for name in feeds)
    assert len(choices) == 6


def test_a_function_that_the_core_gives_to_a_schema_leads_to_the_functions_that_it_calls(repository):
    repo = repository({
        "sql/core/01_pending.sql": "create function pgchange.pending() returns int language sql as $$ select 1; $$;\n",
        "sql/core/02_offered.sql": "do $do$ begin perform pgchange.add_offer('position', 'claim', '%s', $$\n"
        "begin perform pgchange.pending(); end $$, 'Claim.'); end $do$;\n",
        "sql/tube/01_offer.sql": "select pgchange.offer('tube', 'tube', 'a', 'a:%s', '{position}');\n",
        "tests/test_it.py": 'def test_it(c):\n    c.execute("select tube.claim()")\n',
    })  # fmt: skip
    assert chosen(repo, "sql/core/01_pending.sql", 1) == ["test_it.py"]


def test_of_two_tests_behind_the_same_function_the_one_with_the_words_of_the_changed_line_comes_first(
    repository,
):
    test = 'def test_{}(c):\n    c.execute("select tube.claim()")\n'
    repo = repository({
        "sql/tube/01.sql": "create function tube.claim() returns int language sql as $$\nselect letter from t;\n$$;\n",
        "tests/test_a.py": "".join(test.format(name) for name in ("a_pod", "a_letter_is_sent", "a_worker")),
    })  # fmt: skip
    choices = choose(repo, [Change("sql/tube/01.sql", frozenset({2}))])
    assert choices[0].test == "tests/test_a.py::test_a_letter_is_sent"


def test_code_that_a_test_of_the_choosing_makes_up_reaches_nothing(repository):
    repo = repository({
        "sql/tube/13_claim.sql": CLAIM,
        "tests/unit/test_choosing.py": "from tests.suite.choosing.ranking import rank\n"
        'def test_it(c):\n    c.execute("select tube.claim(1)")\n',
    })  # fmt: skip
    assert chosen(repo, "sql/tube/13_claim.sql", 2) == []


def test_changes_are_the_lines_that_differ_and_the_files_that_are_new(repository):
    repo = repository({"a.py": "1\n2\n3\n4\n", "gone.py": "1\n"})

    def git(*arguments: str) -> None:
        author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *author, *arguments], cwd=repo, check=True, capture_output=True)

    git("init", "-b", "main")
    git("add", ".")
    git("commit", "-m", "a")
    assert changes(repo) == []
    git("switch", "-c", "branch")
    repository({"a.py": "1\ntwo\n3\n4\n"})
    git("commit", "-am", "b")
    repository({"a.py": "1\ntwo\n3\n", "b/new.py": ""})
    (repo / "gone.py").unlink()
    assert changes(repo) == [
        Change("a.py", frozenset({2, 3, 4})),
        Change("b/new.py"),
        Change("gone.py", frozenset({0, 1})),
    ]
    assert [change.path for change in changes(repo, "HEAD")] == ["a.py", "b/new.py", "gone.py"]


def test_time_is_filled_in_order_and_the_first_is_always_taken():
    choices = [Choice(name, "") for name in "abc"]
    costs = {"a": 1.0, "b": 9.0, "c": 9.0}.__getitem__
    assert within(choices, 10, costs) == (choices[:2], choices[2:])
    assert within(choices, 0.5, costs) == (choices[:1], choices[1:])


def test_a_cheap_test_comes_before_a_dear_one_that_is_a_little_better():
    choices = [Choice(name, "") for name in "abc"]
    taken, left = within(choices, 10, {"a": 9.0, "b": 0.5, "c": 0.5}.__getitem__)
    assert ([choice.test for choice in taken], left) == (["b", "c", "a"], [])


def sources(graph: Graph) -> Sequence[str]:
    """Return the files whose changes a test must detect. Files with only a docstring are left out."""
    paths = sorted(
        {p.path for p in graph.parts if re.match(r"(airflow_pgchange|sql|dags)/.*(py|sql)$", p.path)}
    )
    return [
        path for path in paths if path.endswith(".sql") or len(syntax((ROOT / path).read_text()).body) > 1
    ]


def test_every_source_file_of_this_repository_has_a_test_that_reaches_it(graph):
    """Takes seconds: it reads every file of the repository."""
    reached = {index for index, part in enumerate(graph.parts) if part.test}
    waiting = list(reached)
    while waiting:
        new = graph.used[waiting.pop()] - reached
        reached |= new
        waiting += new
    missed = set(sources(graph)) - {graph.parts[index].path for index in reached}
    assert [path for path in sorted(missed) if not rank(graph, [Change(path)])] == []


def file(stem: str) -> Change:
    """Return the name of a source file without its suffix.

    With the suffix, this file would name the source file, and so would be chosen for a change of it.
    """
    [path] = ROOT.glob(f"{stem}.*")
    return Change(path.relative_to(ROOT).as_posix())


@pytest.mark.parametrize(
    ("source", "most", "test"),
    [
        ("sql/core/20_offered", 4, "integration/commits/test_claim.py"),
        ("sql/pgmb/21_claim", 4, "integration/events/test_event_"),
        ("sql/mbus/14_hand_out", 4, "integration/messages/test_queue_claims.py"),
        ("sql/tube/30_claim", 4, "integration/tubes/test_tube_claim.py"),
        ("sql/topology/06_masters", 1, "integration/topology/test_topology_masters.py"),
        ("airflow_pgchange/results/merge", 4, "integration/results/test_merge.py"),
        ("airflow_pgchange/cli/consumers", 1, "integration/airflow/test_airflow_cli.py"),
        ("docs/how-to/queues", 1, "integration/messages/test_docs_queues.py"),
    ],
)
def test_tests_about_a_source_file_come_first(graph, source, most, test):
    paths = list(dict.fromkeys(choice.path for choice in rank(graph, [file(source)])))
    assert any(path.startswith(f"tests/{test}") for path in paths[:most])


def test_every_feed_has_its_tests(graph):
    """The tests whose names name no feed belong to the commit feed."""
    found = {feed: {choice.path.rpartition("/")[2] for choice in of_feed(graph, feed)} for feed in FEEDS}
    assert {"test_track.py", "test_claim.py", "test_commits.py"} <= found["commit"]
    assert {"test_queue_claims.py", "test_docs_queues.py"} <= found["queue"]
    assert {"test_sagas.py", "test_saga_traffic.py"} <= found["saga"]
    assert not found["tube"] & found["event"]


@pytest.mark.parametrize(
    ("source", "kinds"),
    [
        ("sql/tube/30_claim", ["spark", "airflow"]),
        ("sql/topology/06_masters", ["spark", "airflow"]),
        ("airflow_pgchange/spark/job", ["airflow"]),
        ("sql/pubsub/02_snapshots", ["spark", "airflow"]),
        ("airflow_pgchange/tubes/copies", ["airflow"]),
        ("airflow_pgchange/operators/messages", ["spark"]),
        ("airflow_pgchange/triggers/backlog_alarm", ["spark"]),
    ],
)
def test_expensive_tests_run_for_what_they_are_about_only(graph, source, kinds):
    change = [file(source)]
    assert concerned(graph, change).unneeded == sorted(kinds)


@pytest.mark.parametrize(
    ("source", "tests"),
    [
        ("airflow_pgchange/spark/startup", {"test_quick_start.py"}),
        ("demo/__main__", {"test_demo.py"}),
        ("sql/tube/30_claim", set()),
    ],
)
def test_the_tests_of_a_release_that_are_near_a_change_are_named(graph, source, tests):
    named = {choice.path.rpartition("/")[2] for choice in concerned(graph, [file(source)]).of_a_release}
    assert named >= tests
    assert tests or not named
