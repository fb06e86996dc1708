"""Upgrades of installed schemas: all data is kept, or nothing has changed."""

from __future__ import annotations

import shutil
from dataclasses import replace

import psycopg
import pytest

from airflow_pgchange.admin import upgrades, versions
from airflow_pgchange.errors import ConsumerBusy, SchemaVersionMismatch
from airflow_pgchange.feeds import ConsumerTransaction
from tests.events import FEED, drain, poll_all, publish, subscribe

COLUMN = """
alter table pgmb.events add column region text;
insert into pgmb.installed (version) values (2);
"""
FUNCTION = """
create function pgmb.region_of(event pgmb.events) returns text language sql return event.region;
insert into pgmb.installed (version) values (3);
"""


@pytest.fixture
def newer(tmp_path, monkeypatch):
    """Turn this package into a newer version, whose event log is upgraded by these files."""

    def make(*upgrades: str) -> None:
        folder = tmp_path / "sql"
        shutil.copytree(versions.sql_folder(), folder)
        (folder / "pgmb" / "upgrade").mkdir()
        for version, text in enumerate(upgrades, start=2):
            (folder / "pgmb" / "upgrade" / f"{version:04}_more.sql").write_text(text)
        systems = [
            replace(system, version=1 + len(upgrades)) if system.folder == "pgmb" else system
            for system in versions.SYSTEMS
        ]
        monkeypatch.setattr(versions, "sql_folder", lambda: folder)
        monkeypatch.setattr(versions, "SYSTEMS", tuple(systems))

    return make


def log_of(connection):
    return next(found for found in versions.installed(connection) if found.system == "pgmb")


def test_an_upgrade_keeps_what_was_published_and_how_far_a_group_has_read(connect, newer):
    connection = connect()
    subscribe(connection)
    publish(connection, "read")
    drain(connection)
    dispatched = publish(connection, "dispatched")
    poll_all(connection)
    published = publish(connection, "published")
    newer(COLUMN, FUNCTION)
    lines = []
    [found] = [found for found in upgrades.upgrade(connection, lines.append) if found.system == "pgmb"]
    assert lines == [
        "schema pgmb: version 1 to 2, 0002_more.sql",
        "schema pgmb: version 2 to 3, 0003_more.sql",
    ]
    assert (found.version, found.needed, found.intact) == (3, 3, True)
    assert drain(connection) == dispatched + published
    connection.execute("insert into pgmb.events (topic, payload, region) values ('t', '{}', 'north')")
    assert connection.execute(
        "select pgmb.region_of(e) from pgmb.events as e where region <> ''"
    ).fetchall() == [("north",)]


def test_an_upgrade_that_fails_changes_nothing_and_can_be_tried_again(connect, newer):
    connection = connect()
    newer(COLUMN, "create table pgmb.more (); select 1/0")
    with pytest.raises(psycopg.errors.DivisionByZero):
        upgrades.upgrade(connection)
    assert log_of(connection).version == 1
    assert connection.execute("select to_regclass('pgmb.more')").fetchone() == (None,)
    (versions.sql_folder() / "pgmb" / "upgrade" / "0003_more.sql").write_text(FUNCTION)
    upgrades.upgrade(connection)
    assert log_of(connection).version == 3


def test_an_upgrade_that_does_not_say_its_version_is_undone(connect, newer):
    connection = connect()
    newer("create table pgmb.more ()")
    with pytest.raises(SchemaVersionMismatch, match="0002_more.sql left schema pgmb at version 1"):
        upgrades.upgrade(connection)
    assert connection.execute("select to_regclass('pgmb.more')").fetchone() == (None,)


def test_an_upgrade_ends_if_others_hold_a_lock_for_too_long(connect, newer):
    connection, writer = connect(), connect()
    newer(COLUMN)
    connection.execute("set lock_timeout = '50ms'")
    with writer.transaction():
        publish(writer, "waiting")
        with pytest.raises(
            ConsumerBusy, match="0002_more.sql waited too long .* nothing was changed: pause the DAGs"
        ):
            upgrades.upgrade(connection)
    assert log_of(connection).version == 1
    connection.execute("reset lock_timeout")
    upgrades.upgrade(connection)
    assert connection.execute("show lock_timeout").fetchone() == ("0",)


def test_a_batch_that_was_claimed_before_an_upgrade_is_acked_and_the_next_claim_is_refused(
    db, connect, newer
):
    connection = connect()
    subscribe(connection)
    published = publish(connection, "t")
    poll_all(connection)
    newer(COLUMN)
    with ConsumerTransaction(FEED, db) as consumer:
        consumer.claim()
        upgrades.upgrade(connection)
        assert [change.id for change in consumer.changes()] == published
        consumer.ack()
    with (
        pytest.raises(SchemaVersionMismatch, match="holds version 2"),
        ConsumerTransaction(FEED, db) as consumer,
    ):
        consumer.claim()
    assert drain(connection) == []


GRANTS = """
create function pgmb.region_of(event pgmb.events) returns text language sql as 'select null';
revoke all on function pgmb.region_of from public;
create or replace function pgmb.grant_consumer(role regrole) returns void language plpgsql as $$
begin
    execute format('grant execute on function pgmb.region_of to %s', role);
end
$$;
insert into pgmb.installed (version) values (2);
"""


def test_roles_get_the_rights_that_an_upgrade_adds_to_their_grants(connect, newer, role):
    connection, reader, publisher = connect(), role("reader"), role("Publisher")
    connection.execute(
        "select pgmb.grant_consumer(%s), pgmb.grant_writer(%s)", [reader.name, f'"{publisher.name}"']
    )
    newer(GRANTS)
    upgrades.upgrade(connection)
    query = "select has_function_privilege(%s, 'pgmb.region_of(pgmb.events)', 'execute')"
    may = [connection.execute(query, [each.name]).fetchone()[0] for each in (reader, publisher)]
    assert may == [True, False]


def test_two_that_upgrade_at_once_do_it_once(connect, newer):
    first, second = connect(), connect()
    newer(COLUMN)
    second.execute("set lock_timeout = '100ms'")
    with first.transaction():
        upgrades.upgrade(first)
        with pytest.raises(ConsumerBusy):
            upgrades.upgrade(second)
    # Autovacuum yields to a session only after that session has waited for a while.
    second.execute("reset lock_timeout")
    upgrades.upgrade(second)
    assert second.execute("select version from pgmb.installed order by version").fetchall() == [(1,), (2,)]


def test_a_database_that_is_ahead_of_the_package_is_not_upgraded(db, connect_to):
    connection = connect_to(db)
    connection.execute("insert into revision.installed (version) values (99)")
    with pytest.raises(SchemaVersionMismatch, match="install the newer package"):
        upgrades.upgrade(connection)


def test_an_upgrade_that_the_package_lacks_is_said(db, connect_to, monkeypatch):
    systems = [replace(system, version=system.version + 1) for system in versions.SYSTEMS]
    monkeypatch.setattr(versions, "SYSTEMS", tuple(systems))
    with pytest.raises(SchemaVersionMismatch, match="no upgrade of schema pgchange from version 1"):
        upgrades.upgrade(connect_to(db))
