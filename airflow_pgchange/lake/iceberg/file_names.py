"""Names of the files that an attempt writes into an Iceberg table.

PyIceberg puts a random UUID into the name of each data file, manifest and list of manifests. Here the text of the UUID
also contains the attempt that has written the file, and the table.
"""

from __future__ import annotations

import re
import secrets
import uuid

from pyiceberg.table.metadata import TableMetadata

from airflow_pgchange.lake.file_names import Attempt

METADATA = "70676368-616e-8"
"""The beginning of the UUIDs of our metadata files: ``pgchan`` and 8, the version of custom UUIDs.

PyIceberg reads the version of a table from the name of a metadata file only if the rest of the name is a UUID.
"""


class FileId(uuid.UUID):
    """A random UUID that begins like the UUID of the table, and whose text begins with the attempt."""

    def __init__(self, attempt: Attempt, metadata: TableMetadata) -> None:
        super().__init__(_id_of(metadata) + str(uuid.uuid4())[8:])
        object.__setattr__(self, "_attempt", attempt)

    def __str__(self) -> str:
        attempt: Attempt = object.__getattribute__(self, "_attempt")
        return f"{attempt}_{super().__str__()}"


def metadata_name(metadata: TableMetadata, version: int) -> str:
    """Return the name of a new metadata file of the table."""
    digits = secrets.token_hex(5)
    unique = f"{METADATA}{digits[:3]}-8{digits[3:6]}-{_id_of(metadata)}{digits[6:]}"
    return f"{version:05d}-{unique}.metadata.json"


def attempt_of(name: str, metadata: TableMetadata) -> Attempt | None:
    """Return the attempt that has written a file of this name for the table; None if it is a file of another writer."""
    attempt = Attempt.in_name(name)
    return attempt if f"{attempt}_{_id_of(metadata)}-" in name else None


def is_metadata(name: str, metadata: TableMetadata) -> bool:
    """Whether ``metadata_name`` has given this name to a metadata file of the table."""
    pattern = rf"\d+-{METADATA}\w{{3}}-\w{{4}}-{_id_of(metadata)}\w{{4}}\.metadata\.json"
    return re.fullmatch(pattern, name) is not None


def _id_of(metadata: TableMetadata) -> str:
    """Return the beginning of the UUID of a table."""
    return str(metadata.table_uuid)[:8]
