"""Fixtures of several modules of the tests of message queues."""

from __future__ import annotations

import pytest

from tests.queues import make, under_roles


@pytest.fixture
def q(connect):
    """A connection to a database with a queue q."""
    connection = connect()
    make(connection)
    return connection


@pytest.fixture
def owner(connect):
    """A connection to a database with queues under roles, as the owner of the queues."""
    with under_roles(connect()) as connection:
        yield connection
