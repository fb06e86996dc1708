"""The staging schema is created and removed with the core. A schema of another owner with this name is never removed."""

from __future__ import annotations

import psycopg
import pytest

from airflow_pgchange.admin import schema, versions
from airflow_pgchange.errors import Refused
from airflow_pgchange.feeds import Batch
from airflow_pgchange.feeds.connections import connect as feed_connect
from airflow_pgchange.results.staging import create
from tests.tubes import one

BATCH = Batch(id="batch-1", feed="commits:test/0", version=1, attempt=2, count=3, slices=(), bounds={})
THEIRS = {
    "table": "create table pgchange_staging.mine ()",
    "table with a comment": "create table pgchange_staging.mine (); comment on table pgchange_staging.mine is 'pgchange'",
    "view": "create view pgchange_staging.mine as select 1 as n",
    "function": "create function pgchange_staging.mine() returns int language sql return 1",
    "type": "create domain pgchange_staging.mine as int",
}


@pytest.fixture
def connection(connect):
    return connect()


def is_there(connection):
    return one(connection, "select to_regnamespace('pgchange_staging') is not null")


def stage(connection):
    with feed_connect(connection.info.dsn) as session:
        return create(session, BATCH, "public.target", [("n", "bigint")])


def test_staging_tables_are_removed_with_the_core(connection):
    stage(connection)
    schema.uninstall(connection)
    assert not is_there(connection)


@pytest.mark.parametrize("kind", THEIRS)
def test_tables_of_others_in_the_staging_schema_are_never_dropped(connection, kind):
    stage(connection)
    connection.execute(THEIRS[kind])
    with pytest.raises(
        Refused, match=r"schema pgchange_staging is used by others: \w+ pgchange_staging\.mine[^,]*:"
    ):
        schema.uninstall(connection)
    assert "core" in versions.present(connection)


def test_objects_of_others_that_use_staging_tables_are_never_dropped(connection):
    connection.execute(f"create view public.mine as select n from pgchange_staging.{stage(connection)}")
    with pytest.raises(Refused, match=r"schema pgchange_staging is used by others: view public\.mine"):
        schema.uninstall(connection)


@pytest.mark.parametrize("told", [None, "where we stage"])
def test_a_schema_of_others_by_its_name_is_refused_before_anything_is_made(bare_db, connect_to, told):
    connection = connect_to(bare_db)
    connection.execute("create schema pgchange_staging")
    connection.execute(f"comment on schema pgchange_staging is {'null' if told is None else repr(told)}")
    with pytest.raises(
        Refused, match="schema pgchange_staging is there and is not ours: .*rename that schema; nothing"
    ):
        schema.install(connection)
    assert versions.present(connection) == schema.uninstall(connection) == []
    assert is_there(connection)


def test_a_schema_of_others_in_its_place_is_refused_and_stays(connection):
    connection.execute("drop schema pgchange_staging cascade; create schema pgchange_staging")
    with pytest.raises(Refused, match="schema pgchange_staging is there and is not ours"):
        schema.install(connection)
    schema.uninstall(connection)
    assert is_there(connection)


def test_a_schema_of_somebody_else_is_not_ours_by_a_comment_like_ours(connection, role):
    connection.execute("drop schema pgchange_staging cascade")
    connection.execute(f"create schema pgchange_staging authorization {role('someone').name}")
    connection.execute("comment on schema pgchange_staging is 'pgchange: results of batches'")
    with pytest.raises(psycopg.errors.DuplicateSchema):
        connection.execute("select pgchange.make_staging()")
    for held in (["core", "tube"], []):
        with pytest.raises(Refused, match="schema pgchange_staging is there and is not ours"):
            schema.install(connection, ["tube"])
        assert [name for name in ("core", "tube") if name in versions.present(connection)] == held
        schema.uninstall(connection)
        assert is_there(connection)


def test_a_staging_schema_with_another_comment_does_not_prevent_an_installation(connection):
    schema.uninstall(connection, ["tube"])
    connection.execute("comment on schema pgchange_staging is 'of our pipelines'")
    schema.install(connection)
    assert "tube" in versions.present(connection)
    schema.uninstall(connection)
    assert not is_there(connection)


def test_a_staging_schema_that_was_dropped_by_hand_is_created_again(connection):
    connection.execute("drop schema pgchange_staging cascade")
    schema.install(connection)
    assert stage(connection) == one(connection, "select name from pgchange.staged_tables()")


def test_a_staging_schema_left_by_a_core_dropped_by_hand_is_used_again(connection):
    name = stage(connection)
    connection.execute("drop schema pgchange cascade")
    schema.uninstall(connection, [system.folder for system in versions.SYSTEMS[1:]])
    schema.install(connection)
    assert name == one(connection, "select name from pgchange.staged_tables()")


def test_a_staging_schema_left_by_a_core_dropped_by_hand_is_removed_with_the_rest(connection):
    connection.execute("drop schema pgchange cascade; create table pgchange_staging.mine ()")
    with pytest.raises(
        Refused, match="schema pgchange_staging is used by others: table pgchange_staging.mine"
    ):
        schema.uninstall(connection)
    connection.execute("drop table pgchange_staging.mine")
    schema.uninstall(connection)
    assert not is_there(connection)


def test_a_staging_schema_that_lost_its_comment_in_a_restore_is_removed_with_the_core(connection):
    connection.execute(
        "comment on schema pgchange_staging is null; comment on table pgchange.installed is null"
    )
    assert schema.install(connection)
    schema.uninstall(connection)
    assert not is_there(connection)
