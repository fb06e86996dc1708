"""Dead letters through Airflow: the command line, and operators."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import psycopg
import pytest
from airflow.sdk.log import mask_secret

from airflow_pgchange.admin import dead_letters
from airflow_pgchange.errors import BatchGivenUp, InvalidArgument, UnknownLetter
from airflow_pgchange.feeds import Batch, Change, CommitFeed, TubeFeed
from airflow_pgchange.operators.batch import BatchOperator
from airflow_pgchange.operators.dead_letters import DeadLettersOperator
from tests.airflow_home import uri
from tests.command_line import parsed
from tests.commits import FEED, commits, narrow_partitions, use_up_transactions
from tests.commits import drain as drain_all
from tests.letters import give_up, only
from tests.tubes import make

pytestmark = pytest.mark.usefixtures("few_sessions")

Connect = Callable[..., psycopg.Connection[Any]]
Command = Callable[..., Any]


@pytest.fixture
def pgchange(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command of letters and return what it prints, read as JSON."""

    def run(*arguments: str) -> Any:
        args = parsed("letters", *arguments, "--output", "json")
        capsys.readouterr()
        args.func(args)
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def conn_id(db: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", uri(db))
    return "airline"


def test_list_tells_everything_of_each_letter(
    db: str, connection: psycopg.Connection[Any], pgchange: Command
) -> None:
    letter, _ = give_up(connection, db)
    (found,) = pgchange("list", "--dsn", db)
    assert (found["id"], found["consumer"], found["changes"]) == (letter, "commits:test/0", 3)
    assert (found["reason"], found["error"]) == ("cannot be parsed", "tests.commits.Failed")
    assert pgchange("list", "--dsn", db, "--consumer", "commits:other/0") == []


def test_list_in_a_table_is_for_people(
    db: str, connection: psycopg.Connection[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    letter, _ = give_up(connection, db)
    dead_letters.redrive(connection, ids=[letter])
    args = parsed("letters", "list", "--dsn", db, "--output", "plain")
    args.func(args)
    printed = capsys.readouterr().out
    assert "cannot be parsed" in printed
    assert "on its way" in printed


def test_no_letters_are_said(db: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = parsed("letters", "list", "--dsn", db)
    args.func(args)
    assert "no dead letters" in capsys.readouterr().err


def test_again_sends_letters_by_number_and_by_consumer(
    db: str, connection: psycopg.Connection[Any], pgchange: Command
) -> None:
    (first, a), (second, b) = give_up(connection, db), give_up(connection, db)
    assert pgchange("redrive", str(first), "--dsn", db) == [{"letter": first, "state": "sent again"}]
    assert pgchange("redrive", "--consumer", "commits:test/0", "--dsn", db) == [
        {"letter": second, "state": "sent again"}
    ]
    assert drain_all(db) == a + b


def test_drop_asks_first_and_forgets(db: str, connection: psycopg.Connection[Any], pgchange: Command) -> None:
    letter, _ = give_up(connection, db)
    with pytest.raises(SystemExit, match="--yes"):
        pgchange("drop", str(letter), "--dsn", db)
    with pytest.raises(SystemExit, match="--yes"):
        pgchange("erase", "parsed", "--dsn", db)
    assert (only(connection).id, only(connection).reason) == (letter, "cannot be parsed")
    erased = pgchange("erase", "parsed", "--field", "n", "--consumer", "commits:test/0", "--dsn", db, "--yes")
    assert (erased, only(connection).reason) == ([{"letter": letter, "erased": 0}], "erased")
    assert pgchange("drop", "--older-than", "0 s", "--dsn", db, "--yes") == [
        {"letter": letter, "state": "dropped"}
    ]
    assert dead_letters.letters(connection) == []


def test_the_source_is_asked_where_it_is_elsewhere(
    db: str, own_database: str, connect_to: Connect, connection: psycopg.Connection[Any], pgchange: Command
) -> None:
    source = connect_to(own_database)
    narrow_partitions(source)
    give_up(connection, db, source=own_database, at=source)
    use_up_transactions(source)
    commits(source)
    drain_all(db, own_database)
    use_up_transactions(source)
    source.execute("select pubsub.trim_commit_queue('0 s')")
    (found,) = pgchange("list", "--dsn", db, "--source-dsn", own_database)
    assert "were trimmed" in found["hindrance"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["redrive"], "say which letters"),
        (["redrive", "5"], "no dead letter 5"),
        (["redrive", "5", "--consumer", "commits:x/0"], "say which letters"),
        (["drop", "--yes"], "say which letters"),
        (["drop", "5", "--yes"], "no dead letter 5"),
        (["list", "--older-than", "soon"], "30 days"),
    ],
)
def test_a_mistake_is_answered_with_what_to_do(
    db: str, pgchange: Command, arguments: list[str], says: str
) -> None:
    with pytest.raises(SystemExit, match=says):
        pgchange(*arguments, "--dsn", db)


def operator(conn_id: str, **arguments: Any) -> DeadLettersOperator:
    return DeadLettersOperator(task_id="letters", postgres_conn_id=conn_id, **arguments)


def run(task: Any) -> Any:
    return task.execute({})


def test_only_letters_that_were_asked_for_are_warned_of(
    own_database: str, connect_to: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Letters whose changes were trimmed are not sent, so each call finds them again."""
    monkeypatch.setenv("AIRFLOW_CONN_AIRLINE", uri(own_database))
    connection, said = connect_to(own_database), Mock()
    monkeypatch.setattr(DeadLettersOperator, "log", said)
    narrow_partitions(connection)
    for feed in (FEED, CommitFeed("other", 0)):
        give_up(connection, own_database, feed=feed)
    for feed in (FEED, CommitFeed("other", 0)):
        drain_all(own_database, feed=feed)
    use_up_transactions(connection)
    connection.execute("select pubsub.trim_commit_queue('0 s')")
    letter, _ = give_up(connection, own_database)
    for chosen, warnings in (
        ({"letter_ids": [letter]}, 0),
        ({"older_than": "1 day"}, 0),
        ({"consumer": "commits:test/0"}, 1),
        ({"consumer": "commits:test/0", "older_than": "0 s"}, 1),
        ({"older_than": "0 s"}, 2),
    ):
        said.reset_mock()
        run(operator("airline", action="redrive", **chosen))
        told = [call for call in said.warning.call_args_list if "cannot be sent again" in call.args[0]]
        assert len(told) == warnings, chosen


def test_an_operator_sends_letters_of_a_consumer_again_and_says_how_many(
    db: str, conn_id: str, connection: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    letter, ids = give_up(connection, db)
    give_up(connection, db, n=6, feed=CommitFeed("other", 0))
    log = Mock()
    monkeypatch.setattr(DeadLettersOperator, "log", log)
    done = run(operator(conn_id, action="redrive", consumer="commits:test/0"))
    assert done == {"action": "redrive", "letters": [letter]}
    log.info.assert_called_once_with("action %s: %d dead letters", "redrive", 1)
    assert drain_all(db) == [*ids, *commits_after(connection, ids)]


def commits_after(connection: psycopg.Connection[Any], ids: list[int]) -> list[int]:
    query = "select commit_id from revision.commit_queue where commit_id > %s order by commit_id"
    return [row[0] for row in connection.execute(query, [max(ids)]).fetchall()]


@pytest.mark.parametrize("age", ["0 s", timedelta(0)])
def test_an_operator_drops_letters_by_age(
    db: str, conn_id: str, connection: psycopg.Connection[Any], age: Any
) -> None:
    letter, _ = give_up(connection, db)
    assert run(operator(conn_id, action="drop", older_than="7 days"))["letters"] == []
    assert run(operator(conn_id, action="drop", older_than=age))["letters"] == [letter]


def test_an_operator_erases_a_key_from_the_letters_of_a_consumer(
    db: str, conn_id: str, connection: psycopg.Connection[Any]
) -> None:
    make(connection)
    connection.execute(
        "select tube.touch('q', 0, '{1,2}', 'T', payload => '{\"mail\": \"ann@example.org\"}')"
    )
    connection.execute("select tube.touch('q', 0, '{3}', 'T', payload => '{\"mail\": \"bob@example.org\"}')")
    run(consumer(conn_id, feed=TubeFeed("q")))
    letter = only(connection)
    assert letter.changes == 3
    erase = {"action": "erase", "key": "ann@example.org"}
    assert run(operator(conn_id, **erase, field="mail", consumer="tube:other/0"))["letters"] == []
    assert run(operator(conn_id, **erase))["letters"] == []
    assert only(connection).changes == 3
    done = run(operator(conn_id, **erase, field="mail", consumer="tube:q/0"))
    assert (done, only(connection).changes) == ({"action": "erase", "letters": [letter.id]}, 1)


@pytest.mark.parametrize("form", ["[{}]", "{}", " {} "])
def test_an_operator_takes_numbers_as_a_form_renders_them(
    db: str, conn_id: str, connection: psycopg.Connection[Any], form: str
) -> None:
    letter, _ = give_up(connection, db)
    assert run(operator(conn_id, action="redrive", letter_ids=form.format(letter)))["letters"] == [letter]


def test_an_operator_names_letters_that_cannot_be_sent(
    db: str, conn_id: str, connection: psycopg.Connection[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    give_up(connection, db)
    connection.execute("update pgchange.letter set void = 'its changes come by themselves'")
    assert run(operator(conn_id, action="redrive", consumer="commits:test/0"))["letters"] == []
    assert "cannot be sent again: its changes come by themselves" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"action": "forget", "consumer": "commits:x/0"}, InvalidArgument),
        ({"action": "drop"}, InvalidArgument),
        ({"action": "drop", "letter_ids": "all"}, InvalidArgument),
        ({"action": "redrive", "letter_ids": [5]}, UnknownLetter),
        ({"action": "drop", "consumer": "commits:x/0", "key": "4711"}, InvalidArgument),
        ({"action": "erase"}, InvalidArgument),
        ({"action": "erase", "key": "4711", "letter_ids": [5]}, InvalidArgument),
        ({"action": "erase", "key": "4711", "older_than": "1 day"}, InvalidArgument),
    ],
)
def test_an_operator_refuses_nonsense(
    db: str, conn_id: str, arguments: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        run(operator(conn_id, **arguments))


def poisonous(batch: Batch, changes: Iterator[Change], connection: psycopg.Connection[Any]) -> None:
    raise ValueError("cannot parse it: key is s3same-open")


def consumer(conn_id: str, **arguments: Any) -> BatchOperator:
    given = {"feed": FEED, "process": poisonous, "max_attempts": 1, "on_give_up": "dead_letter", **arguments}
    return BatchOperator(task_id="audit", postgres_conn_id=conn_id, **given)


def test_a_task_puts_a_batch_that_fails_for_the_last_time_among_the_letters_and_says_how_to_send_it(
    db: str, conn_id: str, connection: psycopg.Connection[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    commits(connection, 2)
    done = run(consumer(conn_id))
    letter = only(connection)
    assert (done["batches"], done["letters"]) == (0, [letter.id])
    assert (
        f"airflow-pgchange letters redrive {letter.id} --postgres-conn-id airline" in capsys.readouterr().out
    )


def test_a_tubes_letter_is_looked_for_where_the_tube_is(
    db: str,
    other_db: str,
    conn_id: str,
    connect_to: Connect,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_TUBES", uri(other_db))
    source = connect_to(other_db)
    make(source)
    source.execute("select tube.touch('q', 0, '{1}', 'T')")
    run(consumer(conn_id, feed=TubeFeed("q"), source_conn_id="tubes"))
    assert f"letters redrive {only(source).id} --postgres-conn-id tubes" in capsys.readouterr().out


def test_by_default_a_task_makes_the_bad_change_alone_a_letter_and_says_so(
    db: str, conn_id: str, connection: psycopg.Connection[Any]
) -> None:
    ids = commits(connection, 3)
    done = []

    def process(batch: Batch, changes: Iterator[Change], connection: psycopg.Connection[Any]) -> None:
        found = [change.id for change in changes]
        if ids[1] in found:
            raise ValueError("cannot parse it")
        done.extend(found)

    task = BatchOperator(
        task_id="audit", postgres_conn_id=conn_id, feed=FEED, process=process, max_attempts=2
    )
    with pytest.raises(ValueError, match="cannot parse it"):
        run(task)
    told = run(task)
    assert (done, told["letters"]) == ([ids[0], ids[2]], [only(connection).id])
    assert (len(told["splits"]), told["extra_attempts"]) == (1, 6)


def test_a_task_fails_on_a_batch_that_failed_as_often_as_it_may_if_it_is_to_fail(
    db: str, conn_id: str, connection: psycopg.Connection[Any]
) -> None:
    commits(connection)
    for error in (ValueError, BatchGivenUp):
        with pytest.raises(error):
            run(consumer(conn_id, on_give_up="fail"))
    assert dead_letters.letters(connection) == []


def test_a_secret_that_airflow_masks_is_not_in_a_letter(
    db: str, conn_id: str, connection: psycopg.Connection[Any]
) -> None:
    mask_secret("s3same-open")
    commits(connection)
    run(consumer(conn_id))
    error = only(connection).error
    assert error is not None
    assert error.startswith("ValueError: cannot parse it")
    assert "s3same-open" not in error


def test_a_choice_that_makes_no_sense_is_refused_when_the_task_is_made(conn_id: str) -> None:
    with pytest.raises(InvalidArgument, match="max_attempts"):
        consumer(conn_id, max_attempts=None)
