"""Control pods: when they are due, and the ids that the downstream returns for them."""

from __future__ import annotations

import json

import psycopg
import pytest

from tests.tubes import attach, controls, drain, make, one, pods, take, touched

ALL = "select seq, type, tbl from tube.control_pods('q', 1, 0)"


def make_item(connection):
    connection.execute("create table item (id bigint primary key, n int default 0)")
    make(connection)
    attach(connection)


@pytest.fixture
def prepared_item():
    return make_item


def backfill(connection, table="item"):
    step1 = one(connection, "select tube.tube_backfill_step1()")
    connection.execute("select tube.tube_backfill_step3(%s, 'q', %s, 'id')", [step1, table])
    return int(step1)


def types(connection):
    return [row[1] for row in connection.execute(ALL)]


def test_an_end_pod_has_its_turn_when_the_backfill_is_done(item):
    item.execute("insert into item values (1), (2)")
    backfill(item)
    assert types(item) == []
    assert take(item) == [1, 2]
    assert types(item) == ["backfill_start", "backfill_end"]


def test_an_incremental_control_pod_does_not_wait_for_a_backfill(item):
    item.execute("insert into item values (1), (2)")
    drain(item)
    backfill(item)
    item.execute("truncate item")
    assert types(item) == ["backfill_start", "truncate"]


def test_a_control_pod_waits_for_what_was_touched_before_it_and_not_for_what_came_later(item):
    item.execute("insert into item values (1)")
    item.execute("truncate item")
    item.execute("insert into item values (2)")
    assert types(item) == []
    assert take(item, limit=1) == [1]
    assert types(item) == ["truncate"]


def test_a_control_pod_is_taken_away_once(item):
    item.execute("truncate item")
    ((seq, _, _),) = item.execute(ALL).fetchall()
    item.execute("select tube.control_done('q', 1, 0, %s)", [seq])
    assert controls(item) == []
    with pytest.raises(psycopg.Error, match="has no control pod"):
        item.execute("select tube.control_done('q', 1, 0, %s)", [seq])


def test_it_is_taken_away_with_the_transaction_or_not_at_all(item, connect):
    item.execute("truncate item")
    ((seq, _, _),) = item.execute(ALL).fetchall()
    worker = connect(autocommit=False)
    worker.execute("select tube.collect('q', 1, 0, %s, '{1}')", [seq])
    worker.execute("select tube.control_done('q', 1, 0, %s)", [seq])
    worker.rollback()
    assert len(controls(item)) == 1
    assert pods(item) == []


def test_another_workers_control_pod_cannot_be_taken_away(connect):
    connection = connect()
    make(connection, workers=2)
    connection.execute("""select tube.touch('q', 1, '{}', 'T', '{"type": "mine"}')""")
    with pytest.raises(psycopg.Error, match="has no control pod"):
        connection.execute("select tube.control_done('q', 2, 0, 1)")
    connection.execute("select tube.control_done('q', 2, 1, 1)")


@pytest.mark.parametrize("tbl", ["", "a.b.c.d", 'a"', "1", None])
def test_a_control_pod_of_a_users_own_may_name_anything(item, tbl):
    payload = json.dumps({"type": "mine", "tbl": tbl})
    item.execute("select tube.touch('q', 0, '{}', 'T', %s)", [payload])
    item.execute("select tube.touch('q', 0, '{}', 'T', '[1]')")
    assert [row[1:] for row in item.execute(ALL)] == [("mine", tbl), (None, None)]
    item.execute("insert into item values (1)")
    backfill(item)
    assert item.execute("select * from tube.tube_stats(), tube.status()").fetchone()


class Mirror:
    """A downstream that stores the table of each id, and the seq of the last write of the id."""

    def __init__(self, connection):
        self.connection = connection
        self.rows = {}

    def work(self):
        query = (
            "select c.id, c.seq, c.shard from tube.worker_now('q', 0) as w "
            "cross join tube.changes('q', 0, w.batch -> 'bounds', '{-2147483648, -1}', '{2147483647, 64}') as c"
        )
        self.connection.execute("select tube.register('q', 1, 0)")
        while one(self.connection, "select tube.claim('q', 0, tube.position('q', 0), 3, 1)"):
            for id_, seq, _ in self.connection.execute(query).fetchall():
                found = None
                for table in ("item", "other"):
                    found = (
                        found
                        or self.connection.execute(
                            f"select '{table}' from {table} where id = %s", [id_]
                        ).fetchone()
                    )
                if found:
                    self.rows[id_] = (found[0], seq)
                else:
                    self.rows.pop(id_, None)
            self.connection.execute("select tube.ack('q', 0, (tube.worker_now('q', 0)).batch)")
        for seq, kind, table in self.connection.execute(ALL).fetchall():
            name = table.removeprefix("public.")
            payload = one(self.connection, "select payload from q where seq = %s", seq)
            if kind in ("truncate", "backfill_end"):
                before = int(payload.get("start_seq", 2**62))
                held = [id_ for id_, (of, at) in self.rows.items() if of == name and at < before]
                self.connection.execute("select tube.collect('q', 1, 0, %s, %s)", [seq, held])
            self.connection.execute("select tube.control_done('q', 1, 0, %s)", [seq])


@pytest.fixture
def mirror(item):
    item.execute("create table other (id bigint primary key)")
    attach(item, "other")
    return Mirror(item)


def settle(mirror):
    for _ in range(3):
        mirror.work()
    assert pods(mirror.connection) == []
    return sorted(mirror.rows)


def test_after_a_backfill_what_the_source_lost_unseen_is_gone_downstream_and_of_that_table_only(item, mirror):
    item.execute("insert into item select generate_series(1, 10)")
    item.execute("insert into other select generate_series(101, 105)")
    assert len(settle(mirror)) == 15
    with item.transaction():
        item.execute("set local session_replication_role = replica")
        item.execute("delete from item where id in (3, 4)")
        item.execute("delete from other where id = 101")
    backfill(item)
    assert settle(mirror) == [1, 2, 5, 6, 7, 8, 9, 10, *range(101, 106)]
    assert controls(item) == []
    backfill(item, "other")
    assert 101 not in settle(mirror)


def test_rows_that_are_written_before_the_control_pods_turn_are_not_given_up(item, mirror):
    item.execute("insert into item values (1), (2)")
    settle(mirror)
    backfill(item)
    item.execute("insert into item values (3)")
    assert settle(mirror) == [1, 2, 3]


def test_after_a_truncate_everything_of_the_table_is_gone_and_what_came_since_is_there(item, mirror):
    item.execute("insert into item select generate_series(1, 10)")
    item.execute("insert into other values (101)")
    settle(mirror)
    item.execute("truncate item")
    item.execute("insert into item values (4)")
    assert settle(mirror) == [4, 101]


def test_collected_ids_are_of_the_control_pods_kind(item):
    item.execute("insert into item values (1)")
    backfill(item)
    drain(item)
    end = next(row[0] for row in item.execute(ALL) if row[1] == "backfill_end")
    assert one(item, "select tube.collect('q', 1, 0, %s, '[0:2]={7,8,null}')", end) == 2
    assert pods(item) == [("B", 0, [7, 8])]
    item.execute("truncate item")
    assert touched(item) == [7, 8]


def test_collected_ids_are_under_the_shard_that_the_table_has_now(item):
    """The shard in the control pod may belong to another worker now, which could have the ids in work at the same
    time."""
    item.execute("truncate item")
    attach(item, shard=4)
    seq = item.execute(ALL).fetchone()[0]
    item.execute("select tube.collect('q', 1, 0, %s, array[7])", [seq])
    assert pods(item) == [("T", 4, [7])]
    item.execute("select tube.tube_table_ensure_detached('q', 'item')")
    item.execute("select tube.collect('q', 1, 0, %s, array[8])", [seq])
    assert pods(item)[1:] == [("T", 4, [8])]


def test_a_transaction_that_does_not_see_that_a_table_was_attached_anew_is_to_be_repeated(item, connect):
    """The transaction would touch the ids under the shard that the table had when it was detached."""
    item.execute("truncate item")
    item.execute("select tube.tube_table_ensure_detached('q', 'item')")
    seq = item.execute(ALL).fetchone()[0]
    worker = connect()
    with pytest.raises(psycopg.errors.SerializationFailure), worker.transaction():
        worker.execute("set transaction isolation level repeatable read")
        worker.execute("select from item")
        attach(item, shard=4)
        worker.execute("select tube.collect('q', 1, 0, %s, '{7}')", [seq])
    assert pods(item) == []
