"""The names of lake tables: plain values, which need no library of their format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

from psycopg import sql

from airflow_pgchange.errors import InvalidArgument

POINTERS = "iceberg_tables"
"""The table of a SQL catalog with the current metadata file of each Iceberg table."""


@dataclass(frozen=True)
class _InACatalog:
    """A table of a catalog of Iceberg."""

    table: str
    catalog: str

    def __post_init__(self) -> None:
        if not all(self.table.split(".")) or "." not in self.table:
            raise InvalidArgument(
                f"{self.table!r} names no Iceberg table: give its namespace, too, as in 'sales.payment'"
            )

    def __str__(self) -> str:
        return f"{self.catalog}.{self.table}"

    @property
    def namespace(self) -> str:
        return self.table.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.table.rpartition(".")[2]


@dataclass(frozen=True)
class Iceberg(_InACatalog):
    """An Iceberg table of a SQL catalog. The tables of the catalog are in the database of the results.

    PyIceberg's ``SqlCatalog`` and the ``JdbcCatalog`` of Spark and Trino use the same catalog. So each of them can
    create the table, read it, and write to it.

    ``table`` is the name of the table with its namespace, such as ``"sales.payment"``. ``catalog`` is the name of the
    catalog. ``schema`` is the schema of PostgreSQL that has the catalog's table ``iceberg_tables``. PyIceberg's own
    configuration has the access to the files. It is the section ``catalog`` of ``.pyiceberg.yaml``, or environment
    variables. For the catalog ``lake`` they are named like ``PYICEBERG_CATALOG__LAKE__S3__ENDPOINT``.
    """

    schema: str = "public"
    kind: Literal["iceberg"] = field(default="iceberg", init=False, repr=False)

    @property
    def pointers(self) -> sql.Identifier:
        """The table of the catalog that has a row for each Iceberg table."""
        return sql.Identifier(self.schema, POINTERS)


@dataclass(frozen=True)
class RemoteIceberg(_InACatalog):
    """An Iceberg table of any other catalog that PyIceberg reaches: REST, Glue, Hive, or SQL in another database.

    The catalog commits before PostgreSQL does. A retry of a batch first looks for the batch in the snapshots of the
    table. So the table must keep its snapshots for longer than a batch is tried.

    ``table`` is the name of the table with its namespace, such as ``"sales.payment"``. ``catalog`` is the name of the
    catalog in PyIceberg's configuration. It is the section ``catalog`` of ``.pyiceberg.yaml``, or environment
    variables. For the catalog ``lake`` they are named like ``PYICEBERG_CATALOG__LAKE__URI``.
    """

    kind: Literal["remote iceberg"] = field(default="remote iceberg", init=False, repr=False)


@dataclass(frozen=True)
class Delta:
    """A Delta table at a location, such as ``"s3://lake/sales/payment"`` or ``"/data/lake/payment"``.

    Environment variables configure the access to an object store. Their names begin with ``AWS_`` for S3, such as
    ``AWS_ENDPOINT_URL``, with ``AZURE_`` for Azure, and with ``GOOGLE_`` for Google Cloud.
    """

    location: str
    kind: Literal["delta"] = field(default="delta", init=False, repr=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.location)
        if not (parts.scheme or self.location.startswith("/")):
            raise InvalidArgument(
                f"{self.location!r} is no location of a Delta table: give a whole path, or a URI such as "
                "'s3://lake/sales/payment'"
            )
        if parts.password is not None or parts.query:
            raise InvalidArgument(
                "the location of a Delta table is stored and shown, so it may have no password and no query: set them "
                "in environment variables"
            )

    def __str__(self) -> str:
        return self.location


LakeTable: TypeAlias = Iceberg | RemoteIceberg | Delta
CLASSES: Mapping[str, type[LakeTable]] = {each.kind: each for each in (Iceberg, RemoteIceberg, Delta)}


def table_of(data: Mapping[str, Any]) -> LakeTable:
    """Return the table whose fields ``dataclasses.asdict`` has given."""
    return CLASSES[data["kind"]](**{name: value for name, value in data.items() if name != "kind"})
