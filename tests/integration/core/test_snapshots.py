"""Functions for transaction ids and snapshots, compared with sets of ids."""

from __future__ import annotations

import random

TOP = 60


def snapshot(chance):
    xmax = chance.randint(1, TOP)
    open_xids = sorted(chance.sample(range(1, xmax), chance.randint(0, min(5, xmax - 1))))
    xmin = open_xids[0] if open_xids else xmax
    return f"{xmin}:{xmax}:{','.join(map(str, open_xids))}"


def seen(connection, text):
    rows = connection.execute(
        "select x from generate_series(0, %s) as x where pg_visible_in_snapshot(x::text::xid8, %s::pg_snapshot)",
        [TOP + 1, text],
    ).fetchall()
    return {row[0] for row in rows}


def test_the_union_sees_what_either_sees(connect):
    connection, chance = connect(), random.Random(1)
    for _ in range(300):
        a, b = snapshot(chance), snapshot(chance)
        union = connection.execute("select pgchange.snapshot_union(%s, %s)::text", [a, b]).fetchone()[0]
        assert seen(connection, union) == seen(connection, a) | seen(connection, b)


def test_below_a_transaction_it_sees_the_same_and_above_nothing(connect):
    connection, chance = connect(), random.Random(2)
    for _ in range(200):
        a, x = snapshot(chance), chance.randint(1, TOP)
        cut = connection.execute(
            "select pgchange.snapshot_below(%s, %s::text::xid8)::text", [a, x]
        ).fetchone()[0]
        assert seen(connection, cut) == {n for n in seen(connection, a) if n < x}


def test_with_one_transaction_more_it_sees_just_that_one_more(connect):
    connection, chance = connect(), random.Random(3)
    for _ in range(200):
        a, x = snapshot(chance), chance.randint(1, TOP)
        more = connection.execute(
            "select pgchange.snapshot_with(%s, %s::text::xid8)::text", [a, x]
        ).fetchone()[0]
        assert seen(connection, more) == seen(connection, a) | {x}


def test_twenty_thousand_transactions_above_an_open_one_leave_one_entry(connect):
    connection = connect()
    union = connection.execute(
        "select pgchange.snapshot_union('100:101:100', '100:20100:100')::text"
    ).fetchone()
    assert union == ("100:20100:100",)


def test_a_transaction_id_keeps_its_epoch(connect):
    connection = connect()
    [own] = connection.execute(
        "select pgchange.full_xid((pg_current_xact_id()::text::bigint & 4294967295)::text::xid) = pg_current_xact_id()"
    ).fetchone()
    assert own
    [near] = connection.execute("select pg_snapshot_xmax(pg_current_snapshot())::text::bigint").fetchone()
    [ahead] = connection.execute(
        "select pgchange.full_xid(%s::text::xid)::text::bigint", [str(near + 1000)]
    ).fetchone()
    assert ahead == near + 1000
