"""What several modules of the tests of tubes need."""

from __future__ import annotations

import pytest

from tests.tubes import make, make_items


@pytest.fixture
def q(connect):
    """A connection to a database with a tube q."""
    connection = connect()
    make(connection)
    return connection


@pytest.fixture
def item(connect):
    """A connection to a database with items in a table that is attached to a tube."""
    connection = connect()
    make_items(connection)
    return connection
