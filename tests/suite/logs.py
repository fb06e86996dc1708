"""Restore the root logger after each test: a command line that sets up logging would change it for the next test."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol() -> Iterator[None]:
    root = logging.getLogger()
    level, handlers = root.level, [*root.handlers]
    result = yield
    root.setLevel(level)
    root.handlers[:] = handlers
    return result
