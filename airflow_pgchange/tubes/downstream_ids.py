"""Check the ids that a downstream returns."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from airflow_pgchange.errors import InvalidArgument
from airflow_pgchange.feeds.keys import BIGINT, text, value


def each_id(held: object, types: Sequence[str]) -> Iterator[int | str]:
    """Yield the ids that a downstream returned: numbers, or keys of other ``types`` as text.

    Raises InvalidArgument for an invalid id. Also for a text in place of a list, because it would be read as a list of
    its characters.
    """
    if not isinstance(held, Iterable) or isinstance(held, (str, bytes, bytearray)):
        raise InvalidArgument(
            f"{held!r:.100} is not a list of ids: a downstream returns a list, or yields ids"
        )
    if tuple(types) == BIGINT:
        return (_id(each) for each in held if each is not None)
    return (_text(each, types) for each in held if each is not None)


def _id(id_: Any) -> int:
    try:
        number = int(id_) if isinstance(id_, str) else operator.index(id_)
    except (TypeError, ValueError):
        number = None
    if number is None or isinstance(id_, bool) or not -(2**63) <= number < 2**63:
        raise InvalidArgument(f"{id_!r:.100} is not an id: ids are whole numbers of 64 bits, like bigint")
    return number


def _text(id_: Any, types: Sequence[str]) -> str:
    if len(types) == 1:
        return str(id_)
    if not isinstance(id_, (str, tuple, list)) or None in id_:
        raise InvalidArgument(f"{id_!r:.100} is not an id: ids are tuples of {', '.join(types)}")
    return text(value(id_ if isinstance(id_, str) else [str(part) for part in id_], types))
