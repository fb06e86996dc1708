"""Fixtures of several modules of the tests of tubes."""

from __future__ import annotations

import pytest

from tests.tubes import make, make_items


@pytest.fixture
def prepared_tube():
    """A function that creates a tube q, for databases that are prepared once."""
    return make


@pytest.fixture
def prepared_item():
    """A function that attaches a table with items to a tube, for databases that are prepared once."""
    return make_items


@pytest.fixture
def q(prepared_tube, connect):
    """A connection to a database with a tube q."""
    return connect()


@pytest.fixture
def item(prepared_item, connect):
    """A connection to a database with a table of items that is attached to tube q."""
    return connect()
