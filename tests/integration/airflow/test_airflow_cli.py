"""``airflow-pgchange`` on a real server."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable

import psycopg
import pytest
from airflow.sdk import DAG
from psycopg.conninfo import make_conninfo

from airflow_pgchange.admin.versions import SYSTEMS, present
from airflow_pgchange.cli import dag_consumers
from airflow_pgchange.cli.status import SHOWN_REASON
from airflow_pgchange.feeds import CommitFeed, ConsumerTransaction
from airflow_pgchange.feeds.extensions import EXTENSIONS
from airflow_pgchange.operators.batch import BatchOperator
from airflow_pgchange.plugins.databases import Places, named_in
from airflow_pgchange.utils.compat import dag_serialization
from tests import tubes
from tests.airflow_home import uri
from tests.command_line import Command, ended, failed, parsed
from tests.conftest import Role
from tests.ledger import Connect

pytestmark = pytest.mark.usefixtures("few_sessions")

FEED = CommitFeed("delays", 0)


@pytest.fixture
def ledger(db: str, connect: Connect) -> str:
    """A database with three commits, one of which a consumer claimed and could not finish."""
    connect().execute(
        "create table ledger (id bigint generated always as identity primary key);"
        "select revision.track('ledger', branch_id => '0');"
        "insert into ledger select from generate_series(1, 3)"
    )
    with pytest.raises(ZeroDivisionError), ConsumerTransaction(FEED, db) as transaction:
        transaction.claim(1)
        raise ZeroDivisionError
    return db


@pytest.mark.hstore
def test_install_says_what_the_database_now_holds(bare_db: str, pgchange: Command) -> None:
    found = pgchange("install", "--dsn", bare_db)
    assert {row["system"] for row in found} == {system.folder for system in SYSTEMS}
    assert pgchange("install", "--dsn", bare_db) == found


def test_one_system_can_be_installed_alone(bare_db: str, pgchange: Command) -> None:
    found = pgchange("install", "--dsn", bare_db, "--system", "revision")
    assert [row["system"] for row in found] == ["core", "revision"]
    assert {row["loaded from"] for row in found} == {"this package"}


def test_install_says_what_it_left_out_and_why(
    bare_db: str, pgchange: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(EXTENSIONS, "mbus", "hstore_of_another_server")
    found = pgchange("install", "--dsn", bare_db, "--without", "topology", "--without", "pgmb")
    assert {system.folder for system in SYSTEMS} - {row["system"] for row in found} == {"topology", "pgmb"}
    [told] = [row["loaded from"] for row in found if row["system"] == "mbus"]
    assert told.startswith("left out: the server has no hstore_of_another_server: install postgresql-contrib")


def test_upgrade_of_what_is_up_to_date_changes_nothing(db: str, pgchange: Command) -> None:
    assert all(row["version"] == row["needed"] for row in pgchange("upgrade", "--dsn", db))


def test_uninstall_removes_the_schemas(db: str, connect: Connect, pgchange: Command) -> None:
    held = present(connect())
    assert [row["removed"] for row in pgchange("uninstall", "--dsn", db, "--yes")] == held[::-1]


def test_a_command_that_deletes_data_asks_first(ledger: str, pgchange: Command) -> None:
    with pytest.raises(SystemExit) as caught:
        pgchange("uninstall", "--dsn", ledger)
    assert "--yes" in failed(caught)


def test_status_tells_how_far_behind_a_consumer_is_and_on_what_it_works(
    ledger: str, pgchange: Command
) -> None:
    (found,) = pgchange("status", "--dsn", ledger)
    assert (found["consumer"], found["ready"], found["attempt"]) == ("commits:delays/0", 3, 1)
    assert found["why"] == f"attempt 1 at batch {found['batch_id']} failed: ZeroDivisionError"


def test_a_malformed_connection_string_is_refused_without_what_it_holds(pgchange: Command) -> None:
    with pytest.raises(SystemExit, match="--dsn is not a connection string") as refused:
        pgchange("status", "--dsn", "host=db password=two words")
    assert "words" not in str(refused.value)


def test_status_shows_what_a_role_may_see_and_says_what_it_leaves_out(
    ledger: str, pgchange: Command, role: Callable[[str], Role], capsys: pytest.CaptureFixture[str]
) -> None:
    someone = role("someone")
    with pytest.raises(SystemExit) as caught:
        pgchange("status", "--dsn", someone.conninfo)
    assert "permission denied" in failed(caught)
    with psycopg.connect(ledger, autocommit=True) as owner:
        owner.execute(f"select pubsub.grant_consumer('{someone.name}')")
    args = parsed("status", "--dsn", someone.conninfo)
    args.func(args)
    said = capsys.readouterr()
    assert "commits:delays/0" in said.out
    assert "consumers of kind event are left out: permission denied" in said.err


def findings(dsn: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, str | None]]:
    """Return the output of health, which ends with code 1 if there is any."""
    args = parsed("health", "--dsn", dsn, "--output", "json")
    capsys.readouterr()
    code = 0
    try:
        args.func(args)
    except SystemExit as exit:
        code = exit.code  # type: ignore[assignment]
    found: list[dict[str, str | None]] = json.loads(capsys.readouterr().out)
    assert code == int(bool(found))
    return found


def test_health_tells_what_a_person_should_look_at_until_it_is_mended(
    ledger: str, pgchange: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert findings(ledger, capsys) == []
    with psycopg.connect(ledger, autocommit=True) as owner:
        owner.execute("update pgchange.claim set attempt = 3, error = 'cannot be parsed'")
    (found,) = findings(ledger, capsys)
    assert (found["severity"], found["consumer"]) == ("error", "commits:delays/0")
    assert str(found["told"]).endswith("has failed 3 times: cannot be parsed")
    assert found["call"] == "to give it up: airflow-pgchange skip commits:delays/0 --reason '...'"
    pgchange("skip", "commits:delays/0", "--reason", "no use", "--dsn", ledger)
    assert [found["kind"] for found in findings(ledger, capsys)] == ["letters"]


def test_health_that_cannot_look_or_sees_nothing_but_a_part_ends_with_code_2(
    ledger: str, role: Callable[[str], Role], capsys: pytest.CaptureFixture[str], pgchange: Command
) -> None:
    nobody = make_conninfo(ledger, port=1)
    assert ended(pgchange, "health", "--dsn", nobody) == 2
    assert "ServerUnavailable: " in capsys.readouterr().err
    someone = role("someone")
    with psycopg.connect(ledger, autocommit=True) as owner:
        owner.execute(f"select pubsub.grant_consumer('{someone.name}')")
    assert ended(pgchange, "health", "--dsn", someone.conninfo) == 2
    said = capsys.readouterr()
    assert "consumers of kind event are left out: permission denied" in said.err
    assert "nothing was found, but the lines above say what could not be looked at" in said.err
    assert said.out == ""


def test_health_asks_the_source_how_far_a_consumer_is_behind(
    ledger: str, other_db: str, connect_to: Connect, capsys: pytest.CaptureFixture[str], pgchange: Command
) -> None:
    with ConsumerTransaction(FEED, other_db, ledger) as transaction:
        transaction.claim(1)
        transaction.ack()
    both = ["--dsn", other_db, "--source-dsn", ledger]
    assert ended(pgchange, "health", *both) == 0
    seen = '[{"feed": "commits:delays/0", "kind": "commit", "ready": 2}]'
    connect_to(other_db).execute("select pgchange.note_watchers(%s)", [seen])
    (row,) = pgchange("status", *both)
    assert row["why"].startswith("its watcher looks, but no task claims the changes")
    connect_to(other_db).execute("select pgchange.limit_lag(%s, '1 microsecond')", [FEED.name])
    assert ended(pgchange, "health", *both) == 1
    assert "2 changes ready" in capsys.readouterr().out


def test_the_limit_of_a_consumer_is_where_its_progress_is(
    ledger: str,
    other_db: str,
    connect: Connect,
    connect_to: Connect,
    capsys: pytest.CaptureFixture[str],
    pgchange: Command,
) -> None:
    """The progress of a tube is in the database of its changes."""
    source, both = connect(), ["--dsn", other_db, "--source-dsn", ledger]
    tubes.make(source)
    tubes.attach(source, "ledger")
    source.execute("select tube.register('q', 1, 0)")
    source.execute("insert into ledger select from generate_series(1, 2)")
    connect_to(other_db).execute("drop schema tube cascade")
    assert ended(pgchange, "health", *both) == 0
    source.execute("select pgchange.limit_lag('tube:q/0', '1 microsecond')")
    assert ended(pgchange, "health", *both) == 1
    assert "2 changes ready" in capsys.readouterr().out


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A paused DAG whose tasks process the changes of two consumers.

    The first consumer has claimed a batch, the second is new.
    """
    with DAG("delays", schedule=None) as dag:
        for consumer in ("delays", "audit"):
            BatchOperator(
                task_id=consumer, feed=CommitFeed(consumer, 0), postgres_conn_id="airline", process=print
            )
    found = Places(paused={"delays"})
    for one in named_in(dag_serialization().to_dict(dag)):
        found.add("delays", one)
    monkeypatch.setattr(dag_consumers.ParsedDags, "places", lambda *_: found)


@pytest.mark.usefixtures("metadata", "named")
def test_status_and_health_say_what_airflow_knows_of_the_dags_of_a_consumer(
    ledger: str, pgchange: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", uri(ledger))
    delays, audit = pgchange("status", "--postgres-conn-id", "airline")
    assert delays["dag_reasons"] == audit["dag_reasons"] == ["its DAG delays is paused"]
    assert (audit["consumer"], audit["new"]) == (
        "commits:audit/0",
        "new consumer, starts at the beginning: 3 changes",
    )
    assert [row["consumer"] for row in pgchange("status", "--dsn", ledger)] == ["commits:delays/0"]
    with psycopg.connect(ledger, autocommit=True) as owner:
        owner.execute("update pgchange.claim set attempt = 3, error = 'cannot be parsed'")
    with pytest.raises(SystemExit):
        pgchange("health", "--postgres-conn-id", "airline")
    assert "cannot be parsed; its DAG delays is paused" in capsys.readouterr().out


def test_status_in_a_table_shows_the_first_line_of_an_error(
    ledger: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with psycopg.connect(ledger, autocommit=True) as owner:
        owner.execute(
            "update pgchange.claim set error = %s",
            [f"psycopg.errors.NotNullViolation: null value {'x' * SHOWN_REASON}\nDETAIL: no such line"],
        )
    args = parsed("status", "--dsn", ledger, "--output", "plain")
    args.func(args)
    said = capsys.readouterr().out
    assert re.search("attempt 1 failed: psycopg.errors.NotNullViolation: null value x+[.]{3}", said)
    assert "DETAIL" not in said


def test_a_number_that_is_an_estimate_is_marked_in_a_table_and_one_that_is_exact_is_not(
    ledger: str, connect: Connect, capsys: pytest.CaptureFixture[str]
) -> None:
    args = parsed("status", "--dsn", ledger, "--output", "plain")
    args.func(args)
    assert re.search(r"commits:delays/0 +3 ", capsys.readouterr().out)
    connect().execute("insert into ledger select from generate_series(1, 3000)")
    args.func(args)
    assert re.search(r"commits:delays/0 +~3[0-9]{3} ", capsys.readouterr().out)


def test_an_airflow_connection_names_the_database_too(
    ledger: str, pgchange: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", uri(ledger))
    assert len(pgchange("status", "--postgres-conn-id", "airline")) == 1


def test_skip_gives_up_the_batch_in_work(ledger: str, pgchange: Command) -> None:
    (found,) = pgchange("skip", "commits:delays/0", "--dsn", ledger, "--reason", "a poisonous row")
    assert found["skipped"]
    (status,) = pgchange("status", "--dsn", ledger)
    assert status["ready"] == 2


def test_letters_in_a_table_show_what_the_last_attempt_failed_on(
    ledger: str, pgchange: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    pgchange("skip", "commits:delays/0", "--dsn", ledger, "--reason", "a poisonous row")
    args = parsed("letters", "list", "--dsn", ledger, "--output", "plain")
    args.func(args)
    printed = capsys.readouterr().out
    assert "a poisonous row" in printed
    assert "ZeroDivisionError" in printed


def test_skip_without_a_batch_in_work_says_so(ledger: str, pgchange: Command) -> None:
    pgchange("skip", "commits:delays/0", "--dsn", ledger, "--reason", "a poisonous row")
    with pytest.raises(SystemExit) as caught:
        pgchange("skip", "commits:delays/0", "--dsn", ledger, "--reason", "again")
    assert "no batch in work" in failed(caught)


@pytest.mark.parametrize(("to", "ready"), [("now", 0), ("beginning", 3), ("2001-01-01T00:00:00+00:00", 3)])
def test_move_takes_a_consumer_elsewhere(ledger: str, pgchange: Command, to: str, ready: int) -> None:
    told = pgchange("move", "commits:delays/0", "--dsn", ledger, "--to", to, "--yes")
    assert told == [{"consumer": "commits:delays/0", "moved_to": to}]
    (status,) = pgchange("status", "--dsn", ledger)
    assert status["ready"] == ready


def test_repair_tells_the_guarantee_from_here_on(ledger: str, pgchange: Command) -> None:
    (found,) = pgchange("repair", "commits:delays/0", "--dsn", ledger, "--yes")
    assert found["from_here_on"] == "exactly once"


def test_drop_forgets_a_consumer(ledger: str, pgchange: Command) -> None:
    told = pgchange("drop", "commits:delays/0", "--dsn", ledger, "--yes")
    assert told == [{"consumer": "commits:delays/0", "dropped": True}]
    assert pgchange("status", "--dsn", ledger) == []


def test_trim_says_what_it_did(ledger: str, pgchange: Command) -> None:
    assert isinstance(pgchange("trim", "--dsn", ledger, "--retention", "1 day", "--yes"), list)


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["status"], "--postgres-conn-id or --dsn"),
        (["status", "--postgres-conn-id", "nowhere"], "airflow connections add"),
        (["status", "--dsn", "nonsense"], "host=... dbname=..."),
        (["status", "--dsn", "colour=blue"], "host=... dbname=..."),
        (["status", "--dsn", "host=127.0.0.1 port=1"], "try again"),
        (["skip", "delays", "--dsn", "dbname=x", "--reason", "y"], "commits:delays/0"),
        (
            ["move", "commits:delays/0", "--dsn", "dbname=x", "--to", "tomorrow", "--yes"],
            "beginning, now or a time",
        ),
        (["move", "tube:copies/0", "--dsn", "dbname=x", "--to", "now", "--yes"], "no watermark"),
        (["repair", "tube:copies/0", "--dsn", "dbname=x", "--yes"], "pgchange skip"),
        (["drop", "tube:copies/0", "--dsn", "dbname=x", "--yes"], "tube.tube_ensure_absent"),
        (["drop", "queue:orders/default", "--dsn", "dbname=x", "--yes"], "mbus.drop_consumer"),
        (["skip", "queue:orders", "--dsn", "dbname=x", "--reason", "y"], "queue:orders/default"),
        (["skip", "events:", "--dsn", "dbname=x", "--reason", "y"], "events:mails"),
    ],
)
def test_a_mistake_is_answered_with_what_to_do(pgchange: Command, arguments: list[str], advice: str) -> None:
    with pytest.raises(SystemExit) as caught:
        pgchange(*arguments)
    assert advice in failed(caught)


@pytest.mark.parametrize("command", ["status", "health"])
def test_a_database_without_our_schemas_is_told_what_to_run(
    bare_db: str, pgchange: Command, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        pgchange(command, "--dsn", bare_db)
    assert "airflow-pgchange install" in failed(caught) + capsys.readouterr().err


def test_an_unknown_consumer_is_told_where_the_names_are(db: str, pgchange: Command) -> None:
    with pytest.raises(SystemExit) as caught:
        pgchange("skip", "commits:nobody/0", "--dsn", db, "--reason", "why")
    assert "airflow-pgchange status" in failed(caught)


@pytest.mark.parametrize(
    "command", [["trim", "--retention", "soon"], ["letters", "drop", "--older-than", "soon"]]
)
def test_a_span_that_is_none_is_answered_with_how_to_write_one_before_anybody_is_asked(
    db: str, pgchange: Command, command: list[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        pgchange(*command, "--dsn", db)
    assert "30 days" in failed(caught)


def test_a_role_that_may_not_install_is_told_who_may(
    bare_db: str, connect_to: Connect, pgchange: Command
) -> None:
    role = f"passer_by_{os.getpid()}"
    connect_to(bare_db).execute(f"create role {role} login")
    try:
        with pytest.raises(SystemExit) as caught:
            pgchange("install", "--dsn", make_conninfo(bare_db, user=role))
    finally:
        connect_to(bare_db).execute(f"drop role {role}")
    assert "grant create on database" in failed(caught)


@pytest.mark.parametrize("command", ["status", "upgrade", "install"])
def test_a_command_that_finds_nothing_says_what_that_means(
    db: str, bare_db: str, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    arguments = {"status": ["--dsn", db], "upgrade": ["--dsn", bare_db], "install": ["--dsn", db]}[command]
    args = parsed(command, *arguments)
    args.func(args)
    said = capsys.readouterr()
    assert {"status": "first claim", "upgrade": "pgchange install", "install": "revision"}[command] in (
        said.out + said.err
    )
