"""The grants that errors about missing rights advise."""

from __future__ import annotations

import pytest

from airflow_pgchange.feeds.grants import advice, declared

ADVISED = {
    ("schema pgmb", "copy pgmb.events (topic) from stdin"): "select pgmb.grant_writer('r')",
    ("function claim", 'select "pubsub"."claim"(null)'): "select pubsub.grant_consumer('r')",
    ("function skip_batch", "select pubsub.skip_batch(null)"): "select pubsub.grant_admin('r')",
    ("table tracked", "select revision.track('item')"): "select revision.grant_owner('r')",
    ("schema pgmb", "select pgchange.status()"): "select pgmb.grant_consumer('r')",
    ("schema mbus", "select mbus.post_q('n=>1')"): (
        "grant usage on schema mbus to r; grant execute on function mbus.post_q to r"
    ),
    (
        "table item",
        "select tube.claim('q', 0)\nSQL statement \"delete from own.item\"",
    ): "grant delete on own.item to r",
    ("table item", "select tube.claim('q', 0)"): "grant select, delete on item to r",
    ("schema own", "select id from own.item"): "grant usage on schema own to r",
    ("table item", "insert into own.item values (1)"): "grant insert on own.item to r",
    (
        "sequence item_id_seq",
        "select nextval('own.item_id_seq')",
    ): "grant usage on sequence own.item_id_seq to r",
    ("database d", "create schema x"): "grant create on database d to r",
    ("function pg_control_system", "select pgmb.here()"): (
        "grant execute on function pg_catalog.pg_control_system to r"
    ),
}


@pytest.mark.parametrize(("denied", "statement"), ADVISED, ids=lambda value: value)
def test_the_smallest_grant_that_suffices_is_advised(denied: str, statement: str) -> None:
    told = advice(f"permission denied for {denied}", statement, "r")
    assert told is not None
    assert told.rpartition(": ")[2] == ADVISED[denied, statement]


def test_the_name_of_a_role_is_quoted_as_in_sql() -> None:
    told = advice("permission denied for schema pgmb", "select pgmb.claim()", "Ann's")
    assert told == "let the owner of schema pgmb run: select pgmb.grant_consumer('\"Ann''s\"')"
    assert str(advice("permission denied for table t", "select", "Ann")).endswith(
        'grant select on t to "Ann"'
    )


def test_an_error_of_another_kind_has_no_grant() -> None:
    assert advice("must be owner of table item", "drop table item", "r") is None


def test_each_schema_of_ours_has_a_role() -> None:
    assert {role.schema for role in declared()} == {
        "pgchange", "revision", "pubsub", "tube", "pgmb", "mbus", "topology"
    }  # fmt: skip
