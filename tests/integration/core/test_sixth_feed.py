"""A sixth feed takes some SQL and a Python file, those of ``tests/sixth_feed``. No other code knows it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from airflow_pgchange.admin import consumers, manual_operations
from airflow_pgchange.admin.health import findings
from airflow_pgchange.assets.pgchange import feed_asset
from airflow_pgchange.errors import InvalidArgument, SourceLostTail, SourceRestored
from airflow_pgchange.feeds import Batch, Change, ConsumerTransaction, feed_kinds
from airflow_pgchange.feeds.feed_kinds import from_json, from_uri, to_json, to_uri
from airflow_pgchange.operators.batch import BatchOperator
from airflow_pgchange.sensors.feed import FeedSensor
from airflow_pgchange.triggers.feed import FeedTrigger
from tests.airflow_home import uri
from tests.command_line import Command, command
from tests.ledger import Connect
from tests.sixth_feed.diary import DiaryFeed
from tests.watching import first

FOLDER = Path(__file__).parents[2] / "sixth_feed"
ANN = DiaryFeed("ann")
Connection = psycopg.Connection[Any]


def install(connection: Connection) -> None:
    with connection.transaction():
        connection.execute((FOLDER / "diary.sql").read_bytes(), prepare=False)
    connection.execute("create table public.copied (number bigint, words text)")


def write(connection: Connection, *words: str) -> None:
    with connection.cursor() as cursor:
        cursor.executemany("insert into diary.line (words) values (%s)", [(word,) for word in words])


@pytest.fixture
def diary(connect: Connect) -> Connection:
    """A database in which somebody keeps a diary."""
    connection = connect()
    install(connection)
    return connection


@pytest.fixture
def conn_id(db: str, diary: Connection, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AIRFLOW_CONN_DIARY", uri(db))
    return "diary"


@pytest.fixture
def pgchange(conn_id: str, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run ``airflow-pgchange`` on that database."""
    run: Command = command(capsys)
    return lambda *arguments: run(*arguments, "--postgres-conn-id", conn_id)


def copy(batch: Batch, changes: Iterator[Change], connection: Connection) -> None:
    with connection.cursor() as cursor:
        rows = [(change.id, change.data["words"]) for change in changes]
        cursor.executemany("insert into public.copied values (%s, %s)", rows)


def copy_but_not_secrets(batch: Batch, changes: Iterator[Change], connection: Connection) -> None:
    for change in changes:
        if change.data["words"] == "secret":
            raise ValueError("these words are private")


def work(conn_id: str, process: Callable[..., None] = copy, **arguments: Any) -> Any:
    task = BatchOperator(
        task_id="copy", process=process, feed=to_json(ANN), postgres_conn_id=conn_id, **arguments
    )
    return task.execute({})


def copied(connection: Connection) -> list[str]:
    return [words for (words,) in connection.execute("select words from public.copied order by number")]


def status(connection: Connection) -> dict[str, Any]:
    (row,) = consumers.status(connection, warn=pytest.fail)
    return row


def test_it_costs_at_most_120_lines_of_sql_and_60_of_python() -> None:
    lines = {path.suffix: len(path.read_text().splitlines()) for path in FOLDER.glob("diary.*")}
    assert lines[".sql"] <= 120
    assert lines[".py"] <= 60


def test_nothing_of_this_package_names_it() -> None:
    root = FOLDER.parents[1]
    files = [*(root / "airflow_pgchange").rglob("*.py"), *(root / "sql").rglob("*.sql")]
    assert [path for path in files if "diary" in path.read_text()] == []


def test_it_is_plain_json_an_asset_and_a_name_as_the_others_are(conn_id: str, diary: Connection) -> None:
    assert from_json(to_json(ANN)) == ANN
    assert from_uri(to_uri(ANN, conn_id)) == (ANN, conn_id)
    assert from_uri(feed_asset(ANN, conn_id).uri) == (ANN, conn_id)
    assert consumers.named("diary:ann")(diary) == consumers.movable("diary:ann") == ANN


def test_a_feed_of_another_package_is_found_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = tmp_path / "diary-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: diary\nVersion: 1\n")
    (about / "entry_points.txt").write_text(
        f"[{feed_kinds.ENTRY_POINTS}]\ndiary = tests.sixth_feed.diary:DiaryFeed\n"
    )
    monkeypatch.setattr(feed_kinds, "_kinds", {})
    feed_kinds.from_other_packages.cache_clear()
    with pytest.raises(InvalidArgument, match="unknown kind"):
        from_json(to_json(ANN))
    monkeypatch.syspath_prepend(tmp_path)
    feed_kinds.from_other_packages.cache_clear()
    assert from_json(to_json(ANN)) == ANN


async def test_its_watcher_wakes_for_what_is_there(conn_id: str, diary: Connection) -> None:
    write(diary, "one", "two")
    payload = await first(FeedTrigger(to_json(ANN), conn_id))
    assert (payload["feed"], payload["ready"]) == ("diary:ann", 2)


def test_a_sensor_waits_for_it(conn_id: str, diary: Connection) -> None:
    sensor = FeedSensor(task_id="wait", feed=ANN, postgres_conn_id=conn_id, deferrable=False)
    context: Any = {"task_state_store": {}}
    assert not sensor.poke(context)
    write(diary, "one")
    assert sensor.poke(context)


def test_a_batch_is_kept_with_its_results_once_and_in_order(conn_id: str, diary: Connection) -> None:
    write(diary, "one", "two", "three")
    assert work(conn_id, limit=2)["changes"] == 2
    assert work(conn_id, limit=2)["changes"] == 1
    assert work(conn_id)["changes"] == 0
    assert copied(diary) == ["one", "two", "three"]


def test_a_batch_that_fails_is_the_same_when_it_is_tried_again_until_it_is_given_up(
    db: str, conn_id: str, diary: Connection, pgchange: Callable[..., Any]
) -> None:
    write(diary, "secret")
    for attempt in (1, 2, 3):
        with pytest.raises(ValueError, match="private"):
            work(conn_id, copy_but_not_secrets)
        write(diary, f"after {attempt}")
        assert (status(diary)["attempt"], status(diary)["ready"]) == (attempt, 1 + attempt)
    (found,) = findings(diary, pytest.fail)
    assert (found.kind, found.severity, found.consumer) == ("diary", "error", "diary:ann")
    assert "ValueError: these words are private" in found.told

    pgchange("skip", "diary:ann", "--reason", "nobody may read it")
    (letter,) = pgchange("letters", "list")
    assert (letter["kind"], letter["consumer"], letter["changes"], letter["attempts"]) == (
        "diary",
        "diary:ann",
        1,
        3,
    )
    assert letter["hindrance"] is None
    work(conn_id)
    assert copied(diary) == ["after 1", "after 2", "after 3"]

    pgchange("letters", "redrive", str(letter["id"]))
    assert status(diary)["ready"] == 1
    work(conn_id)
    assert copied(diary)[0] == "secret"
    assert pgchange("letters", "list") == []
    assert work(conn_id)["changes"] == 0


def test_a_batch_becomes_a_letter_after_its_last_attempt(conn_id: str, diary: Connection) -> None:
    write(diary, "secret")
    given_up = {"max_attempts": 1, "on_give_up": "dead_letter"}
    work(conn_id, copy_but_not_secrets, **given_up)
    (letter,) = diary.execute("select consumer, error from pgchange.letter").fetchall()
    assert letter[0] == "diary:ann"
    diary.execute("select pgchange.redrive(of_consumer => 'diary:ann')")
    work(conn_id, copy_but_not_secrets, **given_up)
    assert diary.execute("select attempts from pgchange.letter").fetchall() == [(2,)]


def test_a_consumer_is_moved_back_and_its_letters_are_void_as_their_changes_come_by_themselves(
    conn_id: str, diary: Connection, pgchange: Callable[..., Any]
) -> None:
    write(diary, "secret")
    with pytest.raises(ValueError, match="private"):
        work(conn_id, copy_but_not_secrets)
    pgchange("skip", "diary:ann", "--reason", "nobody may read it")
    pgchange("move", "diary:ann", "--to", "beginning", "--yes")
    (letter,) = pgchange("letters", "list")
    assert "moved back before it" in letter["hindrance"]
    work(conn_id)
    assert copied(diary) == ["secret"]
    write(diary, "two")
    pgchange("move", "diary:ann", "--to", "now", "--yes")
    assert work(conn_id)["changes"] == 0


def test_results_in_another_database_are_known_to_the_source_and_repaired_from_it(
    db: str, other_db: str, diary: Connection, connect_to: Callable[[str], Connection]
) -> None:
    results = connect_to(other_db)
    install(results)
    write(diary, "one", "two")
    for _ in range(2):
        with ConsumerTransaction(ANN, other_db, db) as transaction:
            batch = transaction.claim(1)
            assert batch is not None
            transaction.ack()
    (row,) = consumers.status(results, diary)
    assert (row["ready"], row["version"]) == (0, 2)
    with pytest.raises(SourceRestored), ConsumerTransaction(ANN, other_db) as transaction:
        transaction.claim(1)
    diary.execute("delete from pgchange.claim")
    with pytest.raises(SourceLostTail), ConsumerTransaction(ANN, other_db, db) as transaction:
        transaction.claim(1)
    assert manual_operations.repair_consumer(results, diary, ANN) == "at least once"
    with ConsumerTransaction(ANN, other_db, db) as transaction:
        assert transaction.claim(10).count == 2
        transaction.ack()


def test_a_role_does_what_it_is_granted_and_nothing_else(
    db: str, diary: Connection, role: Callable[[str], Any]
) -> None:
    write(diary, "one")
    reader, keeper, other = role("reader").name, role("keeper").name, role("other").name
    diary.execute(
        "select diary.grant_consumer(%s::regrole), diary.grant_admin(%s::regrole)", [reader, keeper]
    )
    diary.execute(f"grant create on schema public to {reader}")
    with ConsumerTransaction(ANN, make_conninfo(db, user=reader)) as transaction:
        assert transaction.claim(10) is not None
        assert [change.data["words"] for change in transaction.changes()] == ["one"]
        transaction.ack()
    drop = "select diary.drop_consumer('ann')"
    with pytest.raises(psycopg.errors.InsufficientPrivilege), psycopg.connect(db, user=reader) as theirs:
        theirs.execute(drop)
    with pytest.raises(psycopg.errors.InsufficientPrivilege), psycopg.connect(db, user=other) as others:
        others.execute("select diary.take_lock('ann')")
    with psycopg.connect(db, user=keeper) as theirs:
        theirs.execute(drop)
    assert consumers.status(diary) == []


HOOK = re.compile(r"^\| (\w[\w ]*) \| `(\w+)\((.*)\)` \| `(.*)` \| (.*) \|$", re.MULTILINE)


def test_the_hooks_are_listed_for_whoever_writes_a_feed(diary: Connection) -> None:
    hooks = """
        select trait, name, replace(format(takes, 'consumer', ', options', 'consumer'), '"', ''), returns, told
        from pgchange.hook order by trait, name
    """
    readme = (FOLDER.parents[1] / "sql" / "README.md").read_text()
    assert HOOK.findall(readme) == diary.execute(hooks).fetchall()


OFFER = """
create schema notes;
select pg_catalog.set_config('pgchange.path_before', pg_catalog.current_setting('search_path'), true);
select pgchange.keep_origin('notes'), pgchange.offer('note', 'notes', 'reader text', 'note:%s', traits => {}, own => {});
"""


def offer(connection: Connection, traits: list[str], own: list[str]) -> None:
    connection.execute(sql.SQL(OFFER).format(traits, own))


def test_a_schema_that_lacks_functions_is_refused_with_all_of_them_and_what_each_does(db: str) -> None:
    with psycopg.connect(db) as connection:
        offer(connection, ["position", "recorded letters"], ["status"])
        connection.execute(
            """
            create function notes.at("position" jsonb) returns jsonb language sql as 'select $1';
            create function notes.forget(reader text) returns void language sql as '';
            create function notes.register(reader text, why text default '') returns boolean
                language sql as 'select true';
            create function notes.point(at integer) returns jsonb language sql as 'select null::jsonb';
            """
        )
        with pytest.raises(psycopg.errors.UndefinedObject) as refused:
            connection.execute("select pgchange.close_schema('notes')")
    told = refused.value.diag
    assert told.message_primary == (
        "schema notes cannot be a feed yet: it lacks 9 of the functions that its given functions call"
    )
    lines = (told.message_detail or "").splitlines()
    # Only the function for the status of its kind would call lag().
    assert [line.partition("(")[0].removeprefix("notes.") for line in lines] == [
        "changes",
        "choose",
        "consumers",
        "covers",
        "forget",
        "point",
        '"position"',
        "put",
        "status",
    ]
    assert lines[4] == (
        "notes.forget(reader text) returns boolean, not void: "
        "Delete the progress of the consumer; true if it was in this database."
    )
    assert lines[5].startswith("notes.point() returns jsonb: Return the point")


@pytest.mark.parametrize(
    ("traits", "own", "told"),
    [
        (["position", "letters"], [], "the traits 'letters'"),
        (["position"], ["status", "check_letter"], "in place of 'check_letter'"),
    ],
)
def test_traits_and_own_functions_that_mean_nothing_are_refused(
    db: str, traits: list[str], own: list[str], told: str
) -> None:
    with psycopg.connect(db) as connection, pytest.raises(psycopg.errors.InvalidParameterValue, match=told):
        offer(connection, traits, own)
