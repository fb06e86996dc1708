"""Translate the errors of an Iceberg catalog into errors of this package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pyiceberg.exceptions import (
    BadRequestError,
    ForbiddenError,
    NoSuchTableError,
    NotInstalledError,
    OAuthError,
    RESTError,
    UnauthorizedError,
)

from airflow_pgchange.errors import (
    ExtraMissing,
    InvalidArgument,
    PermissionDenied,
    PgChangeError,
    ServerUnavailable,
)
from airflow_pgchange.feeds.error_text import without_secrets
from airflow_pgchange.lake.tables import RemoteIceberg

DENIED = (UnauthorizedError, ForbiddenError, OAuthError)
"""Errors by which a catalog refuses the user."""
MISTAKES = (ValueError, NotImplementedError, BadRequestError)
"""Errors by which a catalog, or PyIceberg, refuses its configuration. Errors about a malformed address are
ValueErrors."""
MISTAKES_BY_NAME = {"ArgumentError", "ProgrammingError", "NoRegionError", "ProfileNotFound"}
"""Such errors of SQLAlchemy and botocore, which may not be installed."""


@contextmanager
def answers(lake: RemoteIceberg) -> Iterator[None]:
    """Turn the errors of a catalog into our errors."""
    try:
        yield
    except PgChangeError:
        raise
    except Exception as error:  # noqa: BLE001
        # The cause is left out, because its text may have the catalog's address with the password.
        raise as_ours(lake, error) from None


def as_ours(lake: RemoteIceberg, error: Exception) -> PgChangeError:
    """Return our error for an error of a catalog, or of PyIceberg on its way there.

    An error of the configuration needs a person. Any other error is taken for an outage, so a retry may help.
    """
    where = f"{lake}: the catalog {lake.catalog}"
    if isinstance(error, NoSuchTableError):
        return InvalidArgument(f"{where} has no table {lake.table}: make it first, or correct its name")
    if isinstance(error, NotInstalledError | ImportError):
        return ExtraMissing(f"{where} cannot be opened: {text_of(error)}")
    if isinstance(error, DENIED):
        return PermissionDenied(
            f"{where} refuses the user: {text_of(error)}: correct the credentials in PyIceberg's configuration, or give "
            "the user the rights to load the table and to commit to it"
        )
    if _is_mistake(error):
        return InvalidArgument(
            f"{where} cannot be opened as PyIceberg's configuration says: {text_of(error)}: correct its type, address, "
            "warehouse or other settings"
        )
    return ServerUnavailable(
        f"{where} has not answered: {text_of(error)}: check the catalog's address in PyIceberg's configuration, and that "
        "it is up, then try again"
    )


def text_of(error: Exception) -> str:
    """Return the kind and the text of an error, without secrets."""
    return without_secrets(f"{type(error).__name__}: {error}", ())


def _is_mistake(error: Exception) -> bool:
    # RESTError itself stands for answers such as 404 and 422. Its subclasses are errors of the server, and those above.
    return (
        isinstance(error, MISTAKES)
        or type(error) is RESTError
        or any(kind.__name__ in MISTAKES_BY_NAME for kind in type(error).__mro__)
    )
