"""Servers on which PUBLIC may not execute some functions of PostgreSQL, as on some managed services."""

from __future__ import annotations

import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from airflow_pgchange.admin import schema
from airflow_pgchange.errors import PermissionDenied
from airflow_pgchange.feeds.error_translation import translated
from airflow_pgchange.feeds.queries import ask

OWN = ["revision", "pubsub", "tube", "pgmb", "topology"]
"""Systems that a role without CREATEROLE can install."""
USED = {
    "pg_control_system()": "select pgchange.cluster()",
    "pg_walfile_name(pg_lsn)": "select topology.begin_term()",
    "pg_current_wal_insert_lsn()": "select topology.begin_term()",
    "pg_postmaster_start_time()": "select topology.begin_term()",
    "pg_relation_filenode(regclass)": "select topology.begin_term()",
}
"""Functions of PostgreSQL that our SQL calls, each with a call of ours that needs it."""


@pytest.fixture
def owner(role, bare_db, connect_to):
    """A role that may create schemas in an empty database, and a session of a superuser and one of the role there."""
    made = role("owner")
    admin = connect_to(bare_db)
    admin.execute(
        sql.SQL("grant create on database {} to {}").format(
            sql.Identifier(admin.info.dbname), sql.Identifier(made.name)
        )
    )
    return made.name, admin, connect_to(make_conninfo(bare_db, user=made.name))


def revoke(admin, function):
    admin.execute(f"revoke execute on function pg_catalog.{function} from public")


def test_an_install_that_may_not_call_a_revoked_function_says_which_grant_it_needs(owner):
    name, admin, session = owner
    revoke(admin, "pg_control_system()")
    with pytest.raises(
        PermissionDenied, match="grant execute on function pg_catalog.pg_control_system to"
    ) as caught:
        schema.install(session, OWN)
    assert "create on database" not in str(caught.value)
    admin.execute(f"grant execute on function pg_catalog.pg_control_system to {name}")
    assert {made.system for made in schema.install(session, OWN)} >= set(OWN)


@pytest.mark.parametrize(("function", "call"), USED.items(), ids=USED)
def test_an_error_about_a_revoked_function_names_the_missing_grant(owner, function, call):
    name, admin, session = owner
    schema.install(session, ["topology"])
    revoke(admin, function)
    needed = function.partition("(")[0]
    with (
        pytest.raises(PermissionDenied, match=f"grant execute on function pg_catalog.{needed} to"),
        translated(),
    ):
        ask(session, call)
    admin.execute(f"grant execute on function pg_catalog.{needed} to {name}")
    ask(session, call)
