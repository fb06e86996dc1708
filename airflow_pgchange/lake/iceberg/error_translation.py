"""Translate errors of PyIceberg and Arrow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
from pyiceberg.io.pyarrow import UnsupportedPyArrowTypeException

from airflow_pgchange.errors import MergeRefused, PgChangeError
from airflow_pgchange.lake.tables import LakeTable


@contextmanager
def refusals(lake: LakeTable) -> Iterator[None]:
    """Turn errors of PyIceberg and Arrow about rows or tables into MergeRefused."""
    try:
        yield
    except PgChangeError:
        raise
    except (
        ValueError,
        NotImplementedError,
        OverflowError,
        pa.ArrowInvalid,
        pa.ArrowNotImplementedError,
        UnsupportedPyArrowTypeException,
    ) as error:
        raise MergeRefused(f"{lake}: {error}") from error
