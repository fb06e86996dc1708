"""A tube never makes a user's write fail."""

from __future__ import annotations

import threading

import psycopg
import pytest

from airflow_pgchange.admin.maintenance import maintain
from tests.limits import shorten_locks
from tests.tube_writers import PREDICATES, make_item, make_owner, writes
from tests.tubes import attach, controls, detach, faults, make, one, pods, touched
from tests.waiting import until, waits

JUDGED = "kind <> 'never'"


@pytest.fixture
def item(connect):
    return make_item(connect())


@pytest.fixture
def owner(connect, role):
    """A role that owns a table attached to the superuser's tube."""
    return make_owner(connect(), role)


@pytest.mark.parametrize(
    "accident",
    [
        "revoke insert on {pods} from {owner}",
        "revoke usage on schema tube from {owner}",
        "revoke usage on sequence tube.seq from {owner}",
        "revoke all on tube.fault from {owner}",
        "revoke execute on all functions in schema tube from {owner}",
        "alter table {pods} rename to {pods}_renamed",
        "drop table {pods}",
        "drop schema tube cascade",
    ],
)
def test_a_write_succeeds_whatever_happens_to_the_tubes(connect, owner, accident):
    """The table is attached to a tube with a predicate, and to a tube without one."""
    connection = connect()
    make(connection, "judged", predicate=JUDGED)
    connection.execute(f"grant insert, select on judged to {owner.name}")
    with psycopg.connect(owner.conninfo, autocommit=True) as session:
        attach(session, "own.item", "judged")
    for pods_of in ("q", "judged") if "{pods}" in accident else ("q",):
        connection.execute(accident.format(pods=pods_of, owner=owner.name))
    writes(owner.conninfo, "own.item")
    # A renamed key column makes the capture take its slow path, too.
    connection.execute("alter table own.item rename id to number")
    with psycopg.connect(owner.conninfo, autocommit=True) as session:
        session.execute("insert into own.item values (5)")
        session.execute("update own.item set number = 6")
        session.execute("delete from own.item")
    connection.execute("alter table own.item alter number type text")
    with psycopg.connect(owner.conninfo, autocommit=True) as session:
        session.execute("insert into own.item values ('x')")


def test_a_fault_that_cannot_be_noted_does_not_lose_the_touch(connect, owner):
    connection = connect()
    connection.execute(f"revoke all on tube.fault from {owner.name}")
    connection.execute("alter table own.item alter id type text")
    with psycopg.connect(owner.conninfo, autocommit=True, options="-c application_name=backfill") as session:
        session.execute("insert into own.item values ('x'), ('12')")
    assert pods(connection) == [("B", 0, [12])]


def test_an_owner_that_may_only_insert_pods_has_its_truncations_captured(connect, owner):
    with psycopg.connect(owner.conninfo, autocommit=True) as session:
        session.execute("truncate own.item")
    assert controls(connect()) == [("T", 0, {"type": "truncate", "tbl": "own.item"})]


def test_a_write_that_cannot_be_captured_warns(connect, owner):
    connect().execute(f"revoke insert on q from {owner.name}")
    notices = []
    with psycopg.connect(owner.conninfo, autocommit=True) as session:
        session.add_notice_handler(lambda notice: notices.append(notice.message_primary))
        session.execute("insert into own.item values (1)")
    assert "not captured" in notices[0]


@pytest.mark.parametrize("deed", ["reassign owned by {owner} to {heir}", "revoke all on q from {owner}"])
def test_touches_that_are_lost_are_told(connect, owner, role, deed):
    connection, heir = connect(), role("heir")
    connection.execute(f"grant all on schema own to {heir.name}")
    assert one(connection, "select lost from tube.attachments()") is None
    connection.execute(deed.format(owner=owner.name, heir=heir.name))
    connection.execute("insert into own.item values (7), (8)")
    connection.execute("truncate own.item")
    assert touched(connection) == controls(connection) == []
    who = heir.name if "heir" in deed else owner.name
    told = (
        f"own.item: its owner, {who}, may not write the pods of tube q: changes are lost; "
        f"let their owners run: select tube.grant_consumer('{who}'); grant usage on schema public to {who}; "
        f"grant insert (op, shard, ids, payload, ts) on public.q to {who}; then backfill it"
    )
    assert told in maintain(connection).attention
    if who == owner.name:
        # Any role that may use tubes can record the fault, not only the owner.
        assert [(ids, message.split(":")[0]) for ids, message in faults(connection)] == [
            (2, "rows are lost"),
            (0, "a truncation is lost"),
        ]
    connection.execute(told.split("run: ")[1].removesuffix("; then backfill it"))
    assert one(connection, "select lost from tube.attachments()") is None
    connection.execute("insert into own.item values (9)")
    assert touched(connection) == [9]


def test_truncations_that_are_lost_are_told(connect, owner):
    connection = connect()
    connection.execute(f"revoke insert (payload) on q from {owner.name}")
    assert "truncations are lost" in one(connection, "select lost from tube.attachments()")


def test_a_reader_of_pods_can_write_while_the_number_of_workers_changes(item, connect):
    writer = connect(autocommit=False)
    writer.execute("select from q")
    changing = threading.Thread(target=make, args=[connect()], kwargs={"workers": 2})
    changing.start()
    until(item, waits(relation="q"))
    writer.execute("insert into item values (1)")
    writer.commit()
    changing.join()
    assert one(item, "select partitions from tube.tube") == 2


@PREDICATES
def test_users_prepared_transactions_go_on_working(item, predicate):
    make(item, predicate=predicate)
    item.execute("begin")
    item.execute("insert into item values (1)")
    item.execute("update item set id = 2")
    item.execute("prepare transaction 'tube-test'")
    assert pods(item) == []
    item.execute("commit prepared 'tube-test'")
    assert touched(item) == [1, 1, 2]


@PREDICATES
def test_a_write_takes_no_second_transaction_id(connect, predicate):
    connection = connect()
    connection.execute("create table item (id bigint primary key, kind text not null default 'a')")
    make(connection, predicate=predicate)
    attach(connection)
    with connection.transaction():
        own = one(connection, "select pg_current_xact_id()::text::bigint")
        for n in range(100):
            connection.execute("insert into item values (%s)", [n])
            connection.execute("update item set kind = 'b' where id = %s", [n])
    following = one(connection, "select pg_current_xact_id()::text::bigint")
    assert following - own < 100


def test_writers_go_on_while_a_table_is_attached_and_detached(item, connect):
    failures, stop = [], threading.Event()
    begun, inserted = [0, 0], [list[int](), list[int]()]

    def write(part):
        connection = connect()
        n = part
        while not stop.is_set():
            begun[part] = n
            try:
                connection.execute("insert into item values (%s)", [n])
            except psycopg.Error as error:
                failures.append(error)
                return
            inserted[part].append(n)
            n += 2

    threads = [threading.Thread(target=write, args=[part]) for part in (0, 1)]
    for thread in threads:
        thread.start()
    for turn in range(10):
        detach(item)
        attach(item, shard=turn)
    # For these two rows it is unknown whether they were written before the capture.
    latest = list(begun)
    while min(n - last for n, last in zip(begun, latest, strict=True)) < 50:
        pass
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    since = {n for part, last in zip(inserted, latest, strict=True) for n in part if n > last}
    assert len(since) >= 40
    assert since <= set(touched(item))


def test_attaching_does_not_wait_for_a_writer_for_ever(item, connect):
    detach(item)
    writer = connect(autocommit=False)
    writer.execute("insert into item values (1)")
    shorten_locks(item)
    item.execute("set statement_timeout = '15s'")
    with pytest.raises(psycopg.errors.LockNotAvailable, match="being written"):
        attach(item)
    assert item.execute("select tbl from tube.tube_list() where tbl is not null").fetchall() == []


def test_a_new_shard_does_not_wait_for_a_writer_for_ever(item, connect):
    writer = connect(autocommit=False)
    writer.execute("insert into item values (1)")
    shorten_locks(item)
    item.execute("set statement_timeout = '15s'")
    with pytest.raises(psycopg.errors.LockNotAvailable, match="being written"):
        attach(item, shard=7)
    writer.commit()
    assert [shard for _, shard, _ in pods(item)] == [0]


def test_detaching_does_not_wait_for_a_writer_for_ever_and_leaves_the_capture_whole(item, connect):
    writer = connect(autocommit=False)
    writer.execute("insert into item values (1)")
    shorten_locks(item)
    item.execute("set statement_timeout = '15s'")
    with pytest.raises(psycopg.errors.LockNotAvailable, match="being used"):
        detach(item)
    writer.execute("update item set kind = 'b'")
    writer.commit()
    assert touched(item) == [1, 1]


def test_uninstalling_leaves_users_tables_writable(item):
    from airflow_pgchange.admin import schema

    schema.uninstall(item, ["tube"])
    item.execute("insert into item values (1)")
    item.execute("truncate item")
    assert one(item, "select count(*) from pg_trigger where tgrelid = 'item'::regclass") == 0
