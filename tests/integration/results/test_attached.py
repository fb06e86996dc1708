"""The tables that count as copies of tables attached to a tube."""

from __future__ import annotations

import pytest

from airflow_pgchange.errors import PermissionDenied
from airflow_pgchange.results.attached_tables import Attached


def test_a_copy_is_taken_for_one_where_keeper_and_writer_may_write_it_and_nobody_else_owns_it(connect, role):
    ledger = connect()
    ledger.execute("create schema finance; create table finance.ledger (id bigint primary key)")
    keeper, stranger = role("keeper").name, role("stranger").name
    attached = Attached("finance", 0, "public", "ledger", ("id",), keeper=keeper)
    with pytest.raises(
        PermissionDenied,
        match=f"finance.ledger is not written, because {keeper}, the owner of tube finance, may not",
    ):
        attached.copy_in(ledger, "{tube}.{table}")
    assert attached.copy_in(ledger, "finance.{table}") == "finance.ledger"
    ledger.execute(f"grant select, insert, update, delete on finance.ledger to {keeper}")
    assert attached.copy_in(ledger, "{tube}.{table}") == "finance.ledger"
    ledger.execute(f"alter table finance.ledger owner to {stranger}")
    with pytest.raises(PermissionDenied, match=f"belongs to {stranger}, whose triggers would run"):
        attached.copy_in(ledger, "{tube}.{table}")
