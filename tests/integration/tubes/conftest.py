"""Fixtures of several modules of the tests of tubes."""

from __future__ import annotations

import pytest

from tests.tubes import make, make_items


@pytest.fixture
def prepared_tube():
    """A function that makes a tube q."""
    return make


@pytest.fixture
def prepared_item():
    """A function that makes items in a table that is attached to a tube."""
    return make_items


@pytest.fixture
def q(prepared_tube, connect):
    """A connection to a database with a tube q."""
    return connect()


@pytest.fixture
def item(prepared_item, connect):
    """A connection to a database with items in a table that is attached to a tube."""
    return connect()
