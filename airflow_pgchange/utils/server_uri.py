"""The name of a server in the URIs of assets and in lineage."""

from __future__ import annotations

from psycopg.conninfo import conninfo_to_dict


def server_uri(conninfo: str) -> str:
    """The first server that a connection string names: whichever of a group answers, its tables are the same assets."""
    given = conninfo_to_dict(conninfo)
    host = str(given.get("host") or given.get("hostaddr") or "").split(",")[0]
    port = str(given.get("port") or "").split(",")[0] or "5432"
    if not host or host.startswith(("/", "@")):
        host = "localhost"
    return f"postgres://[{host}]:{port}" if ":" in host else f"postgres://{host}:{port}"
