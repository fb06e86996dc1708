"""Mutants: which faults are planted, how a sample is spread, and how a run tells detected faults from surviving ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.suite.mutants.choice import HANGS, Jury, jury
from tests.suite.mutants.mutant import Mutant
from tests.suite.mutants.query import parsed
from tests.suite.mutants.report import report
from tests.suite.mutants.run import Trial, try_all
from tests.suite.mutants.sample import of_file, sample
from tests.suite.mutants.state import Result, State, survivors
from tests.suite.mutants.tree import run
from tests.suite.parsing import syntax

PLPGSQL = """
create function shop.sell(item shop.item, amount integer) returns shop.sale
language plpgsql
as $$
declare
    known shop.sale;
begin
    {}
    return known;
end
$$;
"""


def _made(file: str, text: str) -> dict[str, set[str]]:
    """Return the texts of the mutants of a file, by kind of fault."""
    made: dict[str, set[str]] = {}
    for mutant in of_file(file, text):
        made.setdefault(mutant.kind, set()).add(mutant.apply(text))
    return made


@pytest.mark.parametrize(
    ("kind", "query", "mutated"),
    [
        ("drop condition", "select from t where a and b or c", "select from t where a and b"),
        ("drop condition", "select from t where (a or b) and c", "select from t where c"),
        ("drop condition", "select from t where a between 1 and 2 and b", "select from t where b"),
        ("drop condition", "select from t join u on t.a = u.a", "select from t join u on true"),
        ("drop condition", "select from t where a is distinct from b and c", "select from t where c"),
        ("drop condition", "select from t where left(a, 3) = b and c", "select from t where c"),
        (
            "drop condition",
            "select from t where a and case when b then c else d end and e",
            "select from t where a and e",
        ),
        ("turn order", "select a from t order by a, b desc", "select a from t order by a, b asc"),
        (
            "drop order",
            "select a from t order by a, right(b, 3), c",
            "select a from t order by a, right(b, 3)",
        ),
        ("turn order", "select a from t order by a limit 1", "select a from t order by a desc limit 1"),
        ("drop order", "select a from t order by a, b", "select a from t order by b"),
        ("drop order", "select max(a order by b) from t", "select max(a ) from t"),
        ("off by one", "select from t where a < b", "select from t where a <= b"),
        ("off by one", "select from t limit 5", "select from t limit 6"),
        ("drop lock", "select from t for update of t skip locked", "select from t "),
        ("drop lock", "select from t for share skip locked", "select from t for share "),
        ("drop lock", "select pg_try_advisory_lock(f(1))", "select true"),
        ("drop coalesce", "select coalesce(f(a, b), c)", "select (f(a, b))"),
        ("exists", "select not exists (select)", "select exists (select)"),
        ("exists", "select exists (select)", "select not exists (select)"),
        ("drop distinct", "select distinct on (a, b) c from t", "select  c from t"),
        ("union", "select 1 union all select 2", "select 1 union select 2"),
        ("union", "select 1 union select 2", "select 1 union all select 2"),
    ],
)
def test_a_query_gets_the_fault_of_each_kind(kind: str, query: str, mutated: str) -> None:
    assert mutated in _made("sql/shop/01_query.sql", query)[kind]


@pytest.mark.parametrize(
    ("kind", "statement", "mutated"),
    [
        ("skip check", "if amount < 1 then raise exception 'few'; end if;", "null;"),
        ("fixed condition", "if amount < 1 then return null; end if;", "if false then return null; end if;"),
        ("fixed condition", "if amount < 1 then return null; end if;", "if true then return null; end if;"),
        ("swallow error", "raise exception 'few';", "null;"),
        ("swallow error", "raise exception 'few';", "return null;"),
        ("drop lock", "perform pg_advisory_xact_lock(1);", "null;"),
        ("drop lock", "lock table shop.sale in share mode;", "null;"),
        ("drop lock", "perform shop.lock_item(item);", "null;"),
        ("drop statement", "delete from shop.sale where a = 1;", "null;"),
        ("drop statement", "perform shop.tell(item);", "null;"),
        ("drop statement", "execute format('delete from %I', amount);", "null;"),
        ("drop condition", "perform from t where a and b;", "perform from t where b;"),
        ("drop condition", "known := item.a and item.b;", "known := item.b;"),
        ("drop condition", "select a into known from t where b;", "select a into known from t where true;"),
        ("off by one", "known.amount := 1;", "known.amount := 2;"),
        (
            "drop condition",
            "select a, b\n        into known\n        from t where c;",
            "select a, b\n        into known\n        from t where true;",
        ),
        (
            "off by one",
            "execute format('select 1 from %I', 't');",
            "execute format('select 2 from %I', 't');",
        ),
        (
            "off by one",
            "for i in 1 .. 3 loop null; end loop;",
            "for i in 1 .. 4 loop null; end loop;",
        ),
        (
            "drop lock",
            "for item in select a from t for update loop\n        perform shop.tell(item);\n    end loop;",
            "for item in select a from t  loop\n        perform shop.tell(item);\n    end loop;",
        ),
    ],
)
def test_a_function_gets_the_fault_of_each_kind(kind: str, statement: str, mutated: str) -> None:
    made = _made("sql/shop/01_sell.sql", PLPGSQL.format(statement))
    assert PLPGSQL.format(mutated) in made[kind]


@pytest.mark.parametrize(
    ("statement", "kinds"),
    [
        ("create policy changed on shop.sale for update using (amount > 1)", {"off by one"}),
        ("create index on shop.sale (amount) where amount > 1", set()),
        (
            "create unique index on shop.sale (amount) where amount > 1",
            {"drop condition", "off by one"},
        ),
    ],
)
def test_a_policy_locks_no_row_and_an_index_changes_costs_alone_unless_it_is_unique(
    statement: str, kinds: set[str]
) -> None:
    assert _made("sql/shop/01_tables.sql", statement).keys() == kinds


def test_a_condition_of_many_lines_is_found_whole() -> None:
    text = PLPGSQL.format(
        "if amount < 1\n        and f(item)  -- why\n    then\n        return null;\n    end if;"
    )
    made = _made("sql/shop/01_sell.sql", text)
    assert any("if true  -- why\n    then" in mutated for mutated in made["fixed condition"])


def test_only_volatile_functions_become_stable() -> None:
    texts = {
        "create function f() returns int language sql as $$ select 1 $$": 1,
        "create function f() returns int language sql volatile as $$ select 1 $$": 1,
        "create function f() returns int language sql immutable as $$ select 1 $$": 0,
        "create procedure f() language sql as $$ select 1 $$": 0,
    }
    for text, count in texts.items():
        assert len(_made("sql/shop/01_f.sql", text).get("stable", ())) == count


def test_a_function_with_an_atomic_body_and_one_that_a_function_makes_are_mutated_too() -> None:
    atomic = "create function f() returns int begin atomic select 1 from t where a and b; end"
    assert "drop condition" in _made("sql/shop/01_f.sql", atomic)
    inner = "execute format($f$create function %I() returns int language sql as $b$ select 1 limit 5 $b$ $f$, 'f');"
    made = _made("sql/shop/01_f.sql", PLPGSQL.format(inner))
    assert any("limit 6" in text for text in made["off by one"])


def test_a_function_of_any_number_of_arguments_is_mutated_too() -> None:
    variadic = PLPGSQL.replace("amount integer", "variadic names name[]").format("delete from t;")
    assert "drop statement" in _made("sql/shop/01_sell.sql", variadic)


def test_every_mutant_of_sql_parses() -> None:
    for path in (Path("sql/mbus/14_hand_out.sql"), Path("sql/core/07_lock_waits.sql")):
        text = path.read_text()
        found = of_file(str(path), text)
        assert len(found) > 50
        assert all(parsed(mutant.apply(text)) for mutant in found[::10])


@pytest.mark.parametrize(
    ("kind", "code", "mutated"),
    [
        ("negate", "if a:\n    b = c", "if not a:\n    b = c"),
        ("negate", "if not a:\n    b = c", "if a:\n    b = c"),
        ("and and or", "a = b and c", "a = b or c"),
        ("comparison", "a = b == c", "a = b != c"),
        ("off by one", "a = b < c", "a = b <= c"),
        ("off by one", "a = 7", "a = 8"),
        ("off by one", "a = b[:c]", "a = b[:(c) + 1]"),
        ("off by one", "a = range(b)", "a = range((b) + 1)"),
        ("skip check", "if a:\n    raise b", "pass"),
        ("swallow error", "if a:\n    b()\n    raise c", "if a:\n    b()\n    pass"),
        ("swallow error", "try:\n    a()\nexcept B:\n    c()", "try:\n    a()\nexcept B:\n    pass"),
        ("miss error", "try:\n    a()\nexcept B:\n    c()", "try:\n    a()\nexcept ():\n    c()"),
        ("drop call", "async def a():\n    await b()", "async def a():\n    pass"),
        ("no iteration", "for a in b:\n    c()", "for a in []:\n    c()"),
        ("leave a loop", "for a in b:\n    break", "for a in b:\n    continue"),
        ("true and false", "a(b=True)", "a(b=False)"),
        ("arithmetic", "a = b - c", "a = b + c"),
    ],
)
def test_python_gets_the_fault_of_each_kind(kind: str, code: str, mutated: str) -> None:
    made = _made("airflow_pgchange/shop.py", code)
    assert mutated in made[kind]
    assert all(syntax(text) for texts in made.values() for text in texts)


def test_annotations_decorators_and_docstrings_are_left_alone() -> None:
    code = '@a(True)\ndef b(c: D[1] | None, *, e: int) -> F[2]:\n    """Not and or 1."""\n    g: H[3]\n'
    assert of_file("airflow_pgchange/shop.py", code) == []


def test_imports_for_annotations_only_have_no_mutants() -> None:
    code = "if TYPE_CHECKING:\n    from a import B\n"
    assert of_file("airflow_pgchange/shop.py", code) == []


def _every() -> list[Mutant]:
    line = "a = 1 + b < 2 and c\n"
    folders = ("sql/shop", "airflow_pgchange/hall", "airflow_pgchange")
    found = [m for n in range(8) for m in of_file(f"{folders[1]}/{n}.py", line * (n + 1))]
    query = "select from t where a < 1 and b;\n"
    return [*found, *of_file(f"{folders[0]}/01_a.sql", query), *of_file(f"{folders[2]}/a.py", line)]


def test_a_seed_is_a_sample_and_a_longer_one_starts_as_a_shorter_one() -> None:
    every = _every()
    assert sample(every, 7, 20) == sample(reversed(every), 7, 20)
    assert sample(every, 7, 20)[:9] == sample(every, 7, 9)
    assert sample(every, 7, 20) != sample(every, 8, 20)


def test_a_sample_is_spread_over_feeds_and_files_however_large_they_are() -> None:
    chosen = sample(_every(), 7, 9)
    assert Counter(mutant.feed for mutant in chosen) == {"shop": 3, "hall": 3, "package": 3}
    assert len({mutant.file for mutant in chosen if mutant.feed == "hall"}) == 3


def test_files_do_not_all_begin_with_the_same_kind_of_fault() -> None:
    hall = [mutant for mutant in _every() if mutant.feed == "hall"]
    assert len({mutant.kind for mutant in sample(hall, 7, 8)}) > 1


@pytest.mark.parametrize(
    ("file", "text", "before"),
    [
        ("airflow_pgchange/shop.py", "def f(a):\n    if a < 1:\n        raise B\n", "import c\n\n\n"),
        ("sql/shop/01_a.sql", PLPGSQL.format("delete from t where a < 1;"), "select 5;\n\n"),
    ],
)
def test_ids_stay_when_lines_above_change(file: str, text: str, before: str) -> None:
    ids = {mutant.id for mutant in of_file(file, text)}
    moved = of_file(file, before + text)
    assert ids <= {mutant.id for mutant in moved}
    assert len({mutant.id for mutant in moved}) == len(moved)


def test_a_function_of_sql_may_move_to_another_file_of_its_folder() -> None:
    text = PLPGSQL.format("delete from t;")
    one, same, other = ({m.id for m in of_file(f"sql/{n}.sql", text)} for n in ("a/01", "a/02", "b/01"))
    assert one == same
    assert not one & other


def test_faults_that_are_alike_have_ids_of_their_own() -> None:
    found = of_file("airflow_pgchange/shop.py", "def f():\n    a = 1\n    a = 1\n    return 1, 1\n")
    assert len({mutant.id for mutant in found}) == len(found) == 4


@pytest.fixture
def bare_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replacement for pytest that starts fast."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


@pytest.fixture
def shop(tmp_path: Path, bare_pytest: None) -> Path:
    """A small project with a test that checks only the sold items."""
    root = tmp_path / "shop"
    (root / "airflow_pgchange").mkdir(parents=True)
    (root / "airflow_pgchange" / "__init__.py").touch()
    (root / "airflow_pgchange" / "shop.py").write_text(
        "def sell():\n    return 5\n\n\ndef buy():\n    return 6\n"
    )
    (root / "test_shop.py").write_text(
        "import pytest\nfrom airflow_pgchange.shop import sell\n\n"
        "@pytest.mark.parametrize('price', [5], ids=['10 - 5'])\n"
        "def test_sold(price):\n    assert sell() == price\n"
    )
    (root / "test_red.py").write_text("def test_red():\n    assert False\n")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    return root


def _mutants(root: Path) -> list[Mutant]:
    return of_file("airflow_pgchange/shop.py", (root / "airflow_pgchange" / "shop.py").read_text())


def _trial(root: Path, state: State, judges: Jury, tell: Callable[[Mutant, Result], None]) -> Trial:
    return Trial(root, Path(sys.executable), state, lambda _: judges, tell, 60)


def test_a_planted_fault_is_caught_and_one_that_no_test_sees_is_told_as_a_survivor(shop: Path) -> None:
    state = State(shop.parent / "states" / "one.jsonl")
    told: list[str] = []
    mutants = _mutants(shop)
    trial = _trial(shop, state, Jury(("test_shop.py::test_sold",)), lambda m, r: told.append(r.how))
    try_all(trial, mutants, 1)
    sold, bought = (state.results[mutant.id] for mutant in mutants)
    assert (sold.how, sold.by, sold.quick) == ("caught", "test_shop.py::test_sold[10 - 5]", True)
    assert (bought.how, bought.tests) == ("survived", 1)
    assert told == ["caught", "survived"]

    said = "\n".join(report(shop, mutants, state, {}))
    assert "-    return 6\n+    return 7" in said
    assert "-    return 5" not in said
    assert "because" in "\n".join(report(shop, mutants, state, {mutants[1].id: "because"}))

    # The next run uses these results, even if it runs in another copy of the tree.
    assert State.read(state.path).results == state.results
    assert State.read(state.path).baseline == state.baseline
    assert survivors(state.path.parent) == {mutants[1].id}
    assert "return 5" in (shop / "airflow_pgchange" / "shop.py").read_text()


def test_a_mutant_that_only_the_rest_of_its_feed_catches_is_not_caught_by_the_quick_choice(
    shop: Path,
) -> None:
    (shop / "test_hall.py").write_text("def test_hall(): ...\n")
    state = State(shop.parent / "one.jsonl")
    mutants = _mutants(shop)[:1]
    judges = Jury(("test_hall.py::test_hall",), ("test_shop.py::test_sold",))
    try_all(_trial(shop, state, judges, lambda m, r: None), mutants, 1)
    assert (state.results[mutants[0].id].how, state.results[mutants[0].id].quick) == ("caught", False)
    told = "\n".join(report(shop, mutants, state, {}))
    assert re.search(r"^all +1 +0 ", told, re.MULTILINE)


def test_a_mutant_whose_test_files_fail_anyway_is_red(shop: Path) -> None:
    state = State(shop.parent / "one.jsonl")
    mutants = _mutants(shop)[:1]
    try_all(_trial(shop, state, Jury(("test_red.py",)), lambda m, r: None), mutants, 1)
    assert state.results[mutants[0].id].how == "red"
    assert "fail without any mutant: test_red.py" in "\n".join(report(shop, mutants, state, {}))


def test_a_mutant_with_which_no_test_begins_is_caught(shop: Path) -> None:
    (shop / "conftest.py").write_text("from airflow_pgchange.shop import sell\n\nassert sell() == 5\n")
    state = State(shop.parent / "one.jsonl")
    mutants = _mutants(shop)[:1]
    try_all(_trial(shop, state, Jury(("test_shop.py",)), lambda m, r: None), mutants, 1)
    found = state.results[mutants[0].id]
    assert (found.how, found.by) == ("caught", "test_shop.py")


def test_a_mutant_of_which_all_tests_are_left_out_survives(shop: Path) -> None:
    state = State(shop.parent / "one.jsonl")
    mutants = _mutants(shop)[:1]
    try_all(
        _trial(shop, state, Jury(("test_shop.py",), options=("-k", "other")), lambda m, r: None), mutants, 1
    )
    assert state.results[mutants[0].id].how == "survived"


def test_results_that_were_cut_off_do_not_count(tmp_path: Path) -> None:
    state = State(tmp_path / "one.jsonl")
    state.keep(Result("a", "caught", "b", True, 1, 1.0))
    with state.path.open("a") as file:
        file.write('{"id": "d", "how"')
    assert set(State.read(state.path).results) == {"a"}


@pytest.fixture
def hanging(tmp_path: Path, bare_pytest: None) -> Path:
    """A project whose test starts a process in another session, prints its process id, and hangs."""
    copy = tmp_path / "tree"
    copy.mkdir()
    (copy / "test_hang.py").write_text(
        "import pathlib, subprocess, time\n\n"
        "def test_hang():\n"
        "    child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"    pathlib.Path({str(tmp_path)!r}, 'told').write_text(str(child.pid))\n"
        f"    pathlib.Path({str(tmp_path)!r}, 'told').rename({str(tmp_path / 'pid')!r})\n"
        "    time.sleep(600)\n"
    )
    return copy


def test_tests_that_hang_are_told_from_those_that_fail(hanging: Path) -> None:
    outcome = run(hanging, Path(sys.executable), ["test_hang.py"], 0.2, threading.Event())
    assert outcome.how == "timeout"


def test_a_test_that_fails_and_leaves_a_thread_behind_has_failed(shop: Path) -> None:
    (shop / "test_thread.py").write_text(
        "import threading, time\n\n"
        "def test_thread():\n"
        "    threading.Thread(target=time.sleep, args=[600]).start()\n"
        "    assert False\n"
    )
    outcome = run(shop, Path(sys.executable), ["test_thread.py"], 60, threading.Event())
    assert (outcome.how, outcome.by) == ("failed", "test_thread.py::test_thread")


def test_tests_that_wait_for_their_turn_on_a_busy_machine_do_not_hang(
    shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1000.0 * (os.cpu_count() or 1), 0.0, 0.0))
    outcome = run(shop, Path(sys.executable), ["test_shop.py"], 0.2, threading.Event())
    assert outcome.how == "passed"


def test_on_a_busy_machine_a_test_is_waited_for_longer_before_it_hangs(
    shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (3.0 * (os.cpu_count() or 1), 0.0, 0.0))
    options = jury(shop, _mutants(shop)[0], 100).options
    assert float(options[options.index("--timeout") + 1]) == 3 * HANGS


def test_a_run_that_is_stopped_ends_what_its_tests_have_started(hanging: Path) -> None:
    stop = threading.Event()
    told = hanging.parent / "pid"
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, hanging, Path(sys.executable), ["test_hang.py"], 120, stop)
        while not told.exists() and not running.done():
            time.sleep(0.05)
        stop.set()
        with pytest.raises(InterruptedError):
            running.result()
    # The process that adopted the child may not have waited for it yet.
    child = Path("/proc", told.read_text(), "stat")
    assert not child.exists() or child.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_a_run_that_goes_on_skips_what_is_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.suite.mutants import __main__ as command

    tried: list[str] = []

    def note(trial: Trial, mutants: list[Mutant], workers: int) -> None:
        for mutant in mutants:
            tried.append(mutant.id)
            trial.state.keep(Result(mutant.id, "caught", "", True, 0, 0.0))

    monkeypatch.setattr(command, "try_all", note)
    options = ["", "--only", "sql/core/*_staging.sql", "--state", str(tmp_path / "state.jsonl")]
    for count in ("5", "5", "8"):
        monkeypatch.setattr(sys, "argv", [*options, "--count", count])
        command.main()
    assert len(tried) == len(set(tried)) == 8
    monkeypatch.setattr(sys, "argv", [*options, "--again", tried[0]])
    command.main()
    assert tried[8:] == tried[:1]
    assert "8 mutants of" in capsys.readouterr().out
