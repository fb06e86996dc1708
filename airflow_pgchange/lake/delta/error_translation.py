"""Translate errors of ``deltalake`` and Arrow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from deltalake.exceptions import DeltaError, DeltaProtocolError

from airflow_pgchange.errors import MergeRefused, PgChangeError
from airflow_pgchange.lake.tables import Delta


@contextmanager
def refusals(lake: Delta) -> Iterator[None]:
    """Turn errors of ``deltalake`` and Arrow about rows or tables into MergeRefused.

    If a store cannot be reached, ``deltalake`` raises an OSError while it reads, but a DeltaError while it commits. The
    latter becomes an OSError, too.
    """
    try:
        yield
    except PgChangeError:
        raise
    except (ValueError, NotImplementedError, OverflowError, DeltaProtocolError) as error:
        raise MergeRefused(f"{lake}: {error}") from error
    except DeltaError as error:
        raise OSError(f"{lake}: {error}") from error
