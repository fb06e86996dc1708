"""Names of the files that an attempt writes into an Iceberg table.

PyIceberg puts a random UUID into the name of each data file, manifest and list of manifests. Here the text of the UUID
also says which attempt has written the file.
"""

from __future__ import annotations

import secrets
import uuid

from airflow_pgchange.lake.names import Attempt

METADATA = "70676368-616e-8"
"""The beginning of the UUIDs of our metadata files: ``pgchan`` and the version of UUIDs with content of one's own.

PyIceberg reads the version of a table from the name of a metadata file only if the rest of the name is a UUID."""


class FileId(uuid.UUID):
    """A random UUID whose text begins with an attempt."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(int=uuid.uuid4().int)
        object.__setattr__(self, "_attempt", attempt)

    def __str__(self) -> str:
        attempt: Attempt = object.__getattribute__(self, "_attempt")
        return f"{attempt}_{super().__str__()}"


def metadata_name(version: int) -> str:
    """Return the name of a new metadata file."""
    digits = secrets.token_hex(9)
    return f"{version:05d}-{METADATA}{digits[:3]}-8{digits[3:6]}-{digits[6:]}.metadata.json"
