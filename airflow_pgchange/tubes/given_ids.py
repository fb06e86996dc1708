"""The ids that a downstream gives, checked one by one."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

from airflow_pgchange.errors import InvalidArgument


def each_id(held: object) -> Iterator[int]:
    """What a downstream gave, where it is ids. A text would be taken for its digits."""
    if not isinstance(held, Iterable) or isinstance(held, (str, bytes, bytearray)):
        raise InvalidArgument(f"{held!r:.100} is no list of ids: a downstream gives a list, or yields them")
    return (_id(each) for each in held if each is not None)


def _id(given: Any) -> int:
    try:
        number = int(given) if isinstance(given, str) else operator.index(given)
    except (TypeError, ValueError):
        number = None
    if number is None or isinstance(given, bool) or not -(2**63) <= number < 2**63:
        raise InvalidArgument(f"{given!r:.100} is no id: ids are whole numbers of 64 bits, as bigint is")
    return number
